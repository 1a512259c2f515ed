"""Scores of models, and reports of runs."""

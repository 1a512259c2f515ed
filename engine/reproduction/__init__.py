"""Reproduce the paper's tables: the jobs they need, running them, collecting scores. Used by engine/reproduce.py."""

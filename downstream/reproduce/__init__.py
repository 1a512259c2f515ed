"""Reproduces the paper's tables: plans the trainings and evaluations behind them, runs them as jobs, and writes the tables."""

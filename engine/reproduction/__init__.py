"""The paper's tables, made again: plan, claims, workers, tables. The door is engine/reproduce.py."""

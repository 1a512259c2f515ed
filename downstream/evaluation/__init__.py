"""Scores and compares models, fits heads on frozen models, and says what a model was trained on."""

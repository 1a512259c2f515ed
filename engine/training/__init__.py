"""The training loop and its building blocks."""

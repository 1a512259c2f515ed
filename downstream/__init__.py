"""Use an encoder: embeddings, predictions, fine-tuning, scores, comparisons, other formats. Each module
directly in this folder is a command, except after_training.py, whose functions are passed to a
training."""

"""Use an encoder: embeddings, predictions, fine-tuning, scores, comparisons, other formats. Each module
directly in this folder is a command, but for what a training is handed: after_training.py."""

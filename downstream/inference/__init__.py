"""Uses a trained model: loads it, prepares any ECG for it, and writes its embeddings and
predictions."""

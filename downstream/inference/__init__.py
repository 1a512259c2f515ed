"""A trained model at work: loading it, preparing any ECG for it, and writing its embeddings and
predictions."""

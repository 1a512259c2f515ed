"""Verified datasets -> weights, scores, embeddings."""

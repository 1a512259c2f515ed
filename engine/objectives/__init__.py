"""Losses. They use only tensors and never import engine.model."""

"""Losses. They depend on tensors alone, never on engine.model."""

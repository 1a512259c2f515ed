"""Encoders, the objectives of pre-training, the model that combines them, and model folders."""

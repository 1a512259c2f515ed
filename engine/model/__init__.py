"""The encoder, the quantiser, and the model that combines them for pre-training."""

"""The encoder, the quantiser and the composition that is pre-trained."""

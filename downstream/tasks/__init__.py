"""The tasks that a model is fine-tuned or tested on: their labels, splits and losses."""

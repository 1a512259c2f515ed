"""Trains encoders on datasets. `pretrain.py` puts a training together, `run.py` wraps a training in a
command and a Python function, `status.py` shows the state of a run."""

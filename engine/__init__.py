"""Train encoders on datasets. `pretrain.py` puts a training together, `run.py` has the command and
the Python function around it, `status.py` shows its progress."""

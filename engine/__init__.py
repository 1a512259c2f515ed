"""Train encoders on datasets. `pretrain.py` puts a training together, `run.py` is what surrounds one,
`status.py` shows how far it is."""

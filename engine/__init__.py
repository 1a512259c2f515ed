"""Train, evaluate and use ECG models. Each module directly in this folder is a command, but for
common.py and config.py."""

"""Train, evaluate and use ECG models. Each module directly in this folder is a command, but for what
commands share: command.py, commandline.py, common.py, config.py and run.py."""

"""Turn ECG archives into verified datasets of 10 s crops. Each module directly in this folder is a
command, except plots.py. `dataset/` defines the format."""

"""Turn ECG archives into verified datasets of 10 s crops. Start at `__main__.py`; `dataset/`
defines the format."""

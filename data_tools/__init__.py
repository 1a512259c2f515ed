"""ECG archives -> verified datasets of 10 s crops. Start at `__main__.py`; `dataset.py` is the format."""

"""Files of hospitals' ECG systems: one module for each format, and `files.py`, which reads a folder
of any mixture of them."""

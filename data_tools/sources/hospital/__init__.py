"""The files of hospitals' ECG systems: a module for each format. `../hospital_files.py` reads a folder of
any mixture of them."""

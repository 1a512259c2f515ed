"""Decoders for the files of hospitals' ECG systems, one module for each format. `../hospital_files.py` reads
a folder with any mixture of these formats."""

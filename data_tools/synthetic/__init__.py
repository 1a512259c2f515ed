"""Synthetic ECGs in the layouts of real archives."""

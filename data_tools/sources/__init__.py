"""Readers of ECG archives. `detect.py` finds out which archives a folder contains."""

from .base import Source as Source

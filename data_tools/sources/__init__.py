"""The archives that can be read. `detect.py` finds what is in a folder."""

from .base import Source as Source

"""Imported by the fork server."""

import gc

from tests.forks import HEAVY, import_all

gc.disable()
import_all(HEAVY)
gc.enable()

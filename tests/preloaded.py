"""Imported by the fork server."""

import gc

from tests.forks import import_heavy

gc.disable()
import_heavy()
gc.enable()

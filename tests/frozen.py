"""All that the fork server imports."""

import gc

from tests.forks import HEAVY, import_all

gc.disable()
import_all(HEAVY)
gc.enable()

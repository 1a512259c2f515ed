"""All that the fork server imports: garbage collection skips it there and in the server's children."""

import gc

from tests.forks import HEAVY, import_all

gc.disable()
import_all(HEAVY)
gc.collect()
gc.freeze()
gc.enable()

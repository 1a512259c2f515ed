"""Imported last by the process that others are forked from: their collections pass over all that it has imported."""

import gc

gc.collect()
gc.freeze()

"""Wait for another process or thread."""

import time
from typing import TypeVar

T = TypeVar("T")
HANG_S = 300  # far more than a busy machine needs


def until(condition):
    """Poll until the condition is true."""
    end = time.monotonic() + HANG_S
    while not (found := condition()):
        assert time.monotonic() < end, f"the condition did not become true within {HANG_S} s"
        time.sleep(0.005)
    return found

"""Waiting for another process or thread."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
HANG_S = 300  # far more than a busy machine takes


def until(condition: Callable[[], T]) -> T:
    """Polls until it is true."""
    end = time.monotonic() + HANG_S
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)
    return found

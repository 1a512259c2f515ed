"""Wait for another process or thread, and notice work without end."""

import time
from contextlib import contextmanager

HANG_S = 300  # far more than a busy machine needs
# CPU time: a header's 64 KB take 3 ms, and 37 s with a pattern that tries every pair of blanks
ENDLESS_S = 10


def until(condition):
    """Poll until the condition is true."""
    end = time.monotonic() + HANG_S
    while not (found := condition()):
        assert time.monotonic() < end, f"the condition did not become true within {HANG_S} s"
        time.sleep(0.005)
    return found


@contextmanager
def bounded_work():
    """Other threads and a busy machine do not count."""
    started = time.thread_time()
    try:
        yield
    finally:
        assert time.thread_time() - started < ENDLESS_S

"""Cases to be measured in processes of their own, which import this and not torch."""

import os
from collections.abc import Generator


def works(units: float) -> float:
    return units


def fails(_: float) -> float:
    raise MemoryError("no room\nfor this")


def dies(_: float) -> float:
    os._exit(3)


def stream(units: float) -> Generator[float, bool, None]:
    yield 0.0
    while True:
        units += 1
        if (yield units):
            return

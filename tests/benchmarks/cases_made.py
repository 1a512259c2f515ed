"""Cases to be measured in processes of their own, which import this and not torch."""

import os
import time
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


def hangs() -> None:
    print("it hangs here", flush=True)
    time.sleep(600)


def part(rate: float) -> dict[str, object]:
    spread = {"median": rate, "low": rate, "high": rate}
    return {"input": {}, "results": {f"rate {rate}": {"per_s": spread, "per_cpu_s": spread}}}

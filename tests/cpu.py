"""Measure the CPU seconds of every test with fixtures and processes: `-p tests.cpu` lists the
slowest in tests/README.md."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

README = Path(__file__).with_name("README.md")
HEADING = "## The slowest tests\n"
LISTED = 30
seconds: dict[str, float] = {}


def cpu_s() -> float:
    own, total = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.user_properties.append(("began", cpu_s()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "teardown":  # type: ignore[attr-defined]
        report.user_properties.append(("ended", cpu_s()))  # type: ignore[attr-defined]
    return report  # type: ignore[return-value]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        found = dict(report.user_properties)
        seconds[report.nodeid] = float(found["ended"]) - float(found["began"])  # type: ignore[arg-type]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    slowest = sorted(seconds, key=lambda name: -seconds[name])[:LISTED]
    total = (
        f"{sum(seconds.values()) / 60:.1f} CPU minutes in all, without imports.\n\n| CPU seconds "
        "| test |\n|---:|---|\n"
    )
    table = "".join(
        f"| {seconds[name]:.1f} | `{name.removeprefix('tests/').replace('|', ' ')}` |\n"
        for name in slowest
    )
    before = README.read_text().partition(HEADING)[0]
    README.write_text(f"{before}{HEADING}\n{total}{table}")

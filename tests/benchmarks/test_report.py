"""No figure in the README without a record, no record without what makes a figure mean something."""

import json
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.measure import run_cases

ROOT = Path(__file__).parents[2]


def test_the_readme_says_what_the_records_say() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"{report.BEGIN}\n{report.table()}\n{report.END}" in readme


@pytest.mark.parametrize("lacking", ["versions", "git", "input", "page_cache"])
def test_an_incomplete_record_is_refused(lacking: str, tmp_path: Path) -> None:
    record = json.loads(max(report.RESULTS.glob("ingest_*.json")).read_text())
    del record[lacking]
    (tmp_path / "r.json").write_text(json.dumps(record))
    with pytest.raises(report.RecordError, match=lacking):
        report.load(tmp_path / "r.json")


def test_a_result_without_a_spread_is_refused(tmp_path: Path) -> None:
    record = json.loads(max(report.RESULTS.glob("ingest_*.json")).read_text())
    next(iter(record["results"].values()))["per_cpu_s"] = {"median": 1.0}
    (tmp_path / "r.json").write_text(json.dumps(record))
    with pytest.raises(report.RecordError, match="median, low and high"):
        report.load(tmp_path / "r.json")


def busy(loops: int) -> float:
    return float(sum(i % 7 for i in range(loops)) > 0) * loops


def test_cases_run_in_turns_in_processes_of_their_own() -> None:
    turns: list[str] = []
    results = run_cases({"a": (busy, (200_000,)), "b": (busy, (400_000,))}, 3, turns.append)
    assert [turn[0] for turn in turns] == list("ababab")
    assert results["a"]["repeats"] == 3
    assert results["b"]["units"] == 400_000
    assert results["a"]["per_cpu_s"]["low"] <= results["a"]["per_cpu_s"]["median"] <= results["a"]["per_cpu_s"]["high"]

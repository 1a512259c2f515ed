"""Every figure in README.md and RESULTS.md comes from a record, and incomplete records are
refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, tables


def test_readme_and_results_match_the_records() -> None:
    parts = report.every()
    assert report.README.read_text() == report.readme(parts)
    assert report.TABLES.read_text() == report.whole(parts)


def test_files_that_results_link_to_exist() -> None:
    linked = re.findall(r"\]\(([^)#:]+)[)#]", report.TABLES.read_text())
    assert len(linked) > 10 and not [
        link for link in linked if not (report.TABLES.parent / link).exists()
    ]


def spread(value: float) -> dict[str, float]:
    return {"median": value, "low": 0.9 * value, "high": 1.1 * value}


RATES = {"per_s": spread(100.0), "per_cpu_s": spread(50.0), "peak_mb": 2048.0}
BARE = {"bare_per_s": spread(101.0), "bare_per_cpu_s": spread(51.0)}
LOOP = {"backend": "dali", "checkpoint_s": 0.5} | dict.fromkeys(
    ("overhead_pct", "loop_pct", "loader_pct", "stall_pct"), spread(1.5)
)
RESULTS: dict[str, dict[str, Any]] = {
    "ingest": {"read: omnilead": RATES, "read: wfdb.rdrecord": RATES},
    "loader": {"RLM: torch, batch 256": RATES},
    "step": {"omnilead: bf16, 4 crops": RATES, "matrix product: bf16": RATES},
    "e2e": {"tar: small, 32 crops": RATES | LOOP | BARE},
    "embed": {"tar: small, 16 crops": RATES | BARE | {"share_pct": spread(96.0)}},
    "start": {
        "first step: deepspeed engine/pretrain.py": {
            "seconds": spread(9.0),
            "cpu_seconds": spread(6.0),
        }
    },
    "scaling": {"open to first batch": RATES},
    "evidence": {
        "real": {
            "data": "D",
            "models": {"A": "random weights", "random weights": "random weights", "mean beat": ""},
            "rows": [
                {
                    "model": model,
                    "task": "diagnosis",
                    "leads": "12",
                    "share": share,
                    "noise": 0.0,
                    "n": 50,
                    "patients": 40,
                }
                | {
                    "metrics": {"auroc": value},
                    "intervals": {"auroc": [value - 0.01, value + 0.01]},
                }
                for share in (0.1, 1.0)
                for model, value in (("A", 0.9), ("random weights", 0.8), ("mean beat", 0.7))
            ],
            "differences": [],
            "notes": [],
        }
    },
}
MORE: dict[str, dict[str, Any]] = {
    "scaling": {"shuffle_quality": {}, "ranks": {"1": RATES, "2": RATES}},
}


def suite(device: str) -> dict[str, Any]:
    record = json.loads(max(report.RESULTS.glob("ingest_*.json")).read_text())
    shared = {name: record[name] for name in report.OF_RECORD} | {"date": "2999-01-01T00:00:00"}
    shared["hardware"] = shared["hardware"] | {
        "gpus": [{"name": "NVIDIA H200"}] if device == "cuda" else []
    }
    facts = {
        "archive": "synthetic",
        "dataset": "0" * 64,
        "crops": 4,
        "precision": "bf16",
        "model": "paper",
        "device": device,
    }
    facts |= {"gflop_per_crop": 0.61}
    parts = [
        {
            "benchmark": name,
            "config": {"device": device, "repeats": 3},
            "input": facts,
            "results": results,
        }
        | MORE.get(name, {})
        for name, results in RESULTS.items()
    ]
    return shared | {"benchmark": "suite", "parts": parts}


def write(folder: Path, name: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    (folder / f"{name}.json").write_text(json.dumps(record))
    return report.load(folder / f"{name}.json")


def alone(record: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The first part as a separate record."""
    return (
        {key: value for key, value in record.items() if key != "parts"}
        | record["parts"][0]
        | changes
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_suites_record_becomes_tables_and_pictures(device: str, tmp_path: Path) -> None:
    parts = write(tmp_path, "suite", suite(device))
    assert [part["benchmark"] for part in parts] == list(RESULTS) and {*RESULTS} == {*tables.TABLES}
    text = report.whole(parts)
    for expected in (
        "| omnilead: bf16, 4 crops | 100 | 50 |",
        "| 61 % |",
        "1.5 %",
        "| 96 % | 86 to 106 % |",
        "| 2 | 100 | 90 to 110 | 50 % | 50 | 100 % |",
        "1,024",
        "A              | 0.900 (0.890 to 0.910)",
        "| overhead of the loop alone, % | at most 2 | 1.5 |",
    ):
        assert expected in text, expected
    assert ("on NVIDIA H200" in text) == ("measured on one" in text) == (
        device == "cuda"
    ) and "estimated" in text
    report.share_curves(parts[-1]).savefig(tmp_path / "picture.png")


def test_every_target_is_in_the_table(tmp_path: Path) -> None:
    """With one row for each machine, or "not measured"."""
    assert report.bars_table([]).count("| not measured |  |  |") == len(report.BARS)
    record = suite("cuda")
    record["parts"][2]["input"] = record["parts"][2]["input"] | {"device": "NVIDIA H200"}
    table = report.bars_table(write(tmp_path, "suite", record))
    assert (
        "| overhead of the loop alone, % | at most 2 | 1.5 | NVIDIA H200 | [tar: small, 32 "
        "crops](results/suite.json) |" in table
    )
    assert (
        "the paper's model in bf16, times the re-creation of fairseq-signals' in fp32 | at least "
        "3 | not measured |" in table
    )
    assert (
        "| crops a second through the paper's model on an H200 | at least 2,700 | **missed: 100** "
        "| NVIDIA H200 | [" in table
    )


def test_the_newest_record_of_each_device_counts(tmp_path: Path) -> None:
    for name, device, date in (
        ("a", "cpu", "2026-01-02"),
        ("b", "cpu", "2026-01-01"),
        ("c", "cuda", "2025-01-01"),
    ):
        write(tmp_path, name, suite(device) | {"date": date})
    write(tmp_path, "alone", alone(suite("cpu"), date="2026-01-02"))
    write(tmp_path, "later", suite("cpu") | {"date": "2026-01-02T20:00:00"})
    parts = report.newest(report.every(tmp_path))
    first, *others = RESULTS
    assert parts[first, "cpu"]["file"] == "alone.json"  # of one day's
    assert {parts[name, "cpu"]["file"] for name in others} == {"later.json"}
    assert parts["step", "cuda"]["file"] == "c.json"


@pytest.mark.parametrize(
    "config", [{"only": "^read"}, {"model": "small"}, {"huge": 2000}, {"alone": True}]
)
def test_a_partial_benchmark_does_not_replace_a_whole_one(
    config: dict[str, Any], tmp_path: Path
) -> None:
    made = alone(suite("cpu"))
    for name, date, more in (("a", "2026-01-01", {}), ("b", "2026-05-05", config)):
        write(tmp_path, name, made | {"date": date, "config": made["config"] | more})
    assert report.newest(report.every(tmp_path))["ingest", "cpu"]["file"] == "a.json"
    (tmp_path / "a.json").unlink()
    assert report.newest(report.every(tmp_path))["ingest", "cpu"]["file"] == "b.json"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda r: r["hardware"].pop("gpus"), "hardware.gpus"),
        (lambda r: r.update(parts=[]), "it has no parts"),
        (lambda r: r.pop("page_cache"), "page_cache"),
        (lambda r: r["parts"][2]["results"].clear(), "lacks results"),
        (
            lambda r: r["parts"][3]["results"]["tar: small, 32 crops"].pop("stall_pct"),
            "KeyError: 'stall_pct'",
        ),
        (lambda r: r["parts"][2].pop("input"), "input"),
        (lambda r: r["parts"][2].update(benchmark="other"), "no benchmark 'other'"),
        (lambda r: r["parts"][1]["input"].pop("dataset"), "input.dataset"),
        (lambda r: r["parts"][1]["config"].update(repeats=1), "1 repeats show no spread"),
        (lambda r: r.update(date="some day"), "not a record"),
        (lambda r: r["parts"][1]["config"].update(device=[]), r"on '\[\]'"),
        (
            lambda r: r["parts"][0]["results"]["read: omnilead"].update(per_s=spread(0.0)),
            r"per_s is 0.0 \(0.0 to 0.0\)",
        ),
        (
            lambda r: r["parts"][0]["results"]["read: omnilead"]["per_s"].update(high=float("inf")),
            "to inf",
        ),
        (
            lambda r: r["parts"][1]["results"]["RLM: torch, batch 256"]["per_s"].update(
                median=None
            ),
            "not a record",
        ),
    ],
)
def test_missing_facts_of_a_record_are_named(change: Any, expected: str, tmp_path: Path) -> None:
    record = json.loads(json.dumps(suite("cuda")))
    change(record)
    with pytest.raises(report.RecordError, match=expected) as refused:
        write(tmp_path, "suite", record)
    assert (
        str(refused.value).startswith("suite.json: ") and len(str(refused.value).splitlines()) == 1
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3"])
def test_an_invalid_record_is_a_one_line_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(report.RecordError, match=r"\Ar.json: not a record: .*\Z"):
        report.load(tmp_path / "r.json")


def judged(
    benchmark: str, results: dict[str, Any], device: str = "cpu", **facts: Any
) -> list[tuple[str, float]]:
    part = {
        "benchmark": benchmark,
        "config": {"device": device},
        "input": facts,
        "results": results,
    }
    return [(case, round(value, 3)) for case, value, _ in report.judged(part) if case]


def rate(value: float) -> dict[str, Any]:
    return {"per_cpu_s": spread(value), "per_s": spread(value), "peak_mb": 2048.0}


def test_the_worst_case_is_compared_with_the_target() -> None:
    rates = {
        "RLM: torch, batch 64, first epoch": 90.0,
        "RLM: torch, batch 256": 200.0,
        "RLM: re-creation, 0 workers": 10.0,
    }
    rates |= {
        "RLM: re-creation, 2 workers": 5.0,
        "physio3+RLM: torch, batch 256": 60.0,
    }  # noise has no rival here
    assert judged("loader", {name: rate(value) for name, value in rates.items()}) == [
        ("RLM: torch, batch 64, first epoch", 9.0)
    ]
    ingest = {
        "ingest: omnilead, tar": 50.0,
        "ingest: re-creation of it": 4.0,
        "ingest: omnilead, tar, 2 workers": 30.0,
    }
    figures = judged("ingest", {name: rate(value) for name, value in ingest.items()})
    assert figures == [("ingest: omnilead, tar", 50.0), ("ingest: omnilead, tar", 12.5)]


def test_a_smaller_job_does_not_meet_the_target_of_a_larger_one() -> None:
    case = "open to first batch"
    assert judged("scaling", RESULTS["scaling"], crops=9_999_999) == []
    assert judged("scaling", RESULTS["scaling"], crops=10_000_000) == [(case, 0.01), (case, 2048.0)]
    assert (
        judged(
            "step",
            {"omnilead: bf16, 4 crops": RATES, "re-creation of it: fp32, 4 crops": RATES},
            model="small",
        )
        == []
    )
    assert (
        len(judged("start", RESULTS["start"])) == 1
        and judged("start", RESULTS["start"], "cuda") == []
    )  # it is compiled first
    for threads, bars in ((4, 1), (16, 0), (None, 0)):
        facts = {} if threads is None else {"threads": threads}
        assert (
            len(judged("loader", {"RLM: dali to cuda, batch 256": RATES}, "cuda", **facts)) == bars
        )


def test_many_gpus_by_formula() -> None:
    """Computed by hand: 64 GPUs x 512 crops, 1,024 halves against 65,536, of which 1,024 are also
    compared on one GPU."""
    assert tables.cluster_step(1, 512, 2700.0)[-2:] == (0, 1)
    gradients, weights, _, scores, _, efficiency = tables.cluster_step(64, 512, 2700.0)
    assert scores == pytest.approx(1e3 * 3 * 2 * 1024 * (65_536 - 1024) * 768 / 50e12)
    sent = 2 * 90_883_072 * 63 / 64  # once around the ring; an all-reduce goes twice
    assert weights == pytest.approx(1e3 * (sent / 50e9 + 63 * 5e-6)) and gradients == pytest.approx(
        2 * weights
    )
    assert 0.8 < efficiency < 0.9

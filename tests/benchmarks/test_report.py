"""Every figure in README.md and RESULTS.md comes from a record, and incomplete records are
refused."""

import itertools
import json
import re

import pytest

from benchmarks import report, tables


def test_readme_and_results_match_the_records():
    parts = report.every()
    assert report.README.read_text() == report.readme(parts)
    assert report.TABLES.read_text() == report.whole(parts)
    linked = re.findall(r"\]\(([^)#:]+)[)#]", report.TABLES.read_text())
    assert len(linked) > 10 and all((report.TABLES.parent / link).exists() for link in linked)


def spread(value):
    return {"median": value, "low": 0.9 * value, "high": 1.1 * value}


def rate(value):
    return {"per_cpu_s": spread(value), "per_s": spread(2 * value), "peak_mb": 2048.0}


RATES = rate(50.0)
BARE = {"bare_per_s": spread(101.0), "bare_per_cpu_s": spread(51.0)}
PERCENTAGES = ("overhead_pct", "loop_pct", "loader_pct", "stall_pct")
LOOP = {"backend": "dali", "checkpoint_s": 0.5} | dict.fromkeys(PERCENTAGES, spread(1.5))
MODELS = {"A": 0.9, "random weights": 0.8, "mean beat": 0.7}
ROWS = []
for share in (0.1, 1.0):
    for model, value in MODELS.items():
        row = {"model": model, "task": "diagnosis", "leads": "12", "share": share, "noise": 0.0}
        scores = {"metrics": {"auroc": value}, "intervals": {"auroc": [value - 0.01, value + 0.01]}}
        ROWS.append(row | scores | {"n": 50, "patients": 40})
REAL = {"models": dict.fromkeys(MODELS, "random weights") | {"mean beat": ""}, "rows": ROWS}
RESULTS = {
    "ingest": {"read: omnilead": RATES, "read: wfdb.rdrecord": RATES},
    "loader": {"RLM: torch, batch 256": RATES},
    "step": {"omnilead: bf16, 4 crops": RATES, "matrix product: bf16": RATES},
    "e2e": {"tar: small, 32 crops": RATES | LOOP | BARE},
    "embed": {"tar: small, 16 crops": RATES | BARE | {"share_pct": spread(96.0)}},
    "start": {"first step: deepspeed": {"seconds": spread(9.0), "cpu_seconds": spread(6.0)}},
    "scaling": {
        "open to first batch": RATES,
        "all crops: roles": RATES,
        "1 ranks": RATES,
        "2 ranks": RATES,
    },
    "evidence": {"real": REAL | {"data": "D", "differences": [], "notes": []}},
}


def suite(device, date="2999-01-01"):
    record = json.loads(max(report.RESULTS.glob("ingest_*.json")).read_text())
    shared = {name: record[name] for name in report.OF_RECORD} | {"date": date}
    gpus = [{"name": "NVIDIA H200"}] if device == "cuda" else []
    shared["hardware"] = shared["hardware"] | {"gpus": gpus}
    facts = {"archive": "synthetic", "crops": 4, "gflop_per_crop": 0.61}
    config = {"device": device, "repeats": 3}
    parts = []
    for name, results in RESULTS.items():
        parts.append({"benchmark": name, "config": config, "input": facts, "results": results})
    return shared | {"benchmark": "suite", "parts": parts}


def write(folder, name, record):
    (folder / f"{name}.json").write_text(json.dumps(record))
    return report.load(folder / f"{name}.json")


def alone(date, **config):
    """The first part as a separate record."""
    record = suite("cpu", date)
    (part, *_) = record.pop("parts")
    return record | part | {"config": part["config"] | config}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_suites_record_becomes_tables_and_pictures(device, tmp_path):
    parts = write(tmp_path, "suite", suite(device))
    assert [part["benchmark"] for part in parts] == list(RESULTS) and {*RESULTS} == {*tables.TABLES}
    text = report.whole(parts)
    for expected in (
        "| omnilead: bf16, 4 crops | 100 | 50 |",
        "| 61 % |",
        "1.5 %",
        "| 96.0 % | 86.4 to 106 |",
        "| 2 ranks | 100 | 90 to 110 | 50 % | 50 | 100 % |",
        "A              | 0.900 (0.890 to 0.910)",
        "| overhead of the loop alone, % | at most 2 | 1.5 |",
    ):
        assert expected in text, expected
    assert ("on NVIDIA H200" in text) == ("**missed: 100**" in text) == (device == "cuda")
    report.share_chart(parts[-1]).savefig(tmp_path / "picture.png")
    assert report.bars_table([]).count("| not measured |  |  |") == len(report.BARS)


def test_curves_by_crops_are_those_of_the_models():
    """A panel for each set of leads and share; a model of a single length is no curve."""
    names = {"A, 20,000 crops": 0.9, "A, 10,000 crops": 0.8, "mean beat": 0.7}
    names |= {"mean beat + A, 10,000 crops": 0.95, "random weights of A, 10,000 crops": 0.6}
    names["B, 10,000 crops"] = 0.5
    rows = []
    for leads, share in itertools.product(("12", "1"), (0.1, 1.0)):
        for name, auroc in names.items():
            metrics = {"auroc": auroc - share}
            rows.append({"model": name, "leads": leads, "share": share, "metrics": metrics})
    for axes, share in zip(report.crop_curves({"rows": rows}).axes, (1, 1, 0.1, 0.1), strict=True):
        curve, line = sorted(axes.lines, key=lambda line: str(line.get_label()))
        assert curve.get_xydata().tolist() == [[10_000, 0.8 - share], [20_000, 0.9 - share]]
        assert set(line.get_ydata()) == {0.7 - share}
        assert f"{100 * share:g} % of labels" in axes.get_title(loc="left")


def test_the_newest_record_of_each_device_counts(tmp_path):
    """A part of a suite counts less than a record of its own of the same day."""
    write(tmp_path, "a", suite("cpu", "2026-01-02"))
    write(tmp_path, "b", suite("cpu", "2026-01-01"))
    write(tmp_path, "c", suite("cuda", "2025-01-01"))
    write(tmp_path, "alone", alone("2026-01-02") | {"benchmark": "ingest"})
    write(tmp_path, "later", suite("cpu", "2026-01-02T20:00:00"))
    parts = report.newest(report.every(tmp_path))
    files = {name: parts[name, "cpu"]["file"] for name in RESULTS}
    assert files == dict.fromkeys(RESULTS, "later.json") | {"ingest": "alone.json"}
    assert parts["step", "cuda"]["file"] == "c.json"


@pytest.mark.parametrize("config", [{"only": "^read"}, {"model": "small"}, {"huge": 2000}])
def test_a_partial_benchmark_does_not_replace_a_whole_one(config, tmp_path):
    write(tmp_path, "a", alone("2026-01-01") | {"benchmark": "ingest"})
    write(tmp_path, "b", alone("2026-05-05", **config) | {"benchmark": "ingest"})
    assert report.newest(report.every(tmp_path))["ingest", "cpu"]["file"] == "a.json"
    (tmp_path / "a.json").unlink()
    assert report.newest(report.every(tmp_path))["ingest", "cpu"]["file"] == "b.json"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda r: r["hardware"].pop("gpus"), "'gpus'"),
        (lambda r: r["parts"][2]["results"].clear(), "no results"),
        (lambda r: r["parts"][3]["results"]["tar: small, 32 crops"].pop("stall_pct"), "stall_pct"),
        (lambda r: r["parts"][1]["config"].update(repeats=1), "1 repeats show no spread"),
    ],
)
def test_missing_facts_of_a_record_are_named(change, expected, tmp_path):
    record = json.loads(json.dumps(suite("cuda")))
    change(record)
    with pytest.raises(report.RecordError, match=expected) as refused:
        write(tmp_path, "suite", record)
    assert str(refused.value).startswith("suite.json: not a whole record: ")
    assert len(str(refused.value).splitlines()) == 1


def test_an_invalid_record_is_a_one_line_error(tmp_path):
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(report.RecordError, match=r"\Ar.json: not a whole record: .*\Z"):
        report.load(tmp_path / "r.json")


def judged(benchmark, results, **config):
    config = {"device": "cpu"} | config
    part = {"benchmark": benchmark, "config": config, "results": results}
    found = [report.judged(part, bar) for bar in report.BARS]
    return [(case, round(value, 3)) for case, value in found if case]


def test_the_worst_case_is_compared_with_the_target():
    rates = {
        "RLM: torch, batch 64, first epoch": 90.0,
        "RLM: torch, batch 256": 200.0,
        "RLM: re-creation, 0 workers": 10.0,
        "RLM: re-creation, 2 workers": 5.0,
        "physio3+RLM: torch, batch 256": 60.0,  # has no rival here
    }
    worst = judged("loader", {name: rate(value) for name, value in rates.items()})
    assert worst == [("RLM: torch, batch 64, first epoch", 9.0)]
    case = "open to first batch"
    assert judged("scaling", {case: rate(1.0)}) == [(case, 0.5), (case, 2048.0)]
    assert judged("scaling", {case: rate(1.0)}, huge=9_999_999) == []  # a smaller job
    case = "all crops: data.hold_out"
    assert judged("scaling", {case: rate(0.25)}) == [(case, 4.0)]
    case = "all crops: roles"
    assert judged("scaling", {case: rate(1.0)}) == [(case, 2048.0)]
    # on a GPU it is compiled first
    assert judged("start", RESULTS["start"]) and not judged(
        "start", RESULTS["start"], device="cuda"
    )


def test_of_the_evidence_the_newest_of_each_result_is_shown():
    older, newer, newest = (
        suite("cpu", date)["parts"][-1] | {"benchmark": "evidence", "file": f"evidence_{date}.json"}
        for date in ("2999-01-01", "2999-01-02", "2999-01-03")
    )
    shared = {name: report.every()[-1][name] for name in report.OF_RECORD}
    parts = []
    for part, names in ((older, ("synthetic", "real")), (newer, ("real",)), (newest, ("real",))):
        documents = {name: {"notes": [], "made": part["file"]} for name in names}
        parts.append(shared | part | {"results": documents, "date": part["file"][9:19]})
    parts[0]["input"] = {"made_outside": ["archive"]}
    (found,) = report.newest(parts).values()
    assert found["results"]["real"]["made"] == "evidence_2999-01-03.json"
    (note,) = found["results"]["synthetic"]["notes"]
    where = tables.machine(parts[0])
    assert note == (
        f"From evidence_2999-01-01.json, 2999-01-01, {where}. Made outside the plan: archive."
    )

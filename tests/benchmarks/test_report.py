"""Every figure in README.md, EVIDENCE.md and RESULTS.md comes from a record, and incomplete records are
refused."""

import itertools
import json
import re
from pathlib import Path

import pytest

from benchmarks import report, tables

SUITE = Path(__file__).with_name("golden").joinpath("suite.json").read_text()  # made up


def loaded(folder, name, text):
    (folder / f"{name}.json").write_text(text)
    return report.load(folder / f"{name}.json")


def test_readme_and_results_match_the_records():
    parts = report.every()
    assert report.README.read_text() == report.readme()
    assert report.EVIDENCE.read_text() == report.evidence_page(parts)
    assert report.TABLES.read_text() == report.whole(parts)
    linked = re.findall(r"\]\(([^)#:]+)[)#]", report.TABLES.read_text())
    assert len(linked) > 10 and all((report.TABLES.parent / link).exists() for link in linked)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_suites_record_becomes_tables(device, golden, tmp_path):
    parts = loaded(tmp_path, "suite", SUITE.replace('"device": "cpu"', f'"device": "{device}"'))
    assert {part["benchmark"] for part in parts} == {*tables.TABLES}
    golden(f"suite_{device}.md", f"{report.whole(parts)}\n{tables.headline(parts[-1])}\n")


def test_pictures_are_of_the_models(tmp_path):
    """A panel for each set of leads and share; a model of a single length is no curve."""
    report.share_chart(loaded(tmp_path, "suite", SUITE)[-1]).savefig(tmp_path / "picture.png")
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


DAY = "2026-01-02"
RANKED = {  # date, benchmark and settings of records, the one that counts last
    "only": ("2999-01-01", "scaling", {"only": "^open"}),
    "model": ("2999-01-02", "scaling", {"model": "small"}),
    "huge": ("2999-01-03", "scaling", {"huge": 9_999_999}),
    "old": ("2026-01-01", "scaling", {}),
    "suite": (DAY, "suite", {"only": "tar"}),
    "later": (f"{DAY}T20:00:00", "suite", {}),
    "alone": (DAY, "scaling", {"huge": 10_000_000}),
}


def test_which_record_counts(tmp_path):
    """The newest; of a day, one of its own before a part of a suite; no smaller job if there is
    another."""
    for name, (date, benchmark, config) in RANKED.items():
        record = json.loads(SUITE) | {"date": date, "benchmark": benchmark}
        for part in record["parts"]:
            part["config"] |= config
        loaded(tmp_path, name, json.dumps(record))
    parts = [part for part in report.every(tmp_path) if part["benchmark"] == "scaling"]
    assert [part["file"] for part in parts] == [f"{name}.json" for name in RANKED]
    assert report.newest(parts)["scaling", "cpu"] == parts[-1]
    answers = {}
    for part in parts:
        answers[part["file"]] = any(report.judged(part, bar)[0] for bar in report.BARS)
    assert [name for name, answered in answers.items() if not answered] == [
        "model.json",
        "huge.json",
    ]
    on_gpu = parts[0] | {"config": {"device": "cuda"}}
    assert report.newest([*parts, on_gpu])["scaling", "cuda"] == on_gpu


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"gpus"', '"cpus"', "'gpus'"),
        ('"results": {', '"results": {}, "old": {', "no results"),
        ('"stall_pct"', '"stall"', "stall_pct"),
        ('"repeats": 3', '"repeats": 2', "2 repeats show no spread"),
        ('"format": 1', '"format": 2', "unknown format"),
        ("}", "", "JSONDecodeError"),
    ],
)
def test_missing_facts_of_a_record_are_named(old, new, expected, tmp_path):
    """The tables of a GPU need all of them."""
    text = SUITE.replace('"device": "cpu"', '"device": "cuda"').replace(old, new)
    with pytest.raises(report.RecordError, match=expected) as refused:
        loaded(tmp_path, "suite", text)
    assert re.fullmatch("suite.json: not a whole record: .*", str(refused.value))


def test_of_the_evidence_the_newest_of_each_result_is_shown():
    parts = []
    for day, names in (("01", ("synthetic", "real")), ("02", ("real",)), ("03", ("real",))):
        part = {"benchmark": "evidence", "config": {}, "hardware": {"cpu": "A CPU"}, "input": {}}
        part |= {"file": f"evidence_{day}.json", "date": f"2999-01-{day}"}
        parts.append(part | {"results": {name: {"notes": [], "made": day} for name in names}})
    parts[0]["input"] = {"made_outside": ["archive"]}
    (found,) = report.newest(parts).values()
    assert found["results"]["real"]["made"] == "03"
    assert found["results"]["synthetic"]["notes"] == [
        "From evidence_01.json, 2999-01-01, A CPU. Made outside the plan: archive."
    ]

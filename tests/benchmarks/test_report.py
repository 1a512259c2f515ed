"""Every figure in EVIDENCE.md and RESULTS.md comes from a record, and incomplete records are refused."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.text import Text

from benchmarks import ROOT, chart, report, tables

SUITE = Path(__file__).with_name("golden").joinpath("suite.json").read_text()  # made up


def loaded(folder, text):
    (folder / "suite.json").write_text(text)
    return report.load_parts(folder / "suite.json")


def test_pages_match_the_records():
    parts = report.all_parts()
    assert report.EVIDENCE_PAGE.read_text() == report.evidence_page()
    assert report.RESULTS_PAGE.read_text() == report.results_page(parts)
    assert report.SPEED_CHART_PATH.read_text() == chart.draw_chart(parts)
    linked = re.findall(r"\]\(([^)#:]+)[)#]", report.RESULTS_PAGE.read_text())
    assert len(linked) > 10 and all((report.RESULTS_PAGE.parent / link).exists() for link in linked)


def test_figures_of_readme_come_from_the_records():
    parts, text = (
        report.all_parts(),
        " ".join(ROOT.joinpath("README.md").read_text().split()),
    )
    newest = report.newest_parts(parts)
    step = newest["step", "cuda"]
    case = step["results"]["omnilead: bf16, layers compiled, 512 crops"]["per_s"]["median"]
    product = step["results"]["matrix product: bf16"]["per_s"]["median"]
    share = case * step["input"]["gflop_per_crop"] / product
    assert f"{case:,.0f} ECGs a second (bf16), {100 * share:.0f} % of what" in text
    rates, _ = chart.rates_and_parts(chart.PANELS[0], parts)
    faster = sorted(
        rates["memory-mapped .npy"][name] / rate for name, rate in rates["omnilead"].items()
    )
    assert f"loads {faster[0]:.1f} to {faster[-1]:.1f} times as many" in text
    rows = newest["evidence", "cpu"]["results"]["real"]["rows"]
    for name, model in {
        "gradient boosting on the mean beat and measurements, no pre-training": "boosted features",
        "a linear classifier on `small`": "small",
        "the same on random weights": "random weights",
    }.items():
        cells = {}
        for row in rows:
            if (row["task"], row["model"]) == ("ptbxl-superdiagnostic", model):
                cells[row["leads"], row["share"]] = f"{row['metrics']['auroc']:.3f}"
                assert f"{row['n']} ECGs" in text and f"{row['labelled']:,}" in text
        in_order = [cells[leads, share] for leads in ("12", "1") for share in (0.1, 1.0)]
        assert f"| {name} | {' | '.join(in_order)} |" in text.replace("**", "")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_suites_record_becomes_tables(device, golden, tmp_path):
    parts = loaded(tmp_path, SUITE.replace('"device": "cpu"', f'"device": "{device}"'))
    assert {part["benchmark"] for part in parts} == {*tables.TABLES}
    golden(
        f"suite_{device}.md", f"{report.results_page(parts)}\n{tables.headline_table(parts[-1])}\n"
    )


def test_pictures_are_of_the_models(golden, tmp_path):
    """A panel for each set of leads and share; a model of a single length is no curve. Below the
    lowest panels is what crops cost."""
    part = loaded(tmp_path, SUITE)[-1]
    by_crops, said = report.crop_count_chart(part["results"][tables.BY_CROPS_RESULT], 100.0), []
    for axes in (*report.label_share_chart(part).axes, *by_crops.axes):
        ticks = [tick.get_text() for tick in axes.get_yticklabels()]
        said.append(f"\n{axes.get_title(loc='left')}: {axes.get_xlabel()}; {', '.join(ticks)}")
        said += [f"{line.get_label()} {line.get_xydata().round(4).tolist()}" for line in axes.lines]
        for cost in axes.child_axes:
            said.append(" ".join([cost.get_xlabel(), *map(Text.get_text, cost.get_xticklabels())]))
    golden("pictures.txt", "\n".join([*said, ""]))


def test_the_line_of_boosted_features_has_the_labels_of_the_curves():
    curves = report.newest_parts(report.all_parts())["evidence", "cpu"]["results"][
        tables.BY_CROPS_RESULT
    ]
    labels = []
    for document in curves, json.loads(report.BOOSTED_RESULTS.read_text()):
        rows = document["rows"]
        labels.append({(row["leads"], row["share"], row["labelled"], row["n"]) for row in rows})
    assert labels[0] == labels[1]


DAY = "2026-01-02"
RANKED = (  # date, alone or of a suite, and settings of records; the one that counts last
    ("2999-01-01", True, {"only": "^open"}),
    ("2999-01-02", True, {"model": "small"}),
    ("2999-01-03", True, {"huge": 9_999_999}),
    ("2026-01-01", True, {}),
    (DAY, False, {"only": "tar"}),
    (f"{DAY}T20:00:00", False, {}),
    (DAY, True, {"huge": 10_000_000}),
)


def test_which_record_counts(tmp_path):
    """The newest; of a day, one of its own before a part of a suite; no smaller job if there is
    another."""
    (scaling,) = (part for part in loaded(tmp_path, SUITE) if part["benchmark"] == "scaling")
    parts = []
    for date, alone, config in RANKED:
        parts.append(scaling | {"date": date, "alone": alone, "config": config})
    ranks = [report.sort_key(part) for part in parts]
    assert ranks == sorted(set(ranks)) and not scaling["alone"]
    on_gpu = parts[0] | {"config": {"device": "cuda"}}
    newest = {("scaling", "cpu"): parts[-1], ("scaling", "cuda"): on_gpu}
    assert report.newest_parts([*parts, on_gpu]) == newest
    answers = [
        any(report.deciding_case_and_figure(part, bar)[0] for bar in report.TARGETS)
        for part in parts
    ]
    assert answers == [True, False, False, True, True, True, True]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"gpus"', '"cpus"', "'gpus'"),
        ('"results": {', '"results": {}, "old": {', ", 0 results: must be"),
        ('"stall_pct"', '"stall"', "stall_pct"),
        ('"repeats": 3', '"repeats": 2', "a case has 2 repeats"),
        ('"format": 1', '"format": 2', "format=2, "),
        ("}", "", "JSONDecodeError"),
    ],
)
def test_missing_facts_of_a_record_are_named(old, new, expected, tmp_path):
    """The tables of a GPU need all of them."""
    text = SUITE.replace('"device": "cpu"', '"device": "cuda"').replace(old, new)
    with pytest.raises(
        report.RecordError, match=f"^suite.json: the record is not complete: .*{expected}"
    ):
        loaded(tmp_path, text)


def test_of_the_evidence_the_newest_of_each_result_is_shown():
    parts = []
    for day, names in enumerate(("synthetic real", "real", "real")):
        part = {"benchmark": "evidence", "config": {}, "hardware": {"cpu": "A CPU"}}
        part |= {"file": f"evidence_{day}.json", "date": f"2999-01-0{day}"}
        part["input"] = {"made_outside": ["archive"]}
        parts.append(
            part | {"results": {name: {"notes": [], "made": day} for name in names.split()}}
        )
    (found,) = report.newest_parts(parts).values()
    note = "From evidence_0.json, 2999-01-00, A CPU. Made outside the plan: archive."
    assert found["results"] == {
        "real": {"notes": [], "made": 2},
        "synthetic": {"notes": [note], "made": 0},
    }

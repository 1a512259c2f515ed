"""The tables: what is printed of what has been measured."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_plan import DATA, PAPER

from engine.reproduction import results
from engine.reproduction.paper import LEADS, TASKS, Scale, Table, tables
from engine.reproduction.plan import Choice, Plan, make
from engine.reproduction.workdir import Place, begin

SMALL = Scale.read("small")
GOLDEN = """
| Methods |  | 12-lead | P-3-lead |
| --- | --- | --- | --- |
| W2V | Dx. | 0.510 ± 0.025 / 0.714 ± 0.011 | ... / 0.676 ± 0.011 |
|  | AUROC | 0.750 ± 0.025 |  |
| W2V+RLM | Dx. | **0.615** [1/3] / 0.718 ± 0.003 | failed / 0.700 ± 0.011 |
"""


def made(place: Place, table: Table, **choice: tuple[object, ...]) -> Plan:
    plan = make([table], SMALL, DATA, place.out, 3, Choice(**choice))  # type: ignore[arg-type]
    begin(place, plan, SMALL, DATA)
    return plan


def score(place: Place, plan: Plan, name: str, value: float, **metrics: float) -> None:
    path = place.out / "scores" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    of = dict(plan.named[f"evaluate/{name}"].says)
    path.write_text(json.dumps({"score": value, "metrics": metrics, "intervals": {}} | of))


def test_a_table_of_what_is_there(tmp_path: Path) -> None:
    place, table = Place(tmp_path), tables()[3]
    plan = made(place, table, rows=("W2V", "W2V+RLM"), leads=(12, 3), tasks=("Dx",))
    for seed, value in enumerate((0.50, 0.51, 0.52)):
        score(place, plan, f"w2v-12/diagnosis-12-seed{seed}", value, auroc=value + 0.24)
    score(place, plan, "w2v_rlm-12/diagnosis-12-seed2", 0.615)
    place.of(plan.named["finetune/w2v_rlm-12/diagnosis-P-3-seed0"], "failed").write_text('{"why": "no room"}')
    results.write(place, table, plan, SMALL, DATA, 3)
    text = (tmp_path / "table-3.md").read_text()
    assert GOLDEN in text
    assert text.startswith("# Table 3: Random lead masking added to W2V and to CMSC\n")
    for part in ("Scale `small`", "85,000 crops", "2,127 probes", "model.width 128", "train.steps", "3 seeds", "Student's t"):
        assert part in text, part
    assert "log_every" not in text and "deepspeed" not in text
    assert text.endswith("failed: run again, it is retried.\n")

    lines = list(csv.DictReader((tmp_path / "table-3.csv").open()))
    assert len(lines) == 4 * 2 * 5
    first = lines[0]
    assert (first["row"], first["column"], first["seeds_done"], first["state"]) == ("W2V", "12-lead", "3", "done")
    assert first["scores"] == "0.5 0.51 0.52" and float(first["interval"]) == pytest.approx(4.3027 * 0.01 / 3**0.5, abs=1e-4)
    tree = json.loads((tmp_path / "table-3.json").read_text())
    assert [cell["state"] for cell in tree["cells"]] == [line["state"] for line in lines]
    assert tree["data"]["fingerprint"] == DATA.fingerprint


def test_a_score_counts_if_it_can_be_read_and_is_the_job_s(tmp_path: Path) -> None:
    place, table = Place(tmp_path), tables()[3]
    plan = made(place, table, rows=("W2V",), leads=(12, 3), tasks=("Dx",))
    job = plan.named["evaluate/w2v-12/diagnosis-12-seed0"]
    path, name = tmp_path / job.result, job.name.removeprefix("evaluate/")
    score(place, plan, name, 0.5)
    good = path.read_text()
    assert place.done(job) and place.score(job) == 0.5
    tree = json.loads(good)
    moved = json.dumps(tree | {"model": f"/elsewhere/{tree['model']}", "score": 0.75})
    others = [
        tree | change for change in ({"model": "finetune/other/seed0"}, {"data": "0"}, {"leads": "II"}, {"leads": "I,II"})
    ]
    for damaged in (good[:30], "", "[3]", "null", '{"score": 0.5}', *map(json.dumps, others)):
        path.write_text(damaged)
        assert not place.done(job) and place.score(job) is None, damaged
    path.write_text(moved)
    assert place.done(job) and place.score(job) == 0.75


def test_the_protocol_of_the_papers_scale_names_no_difference_and_a_leak_is_said() -> None:
    paper = Scale.read("paper")
    assert "those of the paper's configurations" in results.protocol(paper, DATA, 3)
    assert "the best CinC score of validation" in results.protocol(paper, DATA, 3)
    assert "the best AUROC of validation" in results.protocol(Scale.read("small"), DATA, 3)
    assert "both sides" not in results.protocol(paper, DATA, 3)
    assert "crops of one ECG lie on both sides" in results.protocol(paper, replace(DATA, split="paper-split"), 3)
    assert "1 seed of fine-tuning" in results.protocol(paper, DATA, 1)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_bold_is_where_the_paper_has_it(number: int, tmp_path: Path) -> None:
    """With the paper's numbers as ours. One of its cells is bold against its own numbers."""
    if not PAPER.is_file():
        pytest.skip("the paper's source is not here (../shared/paper.tex)")
    table, place = tables()[number], Place(tmp_path)
    plan = made(place, table)
    for (_, row, task, leads), names in plan.cells.items():
        printed = table.rows[row].printed[task][leads]
        assert printed
        for name in names:
            score(place, plan, name.removeprefix("evaluate/"), printed[0])
    ours = {(cell.row, cell.task, cell.leads) for cell in results.cells(place, table, plan) if cell.bold}
    source = re.findall(r"\\begin\{table\*\}(.*?)\\end\{table\*\}", PAPER.read_text(), re.DOTALL)[number - 1]
    rows = iter((row, task) for row in table.rows for task in TASKS)
    theirs = set()
    for line in re.findall(r"& (?:Dx|Id)\.? & (.*)", source):
        row, task = next(rows)
        theirs |= {(row, task, leads) for leads, cell in zip(LEADS, line.split("&"), strict=True) if r"\bf" in cell}
    wrong = {("RLM", "Dx", 1), ("RLM+Physio(4)", "Dx", 1)} if number == 4 else set()
    assert ours ^ theirs == wrong

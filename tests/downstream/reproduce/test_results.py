"""The tables: scores beside the paper's."""

import csv
import json
from dataclasses import replace

import pytest
from test_plan import DATA, latex, plan

from omnilead.downstream.reproduce import results
from omnilead.downstream.reproduce.jobs import write_json
from omnilead.downstream.reproduce.paper import paper_tables

GOLDEN = """
| Methods |  | 12-lead | P-3-lead |
| --- | --- | --- | --- |
| W2V | Dx. | 0.510 ± 0.025 / 0.714 ± 0.011 | ... / 0.676 ± 0.011 |
|  | AUROC | 0.750 ± 0.025 |  |
| W2V+RLM | Dx. | **0.615** [1/3] / 0.718 ± 0.003 | failed / 0.700 ± 0.011 |
"""


def started(out, number, **choice):
    made = plan(number, out=str(out), **choice)
    made.folder.note_commands(made.jobs.values())
    return made.folder, made


def score(folder, name, value, **metrics):
    path = folder.path / "scores" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"score": value, "metrics": metrics, "intervals": {}}))


def test_a_table_of_unfinished_scores(tmp_path):
    rows, leads = ("W2V", "W2V+RLM"), (12, 3)
    folder, made = started(tmp_path, 3, scale="small", rows=rows, leads=leads, tasks=("Dx",))
    for seed, value in enumerate((0.50, 0.51, 0.52)):
        score(folder, f"w2v-12/diagnosis-12-seed{seed}", value, auroc=value + 0.24)
    score(folder, "w2v_rlm-12/diagnosis-12-seed2", 0.615)
    failed = made.jobs["finetune/w2v_rlm-12/diagnosis-P-3-seed0"]
    write_json(folder.job_file(failed, "json"), {"error": "no room"})
    results.write_tables(made)
    text = (tmp_path / "table-3.md").read_text()
    assert GOLDEN in text
    assert text.startswith("# Table 3: Random lead masking added to W2V and to CMSC\n")
    parts = ["Scale `small`", "85,000 crops", "2,127 probes"]
    parts += ["model.width 128", "3 seeds", "failed: ", "[1/3]: "]
    assert [part for part in parts if part not in text] == []
    assert "deepspeed" not in text

    lines = list(csv.DictReader((tmp_path / "table-3.csv").read_text().splitlines()))
    assert len(lines) == 4 * 2 * 5
    first = {"row": "W2V", "column": "12-lead", "seeds_done": "3", "state": "done"}
    first["scores"] = "0.5 0.51 0.52"
    assert lines[0].items() >= first.items()
    assert float(lines[0]["interval"]) == pytest.approx(4.3027 * 0.01 / 3**0.5, abs=1e-4)
    tree = json.loads((tmp_path / "table-3.json").read_text())
    assert [cell["state"] for cell in tree["cells"]] == [line["state"] for line in lines]
    assert tree["data"]["fingerprint"] == DATA.fingerprint


@pytest.mark.parametrize("damaged", ["", '{"score": 0.', "[3]", "null", '{"score": null}', "{}"])
def test_a_damaged_score_does_not_count(damaged, tmp_path):
    folder, made = started(tmp_path, 3, rows=("W2V",), leads=(12,), tasks=("Dx",))
    job = made.jobs["evaluate/w2v-12/diagnosis-12-seed0"]
    score(folder, "w2v-12/diagnosis-12-seed0", 0.5)
    assert folder.is_done(job)
    (tmp_path / job.makes).write_text(damaged)
    assert not folder.is_done(job)
    assert not any(cell.scores for cell in results.table_cells(paper_tables()[3], made))


def test_the_protocol_names_differences_from_the_paper():
    def protocol(scale, seeds=3, **facts):
        made = plan(3, scale=scale, seeds=seeds, rows=("W2V",), leads=(12,), tasks=("Dx",))
        return results.protocol_text(replace(made, data=replace(DATA, **facts)))

    exact, small = protocol("paper"), protocol("small")
    assert exact.endswith("configurations: diagnosis: train.best challenge.")
    assert "the best CinC score" in exact
    assert "the best AUROC" in small and "pretrain: model.conv" in small
    assert "train.steps 1000" in small
    assert "crops of one ECG are on both sides" in protocol("paper", split="paper-split")
    assert "both sides" not in exact
    assert "1 seed of fine-tuning" in protocol("paper", seeds=1)


@pytest.mark.parametrize("number", paper_tables())
def test_bold_cells_are_the_papers(number, tmp_path):
    """With the paper's numbers as ours. Table 4 has two bold cells that are not its best."""
    papers_bold = {key for key, text in latex(number).items() if r"\bf" in text}
    table, (folder, made) = paper_tables()[number], started(tmp_path, number, seeds=1)
    for (_, row, task, leads), (name,) in made.cells.items():
        printed = table.rows[row].printed[task][leads] or [0.0]
        score(folder, name.removeprefix("evaluate/"), printed[0])
    cells = results.table_cells(table, made)
    our_bold = {(cell.row, cell.task, cell.leads) for cell in cells if cell.bold}
    other = {("RLM", "Dx", 1), ("RLM+Physio(4)", "Dx", 1)}
    assert our_bold ^ papers_bold == (other if number == 4 else set())

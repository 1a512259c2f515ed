"""The jobs of a table: the paper's cells, each job once, after the jobs it needs."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from omnilead.downstream.reproduce import jobs
from omnilead.downstream.reproduce.jobs import Job, WorkDir, write_json
from omnilead.downstream.reproduce.paper import (
    CONFIG_OF_TASK,
    LEAD_COUNTS,
    DatasetInfo,
    ReproductionScale,
    make_plan,
    paper_tables,
)
from omnilead.downstream.tasks.config import FinetuneConfig
from omnilead.engine.settings.files import CONFIGS
from omnilead.engine.training.config import check_config, load_config

ROLES = {
    "pretrain": 85_000,
    "dx": {"train": 17_000, "valid": 2_100, "test": 2_100},
    "id": {"train": 68_000, "valid": 17_000, "gallery": 2_127, "probe": 2_127},
}
DATA = DatasetInfo("/data/ecg", "f" * 64, "paper", ROLES)
PAPER = Path(__file__).parents[4] / "shared" / "paper.tex"


MODELS = """
pretrain/w2v-12 pretrain/cmsc-12 pretrain/threekg-12 pretrain/simclr_rlm-12 pretrain/w2v_cmsc-12
pretrain/w2v_cmsc_rlm-12 pretrain/w2v_rlm-12 pretrain/cmsc_rlm-12
pretrain/physio3-12 pretrain/physio4-12 pretrain/physio3_rlm-12 pretrain/physio4_rlm-12
pretrain/w2v-6 pretrain/cmsc-6 pretrain/w2v_cmsc-6 pretrain/w2v_cmsc_rlm-6
pretrain/w2v-3 pretrain/cmsc-3 pretrain/w2v_cmsc-3 pretrain/w2v_cmsc_rlm-3
pretrain/w2v-2 pretrain/cmsc-2 pretrain/w2v_cmsc-2 pretrain/w2v_cmsc_rlm-2
pretrain/w2v-1 pretrain/cmsc-1 pretrain/w2v_cmsc-1
"""


@cache
def plan(*numbers, scale="paper", seeds=3, out="/out", **choice):
    chosen = [paper_tables()[number] for number in numbers]
    return make_plan(
        chosen, ReproductionScale.read(scale), DATA, WorkDir(Path(out)), seeds, **choice
    )


def latex(number):
    """The cells of a table in the paper's source: row, task, leads."""
    if not PAPER.is_file():
        pytest.skip("the paper's source is not here (../shared/paper.tex)")
    sources = re.findall(r"\\begin\{table\*\}(.*?)\\end\{table\*\}", PAPER.read_text(), re.DOTALL)
    line = r"(?:\\multirow\{2\}\{\*\}\{(.+?)\} )?& (Dx|Id)\.? & (.*)"
    cells, row = {}, ""
    for name, task, texts in re.findall(line, sources[number - 1]):
        row = re.sub(r"\\textit\{(\w+)\}", r"\1", name) or row
        for leads, text in zip(LEAD_COUNTS, texts.split("&"), strict=True):
            cells[row, task, leads] = text
    return cells


@pytest.mark.parametrize("number", paper_tables())
def test_the_numbers_are_those_of_the_paper(number):
    table, cells = paper_tables()[number], latex(number)
    assert list(dict.fromkeys(row for row, _, _ in cells)) == list(table.rows)
    assert len(cells) == 10 * len(table.rows)
    for (row, task, leads), text in cells.items():
        numbers = [float(shown) for shown in re.findall(r"\d\.\d{3}", text)]
        assert table.rows[row].printed[task][leads] == (numbers or None)


def test_a_plan_has_all_cells_and_every_job_once():
    table_1, table_2, whole = plan(1), plan(2), plan(1, 2, 3, 4, seeds=1)
    assert len(table_1.cells) == 7 * 2 * 5 and all(
        len(jobs) == 3 for jobs in table_1.cells.values()
    )
    kinds = Counter(job.kind for job in table_1.jobs.values())
    assert kinds == {"pretrain": 6, "finetune": 210, "evaluate": 210}
    # the paper has no such cell
    assert len(table_2.cells) == 5 * 2 * 5 - 2 and "w2v_cmsc_rlm-1/" not in str(list(table_2.jobs))
    assert table_2.starts["starts/random-2.yaml"]["model"]["leads"] == 2
    ordered = list(whole.jobs.values())
    assert whole.jobs["finetune/w2v-12/diagnosis-12-seed0"].needs == ("pretrain/w2v-12",)
    models = {job.name for job in ordered if job.kind == "pretrain"}
    assert models == set(MODELS.split())
    cells = whole.cells
    assert cells[1, "W2V+CMSC+RLM", "Dx", 3] == cells[4, "RLM", "Dx", 3]
    assert cells[1, "W2V", "Id", 12] == cells[2, "W2V", "Id", 12]
    assert cells[1, "W2V", "Id", 3] == cells[3, "W2V", "Id", 3] != cells[2, "W2V", "Id", 3]
    before = set()
    for job in ordered:
        assert before.issuperset(job.needs) and job.minutes > 0
        before.add(job.name)
    assert len({job.makes for job in ordered}) == len(before)


@pytest.mark.parametrize(
    ("job", "settings", "absent"),
    [
        (
            "finetune/w2v-12/diagnosis-P-3-seed1",
            "--config diagnosis |--start /out/pretrain/w2v-12 |--data /data/ecg|"
            "augment.leads=3|augment.padded=true|train.seed=1",
            "encoder.feature_grad",
        ),
        ("pretrain/w2v-3", "--config w2v |model.leads=3|augment.padded=false", "seed"),
        ("finetune/w2v-3/identification-3-seed0", "augment.padded=false", "encoder"),
        (
            "finetune/random-12/diagnosis-12-seed0",
            "--start /out/starts/random-12.yaml|encoder.feature_grad=0.1",
            "model.leads",
        ),
        ("pretrain/w2v-12", "--config w2v ", "model.leads"),
        ("evaluate/w2v-12/diagnosis-P-3-seed1", "--leads 3 --role test", "--set"),
    ],
)
def test_commands_contain_the_settings_of_a_cell(job, settings, absent):
    command = " ".join(plan(1, 2, seeds=2).jobs[job].command)
    assert absent not in command
    for setting in settings.split("|"):
        assert setting in command


def test_random_weights_are_a_basis_of_what_is_made_from_them():
    for start, same in (("random-12", False), ("w2v-12", True)):
        paper, smoke = (plan(1, scale=scale, seeds=1).jobs for scale in ("paper", "smoke"))
        name = f"finetune/{start}/diagnosis-12-seed0"
        assert (paper[name].basis == smoke[name].basis) == same


@pytest.mark.parametrize("name", ["paper", "small", "smoke"])
def test_a_scale_leaves_methods_alone_and_fits_every_method(name):
    """Objectives, augmentations and heads are those of the methods."""
    settings = ReproductionScale.read(name).settings
    assert {key.split(".")[0] for given in settings.values() for key in given} <= {"model", "train"}
    pretraining = settings["pretrain"] | {"data.datasets": ["D"]}
    for method in {
        row.pretrain for table in paper_tables().values() for row in table.rows.values()
    }:
        check_config(load_config(CONFIGS / "pretrain" / f"{method}.yaml", pretraining), 1)
    for task in CONFIG_OF_TASK.values():
        path = CONFIGS / "finetune" / f"{task}.yaml"
        config = load_config(path, settings[task], FinetuneConfig)
        assert config.task.name == task
        assert (config.train.steps is None) != (config.train.epochs is None)
    papers = list(settings.values()) == [{}, {"train.best": "challenge"}, {}]
    assert papers == (name == "paper")


def test_jobs_that_are_done_tell_how_long_others_of_their_kind_take(tmp_path):
    folder = WorkDir(tmp_path)
    plan = [Job(name, ("python",), (), f"{name}/f", 2.0) for name in ("a/1", "a/2", "b/1")]
    folder.note_commands(plan)
    assert jobs.expected_seconds(folder, plan) == {"a/1": 120, "a/2": 120, "b/1": 120}
    (tmp_path / "a/1/f").mkdir(parents=True)
    write_json(folder.job_file(plan[0], "json"), {"seconds": 30.0})
    assert jobs.expected_seconds(folder, plan) == {"a/2": 30, "b/1": 120}


def test_jobs_find_the_files_that_a_plan_names_below_configs():
    assert (jobs.ROOT / "configs" / "evidence" / "tasks" / "ptbxl-100.yaml").is_file()

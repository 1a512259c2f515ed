"""The jobs of a table: the paper's cells, each job once, after the jobs it needs."""

import re
from collections import Counter
from pathlib import Path

import pytest

from omnilead.engine.common import ConfigError
from omnilead.engine.config import CONFIGS, check, load
from omnilead.engine.reproduce import cost
from omnilead.engine.reproduce.paper import LEADS, TASKS, ReproductionScale, as_arguments, tables
from omnilead.engine.reproduce.plan import DatasetInfo, JobPlan, make_plan
from omnilead.engine.reproduce.workdir import WorkDir, write_json
from omnilead.engine.tasks.config import FinetuneConfig

ROLES = {
    "pretrain": 85_000,
    "dx": {"train": 17_000, "valid": 2_100, "test": 2_100},
    "id": {"train": 68_000, "valid": 17_000, "gallery": 2_127, "probe": 2_127},
}
DATA = DatasetInfo("/data/ecg", "f" * 64, "paper", ROLES)
PAPER = Path(__file__).parents[4] / "shared" / "paper.tex"


def plan(
    *numbers: int,
    scale: str = "paper",
    seeds: int = 3,
    out: Path = Path("/out"),
    **choice: tuple[object, ...],
) -> JobPlan:
    return make_plan(
        [tables()[n] for n in numbers], ReproductionScale.read(scale), DATA, out, seeds, **choice
    )  # type: ignore[arg-type]


def latex(number: int) -> dict[tuple[str, str, int], str]:
    """The cells of a table in the paper's source: row, task, leads."""
    if not PAPER.is_file():
        pytest.skip("the paper's source is not here (../shared/paper.tex)")
    source = re.findall(r"\\begin\{table\*\}(.*?)\\end\{table\*\}", PAPER.read_text(), re.DOTALL)[
        number - 1
    ]
    cells, row = {}, ""
    for name, task, line in re.findall(
        r"(?:\\multirow\{2\}\{\*\}\{(.+?)\} )?& (Dx|Id)\.? & (.*)", source
    ):
        row = re.sub(r"\\textit\{(\w+)\}", r"\1", name) or row
        cells |= {
            (row, task, leads): cell for leads, cell in zip(LEADS, line.split("&"), strict=True)
        }
    return cells


@pytest.mark.parametrize("number", tables())
def test_the_numbers_are_those_of_the_paper(number: int) -> None:
    table, cells = tables()[number], latex(number)
    assert list(dict.fromkeys(row for row, _, _ in cells)) == list(table.rows) and len(
        cells
    ) == 10 * len(table.rows)
    for (row, task, leads), text in cells.items():
        assert table.rows[row].printed[task][leads] == (
            list(map(float, re.findall(r"\d\.\d{3}", text))) or None
        )


def test_a_plan_has_all_cells_and_every_job_once() -> None:
    one = plan(1)
    assert len(one.cells) == 7 * 2 * 5 and all(len(jobs) == 3 for jobs in one.cells.values())
    assert Counter(job.kind for job in one.ordered) == {
        "pretrain": 6,
        "finetune": 210,
        "evaluate": 210,
    }
    two = plan(2)
    assert not [
        name for name in two.jobs if "w2v_cmsc_rlm-1/" in name
    ]  # the paper has no such cell
    assert (
        len(two.cells) == 5 * 2 * 5 - 2
        and two.starts["starts/random-2.yaml"]["model"]["leads"] == 2
    )
    every = plan(1, 2, 3, 4, seeds=1)
    models = {
        "w2v",
        "cmsc",
        "threekg",
        "simclr_rlm",
        "w2v_cmsc",
        "w2v_cmsc_rlm",
        "w2v_rlm",
        "cmsc_rlm",
    }
    models |= {"physio3", "physio4", "physio3_rlm", "physio4_rlm"}
    fewer = {
        f"pretrain/{m}-{n}"
        for m in ("w2v", "cmsc", "w2v_cmsc", "w2v_cmsc_rlm")
        for n in (6, 3, 2, 1)
    }
    pretrained = {name for name in every.jobs if name.startswith("pretrain/")}
    assert pretrained == {f"pretrain/{m}-12" for m in models} | fewer - {"pretrain/w2v_cmsc_rlm-1"}
    assert every.cells[1, "W2V+CMSC+RLM", "Dx", 3] == every.cells[4, "RLM", "Dx", 3]
    assert every.cells[1, "W2V", "Id", 12] == every.cells[2, "W2V", "Id", 12]
    assert (
        every.cells[1, "W2V", "Id", 3]
        == every.cells[3, "W2V", "Id", 3]
        != every.cells[2, "W2V", "Id", 3]
    )
    before: set[str] = set()
    for job in every.ordered:
        assert before.issuperset(job.needs) and job.work > 0 and job.disk > 0
        before.add(job.name)
    assert len({job.result for job in every.ordered}) == len(before)


def test_commands_contain_the_settings_of_a_cell() -> None:
    commands = {name: " ".join(job.command) for name, job in plan(1, 2, seeds=2).jobs.items()}
    padded = commands["finetune/w2v-12/diagnosis-P-3-seed1"]
    assert "--config diagnosis " in padded and 'start="/out/pretrain/w2v-12"' in padded
    assert (
        "augment.leads=3" in padded and "augment.padded=true" in padded and "train.seed=1" in padded
    )
    fewer = commands["pretrain/w2v-3"]
    assert "--config w2v " in fewer and "model.leads=3" in fewer and "augment.padded=false" in fewer
    assert "augment.padded=false" in commands["finetune/w2v-3/identification-3-seed0"]
    random = commands["finetune/random-12/diagnosis-12-seed0"]
    assert 'start="/out/starts/random-12.yaml"' in random and "encoder.feature_grad=0.1" in random
    assert "encoder.feature_grad" not in padded and "model.leads" not in commands["pretrain/w2v-12"]
    assert "--leads 3 --role test" in commands["evaluate/w2v-12/diagnosis-P-3-seed1"]


@pytest.mark.parametrize("name", ["paper", "small", "smoke"])
def test_a_scale_leaves_methods_alone_and_fits_every_method(name: str) -> None:
    scale = ReproductionScale.read(name)
    changed = {key.split(".")[0] for settings in scale.settings.values() for key in settings}
    assert changed <= {"model", "train"}, (
        "objectives, augmentations and heads are those of the methods"
    )
    for row in {row.pretrain for table in tables().values() for row in table.rows.values()}:
        settings = [*as_arguments(scale.settings["pretrain"]), "data.datasets=[D]"]
        check(load(CONFIGS / "pretrain" / f"{row}.yaml", settings), 1)
    for task in TASKS.values():
        config = load(
            CONFIGS / "finetune" / f"{task}.yaml",
            as_arguments(scale.settings[task]),
            FinetuneConfig,
        )
        assert config.task.name == task and (config.train.steps is None) != (
            config.train.epochs is None
        )
    assert (name == "paper") == (
        list(scale.settings.values()) == [{}, {"train.best": "challenge"}, {}]
    )


def test_rows_leads_and_tasks_select_cells() -> None:
    chosen = plan(1, rows=("W2V",), leads=(12, 3), tasks=("Dx",), seeds=1)
    assert [job.kind for job in chosen.ordered] == [
        "pretrain",
        "finetune",
        "evaluate",
        "finetune",
        "evaluate",
    ]
    with pytest.raises(ConfigError, match=r"'W2V\+RLM'.*Random Init\., W2V, CMSC"):
        plan(1, rows=("W2V+RLM",))


def test_estimated_work_grows_with_crops_and_scale() -> None:
    """Identification has four times as many crops, evaluation no backward pass; a larger scale
    takes longer."""
    paper, smoke = (plan(1, scale=scale, seeds=1).jobs for scale in ("paper", "smoke"))
    diagnosis, identification = (
        paper[f"finetune/w2v-12/{task}-12-seed0"] for task in TASKS.values()
    )
    assert identification.work == 4 * diagnosis.work
    assert paper["pretrain/w2v-12"].work == pytest.approx(200 * 85_000 * 175.9e9, rel=0.01)
    assert paper["pretrain/cmsc-12"].work < paper["pretrain/w2v-12"].work
    assert all(smoke[name].work <= paper[name].work for name in paper)
    assert diagnosis.disk == 4 * 90_883_072


def test_the_estimate_is_from_the_measured_speed_then_from_finished_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "MEASURE_S", 0.01)
    small = plan(
        1, scale="smoke", seeds=1, rows=("W2V",), leads=(12, 3), tasks=("Dx",), out=tmp_path
    )
    assert 1e6 < cost.flops_per_s(small.models["pretrain/w2v-12"]) < 1e16
    folder, (pretrain, finetune, evaluate, similar, _) = WorkDir(tmp_path), small.ordered
    folder.start(small)
    seconds = cost.expected_seconds(small, folder, 1e9)
    assert seconds == {
        job.name: pytest.approx(job.work / 1e9 + cost.STARTUP_S) for job in small.ordered
    }
    for job, took in ((pretrain, 100.0), (finetune, 7.0)):
        (tmp_path / job.result).mkdir(parents=True)
        write_json(folder.file(job, "json"), {"seconds": took})
    then = cost.expected_seconds(small, folder, 1e9)
    assert set(then) == {job.name for job in small.ordered[2:]}
    assert (
        then[similar.name] == pytest.approx(7.0) and then[evaluate.name] == seconds[evaluate.name]
    )

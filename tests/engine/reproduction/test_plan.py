"""What a table needs: the paper's cells, each job once, in an order that can be run."""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.common import ConfigError
from engine.config import CONFIGS, FinetuneConfig, build, check, load
from engine.reproduction import cost
from engine.reproduction.paper import LEADS, TASKS, Scale, as_arguments, scales, tables
from engine.reproduction.plan import Choice, Data, Plan, make
from engine.reproduction.workdir import Place, begin

ROLES = {
    "pretrain": 85_000,
    "dx": {"train": 17_000, "valid": 2_100, "test": 2_100},
    "id": {"train": 68_000, "valid": 17_000, "gallery": 2_127, "probe": 2_127},
}
DATA = Data("/data/ecg", "f" * 64, "paper", ROLES)
PAPER = Path(__file__).parents[4] / "shared" / "paper.tex"


def plan(*numbers: int, scale: str = "paper", seeds: int = 3, **choice: tuple[object, ...]) -> Plan:
    return make([tables()[n] for n in numbers], Scale.read(scale), DATA, Path("/out"), seeds, Choice(**choice))  # type: ignore[arg-type]


def test_the_numbers_are_those_of_the_paper() -> None:
    """Every cell, read again from the paper's own source."""
    if not PAPER.is_file():
        pytest.skip("the paper's source is not here (../shared/paper.tex)")
    sources = re.findall(r"\\begin\{table\*\}(.*?)\\end\{table\*\}", PAPER.read_text(), re.DOTALL)
    assert len(sources) == len(tables()) == 4
    seen = 0
    for table, source in zip(tables().values(), sources, strict=True):
        names: list[str] = []
        for line in source.splitlines():
            found = re.match(r"\s*(?:\\multirow\{2\}\{\*\}\{(.+?)\} )?& (Dx|Id)\.? & (.*)", line)
            if not found:
                continue
            if found[1]:
                names.append(re.sub(r"\\textit\{(\w+)\}", r"\1", found[1]))
            row = table.rows[names[-1]]
            for leads, cell in zip(LEADS, found[3].split("&"), strict=True):
                numbers = re.findall(r"\d\.\d{3}", cell)
                assert row.printed[found[2]][leads] == (tuple(map(float, numbers)) or None), (table.number, row.name, leads)
                seen += 1
        assert names == list(table.rows)
        assert table.padded == ("P-6-lead" in source)
    assert seen == 10 * sum(len(table.rows) for table in tables().values()) == 210


def test_a_plan_has_the_cells_of_its_table_and_every_job_once() -> None:
    one = plan(1)
    assert len(one.cells) == 7 * 2 * 5 and all(len(jobs) == 3 for jobs in one.cells.values())
    assert Counter(job.kind for job in one.jobs) == {"pretrain": 6, "finetune": 210, "evaluate": 210}
    assert not [job for job in plan(2).jobs if "w2v_cmsc_rlm-1/" in job.name]  # the paper has no such cell
    assert len(plan(2).cells) == 5 * 2 * 5 - 2
    every = plan(1, 2, 3, 4)
    models = {"w2v", "cmsc", "threekg", "simclr_rlm", "w2v_cmsc", "w2v_cmsc_rlm", "w2v_rlm", "cmsc_rlm"}
    models |= {"physio3", "physio4", "physio3_rlm", "physio4_rlm"}
    pretrained = {job.name for job in every.jobs if job.kind == "pretrain"}
    truly = {f"pretrain/{m}-{n}" for m in ("w2v", "cmsc", "w2v_cmsc", "w2v_cmsc_rlm") for n in (6, 3, 2, 1)}
    assert pretrained == {f"pretrain/{m}-12" for m in models} | truly - {"pretrain/w2v_cmsc_rlm-1"}
    assert every.cells[1, "W2V+CMSC+RLM", "Dx", 3] == every.cells[4, "RLM", "Dx", 3]
    assert every.cells[1, "W2V", "Id", 12] == every.cells[2, "W2V", "Id", 12]
    assert every.cells[1, "W2V", "Id", 3] == every.cells[3, "W2V", "Id", 3] != every.cells[2, "W2V", "Id", 3]
    results = [job.result for job in every.jobs]
    assert len(set(results)) == len(results)


def test_what_a_job_needs_stands_before_it() -> None:
    before: set[str] = set()
    for job in plan(1, 2, 3, 4, scale="small").jobs:
        assert set(job.needs) <= before
        assert job.flops > 0 and job.disk > 0
        before.add(job.name)


def test_commands_say_what_makes_a_cell() -> None:
    jobs = {job.name: " ".join(job.command) for job in plan(1, 2, seeds=2).jobs}
    padded = jobs["finetune/w2v-12/diagnosis-P-3-seed1"]
    assert "configs/finetune/diagnosis.yaml" in padded and 'start="/out/pretrain/w2v-12"' in padded
    assert "augment.leads=3" in padded and "augment.padded=true" in padded and "train.seed=1" in padded
    truly = jobs["pretrain/w2v-3"]
    assert "configs/pretrain/w2v.yaml" in truly and "model.leads=3" in truly and "augment.padded=false" in truly
    assert "augment.padded=false" in jobs["finetune/w2v-3/identification-3-seed0"]
    assert 'start="/out/starts/random-12.yaml"' in jobs["finetune/random-12/diagnosis-12-seed0"]
    assert "encoder.feature_grad=0.1" in jobs["finetune/random-12/diagnosis-12-seed0"]
    assert "encoder.feature_grad" not in padded
    assert "--leads 3 --role test" in jobs["evaluate/w2v-12/diagnosis-P-3-seed1"]
    assert "model.leads" not in jobs["pretrain/w2v-12"]
    assert plan(2).starts["starts/random-2.yaml"]["model"]["leads"] == 2


@pytest.mark.parametrize("name", scales())
def test_a_scale_leaves_methods_alone_and_fits_every_method(name: str) -> None:
    scale = Scale.read(name)
    touched = {key.split(".")[0] for sets in scale.sets.values() for key in sets}
    assert touched <= {"model", "train"}, "objectives, augmentations and heads are those of the methods"
    for row in {row.pretrain for table in tables().values() for row in table.rows.values()}:
        check(load(CONFIGS / "pretrain" / f"{row}.yaml", [*as_arguments(scale.sets["pretrain"]), "data.datasets=[D]"]), 1)
    for task in TASKS.values():
        tuned = load(CONFIGS / "finetune" / f"{task}.yaml", as_arguments(scale.sets[task]), FinetuneConfig)
        assert tuned.head.task == task and (tuned.train.steps is None) != (tuned.train.epochs is None)
    assert (name == "paper") == (list(scale.sets.values()) == [{}, {"train.best": "challenge"}, {}])


def test_a_choice_of_cells() -> None:
    chosen = plan(1, rows=("W2V",), leads=(12, 3), tasks=("Dx",), seeds=1)
    assert [job.kind for job in chosen.jobs] == ["pretrain", "finetune", "evaluate", "finetune", "evaluate"]
    with pytest.raises(ConfigError, match=r"--rows 'W2V\+RLM': table 1 has no such row: use Random Init\., W2V, CMSC"):
        plan(1, rows=("W2V+RLM",))
    with pytest.raises(ConfigError, match="--scale 'huge': no such scale: use demo, paper, small, smoke, or"):
        Scale.read("huge")


def test_work_grows_with_what_costs() -> None:
    """Identification sees four times as many crops, evaluation has no backward, a larger scale takes longer."""
    paper, smoke = ({job.name: job for job in plan(1, scale=scale).jobs} for scale in ("paper", "smoke"))
    dx, identity = (paper[f"finetune/w2v-12/{task}-12-seed0"] for task in TASKS.values())
    assert identity.flops == 4 * dx.flops
    assert paper["pretrain/w2v-12"].flops == pytest.approx(200 * 85_000 * 175.9e9, rel=0.01)
    assert paper["pretrain/cmsc-12"].flops < paper["pretrain/w2v-12"].flops
    assert all(smoke[name].flops <= paper[name].flops for name in paper)


def test_the_forecast_is_that_of_the_speed_and_then_of_what_was_seen(tmp_path: Path) -> None:
    place, one = Place(tmp_path), plan(1, scale="smoke", seeds=1, rows=("W2V",), leads=(12, 3), tasks=("Dx",))
    begin(place, one, Scale.read("smoke"), DATA)
    first = cost.estimate(one, place, 1e9)
    assert len(first.seconds) == 5 and all(seconds > cost.START_S for seconds in first.seconds.values())
    assert first.total_s == pytest.approx(sum(job.flops for job in one.jobs) / 1e9 + 5 * cost.START_S)
    pretrain, tuned = one.jobs[:2]
    for job, seconds in ((pretrain, 100.0), (tuned, 7.0)):
        (tmp_path / job.result).mkdir(parents=True)
        place.keep(place.of(job, "json"), {"seconds": seconds})
    then = cost.estimate(one, place, 1e9)
    assert set(then.seconds) == {job.name for job in one.jobs[2:]}
    assert then.seconds["finetune/w2v-12/diagnosis-P-3-seed0"] == pytest.approx(7.0)
    assert 0 < then.disk < first.disk


def test_speed_is_measured_once_in_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "ENOUGH_S", 0.01)
    one, place = plan(1, scale="smoke", seeds=1, rows=("W2V",)), Place(tmp_path)
    found = cost.measure(one.configs[0])
    assert 1e6 < found < 1e16
    asked: list[str] = []

    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        asked.append(how["input"])
        return subprocess.CompletedProcess(command, 0, f"noise\n{found}\n", "")

    monkeypatch.setattr(cost.subprocess, "run", run)
    begin(place, one, Scale.read("smoke"), DATA)
    assert cost.speed(one, place) == cost.speed(one, place) == found
    assert len(asked) == 1 and build(json.loads(asked[0])).model == one.configs[0].model

"""omnilead.downstream.evaluate: what it refuses, faults, and several ranks."""

import errno
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from omnilead.data_tools.dataset import Dataset
from omnilead.downstream.evaluate import main
from omnilead.downstream.inference.outputs import part_tables
from omnilead.downstream.tasks.labels import TaskLabels
from omnilead.engine.data.datasets import Datasets
from omnilead.engine.model.folder import write_config
from tests.downstream.evaluate.conftest import (
    DIAGNOSIS,
    IDENTIFICATION,
    quick_main,
)
from tests.engine.training.ranks import free_port
from tests.forks import started
from tests.waiting import HANG_S


@pytest.mark.parametrize(
    ("head", "task", "pattern"),
    [
        (None, "diagnosis", "is only pre-trained and has no head to score: fine-tune it"),
        (IDENTIFICATION, "diagnosis", "is fine-tuned for identification and has no head"),
        (
            DIAGNOSIS | {"classes": ["AF", "NSR"], "thresholds": [0.5] * 2},
            "auto",
            "2 classes, not AFL, BBB",
        ),
    ],
)
def test_a_model_without_the_tasks_head(head, task, pattern, saved_model, refused):
    refused(pattern, saved_model(head=head), "--task", task)


def test_data_without_held_out_crops(data, diagnostic, refused, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Dataset, "labels", np.zeros((len(data), 26), bool))
        refused(r"none of its \d+ crops with dx=test has a scored diagnosis", diagnostic)
    monkeypatch.setattr(Datasets, "rows_with_id_role", lambda self, identity: np.zeros(0, int))
    monkeypatch.setattr(TaskLabels, "rows_of_all_datasets", lambda self, *split: np.zeros(0, int))
    refused("no crop has dx=test: .*--plan paper, .* shard --dx-sources", diagnostic)
    refused("no crop has id=gallery", diagnostic, "--task", "identification")
    refused(
        "no crop has id=valid and two halves",
        diagnostic,
        "--task",
        "identification",
        "--role",
        "valid",
    )


def test_arguments_and_files_are_checked_before_the_work(pretrained, tmp_path, refused):
    refused("none: does not exist", pretrained, "--data", tmp_path / "none")
    refused("none: ", tmp_path / "none")
    refused("--json .*none", pretrained, "--json", tmp_path / "none" / "f.json")
    refused(f"--report {tmp_path}: ", pretrained, "--report", tmp_path)
    refused(
        "the same file",
        pretrained,
        "--json",
        tmp_path / "f",
        "--report",
        tmp_path / ".." / tmp_path.name / "f",
    )
    if not torch.cuda.is_available():
        refused("--device cuda", pretrained, "--device", "cuda")


def test_a_full_disk_names_the_output(data, pretrained, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("omnilead.data_tools.io.storage.os.fsync", full)
    assert (
        main(["--model", str(pretrained), "--data", data.root.url, "--json", str(tmp_path / "f")])
        == 1
    )
    err = capsys.readouterr().err
    assert err.startswith(f"omnilead evaluate: --json {tmp_path / 'f'}: No space left on device: ")
    assert err.count("\n") == 1 and not (tmp_path / "f").exists()


@pytest.mark.parametrize(("key", "value"), [("fs_hz", 250), ("uv_per_lsb", 4.88)])
def test_another_rate_or_unit_is_refused(key, value, copy, pretrained, refused):
    refused(
        f"dataset.json: the entry {key} is not valid", pretrained, "--data", copy(**{key: value})
    )


@pytest.mark.parametrize("text", ["", "kind: regression", "tasks: {kind: regression}", "task: age"])
def test_a_task_file_without_a_task_is_not_diagnosis(text, diagnostic, tmp_path, refused):
    (tmp_path / "my.yaml").write_text(text)
    says = "my.yaml has no section `task`: add one, `task: {name: ..., kind: ...}`"
    refused(says, diagnostic, "--task", tmp_path / "my.yaml")


@pytest.mark.parametrize("head", [DIAGNOSIS, IDENTIFICATION], ids=["diagnosis", "identification"])
def test_nan_outputs_of_a_model_are_refused(head, saved_model, tmp_path, refused):
    folder = saved_model(head=head)
    weights = load_file(folder / "model.safetensors")
    weights[next(name for name in weights if name.startswith("encoder.layers"))][:] = np.nan
    save_file(weights, folder / "model.safetensors")
    write_config(folder, json.loads((folder / "config.json").read_text()))
    refused("the model's outputs are not finite", folder, "--json", tmp_path / "f.json", code=1)
    assert not (tmp_path / "f.json").exists()


def damaged(data, row, place):
    shutil.copytree(data.root.url, place)
    number, offset, _ = (int(column[row]) for column in data.addresses)
    path = place / "shards" / str(data.shards[number].name)
    content = bytearray(path.read_bytes())
    content[offset + 100] ^= 1
    path.write_bytes(content)
    return place


def test_public_data_need_no_credentials(pretrained, refused, monkeypatch):
    def open_dataset(url, anonymous=False):
        raise FileNotFoundError(2, f"anonymous={anonymous}", url)

    monkeypatch.setattr(Dataset, "open", open_dataset)
    refused("s3://b/d: anonymous=True", pretrained, "--data", "s3://b/d", "--anonymous")


def test_ranks_share_the_parts_and_a_killed_evaluation_resumes(
    diagnostic, data, tmp_path, monkeypatch
):
    """The same bytes as from one process; a rank that meets a damaged crop ends the others."""
    alone, shared = tmp_path / "alone.json", tmp_path / "shared.json"
    arguments = ["--model", str(diagnostic), "--data", data.root.url, "--batch", "1", "--json"]
    assert main([*arguments, str(alone)]) == 0
    codes, said = of_two_ranks([*arguments, str(shared)], tmp_path)
    assert (
        codes == [0, 0]
        and said.count("to report: CinC 2021 score") == 1
        and shared.read_bytes() == alone.read_bytes()
    ), said
    row = int(data.select(dx="test")[-1])
    shared.unlink()
    copy = str(damaged(data, row, tmp_path / "copy"))
    codes, said = of_two_ranks([*arguments[:3], copy, *arguments[4:], str(shared)], tmp_path)
    assert (
        sorted(codes) == [1, 2]
        and f"crop {row} at byte" in said
        and "another rank died" in said
        and not shared.exists()
    )
    kept = tmp_path / "shared.json.halves.parquet.parts"
    there = {int(path.stem) for path in kept.glob("0*.parquet")}
    computed = []
    monkeypatch.setattr(
        "omnilead.downstream.inference.outputs.part_tables",
        lambda *given: computed.extend(given[3]) or part_tables(*given),
    )
    assert main([*arguments, str(shared)]) == 0
    assert 1 in there and computed == sorted({*range(len(data.select(dx="test")))} - there)
    assert shared.read_bytes() == alone.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.json", "copy", "shared.json"]


def test_outputs_kept_from_an_interrupted_evaluation(
    diagnostic,
    data,
    tmp_path,
    refused,
    evaluated,
    monkeypatch,
):
    def interrupt(*_):
        raise KeyboardInterrupt

    arguments = "--json", tmp_path / "f.json"
    with monkeypatch.context() as patch:
        patch.setattr(
            "omnilead.downstream.inference.outputs.ParquetParts.write_part", lambda *_: None
        )
        refused(
            "f.json.halves.parquet: cannot be read back: run the same command again",
            diagnostic,
            *arguments,
            code=1,
        )
    with monkeypatch.context() as patch:
        patch.setattr("omnilead.downstream.evaluation.results.embedding_matrix", interrupt)
        refused("interrupted: run the same command again", diagnostic, *arguments, code=130)
        refused(
            "interrupted: run the same command again",
            diagnostic,
            "--report",
            tmp_path / "f.html",
            code=130,
        )
    refused(
        "f.json.halves.parquet: another job wrote it .*choose another",
        diagnostic,
        *arguments,
        "--leads",
        "II",
    )
    monkeypatch.setattr(
        "omnilead.downstream.inference.outputs.part_tables",
        lambda *_: pytest.fail("computed again"),
    )
    evaluated(diagnostic)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.html.halves.parquet", "f.json"]
    given = "--model", diagnostic, "--data", data.root.url, "--report", tmp_path / "f.html"
    assert main([str(word) for word in given]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.html", "f.json"]


def test_ranks_need_a_file_and_each_other(diagnostic, tmp_path, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(
        "WORLD_SIZE=2: several ranks keep .* next to the results, but no file of results is named: give --json F or --report F",
        diagnostic,
    )
    refused(
        "MASTER_PORT='': rank 0 cannot join 2 ranks: ", diagnostic, "--report", tmp_path / "f.html"
    )


def of_two_ranks(arguments, folder):
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = [place | {"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(2)]
    both = [
        started(quick_main, [*arguments, f"--local_rank={n}"], out=folder / "said", env=ranks[n])
        for n in range(2)
    ]
    for process in both:
        process.join(HANG_S)
        process.kill()
        process.join()
    said = (folder / "said").read_text()
    (folder / "said").unlink()
    return [process.exitcode for process in both], said

"""What is lost or forged in RUN: the run goes on from what is whole, or says what it refuses."""

import importlib
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import curve, pretrain, rows, settings, tuning

from data_tools.dataset import Dataset
from engine.training import checkpoint
from engine.training.checkpoint import CheckpointError
from engine.training.distributed import Ranks
from engine.training.tracking import _cut

ALONE = Ranks(0, 1, torch.device("cpu"), None)
STATE = {"step": 2, "crops_seen": 16, "skipped_steps": 0, "in_a_row": 0, "best": {}, "world": 1, "zero_stage": 1}
STATE |= {"preprocessing_sha256": "0", "datasets": ["0"], "config": {}}


def checkpoints(run: Path, *steps: int) -> Path:
    for step in steps:
        (run / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (run / "checkpoints" / f"step-{step}" / checkpoint.MANIFEST).write_text("{}")
    return run / "checkpoints"


UNUSABLE = (None, b"", b"\xff\x00", b"../../elsewhere", b"step-", b"step-99", b"step-\xc2\xb2", b"step-" + b"9" * 5000)


@pytest.mark.parametrize("latest", UNUSABLE, ids=lambda latest: str(latest)[:20])
def test_without_a_usable_latest_the_newest_whole_one_counts(latest: bytes | None, tmp_path: Path) -> None:
    root, said = checkpoints(tmp_path, 5, 10, 9), []
    if latest is not None:
        (root / checkpoint.LATEST).write_bytes(latest)
    (root / "step-10" / checkpoint.MANIFEST).write_text('{"gone.pt": {"bytes": 1, "crc32c": 1}}')
    assert checkpoint.newest(tmp_path, said.append) == root / "step-9"
    assert len(said) == 1 and "gone.pt" in said[0] and "step-9" in said[0] and ("latest" in said[0] or "step-99" in said[0])


def test_nothing_whole_is_refused_and_nothing_at_all_begins(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    root = checkpoints(tmp_path, 3)
    for manifest in ("[]", "3", '{"a": 3}', "[" * 100_000, ""):
        (root / "step-3" / checkpoint.MANIFEST).write_text(manifest)
        reason = checkpoint.fault(root / "step-3")
        if manifest != "":
            assert reason and "\n" not in reason
    with pytest.raises(CheckpointError):
        checkpoint.newest(tmp_path)


def test_a_copy_by_its_user_is_no_checkpoint(tmp_path: Path) -> None:
    root = checkpoints(tmp_path, 3)
    (root / "step-3.mine").mkdir()
    checkpoint.clean(root)
    assert (root / "step-3.mine").is_dir() and [path.name for path in checkpoint.wholes(root)] == ["step-3"]


def test_a_run_without_latest_goes_on(dataset: Dataset, tmp_path: Path) -> None:
    assert pretrain(tmp_path, dataset.root.url, train__save_every_steps=1, train__steps=3).ok
    root = tmp_path / "run" / "checkpoints"
    (root / "latest").unlink()
    ended = pretrain(tmp_path, dataset.root.url, train__steps=4)
    assert ended.ok and "goes on after step 3" in ended.output and "latest" in ended.output.splitlines()[0], ended.output
    assert {path.name for path in root.glob("step-*")} == {"step-2", "step-3", "step-4"}
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


def test_lines_that_are_done_again_are_kept_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (3, 1):
        path.write_bytes(b"".join(b'{"step": %d}\n' % n for n in range(1, 6)) + b'\xff{"st')
        _cut(path, step)
        assert [row["step"] for row in rows(tmp_path)] == list(range(1, step + 1))
    cut = (tmp_path / "metrics.cut.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in cut if line.startswith(b"{")] == [4, 5, 2, 3, 4, 5]
    assert cut.count(b'\xff{"st') == 2
    _cut(path, 1)
    assert len((tmp_path / "metrics.cut.jsonl").read_bytes().splitlines()) == len(cut)


def lose(how: Callable[[Path], None]) -> None:
    """RUN goes after the third step."""
    from engine.training.loop import Loop

    step = Loop._step

    def losing(self: Loop, batch: object) -> object:
        if self.progress.step == 3 and self.ranks.first:
            how(self.run)
        return step(self, batch)  # type: ignore[arg-type]

    Loop._step = losing  # type: ignore[method-assign, assignment]


def moved(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def replaced(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()
    (run / ".lock").touch()


@pytest.mark.parametrize(("how", "world"), [(moved, 2), (replaced, 1), (shutil.rmtree, 1)])
def test_a_run_that_is_gone_ends_soon_and_in_one_line(how: Any, world: int, dataset: Dataset, tmp_path: Path) -> None:
    ended = pretrain(tmp_path, dataset.root.url, world=world, before=partial(lose, how), train__steps=10_000)
    assert ended.codes == [1] * world and "was moved or deleted" in ended.output, ended.output
    assert "Traceback" not in ended.output and "step 9/" not in ended.output
    assert not (tmp_path / "run" / "checkpoints").exists()


WRONG = {"step": ("-1", f"{2**64}", '"2"', "2.0", "null", "true"), "crops_seen": ("9" * 5000,), "world": ("0",)}
WRONG |= {"zero_stage": ("4",), "datasets": ('"0"',), "config": ("[]",), "best": ('{"step": "x"}',)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_forged_state_is_refused_by_name(name: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps(STATE | {name: "VALUE"}).replace('"VALUE"', value))
    with pytest.raises(CheckpointError) as error:
        checkpoint.read_state(tmp_path)
    assert "state.json" in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


FORGED = ("", "[]", "{}", "null", "[" * 100_000, "\xff", '{"recipe": 3}', '{"recipe": {"backend": "dali"}}')


@pytest.mark.parametrize("text", FORGED, ids=lambda text: text[:30])
def test_a_forged_loader_state_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "loader-rank0.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError) as error:
        checkpoint.read_loader_state(tmp_path, ALONE, 1)
    assert "loader-rank0.json" in str(error.value) and "\n" not in str(error.value)
    if "dali" in text:
        assert checkpoint.read_loader_state(tmp_path, ALONE, 2)["dali"] is None  # another number of ranks


def forge(path: Path, **changes: Any) -> None:
    """As one who knows the manifest would."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    manifest = json.loads((path.parent / checkpoint.MANIFEST).read_text())
    manifest[path.name] = {"bytes": path.stat().st_size, "crc32c": checkpoint.crc32c(path)}
    (path.parent / checkpoint.MANIFEST).write_text(json.dumps(manifest))


def test_a_rewound_order_and_other_settings_in_a_checkpoint_are_one_line(dataset: Dataset, tmp_path: Path) -> None:
    assert pretrain(tmp_path, dataset.root.url, train__steps=2).ok
    found = checkpoint.newest(tmp_path / "run")
    assert found is not None
    saved = found.with_name("saved")
    shutil.copytree(found, saved)
    for name, changes, says in (
        ("loader-rank0.json", {"crops_seen": 8}, "loader's state of step 1"),
        ("state.json", {"step": 1}, "state.json is of step 1"),
        ("state.json", {"config": {"train": {"lr": "x"}}}, "state.json: config: train.lr='x'"),
    ):
        forge(found / name, **changes)
        ended = pretrain(tmp_path, dataset.root.url, train__steps=3)
        assert ended.codes == [2] and says in ended.output and ended.output.count("\n") == 1, ended.output
        shutil.rmtree(found)
        shutil.copytree(saved, found)


def in_one_process(runs: Sequence[tuple[str, list[str], int]]) -> None:
    for door, arguments, code in runs:
        assert importlib.import_module(f"engine.{door}").main(arguments) == code


def test_several_trainings_in_one_process(dataset: Dataset, tmp_path: Path) -> None:
    """As in a notebook: one after the other, also after one that failed, and each as if it were alone."""
    url = dataset.root.url
    first = settings(tmp_path, url, "first", train__steps=2)
    tune = tuning(tmp_path, url, tmp_path / "first", "diagnosis", "tuned", train__steps=2)
    refused = settings(tmp_path, url, "first", train__steps=1, train__schedule="fixed")
    before = partial(in_one_process, [("pretrain", first, 0), ("finetune", tune, 0), ("pretrain", refused, 2)])
    ended = pretrain(tmp_path, url, "again", before=before, train__steps=2)
    assert ended.ok, ended.output
    assert curve(tmp_path / "again") == curve(tmp_path / "first")

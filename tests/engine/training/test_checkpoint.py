"""Checkpoints: killed at any moment, damaged, forged, on a full disk, with code in their
pickles."""

import errno
import fcntl
import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import curve, pretrain, rows, run, settings, start

from omnilead.data_tools.dataset import Dataset
from omnilead.engine import convert
from omnilead.engine.model.folder import LoadError
from omnilead.engine.pretrain import main
from omnilead.engine.tasks.finetuning import read_start
from omnilead.engine.training import checkpoint
from omnilead.engine.training.checkpoint import FORBID, FORCE, MANIFEST, CheckpointError, WriteError
from omnilead.engine.training.distributed import Ranks
from tests.forks import started

ALONE = Ranks(0, 1, torch.device("cpu"), None)
KILLS = 4
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
LONGER = {"train__steps": 2, "train__schedule": "fixed"}


@pytest.fixture(scope="module")
def genuine(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, each with its checkpoint."""
    tmp = tmp_path_factory.mktemp("genuine")
    ended = pretrain(
        tmp, dataset.root.url, train__save_every_steps=1, **LONGER | {"train__steps": 3}
    )
    assert ended.ok, ended.output
    return tmp / "run"


@pytest.fixture
def copied(genuine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(genuine, tmp_path / "run"))


def resumed(tmp: Path, dataset: Dataset, **changes: Any) -> Any:
    return pretrain(tmp, dataset.root.url, **LONGER | {"train__steps": 4} | changes)


def made(root: Path, *steps: int) -> Path:
    for step in steps:
        (root / f"step-{step}").mkdir(parents=True)
        (root / f"step-{step}" / "state.json").write_text("{}")
        (root / f"step-{step}" / MANIFEST).write_text("{}")
        forge(root / f"step-{step}" / "state.json")
    return root


def forge(path: Path) -> None:
    """Makes the manifest fit, as an attacker would."""
    manifest = json.loads((path.parent / MANIFEST).read_text())
    manifest[path.name] = {"bytes": path.stat().st_size, "crc32c": checkpoint.crc32c(path)}
    (path.parent / MANIFEST).write_text(json.dumps(manifest))


def test_killed_at_any_time_it_resumes_and_ends_as_if_nothing_had_happened(
    dataset: Dataset, tmp_path: Path
) -> None:
    how = {"train__steps": 28, "train__save_every_steps": 1, "train__keep": 2}
    assert pretrain(tmp_path, dataset.root.url, "whole", **how).ok
    arguments, chance, killed = (
        settings(tmp_path, dataset.root.url, "killed", **how),
        random.Random(3),
        0,
    )
    for _ in range(KILLS):
        (process,) = start(tmp_path, arguments, before=partial(die_within, chance.random() * 0.2))
        process.join()
        killed += process.exitcode == -signal.SIGPROF
        # the one that `latest` names is complete
        path = checkpoint.newest(tmp_path / "killed", pytest.fail)
        assert path is None or checkpoint.fault(path) is None
    assert killed >= KILLS - 2
    assert run(tmp_path, arguments).ok
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")


def die_within(cpu_s: float) -> None:
    """Dies after this much CPU time past its first checkpoint: SIGPROF ends a process as SIGKILL
    does."""
    written = checkpoint.write_whole

    def last(path: Path, text: str) -> None:
        written(path, text)
        if path.name == "latest" and signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0):
            signal.setitimer(signal.ITIMER_PROF, cpu_s)

    checkpoint.write_whole = last


@pytest.mark.parametrize("name", ["loader-rank0.json", "state.json", "manifest.json", "latest"])
def test_killed_between_any_two_files_of_a_checkpoint(
    name: str, dataset: Dataset, tmp_path: Path
) -> None:
    how = {"train__save_every_steps": 2, "train__steps": 5}
    ended = pretrain(tmp_path, dataset.root.url, before=partial(die_before, name), **how)
    assert ended.codes == [9]
    path = checkpoint.newest(tmp_path / "run", pytest.fail)
    assert path is not None and path.name == "step-2"
    ended = pretrain(tmp_path, dataset.root.url, **how)
    assert ended.ok and "resumes after step 2" in ended.output, ended.output
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5]


def die_before(name: str) -> None:
    """Dies before the second checkpoint's file of this name exists."""
    written, calls = checkpoint.write_whole, iter(range(10))

    def deadly(path: Path, text: str) -> None:
        if path.name == name and next(calls) == 1:
            os._exit(9)
        written(path, text)

    checkpoint.write_whole = deadly


def small_files() -> None:
    """Imitates a full disk: a file may grow to 60 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(
    dataset: Dataset, copied: Path, tmp_path: Path
) -> None:
    ended = resumed(tmp_path, dataset, before=small_files)
    assert ended.codes == [1] and "the last good checkpoint is step-3" in ended.output, ended.output
    assert "Traceback" not in ended.output
    ended = resumed(tmp_path, dataset)
    assert ended.ok and "resumes after step 3" in ended.output


def test_a_damaged_checkpoint_and_one_without_latest(
    dataset: Dataset, copied: Path, tmp_path: Path
) -> None:
    root = copied / "checkpoints"
    file = root / "step-3" / OPTIMIZER
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (root / "latest").unlink()
    ended = resumed(tmp_path, dataset)
    assert (
        ended.ok
        and "resumes after step 2" in ended.output
        and "latest" in ended.output.splitlines()[0]
    ), ended.output
    assert f"{file}: damaged" in ended.output
    assert {path.name for path in root.glob("step-*")} == {"step-2", "step-3", "step-4"}
    assert [row["step"] for row in rows(copied)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "listed", [(), ("state.json", MODEL, "loader-rank0.json")], ids=["nothing", "not the optimizer"]
)
def test_a_manifest_that_does_not_list_every_file_means_damage(
    listed: tuple[str, ...], dataset: Dataset, copied: Path, tmp_path: Path
) -> None:
    step = copied / "checkpoints" / "step-3"
    content = bytearray((step / OPTIMIZER).read_bytes())
    content[len(content) // 2] ^= 1
    (step / OPTIMIZER).write_bytes(content)
    # left by an interrupted conversion: no damage
    (step / checkpoint.LATEST_UNIVERSAL).write_text("")
    assert "damaged: size or checksum" in str(checkpoint.fault(step))
    manifest = json.loads((step / MANIFEST).read_text())
    (step / MANIFEST).write_text(json.dumps({name: manifest[name] for name in listed}))
    assert "not listed in manifest.json" in str(checkpoint.fault(step))
    ended = resumed(tmp_path, dataset)
    assert (
        ended.ok
        and "resumes after step 2" in ended.output
        and "not listed in manifest.json" in ended.output
    ), ended.output


def test_a_checkpoint_without_its_optimizer_is_not_resumed(
    dataset: Dataset, copied: Path, tmp_path: Path
) -> None:
    step = copied / "checkpoints" / "step-3"
    (step / OPTIMIZER).unlink()
    manifest = json.loads((step / MANIFEST).read_text())
    del manifest[OPTIMIZER]
    (step / MANIFEST).write_text(json.dumps(manifest))
    assert "step-3" in resumed(tmp_path, dataset).one_line()


UNUSABLE = (
    None,
    b"",
    b"\xff\x00",
    b"../../elsewhere",
    b"step-",
    b"step-99",
    b"step-\xc2\xb2",
    b"step-" + b"9" * 5000,
)


@pytest.mark.parametrize("latest", UNUSABLE, ids=lambda latest: str(latest)[:20])
def test_without_a_usable_latest_the_newest_complete_one_counts(
    latest: bytes | None, tmp_path: Path
) -> None:
    root, said = made(tmp_path / "checkpoints", 5, 10, 9), []
    if latest is not None:
        (root / checkpoint.LATEST).write_bytes(latest)
    (root / "step-10" / MANIFEST).write_text(
        '{"gone.pt": {"bytes": 1, "crc32c": 1}, "state.json": {}}'
    )
    assert checkpoint.newest(tmp_path, said.append) == root / "step-9"
    assert (
        len(said) == 1
        and "gone.pt" in said[0]
        and "step-9" in said[0]
        and ("latest" in said[0] or "step-99" in said[0])
    )


def test_damaged_checkpoints_are_refused_and_a_run_without_any_starts(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    root = made(tmp_path / "checkpoints", 3)
    for manifest in ("[]", "3", '{"a": 3}', "[" * 100_000, "", "{}"):
        (root / "step-3" / MANIFEST).write_text(manifest)
        reason = checkpoint.fault(root / "step-3")
        assert reason and "\n" not in reason
    with pytest.raises(CheckpointError):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize(
    ("keep", "left"), [(1, {5, 30, 40}), (2, {5, 20, 30, 40}), (9, {5, 10, 20, 30, 40})]
)
def test_only_checkpoints_up_to_the_newest_are_pruned(
    keep: int, left: set[int], tmp_path: Path
) -> None:
    """A run that resumed before step 40 keeps what it writes on its way there, and leaves step 40
    and copies alone."""
    made(tmp_path, 5, 10, 20, 30, 40)
    (tmp_path / "step-3.mine").mkdir()
    (tmp_path / checkpoint.BEST).write_text("step-5")
    checkpoint._prune(tmp_path, tmp_path / "step-30", keep)
    checkpoint._make_room(tmp_path, tmp_path / "step-31")
    assert {path.name for path in tmp_path.glob("step-*")} == {f"step-{step}" for step in left} | {
        "step-3.mine"
    }


def test_two_processes_do_not_share_a_run(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with checkpoint.locked(tmp_path / "run", ALONE):
        for world in (1, 2):
            ended = pretrain(tmp_path, dataset.root.url, world=world)
            assert ended.codes == [2] * world and "another process trains here" in ended.output
            assert "Traceback" not in ended.output
    with (
        pytest.raises(CheckpointError, match=r"missing: .*--out RUN"),
        checkpoint.locked(tmp_path / "missing", ALONE),
    ):
        raise AssertionError


def test_a_run_on_a_file_system_without_locks_trains_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with checkpoint.locked(tmp_path, ALONE):
        assert (tmp_path / checkpoint.LOCK).exists()
    assert (
        capsys.readouterr().err
        == f"note: {tmp_path}: its file system has no locks: never let two runs write there\n"
    )


WRONG = {
    "step": ("-1", f"{2**64}", '"2"', "2.0", "null", "true"),
    "crops_seen": ("9" * 5000,),
    "world": ("0",),
}
WRONG |= {"code": ('{"../../x.py": ""}', '{"x.txt": ""}', '["x.py"]', "3")}
WRONG |= {"zero_stage": ("4",), "datasets": ('"0"',), "config": ("[]",), "best": ('{"step": "x"}',)}
STATE = {
    "step": 2,
    "crops_seen": 16,
    "skipped_steps": 0,
    "in_a_row": 0,
    "best": {},
    "world": 1,
    "zero_stage": 1,
}
STATE |= {"preprocessing_sha256": "0", "datasets": ["0"], "config": {}}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_forged_state_is_refused_by_name(name: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(
        json.dumps(STATE | {name: "VALUE"}).replace('"VALUE"', value)
    )
    with pytest.raises(CheckpointError) as error:
        checkpoint.read_state(tmp_path)
    assert (
        "state.json" in str(error.value)
        and "\n" not in str(error.value)
        and len(str(error.value)) < 500
    )


FORGED = (
    "",
    "[]",
    "{}",
    "null",
    "[" * 100_000,
    "\xff",
    '{"recipe": 3}',
)


@pytest.mark.parametrize("text", FORGED, ids=lambda text: text[:30])
def test_a_forged_loader_state_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "loader-rank0.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError) as error:
        checkpoint.read_loader_state(tmp_path, ALONE, 1)
    assert "loader-rank0.json" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("loader-rank0.json", {"crops_seen": 8}, "loader's state of step 1"),
        ("state.json", {"step": 1, "crops_seen": 8}, "state.json is of step 1"),
        ("state.json", {"config": {"train": {"lr": "x"}}}, "state.json: config: train.lr='x'"),
        (
            "state.json",
            {"crops_seen": 2**62},
            "crops_seen=4611686018427387904, but 3 steps of 8 crops are 24",
        ),
        ("state.json", {"world": 2}, "world=2, but 1 ranks wrote loader-rankR.json"),
    ],
)
def test_an_inconsistent_step_or_invalid_settings_in_a_checkpoint_are_one_line(
    name: str, changes: dict[str, Any], says: str, dataset: Dataset, copied: Path, tmp_path: Path
) -> None:
    file = copied / "checkpoints" / "step-3" / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    forge(file)
    assert says in resumed(tmp_path, dataset).one_line()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"crops_seen": -24}, "crops_seen=-24"),
        ({"crops_seen": 2**62}, "crops_seen=4611686018427387904, but 3 steps of 8 crops are 24"),
        ({"world": 3}, "world=3, but 1 ranks"),
        ({"config": {"task": {}}}, "holds another run, a fine-tuning for None"),
        ({"code": ["x.py"]}, "code=['x.py']"),
        ({"code": {"../../../x.py": ""}}, "state.json: code."),
        ({"code": {"gone.py": ""}}, "code/gone.py: no such file"),
    ],
)
def test_a_forged_state_is_not_exported(
    changes: dict[str, Any], says: str, copied: Path, capsys: Any
) -> None:
    file = copied / "checkpoints" / "step-3" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    forge(file)
    assert main(["--export", str(copied)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


class Payload:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def poisoned(run: Path, trace: Path, name: str) -> Path:
    """Puts a payload into one file of the newest checkpoint and makes the manifest fit."""
    shutil.rmtree(run / "model")
    step = run / "checkpoints" / "step-3"
    content = torch.load(step / MODEL, weights_only=True)
    torch.save(
        content | {"optimizer_state_dict": content["module"], "payload": Payload(trace)},
        step / name,
    )
    forge(step / name)
    return step


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_no_command_runs_a_payload(
    name: str, dataset: Dataset, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "executed"
    step = poisoned(copied, trace, name)
    for ended in (
        lambda: main(["--export", str(copied)]),
        lambda: convert.main(["to-fairseq", str(copied), str(tmp_path / "a.pt")]),
        lambda: convert.main(["from-fairseq", str(step / name), str(tmp_path / "out")]),
    ):
        assert ended() == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
    main(["--export", str(copied)])
    assert f"{step}: would run code" in capsys.readouterr().err
    for begin in (copied, step / name):
        with pytest.raises(LoadError):
            read_start(str(begin))
    if "rank_1" not in name:  # which one rank does not read
        assert "would run code" in resumed(tmp_path, dataset).one_line()
    assert not trace.exists() and not (copied / "model").exists()


def read_by_deepspeed(step: Path, trace: Path, out: Path) -> None:
    """In a process of its own: export's zero_to_fp32 and the conversion for other ranks."""
    told: dict[str, Any] = {}
    for read in (checkpoint.full_weights, checkpoint.to_universal):
        try:
            read(step)
            told[read.__name__] = "read"
        except (CheckpointError, WriteError) as error:
            told[read.__name__] = str(error)
    os.environ[FORBID] = "1"
    torch.load(step / MODEL, weights_only=False)  # as it would be by anyone else
    told["before, after, environment"] = [trace.exists(), FORCE in os.environ, os.environ[FORBID]]
    out.write_text(json.dumps(told))


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
def test_deepspeed_runs_no_payload(name: str, copied: Path, tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    step = poisoned(copied, trace, name)
    started(read_by_deepspeed, step, trace, tmp_path / "told.json", out=tmp_path / "out.txt").join()
    told = json.loads((tmp_path / "told.json").read_text())
    assert told.pop("before, after, environment") == [name == MODEL, False, "1"]
    assert all(f"{step}: would run code" in text and "\n" not in text for text in told.values()), (
        told
    )


def test_a_pickle_named_like_a_model_is_not_run(
    saved_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved_model()
    torch.save({"payload": Payload(tmp_path / "executed")}, folder / "model.safetensors")
    with pytest.raises(LoadError):
        read_start(str(folder))
    assert not (tmp_path / "executed").exists()


def test_a_planted_universal_folder_is_not_read(
    dataset: Dataset, copied: Path, tmp_path: Path
) -> None:
    planted = copied / "checkpoints" / "step-3" / checkpoint.UNIVERSAL
    (planted / "zero" / "encoder.norm.weight").mkdir(parents=True)
    for place in (planted / MODEL, planted / "zero" / "encoder.norm.weight" / "fp32.pt"):
        torch.save(Payload(tmp_path / "executed"), place)
    ended = resumed(tmp_path, dataset, world=2)
    assert ended.ok, ended.output
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("harm", ["cut", "empty", "legacy", "not a pickle"])
def test_a_file_that_is_not_a_checkpoint_is_one_line(
    harm: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copied / "checkpoints" / "step-3" / MODEL
    content = {
        "cut": file.read_bytes()[:-300],
        "empty": b"",
        "legacy": b"\x80\x02",
        "not a pickle": b"hello",
    }
    file.write_bytes(content[harm])
    forge(file)
    assert main(["--export", str(copied)]) == 2
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1 and "step-3: cannot be read" in error
    ) or "step-3: holds more than weights" in error


def not_merged(*_: object) -> None:
    raise RuntimeError("basic_ios::clear: iostream error")


def fail_to_merge() -> None:
    from deepspeed.checkpoint import ds_to_universal  # type: ignore[import-untyped]

    ds_to_universal.main = not_merged


def test_a_full_disk_in_the_conversion_for_other_ranks_is_one_line(
    dataset: Dataset, copied: Path, tmp_path: Path
) -> None:
    ended = resumed(tmp_path, dataset, world=2, before=fail_to_merge)
    assert (
        set(ended.codes) == {1}
        and "cannot be converted for another number of ranks: basic_ios" in ended.output
    )
    assert (
        "Traceback" not in ended.output
        and not (copied / "checkpoints" / "step-3" / ".universal").exists()
    )

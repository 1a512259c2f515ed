"""What a run survives, and what it says when it does not."""

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import curve, free_port, pretrain, rows, settings, start, tuning, wait

from data_tools.dataset import Dataset
from data_tools.errors import StorageError
from engine.config import Config, load
from engine.data.order import DatasetRows, Order
from engine.pretrain import main as pretrain_main
from engine.training import checkpoint
from engine.training import train as course
from engine.training.validation import training_roles
from tests.waiting import until

ROOT = Path(__file__).parents[3]
KILLS = 4


def test_killed_at_any_time_it_goes_on_and_ends_as_if_nothing_had_been(dataset: Dataset, tmp_path: Path) -> None:
    how = {"train__steps": 24, "train__save_every_steps": 1, "train__keep": 2}
    assert pretrain(tmp_path, dataset.root.url, "whole", **how).ok
    arguments, chance, killed = settings(tmp_path, dataset.root.url, "killed", **how), random.Random(3), 0
    for _ in range(KILLS):
        (process,) = start(tmp_path, arguments, before=partial(die_within, chance.random() * 0.2))
        process.join()
        killed += process.exitcode == -signal.SIGPROF
        path = checkpoint.newest(tmp_path / "killed", pytest.fail)  # the one that `latest` names is whole
        assert path is None or checkpoint.fault(path) is None
    assert killed >= KILLS - 2
    ended = wait(tmp_path, start(tmp_path, arguments))
    assert ended.ok, ended.output
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")


def die_within(cpu_s: float) -> None:
    """So many seconds of work after its first checkpoint: SIGPROF ends a process as SIGKILL does."""
    written = checkpoint.write_whole

    def last(path: Path, text: str) -> None:
        written(path, text)
        if path.name == "latest" and signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0):
            signal.setitimer(signal.ITIMER_PROF, cpu_s)

    checkpoint.write_whole = last


@pytest.mark.parametrize("name", ["loader-rank0.json", "state.json", "manifest.json", "latest"])
def test_killed_between_any_two_files_of_a_checkpoint(name: str, dataset: Dataset, tmp_path: Path) -> None:
    how = {"train__save_every_steps": 2, "train__steps": 6}
    ended = pretrain(tmp_path, dataset.root.url, before=partial(die_before, name), **how)
    assert ended.codes == [9]
    path = checkpoint.newest(tmp_path / "run", pytest.fail)
    assert path is not None and path.name == "step-2"
    ended = pretrain(tmp_path, dataset.root.url, **how)
    assert ended.ok and "goes on after step 2" in ended.output, ended.output
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def die_before(name: str) -> None:
    """Before the second checkpoint's file of this name is there."""
    written, calls = checkpoint.write_whole, iter(range(10))

    def deadly(path: Path, text: str) -> None:
        if path.name == name and next(calls) == 1:
            os._exit(9)
        written(path, text)

    checkpoint.write_whole = deadly


def progress(run: Path) -> int:
    latest = run / "checkpoints" / "latest"
    return checkpoint.step_of(Path(latest.read_text())) if latest.exists() else 0


@pytest.mark.parametrize(("task", "asked"), [("pretraining", "SIGTERM"), ("diagnosis", "SIGTERM"), ("pretraining", "SIGINT")])
def test_asked_to_stop_it_writes_a_checkpoint_and_ends_well(task: str, asked: str, dataset: Dataset, tmp_path: Path) -> None:
    arguments = settings(tmp_path, dataset.root.url, train__steps=100_000)
    if task == "diagnosis":  # from random weights of those settings
        arguments = tuning(tmp_path, dataset.root.url, tmp_path / "tiny.yaml", task, train__steps=100_000)
    processes = start(tmp_path, arguments, world=2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3)
    os.kill(processes[1].pid, signal.Signals[asked])  # one rank is enough
    ended = wait(tmp_path, processes)
    assert ended.ok, ended.output
    assert progress(tmp_path / "run") == rows(tmp_path / "run")[-1]["step"] > 3
    assert "the same command goes on" in ended.output


def poison() -> None:
    """Gradients of steps 3 and 4, and from step 8 on, are no numbers."""
    from engine.model.pretrainer import Pretrainer

    forward, calls = Pretrainer.forward, iter(range(1, 10_000))

    def poisoned(self: Pretrainer, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        losses: dict[str, torch.Tensor] = forward(self, *args, **kwargs)  # type: ignore[arg-type]
        call = next(calls)
        return losses | {"loss": losses["loss"] * float("nan")} if call in (3, 4) or call >= 8 else losses

    Pretrainer.forward = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_that_is_not_finite_is_skipped_and_too_many_end_the_run(stage: int, dataset: Dataset, tmp_path: Path) -> None:
    how = {"train__zero_stage": stage, "train__max_nonfinite": 5, "train__steps": 30}
    ended = pretrain(tmp_path, dataset.root.url, before=poison, **how)
    skipped = [row["skipped_steps"] for row in rows(tmp_path / "run")]
    assert skipped == [0, 0, 1, 2, 2, 2, 2, 3, 4, 5, 6, 7]
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert all(loss == loss for loss in losses[4:7])
    assert ended.codes == [1] and "not finite in 5 steps in a row (train.max_nonfinite)" in ended.output
    assert "rows" in ended.output and "Traceback" not in ended.output
    assert progress(tmp_path / "run") == 12  # the good steps are not lost


def forbid_waiting() -> None:
    """DeepSpeed's way to wait for the device."""
    from deepspeed.accelerator import get_accelerator

    def synchronize(*_: object) -> None:
        print("the device was waited for")

    get_accelerator().synchronize = synchronize


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_does_not_wait_for_the_device(stage: int, dataset: Dataset, tmp_path: Path) -> None:
    how = {"train__steps": 3, "train__micro_batch": 4, "train__zero_stage": stage, "train__save_every_steps": 100}
    ended = pretrain(tmp_path, dataset.root.url, before=forbid_waiting, **how)
    assert ended.ok and "the device was waited for" not in ended.output.partition("step 3/3")[0], ended.output  # until the end


def test_a_rank_whose_crops_are_bad_says_which(dataset: Dataset, tmp_path: Path) -> None:
    """Alone, what was trained before is kept."""
    shutil.copytree(dataset.root.url, tmp_path / "damaged")
    damaged = Dataset.open(str(tmp_path / "damaged"))
    config = load(tmp_path / "tiny.yaml", settings(tmp_path, damaged.root.url)[3::2], Config)
    order = Order((DatasetRows.of(damaged, **training_roles(config)),), 8)
    row = int(order.slice(3, 1, 2).row[0])  # of rank 1, in the fourth step
    shard, offset, _ = damaged.addresses
    with open(tmp_path / "damaged" / "shards" / damaged.shards[shard[row]]["name"], "r+b") as file:
        file.seek(offset[row])
        file.write(bytes(200))
    for run, world, said in (("two", 2, f"rank 1: .*crop {row} at byte"), ("one", 1, f"pretrain.py: /.*crop {row} at byte")):
        ended = pretrain(tmp_path, damaged.root.url, run, world)
        assert ended.codes == [1] * world and re.search(said, ended.output), ended.output
        assert "Traceback" not in ended.output
    assert progress(tmp_path / "one") == 3


def test_checkpoints_by_time(dataset: Dataset, tmp_path: Path) -> None:
    assert pretrain(tmp_path, dataset.root.url, train__steps=4, train__save_every_minutes=1e-6, train__keep=9).ok
    assert {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")} >= {"step-1", "step-2", "step-3"}


def test_deterministic_kernels_are_asked_for(dataset: Dataset, tmp_path: Path) -> None:
    for run, how in (("plain", False), ("strict", True)):
        ended = pretrain(tmp_path, dataset.root.url, run, before=show_determinism, train__deterministic=how)
        assert ended.ok and f"deterministic: {how}, TF32: False" in ended.output, ended.output
    assert curve(tmp_path / "plain") == curve(tmp_path / "strict")


def show_determinism() -> None:
    from engine.training.loop import Loop

    train = Loop.train

    def shown(self: Loop) -> bool:
        print(f"deterministic: {torch.are_deterministic_algorithms_enabled()}, TF32: {torch.backends.cudnn.allow_tf32}")
        return train(self)

    Loop.train = shown  # type: ignore[method-assign]


def die(_: Path) -> None:
    """Rank 1 is gone at its fourth step."""
    from engine.training.loop import Loop

    step, calls = Loop._step, iter(range(10_000))

    def deadly(self: Loop, batch: object) -> object:
        if next(calls) == 3 and self.ranks.rank == 1:
            os._exit(9)
        return step(self, batch)  # type: ignore[arg-type]

    Loop._step = deadly  # type: ignore[method-assign, assignment]


def hang(told: Path) -> None:
    """Until the other one has given up."""
    from engine.training.loop import Loop

    step, calls = Loop._step, iter(range(10_000))

    def idle(self: Loop, batch: object) -> object:
        if next(calls) == 3 and self.ranks.rank == 1:
            until(lambda: "died or hung" in told.read_text())
            os._exit(9)
        return step(self, batch)  # type: ignore[arg-type]

    Loop._step = idle  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("script", ["pretrain", "finetune"])
def test_a_run_that_is_over_is_not_taken_down_by_what_is_left_of_it(script: str) -> None:
    """Gloo's threads outlive their group, and the interpreter that goes down under one of them ends with SIGABRT."""
    path = str(ROOT / "engine" / f"{script}.py")
    code = f"import atexit, os, runpy; atexit.register(os.abort); runpy.run_path({path!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, "--schema"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)["properties"]["train"]


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, str(ROOT / "engine" / "pretrain.py"), "--schema"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


@pytest.mark.parametrize("fate", [die, hang])
def test_a_rank_that_dies_or_hangs_ends_the_run_in_time_and_it_goes_on(
    fate: Callable[[Path], None], dataset: Dataset, tmp_path: Path
) -> None:
    how = {"train__timeout_s": 15 if fate is hang else 600, "train__save_every_steps": 1}
    ended = pretrain(tmp_path, dataset.root.url, world=2, before=partial(fate, tmp_path / "out.txt"), **how)
    assert ended.codes == [1, 9]
    assert "another rank died or hung" in ended.output and "Traceback" not in ended.output
    ended = pretrain(tmp_path, dataset.root.url, world=2)
    assert ended.ok and "goes on after step" in ended.output, ended.output


def small_files() -> None:
    """As a full disk: a file may grow to 60 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


def no_space() -> None:
    import shutil

    usage = shutil.disk_usage("/")
    shutil.disk_usage = lambda _: usage._replace(free=1000)  # type: ignore[assignment]


@pytest.mark.parametrize("disk", [small_files, no_space])
def test_a_full_disk_is_said_and_the_last_checkpoint_stays_good(disk: object, dataset: Dataset, tmp_path: Path) -> None:
    assert pretrain(tmp_path, dataset.root.url, train__steps=2).ok
    ended = pretrain(tmp_path, dataset.root.url, before=disk, train__steps=4)  # type: ignore[arg-type]
    assert ended.codes == [1] and "the last good checkpoint is step-2" in ended.output, ended.output
    assert "Traceback" not in ended.output
    assert progress(tmp_path / "run") == 2
    assert pretrain(tmp_path, dataset.root.url, train__steps=4).ok


def test_a_damaged_checkpoint_is_passed_over(dataset: Dataset, tmp_path: Path) -> None:
    assert pretrain(tmp_path, dataset.root.url, train__save_every_steps=1, train__steps=3).ok
    file = next((tmp_path / "run" / "checkpoints" / "step-3").glob("*optim_states.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    ended = pretrain(tmp_path, dataset.root.url, train__steps=4)
    assert ended.ok and "is not what was written" in ended.output and "goes on after step 2" in ended.output


def test_a_port_in_use_is_one_line(dataset: Dataset, tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        arguments = settings(tmp_path, dataset.root.url)
        (process,) = start(tmp_path, arguments, 1, None, WORLD_SIZE="2", MASTER_PORT=str(taken.getsockname()[1]))
        ended = wait(tmp_path, [process])
    assert ended.codes == [2] and "--master_port" in ended.output and len(ended.output.splitlines()) == 1


def launched(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "PYTHONPATH": ""}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)


def test_deepspeed_starts_it(dataset: Dataset, tmp_path: Path) -> None:
    script = [str(ROOT / "engine" / "pretrain.py"), *settings(tmp_path, dataset.root.url, train__steps=2)]
    port = ["--master_port", str(free_port())]
    ended = launched(tmp_path, sys.executable, "-m", "deepspeed.launcher.runner", "-q", "--num_gpus", "1", *port, *script)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "error, code, says",
    [
        (
            StorageError("s3://ecgs/dataset.json: the server does not answer"),
            2,
            "pretrain.py: s3://ecgs/dataset.json: the serv",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0"), 1, "memory: lower train.micro_batch"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            1,
            "memory: lower train.micro_batch",
        ),
        (RuntimeError("can't start new thread"), 1, "memory: lower train.micro_batch"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "memory: lower train.micro_batch"),
        (MemoryError(), 1, "memory: lower train.micro_batch"),
        (UnicodeEncodeError("utf-8", "r\udcff", 1, 2, "surrogates not allowed"), 2, "'r\\udcff': a name that is not UTF-8"),
    ],
)
def test_errors_from_elsewhere_are_one_line(
    error: Exception, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(course, "train", fail)
    assert pretrain_main([]) == code
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def little_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))


def test_too_little_memory_is_one_line(dataset: Dataset, tmp_path: Path) -> None:
    ended = pretrain(tmp_path, dataset.root.url, before=little_memory, pipeline__read_ahead=10**6)
    assert ended.codes == [1] and "Traceback" not in ended.output, ended.output
    assert "pretrain.py: out of memory: lower train.micro_batch" in ended.output.splitlines()[-1]


def full_output() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def test_lost_output_does_not_end_a_training(dataset: Dataset, tmp_path: Path) -> None:
    ended = pretrain(tmp_path, dataset.root.url, before=full_output, train__steps=2)
    assert ended.ok and ended.output.count("\n") == 1 and "standard output: No space left" in ended.output
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize("zero", ['"reduce_bucket_size": "big"', '"no_such_key": 1'])
def test_what_deepspeed_refuses_is_one_line(zero: str, dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(f'{{"zero_optimization": {{"stage": 1, {zero}}}}}')
    ended = pretrain(tmp_path, dataset.root.url, train__deepspeed=str(tmp_path / "ds.json"))
    assert ended.codes == [2] and ended.output.count("\n") == 1
    assert "DeepSpeed refuses it" in ended.output

"""Several ranks: equal to one, resumed on another number, lost, on several nodes each with its own
launcher."""

import ctypes
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import free_port, pretrain, rows, run, settings

from omnilead.data_tools.dataset import Dataset
from tests.forks import started
from tests.waiting import until

CLONE_NEWNET = 0x40000000  # of setns: a network namespace
SCRIPT = str(Path(__file__).parents[3] / "engine" / "pretrain.py")
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
STILL = {f"model__{name}dropout": 0 for name in ("", "attention_", "input_", "feature_")}
PARTS = (
    "loss",
    "loss_local",
    "loss_global",
    "loss_diversity",
    "loss_features",
    "grad_norm",
    "code_perplexity",
)
Plan = list[tuple[int, int, int]]  # ranks, steps, micro-batch


def assert_equal(
    dataset: Dataset,
    tmp: Path,
    alone: Plan,
    moved: Plan,
    rtol: float,
    parts: Sequence[str] = PARTS,
    **how: Any,
) -> None:
    """Compares losses and validation metrics of two runs that are resumed as their plans say."""
    for name, plan in (("alone", alone), ("moved", moved)):
        for world, steps, micro in plan:
            changes = STILL | {"train__steps": steps, "train__micro_batch": micro} | how
            ended = pretrain(tmp, dataset.root.url, name, world, **changes)
            assert ended.ok, ended.output
    one, two = (
        [[row[part] for part in parts] for row in rows(tmp / name)] for name in ("alone", "moved")
    )
    np.testing.assert_allclose(two, one, rtol=rtol)
    one, two = (
        [list(row.values()) for row in rows(tmp / name, "validation.jsonl")]
        for name in ("alone", "moved")
    )
    np.testing.assert_allclose(two, one, rtol=rtol)


def test_two_ranks_equal_one(dataset: Dataset, tmp_path: Path) -> None:
    """Candidates, codes in use, norm and clipping are those of the global batch."""
    parts = (*PARTS, "accuracy_global")
    assert_equal(
        dataset,
        tmp_path,
        [(1, 3, 8)],
        [(2, 3, 4)],
        2e-5,
        parts,
        train__validate_every=2,
        train__valid_batches=3,
    )
    assert rows(tmp_path / "moved")[-1]["crops_seen"] == 24


def test_micro_batches_hold_the_same_crops_on_one_rank_and_two(
    dataset: Dataset, tmp_path: Path
) -> None:
    """1 -> 2 ranks in mid-run; crops are contrasted within their micro-batch."""
    assert_equal(dataset, tmp_path, [(1, 3, 4)], [(1, 2, 4), (2, 3, 2)], 2e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_resumes_on_another_number_of_ranks(
    stage: int, dataset: Dataset, tmp_path: Path
) -> None:
    """1 -> 2 -> 1 ranks, against a run on one rank; a fresh Adam would give other results."""
    moved = [(1, 2, 8), (2, 3, 4), (1, 5, 8)]
    assert_equal(dataset, tmp_path, [(1, 5, 8)], moved, 1e-4, train__zero_stage=stage)


def test_two_ranks_in_bf16(dataset: Dataset, tmp_path: Path) -> None:
    """1 -> 2 ranks at the default precision; equal up to its rounding."""
    assert_equal(
        dataset,
        tmp_path,
        [(1, 4, 8)],
        [(1, 2, 8), (2, 4, 4)],
        0.01,
        ("loss", "grad_norm"),
        train__precision="bf16",
    )


def test_validation_of_fewer_batches_than_ranks(dataset: Dataset, tmp_path: Path) -> None:
    """Ranks without a batch of their own take part as well, as ZeRO 3 requires."""
    how = {"train__validate_every": 1, "train__zero_stage": 3, "train__valid_batches": 1}
    assert_equal(dataset, tmp_path, [(1, 1, 8)], [(4, 1, 2)], 2e-5, **how)
    assert [row["step"] for row in rows(tmp_path / "moved", "validation.jsonl")] == [0, 1]


def count_graphs() -> None:
    """Counts the compiler's graphs on rank 0 and runs them as they are. Rank 1 is not compiled: it
    makes the same calls."""
    from omnilead.engine.training import train

    def counted(graph: Any, inputs: Any) -> Any:
        print(f"a graph of {len(graph.graph.nodes)} operations", flush=True)
        return graph.forward

    compiled = partial(train.compile_model, backend=counted)
    train.compile_model = compiled if os.environ["RANK"] == "0" else lambda *_: None  # type: ignore[assignment]


def test_a_step_of_two_ranks_compiles_in_few_graphs(dataset: Dataset, tmp_path: Path) -> None:
    how = {"train__compile": "step", "train__steps": 1, "model__layers": 1}
    ended = pretrain(tmp_path, dataset.root.url, "run", 2, count_graphs, **how)
    assert ended.ok, ended.output
    assert (
        max(int(size) for size in re.findall("a graph of ([0-9]+) operations", ended.output)) > 250
    )


def at_step_four(how: Callable[[], None]) -> None:
    """Makes it happen to rank 1."""
    from omnilead.engine.training.loop import Loop

    step = Loop._step

    def patched(self: Loop, batch: Any) -> Any:
        if self.progress.step == 3 and self.ranks.rank == 1:
            how()
        return step(self, batch)

    Loop._step = patched  # type: ignore[method-assign]


def die() -> None:
    os._exit(9)


def hang(told: Path) -> None:
    until(lambda: "died or hung" in told.read_text())
    die()


@pytest.mark.parametrize("fate", ["dies", "hangs"])
def test_a_rank_that_dies_or_hangs_ends_the_run_in_time_and_it_resumes(
    fate: str, dataset: Dataset, tmp_path: Path
) -> None:
    how = {"train__timeout_s": 15 if fate == "hangs" else 600, "train__save_every_steps": 1}
    before = partial(at_step_four, die if fate == "dies" else partial(hang, tmp_path / "out.txt"))
    ended = pretrain(tmp_path, dataset.root.url, world=2, before=before, **how)
    assert ended.codes == [1, 9]
    assert "another rank died or hung" in ended.output and "Traceback" not in ended.output
    ended = pretrain(tmp_path, dataset.root.url, world=2, train__steps=5)
    assert ended.ok and "resumes after step" in ended.output, ended.output


def test_a_port_in_use_or_no_port_is_one_line(dataset: Dataset, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        for port in (str(taken.getsockname()[1]), "99999", "http"):
            ended = run(
                tmp_path, settings(tmp_path, dataset.root.url), WORLD_SIZE="2", MASTER_PORT=port
            )
            assert f"MASTER_PORT='{port}'" in ended.one_line() and "--master_port" in ended.output


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """`python ...` as a fork of this process, which has imported what it needs: what launchers
    start."""

    def _execute_child(
        self, args: list[str], *options: Any
    ) -> None:  # executable, preexec, close_fds, pass_fds, cwd, env, ...
        self.pid, self._child_created = os.fork(), True  # type: ignore[misc]
        if self.pid:
            return
        os.environ.clear()
        os.environ.update(options[5])
        sys.argv = [word for word in args[1:] if word != "-u"]
        code: Any = 1
        try:
            if sys.argv[0] == "-m":
                del sys.argv[0]
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(int(code or 0))


def launch(launcher: str, arguments: list[str], namespace: str) -> None:
    from deepspeed.launcher import runner  # type: ignore[import-untyped]
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    for name in OF_A_RANK:
        os.environ.pop(name, None)
    if namespace:
        with open(f"/var/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
    subprocess.Popen = subprocess_handler.Popen = Forked  # type: ignore[misc, attr-defined]
    (torchrun if launcher == "torchrun" else runner).main(arguments)


@pytest.fixture
def networks() -> Iterator[tuple[str, ...]]:
    """Two network namespaces joined by one cable: 10.77.0.1 on `cable0` in the first, 10.77.0.2
    on `cable1` in the second. None without iproute2's `ip` and permission."""
    names = f"omnilead-{os.getpid()}-0", f"omnilead-{os.getpid()}-1"
    script = [f"netns add {name}" for name in names]
    script += [f"link add cable0 netns {names[0]} type veth peer name cable1 netns {names[1]}"]
    for i, name in enumerate(names):
        script += [f"-n {name} addr add 10.77.0.{i + 1}/24 dev cable{i}"]
        script += [f"-n {name} link set {device} up" for device in ("lo", f"cable{i}")]
    try:
        yield () if shutil.which("ip") is None or any(_ip(line) for line in script) else names
    finally:
        for name in names if shutil.which("ip") else ():
            _ip(f"netns del {name}")


def _ip(line: str) -> int:
    return subprocess.run(["ip", *line.split()], capture_output=True, check=False).returncode


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_nodes(
    launcher: str, networks: tuple[str, ...], dataset: Dataset, tmp_path: Path
) -> None:
    """Each with its own launcher. No loopback, no port of the host: only the cable between them,
    if networks can be made. The disk is shared, as RUN must be."""
    address, port = ("10.77.0.1", "29500") if networks else ("127.0.0.1", str(free_port()))
    # their number counts, not their names
    (tmp_path / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
    nodes, outs = [], [tmp_path / f"node-{node}.txt" for node in range(2)]
    for node, out in enumerate(outs):
        env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        env |= {"GLOO_SOCKET_IFNAME": f"cable{node}"} if networks else {}
        options = {"node_rank": node, "master_addr": address, "master_port": port}
        more = ["--hostfile", str(tmp_path / "hosts"), "--no_ssh"]
        if launcher == "torchrun":
            more = ["--nnodes", "2", "--nproc-per-node", "1"]
        words = [f"--{name}={value}" for name, value in options.items()] + [*more, SCRIPT]
        words += settings(tmp_path, dataset.root.url, train__steps=1)
        nodes.append(
            started(launch, launcher, words, networks[node] if networks else "", out=out, env=env)
        )
    for running in nodes:
        running.join()
    outputs = [out.read_text() for out in outs]
    assert [running.exitcode for running in nodes] == [0, 0], "\n".join(outputs)
    assert "2 x cpu" in outputs[0] and "step 1/1" in outputs[0] and "step 1/1" not in outputs[1]
    assert (
        rows(tmp_path / "run")[-1]["step"] == 1
        and (tmp_path / "run" / "model" / "model.safetensors").exists()
    )

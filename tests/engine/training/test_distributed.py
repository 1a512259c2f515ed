"""Several ranks: equal to one, resumed on another number, lost, on several nodes each with its own
launcher."""

import os
import re
import shutil
import socket
import subprocess
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launching import launch
from ranks import STILL, column, free_port, rows, run, settings, wait

from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.status import is_training
from omnilead.engine.training import distributed
from omnilead.engine.training.checkpoint_files import checkpoint_named
from tests.forks import started
from tests.waiting import HANG_S, until

SCRIPT = str(Path(__file__).parents[3] / "engine" / "pretrain.py")
PARTS = ["loss", "loss_local", "loss_global", "loss_diversity", "loss_features", "grad_norm"]
PARTS += ["code_perplexity"]
VALIDATED = {"train__validate_every": 2, "train__valid_batches": 3}
# ranks without a batch of their own take part as well, as ZeRO 3 requires
FEWER = {"train__validate_every": 1, "train__zero_stage": 3, "train__valid_batches": 1}
AWAY_AND_BACK = [(1, 2, 8), (2, 3, 4), (1, 5, 8)]  # a fresh Adam would give other results


@pytest.mark.parametrize(
    ("alone", "moved", "rtol", "how"),
    [
        pytest.param((1, 3, 8), [(2, 3, 4)], 2e-5, VALIDATED, id="two"),
        # crops are contrasted within their micro-batch
        pytest.param((1, 3, 4), [(1, 2, 4), (2, 3, 2)], 2e-5, {}, id="micro-batches"),
        *(
            pytest.param(
                (1, 5, 8), AWAY_AND_BACK, 1e-4, {"train__zero_stage": stage}, id=f"{stage}"
            )
            for stage in range(4)
        ),
        pytest.param((1, 1, 8), [(4, 1, 2)], 2e-5, FEWER, id="fewer batches than ranks"),
        # the default precision; equal up to its rounding
        pytest.param(
            (1, 4, 8), [(1, 2, 8), (2, 4, 4)], 0.01, {"train__precision": "bf16"}, id="bf16"
        ),
    ],
)
def test_several_ranks_equal_one(alone, moved, rtol, how, training, tmp_path):
    """Losses and validation of two runs that are resumed as their plans say. Candidates, codes in
    use, norm and clipping are those of the global batch."""
    for name, plan in (("alone", [alone]), ("moved", moved)):
        for world, steps, micro in plan:
            changes = STILL | {"train__steps": steps, "train__micro_batch": micro} | how
            training(name, world, **changes).good()
    one, two = tmp_path / "alone", tmp_path / "moved"
    for part in PARTS if rtol < 0.01 else ("loss", "grad_norm"):
        np.testing.assert_allclose(column(two, part), column(one, part), rtol=rtol)
    if how == VALIDATED:
        accuracies = (column(run, "accuracy_global") for run in (two, one))
        np.testing.assert_allclose(*accuracies, rtol=rtol)
    assert column(two, "crops_seen") == column(one, "crops_seen")
    valid = ([list(row.values()) for row in rows(run, "validation.jsonl")] for run in (two, one))
    np.testing.assert_allclose(*valid, rtol=rtol)


def count_graphs():
    """Counts the compiler's graphs on rank 0 and runs them as they are. Rank 1 is not compiled: it
    makes the same calls."""
    from omnilead.engine.training import train

    def counted(graph, inputs):
        print(f"a graph of {len(graph.graph.nodes)} operations", flush=True)
        return graph.forward

    compiled = partial(train.compile_model, backend=counted)
    train.compile_model = compiled if os.environ["RANK"] == "0" else lambda *_: None


def test_a_step_of_two_ranks_compiles_in_few_graphs(training):
    how = {"train__compile": "step", "train__steps": 1, "model__layers": 1}
    output = training("run", 2, count_graphs, **how).good()
    assert max(map(int, re.findall("a graph of ([0-9]+) operations", output))) > 250


def at_step_four(how):
    """Makes it happen to rank 1. From there on, the other soon gives up: a shorter train.timeout_s
    would also count while the ranks start."""
    from omnilead.engine.training import checkpoint
    from omnilead.engine.training.loop import Loop

    checkpoint.LOST_RANKS_WAIT_S = 1
    step = Loop._step

    def patched(self, batch):
        if self.progress.step == 3:
            group = dist.group.WORLD._get_backend(self.ranks.device)
            assert group.options._timeout == timedelta(seconds=self.config.train.timeout_s)
            for group in dist.distributed_c10d._world.pg_map:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5), group)
            if self.ranks.rank == 1:
                how()
        return step(self, batch)

    Loop._step = patched


def die():
    os._exit(9)


def hang(told):
    until(lambda: "died or hung" in told.read_text())
    die()


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["dies", "hangs"])
def test_a_rank_that_dies_or_hangs_ends_the_run_in_time_and_it_resumes(fate, training, tmp_path):
    how = {"train__timeout_s": 500, "train__save_every_steps": 1}
    before = partial(at_step_four, die if fate == "dies" else partial(hang, tmp_path / "out.txt"))
    ended = training(world=2, before=before, **how)
    ended.last_line(1, 9)
    assert "another rank died or hung" in ended.output
    assert "resumes after step" in training(world=2, train__steps=5).good()


def wait_for_one_that_is_dead(how):
    """Exit code 0 if rank 0 knows why its collective fails."""
    distributed._join("gloo", timedelta(seconds=HANG_S))
    ranks = distributed.Ranks(dist.get_rank(), 2, torch.device("cpu"), dist.group.WORLD)
    dist.barrier()
    if ranks.rank == 1:
        os._exit(9)
    try:
        how(ranks)
    except RuntimeError as error:
        os._exit(0 if distributed.lost_a_rank(error) else 3)
    os._exit(4)


def reduce(_):
    dist.all_reduce(torch.zeros(3))


def tell_others(ranks):
    distributed.on_first_rank(ranks, lambda: "told")


def exchange_while_working(ranks):
    largest = distributed.MaxOverRanks(ranks)
    largest(1)
    largest.finish()


@pytest.mark.parametrize("how", [reduce, tell_others, exchange_while_working])
def test_a_collective_that_a_dead_rank_breaks_says_so(how, tmp_path):
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    out, ranks = tmp_path / "out.txt", [common | {"RANK": str(rank)} for rank in range(2)]
    ended = [started(wait_for_one_that_is_dead, how, out=out, env=env) for env in ranks]
    assert wait(tmp_path, ended).codes == [0, 9]


UNFRIENDLY = """
from torch import nn

class Objective(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.out, self.steps = nn.Linear(encoder.width, 1), 0

    def forward(self, encoder, x_BSLT, keys_BS):
        self.steps += 1
        if self.steps > 2:  # the first is a trial before training
            raise RuntimeError("gloo is not my friend: NCCL: Connection closed")
        return {"mean": self.out(encoder(x_BSLT.flatten(0, 1))).square().mean()}
"""


def test_an_error_of_a_plug_in_that_speaks_of_gloo_is_its_own(training, tmp_path):
    (tmp_path / "own.py").write_text(UNFRIENDLY)
    how = {"objective__method": f"{tmp_path}/own.py:Objective", "objective__local": 0}
    ended = training(world=2, **how)
    assert "step 1/" in ended.output and "Traceback" in ended.output
    assert "RuntimeError: gloo is not my friend" in ended.output
    assert "another rank" not in ended.output


def test_a_port_in_use_or_no_port_is_one_line(dataset, tmp_path):
    arguments = settings(tmp_path, dataset.root.url)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        for port in (str(taken.getsockname()[1]), "99999", "http"):
            line = run(tmp_path, arguments, WORLD_SIZE="2", MASTER_PORT=port).one_line()
            assert f"MASTER_PORT='{port}'" in line and "--master_port" in line


@pytest.mark.parametrize(
    ("master", "error", "mend"),
    [
        (
            "10.77.0.1",
            "connect: SO_ERROR: Connection refused, remote=[127.0.1.1]:14244$0",
            "IFNAME",
        ),
        ("node-a", "NCCL error\nLast error:\nConnect to ::1<4> failed", "NCCL_SOCKET_IFNAME"),
        ("10.77.0.1", "connect: SO_ERROR: Connection refused, remote=[10.77.0.2]:14244$0", "port"),
        ("10.77.0.1", "no address of (10.127.0.0, 29500)", "--master_port"),
        # all ranks are on this machine
        ("127.0.0.1", "connect: SO_ERROR: Connection refused, remote=[127.0.0.1]:5$0", "port"),
        ("localhost", "no address of (localhost, 29500), 127.0.0.1", "--master_port"),
    ],
)
def test_ranks_that_look_for_others_at_a_loopback_address_need_an_interface(
    master, error, mend, monkeypatch
):
    """Where a host name stands for 127.0.1.1, as in Debian's /etc/hosts."""
    monkeypatch.setattr(dist, "init_process_group", mock.Mock(side_effect=RuntimeError(error)))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": master}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as told:
        distributed._join("gloo", timedelta(seconds=1))
    line = str(told.value)
    assert mend in line
    assert ("GLOO_SOCKET_IFNAME" in line) == ("IFNAME" in mend)
    assert ("--master_port" in line) == ("port" in mend)


@pytest.fixture
def networks():
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


def _ip(line):
    return subprocess.run(["ip", *line.split()], capture_output=True, check=False).returncode


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_nodes(launcher, networks, dataset, tmp_path):
    """Each with its own launcher. No loopback, no port of the host: only the cable between them,
    if networks can be made. The disk is shared, as RUN must be."""
    address, port = ("10.77.0.1", "29500") if networks else ("127.0.0.1", str(free_port()))
    # their number counts, not their names
    (tmp_path / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
    nodes, outs = [], [tmp_path / f"node-{node}.txt" for node in range(2)]
    for node, out in enumerate(outs):
        env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        env |= {"GLOO_SOCKET_IFNAME": f"cable{node}"} if networks else {}
        words = [f"--node_rank={node}", f"--master_addr={address}", f"--master_port={port}"]
        more = ["--hostfile", str(tmp_path / "hosts"), "--no_ssh"]
        if launcher == "torchrun":
            more = ["--nnodes", "2", "--nproc-per-node", "1"]
        words += [*more, SCRIPT, *settings(tmp_path, dataset.root.url, train__steps=1)]
        namespace = networks[node] if networks else ""
        nodes.append(started(launch, launcher, words, namespace, out=out, env=env))
    for running in nodes:
        running.join(HANG_S)
        running.kill()
        running.join()
    outputs = [out.read_text() for out in outs]
    assert [running.exitcode for running in nodes] == [0, 0], "\n".join(outputs)
    assert "2 x cpu" in outputs[0] and "step 1/1" in outputs[0] and "step 1/1" not in outputs[1]
    assert column(tmp_path / "run") == [1]
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def at_one(launcher, tmp_path, words, **env):
    """Two ranks on this machine."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    how = ["--nproc-per-node=2"]
    if launcher == "deepspeed":
        how = ["--hostfile", str(hosts), "--no_ssh", "--node_rank=0", "--master_addr=127.0.0.1"]
    how += [f"--master_port={free_port()}", SCRIPT, *words]
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return started(launch, launcher, how, out=tmp_path / "out.txt", env=env)


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_launcher_shows_the_error_whichever_rank_fails_first(launcher, tmp_path):
    """And as the last thing that the user sees: torchrun at the end of its own report, deepspeed after
    its list of processes, too."""
    words = settings(tmp_path, str(tmp_path / "nowhere"))
    job = at_one(launcher, tmp_path, words, SLOW_RANK="0")
    assert wait(tmp_path, [job]).codes == [1 if launcher == "torchrun" else 2]
    out = tmp_path / "out.txt"
    says = f"omnilead pretrain: {tmp_path / 'nowhere'}: does not exist"
    if launcher == "deepspeed":
        until(lambda: out.read_text().splitlines()[-1].startswith(says))
        return
    lines = out.read_text().splitlines()
    assert sum(line.startswith(says) for line in lines) == 1
    assert lines[-2].strip().startswith(f"traceback : {says}") and set(lines[-1]) == {"="}


def test_sigterm_to_the_command_deepspeed_ends_its_ranks_with_a_checkpoint(dataset, tmp_path):
    words = settings(tmp_path, dataset.root.url, train__steps=600)
    out = tmp_path / "out.txt"
    out.touch()
    job = at_one("deepspeed", tmp_path, words, ORPHANS="1")
    until(lambda: "step 2/" in out.read_text() or not job.is_alive())
    job.terminate()
    until(lambda: not is_training(tmp_path / "run"))
    assert "stopped after step" in out.read_text()
    assert int(checkpoint_named(tmp_path / "run" / "checkpoints", "latest").name[5:]) < 600


def slow_first():
    """The first rank is slow to write `latest`; the other tells when it leaves."""
    from omnilead.engine.training import checkpoint
    from omnilead.engine.training.loop import Loop

    publish, train = checkpoint._publish, Loop.train

    def late(*arguments):
        time.sleep(1)
        publish(*arguments)

    def left(self, tracer):
        if self.ranks.rank:
            self.terminated = True
        finished = train(self, tracer)
        assert (self.folder.checkpoints / "latest").is_file()
        return finished

    checkpoint._publish, Loop.train = late, left


def test_no_rank_that_is_stopped_leaves_before_the_checkpoint_is_written(training):
    """Slurm kills all nodes once one has left with an error, as torchrun does after SIGTERM."""
    assert "stopped after step" in training(world=2, before=slow_first).good()

"""One run on several nodes, each with its own launcher: in networks of their own, where that is permitted."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ranks import free_port, rows, settings

from data_tools.dataset import Dataset

SCRIPT = str(Path(__file__).parents[3] / "engine" / "pretrain.py")
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")


def deepspeed(tmp: Path, node: int, address: str, port: str) -> list[str]:
    """The hosts named in the file are only counted."""
    hostfile = tmp / "hosts"
    hostfile.write_text("node-a slots=1\nnode-b slots=1\n")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--no_ssh"]
    return [*launcher, "--node_rank", str(node), "--master_addr", address, "--master_port", port, SCRIPT]


def torchrun(tmp: Path, node: int, address: str, port: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    return [*launcher, "--node-rank", str(node), "--master-addr", address, "--master-port", port, SCRIPT]


def together(tmp: Path, commands: Sequence[list[str]], *environments: dict[str, str]) -> list[str]:
    """What each printed; all of them ended well."""
    env = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    nodes = []
    for i, command in enumerate(commands):
        own = env | (environments[i] if environments else {})
        out = open(tmp / f"node-{i}.txt", "w")  # noqa: SIM115
        nodes.append(subprocess.Popen(command, cwd=tmp, env=own, stdout=out, stderr=subprocess.STDOUT, start_new_session=True))
        out.close()
    try:
        for node in nodes:
            node.wait()
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, 9)
    outputs = [(tmp / f"node-{i}.txt").read_text() for i in range(len(nodes))]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    return outputs


def test_two_nodes_by_torchrun(dataset: Dataset, tmp_path: Path) -> None:
    arguments, port = settings(tmp_path, dataset.root.url, train__steps=2), str(free_port())
    check(tmp_path, [[*torchrun(tmp_path, node, "127.0.0.1", port), *arguments] for node in range(2)])


def check(tmp: Path, commands: Sequence[list[str]], *environments: dict[str, str]) -> None:
    outputs = together(tmp, commands, *environments)
    assert "2 x cpu" in outputs[0] and "step 2/2" in outputs[0] and "step 2/2" not in outputs[1]
    assert rows(tmp / "run")[-1]["step"] == 2


@pytest.fixture
def networks() -> Iterator[tuple[str, ...]]:
    """Two network namespaces joined by one cable: 10.77.0.1 on `cable0` in the first, 10.77.0.2 on `cable1` in the second. None
    where they are not to be had: they need iproute2's `ip` and permission."""
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


@pytest.mark.slow
def test_two_nodes_by_deepspeed_without_ssh(networks: tuple[str, ...], dataset: Dataset, tmp_path: Path) -> None:
    """No loopback, no port of the host: only the cable between them. The disk is shared, as RUN must be. Else on loopback."""
    arguments = settings(tmp_path, dataset.root.url, train__steps=2)
    address, port = ("10.77.0.1", "29500") if networks else ("127.0.0.1", str(free_port()))
    into = [["ip", "netns", "exec", name] for name in networks] or [[], []]
    commands = [[*into[node], *deepspeed(tmp_path, node, address, port), *arguments] for node in range(2)]
    check(tmp_path, commands, *({"GLOO_SOCKET_IFNAME": f"cable{node}"} if networks else {} for node in range(2)))

"""kill -9 at any moment: no file under a final name is ever wrong, and another run gives the same bytes.
The runs that are killed are in victims.py."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from handmade import build, files

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.sharding import plan
from tests.forks import members
from tests.waiting import until


def _start(*arguments, **options):
    here = Path(__file__)
    path = os.pathsep.join([str(here.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, here.with_name("victims.py"), *arguments]
    return subprocess.Popen(list(map(str, command)), env=environment, text=True, **options)


def _result(*arguments):
    run = _start(*arguments, stdout=subprocess.PIPE)
    output = run.communicate()[0]
    assert run.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.mark.slow
def test_a_build_killed_over_and_over(small, tmp_path):
    during = _result("new_dataset", small, tmp_path, 40)
    assert sum(during.values()) >= 40
    # Kills fell where something can break
    assert min(during[phase] for phase in ("shards", "zarr", "tables")) >= 5


@pytest.mark.slow
def test_a_dataset_from_another_killed_over_and_over(more, old, tmp_path):
    patients = [one for one in Dataset.open(str(old)).column("patient") if one]
    (tmp_path / "withdrawn.txt").write_text(patients[0])
    assert _result("from_dataset", more, tmp_path, 24, old, tmp_path / "withdrawn.txt") >= 24


def test_killing_a_run_also_ends_its_worker_processes(small, tmp_path):
    """Kill the whole group, then only the parent: its workers, here reading a zip, must not keep
    writing where the next run writes."""
    source = shutil.make_archive(str(tmp_path / "z"), "zip", small)
    assert _result("workers", source, tmp_path, 1) == {"kills": 2, "orphans": 0}


def test_a_second_run_is_refused_until_the_first_ends(small, shell, tmp_path):
    """The second run is refused with one line and changes nothing. After the first is killed, a
    run with other settings may use the folder, and nothing of the killed run stays: its parts
    have plain names, and the next run has a key."""
    out = tmp_path / "out"
    run = _start("held", small, out, 8, 1)
    try:
        assert os.WIFSTOPPED(os.waitpid(run.pid, os.WUNTRACED)[1])
        before = files(out)
        assert [name for name in before if name.endswith(".parquet")]
        line = shell.error("shard", small, "--workers", 1, "--out", out)
        assert "another run is writing there" in line
        assert files(out) == before
    finally:
        run.kill()
        run.wait()
    hidden = build(small, out, pseudonym_key=b"k" * 32)
    build(small, tmp_path / "fresh", pseudonym_key=b"k" * 32)
    assert files(out) == files(tmp_path / "fresh")
    names = hidden.column("record")
    assert not [name for name in names if name.startswith(("HR", "A0", "JS", "E0"))]


def test_ctrl_c_is_one_line_and_the_run_can_be_finished(small, shell, tmp_path, monkeypatch):
    """Ctrl-C for the whole group gives one line, no traceback of any process, and exit code 130;
    another run finishes."""
    out = tmp_path / "out"
    monkeypatch.setenv("HANG_AT", "3")
    # Or, begun by `command &`, nobody here would hear it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    run = _start("typed", small, out, 2, stderr=subprocess.PIPE, start_new_session=True)
    signal.signal(signal.SIGINT, before)
    until(lambda: len(list(out.glob(".build/*.parquet"))) >= 3)
    os.killpg(run.pid, signal.SIGINT)
    error = run.communicate()[1]
    assert (run.returncode, error) == (
        130,
        "omnilead shard: interrupted: run the same command again to continue\n",
    )
    assert members(run.pid) == []
    monkeypatch.setattr(plan, "SHARD_CROPS", 4)
    shell.run("shard", small, "--out", out, "--format", "both", "--workers", 1)

"""What all commands have in common before their work begins: wrong arguments, lost output, Ctrl-C,
how they exit."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from docs import augmentations
from omnilead.data_tools.io.terminal import guard_streams
from omnilead.downstream import convert, embed, evaluate
from omnilead.engine import pretrain
from tests.forks import started

ROOT = Path(__file__).parents[1]
# Ctrl-C as numpy or torch is looked for, in a program that is run as it is by its users
STOPPED = """
import runpy, sys
class Finder:
    def find_spec(self, name, *_):
        if name in ("numpy", "torch"):
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("door", "arguments"),
    [
        (evaluate.main, ["--model", "m", "--data", "d", "--role", "x"]),
        (embed.main, ["--model", "m", "--data", "d", "--out", "o.parquet", "--workers", "0"]),
        (augmentations.main, []),
        (pretrain.main, ["--nothing"]),
        (convert.main, ["to-onnx"]),
    ],
)
def test_wrong_arguments_are_one_line(door, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        door(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1) and err.endswith(
        "(--help shows all)\n"
    )


UNBUFFERED = '-u -c "from omnilead.data_tools.io.terminal import Parser; Parser(); [print(n) for n in range(10**5)]"'


@pytest.mark.parametrize(
    ("command", "output", "code", "lines"),
    [
        (UNBUFFERED, "| true", 1, 0),
        (UNBUFFERED, "> /dev/full", 1, 1),
        ("-m omnilead --help", "> /dev/full", 1, 1),
        ("-m omnilead --help", ">&-", 0, 0),
        ("-m omnilead --help", "| true", 0, 0),
        ("-m omnilead --help", "2>&- | cat", 0, 0),
        ("-m omnilead show $'no\\xff'", "", 2, 1),
    ],
)
def test_output_that_cannot_be_written_and_names_that_are_not_text(command, output, code, lines):
    line = f"set -o pipefail; {sys.executable} {command} {output}"
    ended = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (code, lines), ended.stderr
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr


DOORS = [
    "pretrain",
    "evaluate --model m --data d",
    "embed --model m --data d --out f.parquet",
]
DOORS += ["convert to-onnx m f", "reproduce/__main__ --table 1 --out d --data d"]


@pytest.mark.parametrize("door", DOORS)
def test_ctrl_c_during_imports_is_one_line(door):
    name, *arguments = door.split()
    wing = "engine" if name == "pretrain" else "downstream"
    command = [sys.executable, "-c", STOPPED, f"{wing}/{name}.py", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr.count("\n") == 1 and ": interrupted" in ended.stderr


def test_ctrl_c_while_a_training_imports_pytorch(dataset, tmp_path):
    """Its settings are right, so that it gets there."""
    stopped = STOPPED.replace('("numpy", "torch")', '("torch",)')
    words = ["--config", "small", "--data", dataset.root.url, "--out", str(tmp_path / "run")]
    command = [sys.executable, "-c", stopped, "engine/pretrain.py", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    line = "omnilead pretrain: interrupted: the same command continues\n"
    assert (ended.returncode, ended.stderr) == (130, line)


def as_script(path):
    sys.argv = [path, "--schema"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit:
        return 7
    return 8


@pytest.mark.parametrize("script", ["engine/pretrain.py", "downstream/finetune.py"])
def test_training_exits_without_shutting_down_the_interpreter(script, tmp_path):
    """Gloo's threads outlive their group; shutting down the interpreter while one runs ends with
    SIGABRT."""
    process = started(as_script, str(ROOT / script), out=tmp_path / "out.txt")
    process.join()
    assert process.exitcode == 0 and '"train"' in (tmp_path / "out.txt").read_text()


def into_closed_pipe():
    guard_streams()
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    pretrain.main(["--schema"])


def onto_full_disk():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    return as_script(str(ROOT / "engine" / "pretrain.py"))


@pytest.mark.parametrize(
    ("call", "code", "lines"), [(into_closed_pipe, -signal.SIGPIPE, 0), (onto_full_disk, 1, 1)]
)
def test_the_schema_cannot_be_written(call, code, lines, tmp_path):
    process = started(call, out=tmp_path / "out.txt")
    process.join()
    said = (tmp_path / "out.txt").read_text()
    assert (process.exitcode, said.count("\n")) == (code, lines) and "Traceback" not in said


@pytest.mark.parametrize(("given", "used"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_wait_for_each_other_in_short_loops(given, used):
    """In a command, and in Python once a function is named."""
    code = "import os, omnilead; omnilead.synth; print(os.environ['GOMP_SPINCOUNT'])"
    env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"} | given
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert said.stdout == f"{used}\n"

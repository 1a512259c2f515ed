"""What all doors have in common: how they answer before their work begins."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import convert, embed, evaluate, parity, pretrain
from engine.data import picture
from engine.evaluation import run_report

ROOT = Path(__file__).parents[2]
# Ctrl-C as torch is looked for, in a program that is run as it is by its users
STOPPED = """
import runpy, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
sys.argv = [sys.argv[1]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("door", "arguments"),
    [
        (evaluate.main, ["--model", "m", "--data", "d", "--task", "x"]),
        (embed.main, ["--model", "m"]),
        (picture.main, []),
        (pretrain.main, ["--nothing"]),
        (convert.main, ["to-onnx"]),
        (parity.main, []),
        (run_report.main, []),
    ],
)
def test_wrong_arguments_are_one_line(
    door: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        door(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1) and err.endswith("(--help shows all)\n")


UNBUFFERED = '-u -c "from data_tools.cli import Parser; Parser(); [print(n) for n in range(10**5)]"'


@pytest.mark.parametrize(
    ("command", "output", "code", "lines"),
    [
        (UNBUFFERED, "| true", 1, 0),
        (UNBUFFERED, "> /dev/full", 1, 1),
        ("-m data_tools --help", "> /dev/full", 1, 1),
        ("-m data_tools --help", ">&-", 0, 0),
        ("-m data_tools --help", "| true", 0, 0),
        ("-m data_tools --help", "2>&- | cat", 0, 0),
        ("-m data_tools show $'no\\xff'", "", 2, 1),
        ("engine/pretrain.py --schema", "> /dev/full", 1, 1),
        ("engine/pretrain.py --schema", ">&-", 0, 0),
        ("engine/pretrain.py --set run=$'\\xff'", "", 2, 1),
    ],
)
def test_output_that_cannot_be_written_and_names_that_are_no_text(command: str, output: str, code: int, lines: int) -> None:
    line = f"set -o pipefail; {sys.executable} {command} {output}"
    ended = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (code, lines), ended.stderr
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("door", ["pretrain", "finetune", "evaluate", "embed"])
def test_stopped_while_all_is_imported_is_one_line(door: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED, f"engine/{door}.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode in (130, -2) and ended.stdout == ""
    assert ended.stderr.count("\n") == 1 and ended.stderr.endswith(
        f"{door}{'.py' * (door in ('pretrain', 'finetune'))}: interrupted\n"
    )

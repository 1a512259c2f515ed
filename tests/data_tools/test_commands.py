"""One way from an error to a line and an exit code, for all commands."""

import errno

import pytest

from omnilead.data_tools.io.commands import run_command, run_data_command
from omnilead.data_tools.io.errors import DatasetError
from omnilead.data_tools.io.terminal import OutputClosed
from omnilead.engine.run import explain_training_error
from omnilead.engine.settings.commandline import RESUMABLE, run_on_ranks, tell_failure
from omnilead.engine.settings.errors import ConfigError, OutputError, TrainError
from omnilead.engine.training.checkpoint_files import WriteError

FULL = OSError(errno.ENOSPC, "No space left on device")
REFUSED = OSError(errno.EACCES, "Permission denied", "/out/x")


def raising(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong"), 2),
        (DatasetError("wrong"), 2),
        (OutputError("wrong"), 1),
        (TrainError("wrong"), 1),
        (WriteError("wrong"), 1),
        (KeyboardInterrupt("wrong"), 130),
    ],
)
@pytest.mark.parametrize("run", [run_command, run_on_ranks])
def test_an_error_has_its_exit_code(run, error, code, capsys):
    assert run("omnilead x", raising(error)) == code
    assert capsys.readouterr().err == "omnilead x: wrong\n"


@pytest.mark.parametrize(
    ("run", "code", "line"),
    [
        (
            lambda work: run_data_command("x", work, "--out", "/out"),
            2,
            "--out /out: No space left on device: free disk space, or choose another",
        ),
        (
            lambda work: run_on_ranks("omnilead x", work, "/out"),
            1,
            f"--out /out: No space left on device{RESUMABLE}",
        ),
        (
            lambda work: run_command("omnilead x", work, explain_training_error),
            1,
            "--out RUN: No space left on device: the last checkpoint is intact",
        ),
    ],
)
def test_a_full_disk_is_told_with_what_helps(run, code, line, capsys):
    assert run(raising(FULL)) == code
    assert capsys.readouterr().err == f"omnilead x: {line}\n"


def test_the_same_command_again_does_not_help_against_a_missing_permission(capsys):
    assert run_on_ranks("omnilead x", raising(REFUSED), "/out") == 2
    assert capsys.readouterr().err == "omnilead x: --out /out: Permission denied\n"


def test_a_closed_output_is_no_error_but_another_broken_pipe_is(capsys, monkeypatch):
    monkeypatch.setattr("omnilead.data_tools.io.commands.drop_output", lambda: 0)
    assert run_command("omnilead x", raising(OutputClosed())) == 0
    assert run_command("omnilead x", raising(BrokenPipeError(errno.EPIPE, "Broken pipe"))) == 2
    assert capsys.readouterr().err == "omnilead x: a file: Broken pipe\n"


def test_a_bug_is_raised():
    with pytest.raises(ZeroDivisionError):
        run_command("omnilead x", lambda: 1 // 0)


def test_a_rank_says_which_it_is_if_it_fails_alone_and_ctrl_c_is_told_once(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    tell_failure("omnilead x", "interrupted", 130)
    tell_failure("omnilead x", "the disk\n  is full", 1)
    assert capsys.readouterr().err == "omnilead x: rank 1: the disk is full\n"

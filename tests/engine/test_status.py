"""`omnilead status`: one screen about a run that trains, has stopped, or is damaged."""

import fcntl
import json
import os
import re
import subprocess
import sys
import time

import fsspec
import pytest

from omnilead.__main__ import main
from omnilead.downstream.after_training import AFTER_TRAINING
from omnilead.engine import status
from omnilead.engine.settings.run_files import LOCK, METRICS, PROMETHEUS, VALIDATION
from omnilead.engine.training.loggers import write_gauges


def line(step, crops_per_s, **more):
    """16 crops a step."""
    row = {
        "step": step,
        "crops_seen": 16 * step,
        "epoch": step / 10,
        "loss": 4.5,
        "loss_local": 4.25,
    }
    row |= {"loss_global": None, "crops_per_s": crops_per_s, "data_wait_pct": 1.25, "mfu": 0.3}
    return row | {"skipped_steps": 0} | more


@pytest.fixture
def run(tmp_path):
    """100 of 400 steps in 160 s: 100 s of 8 crops/s, 60 s of 13.33 crops/s."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "latest").write_text("step-80\n")
    rows = [line(25, 8.0), line(50, 8.0), line(100, 40 / 3, skipped_steps=2)]
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = {"step": 50, "crops_seen": 800, "loss": 4.75, "auroc": 0.875}
    (folder / VALIDATION).write_text(json.dumps(held_out) + "\n")
    (folder / "run.json").write_text(json.dumps({"steps": 400}))
    now = {"first_step": 25, "started_at_seconds": 1000.0, "logged_at_seconds": 1220.0}
    write_gauges(folder / PROMETHEUS, now)
    return folder


def shown(run, capsys):
    assert status.main([str(run)]) == 0
    return dict(text.split(maxsplit=1) for text in capsys.readouterr().out.splitlines())


def test_a_run_in_one_screen(run, capsys):
    at = time.time() - 90
    os.utime(run / "checkpoints" / "latest", (at, at))
    screen = shown(run, capsys)
    assert screen.pop("checkpoint") in ("step-80, 0:01:30 ago", "step-80, 0:01:31 ago")
    assert screen == {
        "run": f"{run}: not training on this machine; the same command resumes it",
        "step": "100 of 400 (25.0 %), epoch 10.00",
        "loss": "4.5000, local 4.25",
        "validation": "loss 4.75, AUROC 0.875 at step 50",
        "speed": "13.3 crops/s in the last minute of training, 10.0 over the run, MFU 30.0 %",
        # 110 s of the 220 s since it was resumed after step 25
        "time": "1.2 % of training waits for data; 50 % of the time since the start is validation, "
        "saving and the like",
        "skipped": "2 steps whose loss or gradient was not finite",
        "left": "0:06:00 of training, without validation",
    }


def test_whether_it_trains_has_finished_or_is_silent(run, capsys):
    with open(run / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert shown(run, capsys)["run"] == f"{run}: training"
        at = time.time() - status.SILENT_S - 1
        os.utime(run / METRICS, (at, at))
        assert shown(run, capsys)["silent"].startswith("nothing logged for 0:05:0")
    with open(run / LOCK) as lock:  # held by somebody who asks the same
        fcntl.flock(lock, fcntl.LOCK_SH)
        screen = shown(run, capsys)
    assert "silent" not in screen and "not training" in screen["run"]
    (run / "model").mkdir()
    (run / "run.json").write_text(json.dumps({"steps": 100}))
    screen = shown(run, capsys)
    assert screen["run"] == f"{run}: finished" and "left" not in screen


def test_a_run_that_has_only_begun_and_one_of_an_earlier_version(run, capsys):
    for name in (VALIDATION, PROMETHEUS, "checkpoints/latest"):
        (run / name).unlink()
    (run / METRICS).write_text(json.dumps(line(1, 4.0)) + "\n")
    screen = shown(run, capsys)
    assert "validation" not in screen and screen["checkpoint"] == "none yet"
    assert screen["time"] == "1.2 % of training waits for data"
    assert screen["left"] == "0:26:36 of training, without validation"


@pytest.mark.parametrize(
    "name, content, says",
    [
        (METRICS, None, "no metrics.jsonl: give the folder of a pretrain or finetune run"),
        (METRICS, "", "has no step yet"),
        (METRICS, '{"step": 1}\n', "epoch"),
        ("run.json", None, "run.json"),
        ("run.json", "{", "Expecting"),
        ("run.json", "[]", "list indices"),
    ],
)
def test_a_damaged_run_is_one_line(run, capsys, name, content, says):
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    assert status.main([str(run)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("omnilead status: ") and says in err and err.count("\n") == 1


def test_the_report_is_one_page(run, capsys):
    assert main(["status", str(run), "--html"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{run / 'report.html'}\nrun ") and (run / "report.html").is_file()
    (run / METRICS).write_text('{"step": 1}\n')  # too little for the screen
    (run / "report.html").unlink()
    assert main(["status", str(run), "--html"]) == 2 and (run / "report.html").is_file()
    for arguments, handed, says in (
        ([str(run), "--html"], None, "omnilead.downstream, which is not installed"),
        (["s3://bucket/run", "--html"], AFTER_TRAINING, "give its working folder"),
    ):
        assert status.main(arguments, handed) == 2
        assert says in capsys.readouterr().err


def test_a_reader_who_leaves_is_no_error(run):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "omnilead", "status", run]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_run_in_a_bucket(run, capsys):
    """As its last checkpoint uploaded it: no machine knows whether another trains it."""
    bucket = fsspec.filesystem("memory")
    bucket.put(str(run), "/bucket/first", recursive=True)
    url = "memory://bucket/first"
    here, there = shown(run, capsys), shown(url, capsys)
    assert re.fullmatch(rf"{url}: as uploaded 0:00:\d\d ago", there.pop("run"))
    assert re.fullmatch(r"step-80, 0:00:\d\d ago", there.pop("checkpoint"))
    del here["run"], here["checkpoint"]
    assert there == here and there["step"] == "100 of 400 (25.0 %), epoch 10.00"
    bucket.pipe("/bucket/first/model/config.json", b"{}")
    bucket.pipe("/bucket/first/run.json", b'{"steps": 100}')
    assert shown(f"{url}/", capsys)["run"] == f"{url}: finished"
    assert status.main(["memory://bucket/other"]) == 2
    assert "memory://bucket/other: no metrics.jsonl" in capsys.readouterr().err

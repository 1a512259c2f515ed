"""The checks of first_run on a CPU, with small settings."""

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks import first_run
from benchmarks.measure import CaseError
from omnilead.engine.training.loop import Loop


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(first_run, "call_fresh", lambda check, seconds: check())
    monkeypatch.setattr(Loop, "train", Loop.train)  # which `train` replaces


def test_every_check(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(tiny).parent)
    words = f"{tmp_path} --model tiny.yaml --batch 4 --crops 150 --seconds 1 --only"
    assert first_run.main([*words.split(), "install|tiny|profile|train"]) == 0
    found = json.loads((tmp_path / "first_run.json").read_text())
    assert list(found) == ["install", "smoke torch tiny.yaml", "profile", "train"]
    assert found["smoke torch tiny.yaml"]["step"] == 2
    profile, train = found["profile"], found["train"]
    assert profile["step"] > 0 and "Self CPU" in "".join(profile["operators"])
    assert list(tmp_path.glob("profile-*/profile/trace.json"))
    assert train["last"]["step"] >= train["first"]["step"] == 1
    scored = {row["model"] for row in train["scores"]}
    assert {"trained", "random weights"} <= scored


def test_checks_of_another_commit_run_again(tmp_path, monkeypatch):
    """On a machine without git, which a copy of the code has reached."""
    ran = []
    monkeypatch.setenv("PATH", "/nowhere")
    table = [("one", 1, lambda: ran.append(1) or {"ok": 1})]
    monkeypatch.setattr(first_run, "checks", lambda options: iter(table))
    for revision, times in (("1" * 40, 1), ("1" * 40, 1), ("2" * 40, 2)):
        monkeypatch.setenv("OMNILEAD_REVISION", revision)
        assert first_run.main([str(tmp_path)]) == 0 and len(ran) == times
        found = json.loads((tmp_path / "first_run.json").read_text())
        assert found["one"]["commit"] == revision


def test_failures_are_recorded_and_retried(tmp_path, monkeypatch):
    ran = []

    def check(name, works):
        ran.append(name)
        if not works:
            raise CaseError("no device")
        return {"ok": 1}

    for works, code, expected in ((False, 1, ["one", "two"]), (True, 0, ["two"]), (True, 0, [])):
        table = [("one", 1, partial(check, "one", True)), ("two", 1, partial(check, "two", works))]
        monkeypatch.setattr(first_run, "checks", lambda options, table=table: iter(table))
        ran.clear()
        assert first_run.main([str(tmp_path)]) == code and ran == expected
        found = json.loads((tmp_path / "first_run.json").read_text())
        assert ("error" in found["two"]) == (not works)

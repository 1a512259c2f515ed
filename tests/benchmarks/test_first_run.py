"""The checks of first_run on a CPU, with small settings."""

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks import first_run
from benchmarks.measure import CaseError
from omnilead.engine.training.loop import Loop
from tests.downstream.evaluate.conftest import make_quick


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(first_run, "call_fresh", lambda check, seconds: check())
    monkeypatch.setattr(Loop, "train", Loop.train)  # which `train` replaces
    make_quick(monkeypatch)


@pytest.mark.slow
def test_every_check(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(tiny).parent)
    monkeypatch.setattr(first_run, "LoopRun", partial(first_run.LoopRun, steps=2))  # in a profile
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


def test_what_is_missing_failed_or_of_another_commit_runs_again(tmp_path, monkeypatch):
    """Also without git, on a machine that a copy of the code has reached."""
    ran, broken = [], ["two"]

    def check(name):
        ran.append(name)
        if name in broken:
            raise CaseError("no device")
        return {"ok": 1}

    table = [(name, 1, partial(check, name)) for name in ("one", "two")]
    monkeypatch.setattr(first_run, "make_dataset_and_yield_checks", lambda options: iter(table))
    monkeypatch.setenv("PATH", "/nowhere")
    for revision, expected in (("1", "one two"), ("1", "two"), ("1", ""), ("2", "one two")):
        monkeypatch.setenv("OMNILEAD_REVISION", revision)
        ran.clear()
        assert first_run.main([str(tmp_path)]) == len(broken) and ran == expected.split()
        found = json.loads((tmp_path / "first_run.json").read_text())
        assert found["one"]["commit"] == revision and ("error" in found["two"]) == bool(broken)
        broken.clear()

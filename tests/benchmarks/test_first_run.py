"""The checks of first_run on a CPU, with small settings."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import omnilead
from benchmarks import first_run
from benchmarks.measure import CaseError
from omnilead.engine import embed
from omnilead.engine.training.loop import Loop


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run, "call_fresh", lambda check, seconds: check())
    monkeypatch.setattr(Loop, "train", Loop.train)  # which `train` replaces


def test_every_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed, main = list[str](), embed.main
    monkeypatch.setattr(embed, "main", lambda words: probed.append(words[1]) or main(words))  # type: ignore[func-returns-value]
    words = [
        str(tmp_path),
        "--model",
        "quickstart",
        "--batch",
        "4",
        "--crops",
        "150",
        "--seconds",
        "1",
        "--set",
        "train.valid_batches=1",
    ]
    assert first_run.main([*words, "--only", "install|quickstart|profile|train"]) == 0
    found = json.loads((tmp_path / "first_run.json").read_text())
    assert list(found) == ["install", "smoke torch quickstart", "profile", "train"]
    assert found["smoke torch quickstart"]["step"] == 2
    profile = found["profile"]
    assert profile["step"] > 0 and "Self CPU" in "".join(profile["operators"])
    assert list(tmp_path.glob("profile-*/profile/trace.json"))
    train = found["train"]
    assert train["last"]["step"] >= train["first"]["step"] == 1
    assert len(set(probed)) == 2 and probed[1] == f"{probed[0]}-random"
    trained, random = (omnilead.load(model).encoder.state_dict() for model in probed)
    assert any(not weights.equal(random[name]) for name, weights in trained.items())
    assert train["trained"]["records"] == train["random"]["records"]


def test_failures_are_recorded_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def check(name: str, works: bool) -> dict[str, Any]:
        ran.append(name)
        if not works:
            raise CaseError("no device")
        return {"ok": 1}

    for works, code, expected in ((False, 1, ["one", "two"]), (True, 0, ["two"]), (True, 0, [])):
        table = [("one", 1, partial(check, "one", True)), ("two", 1, partial(check, "two", works))]
        monkeypatch.setattr(first_run, "checks", lambda options, table=table: iter(table))
        ran.clear()
        assert first_run.main([str(tmp_path)]) == code and ran == expected
    assert '"error": "no device"' in capsys.readouterr().err

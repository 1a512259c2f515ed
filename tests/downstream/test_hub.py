"""Models on the Hub: what is uploaded and what is not, how it is fetched, and one-line errors."""

import errno
import hashlib
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import yaml

import omnilead
from omnilead.downstream.hub import main
from omnilead.engine.model import folder
from tests.downstream.fake_hub import TOKEN, hub


@pytest.fixture
def server(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    with hub() as running:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(
            constants.ENDPOINT, running.url
        )  # made when it was imported
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        yield running


def test_a_pushed_model_can_be_pulled(
    server,
    saved_model,
    tmp_path,
    capsys,
    monkeypatch,
):
    definition = {
        "name": "rhythm",
        "kind": "multilabel",
        "labels": "wards/Jane Doe/labels.csv",
        "was": "/mnt/Jane Doe/a.csv",
    }
    head = {
        "task": "diagnosis",
        "kind": "multilabel",
        "classes": ["ST/T", "AF"],
        "thresholds": [0.5] * 2,
        "definition": definition,
    }
    run = saved_model(head=head).parent
    (run / "metrics.jsonl").write_text("secret")  # beside the model, and a stray file within it
    (run / "model" / "patients.csv").write_text("secret")
    card = (
        f"# A model\n\nFine-tuned from {run} with s3://hospital/ward/labels.csv; "
        "https://example.org/a/b.\n"
    )
    (run / "model" / "README.md").write_text(card)
    assert main(["push", str(run), "ward/ecg", "--private", "--licence", "cc-by-4.0"]) == 0
    assert capsys.readouterr().out == f"{server.url}/ward/ecg\n" and server.private == {"ward/ecg"}
    files = server.repos["ward/ecg"]
    assert files.keys() == {"README.md", "config.json", "model.safetensors", "preprocessing.json"}
    for private in (str(tmp_path), "hospital", "Jane", "secret"):
        assert not [name for name, content in files.items() if private.encode() in content]
    _, head, text = files["README.md"].decode().split("---\n")
    facts = yaml.safe_load(head)
    assert (
        facts["license"] == "cc-by-4.0"
        and facts["library_name"] == "omnilead"
        and "ecg" in facts["tags"]
    )
    assert "Fine-tuned from run with labels.csv; https://example.org/a/b." in text
    config = json.loads(files["config.json"])
    assert config["head"]["definition"] == definition | {
        "labels": "labels.csv",
        "was": "a.csv",
    } and config["head"]["classes"] == ["ST/T", "AF"]
    assert config["sha256"]["README.md"] == hashlib.sha256(files["README.md"]).hexdigest()

    out = tmp_path / "pulled"
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    monkeypatch.chdir(tmp_path / "empty")
    for place in (str(out), ".", str(tmp_path / "link")):
        assert main(["pull", "ward/ecg@v1", place]) == 0
        assert {path.name: path.read_bytes() for path in Path(place).iterdir()} == files
        for path in (tmp_path / "empty").iterdir():
            path.unlink()
    mine, theirs = omnilead.load(run), omnilead.load("hf://ward/ecg")
    assert theirs.digest == omnilead.load(out).digest and theirs.encoder.width == mine.encoder.width
    assert all(
        theirs.state_dict()[name].equal(weights) for name, weights in mine.state_dict().items()
    )
    assert main(["push", str(run), "ward/ecg"]) == 0  # again: another commit


@pytest.fixture
def pull_a_stranger(server, saved_model, tmp_path):
    """Pulls a repository whose config.json lists these files of code, and names the encoder's."""

    def pull(encoder, *codes, out="out"):
        stranger = saved_model("stranger/model")
        config = folder.read_document(stranger / folder.CONFIG)
        config["model"]["encoder"] = encoder
        for name in codes:
            (stranger / name).write_text("raise SystemExit('a stranger ran')")
        folder.write_config(stranger, config)
        files = {path.name: path.read_bytes() for path in stranger.iterdir()}
        server.repos["me/ecg"] = files
        return main(["pull", "me/ecg", str(tmp_path / out)]), tmp_path / out

    return pull


def test_of_code_only_what_the_settings_name_is_pulled(pull_a_stranger, tmp_path):
    """Python would run yaml.py in place of the library that it was called as."""
    code, out = pull_a_stranger("net.py:Net", "net.py", "yaml.py", "sitecustomize.py", "a.so")
    assert code == 0
    (snapshot,) = (tmp_path / "cache" / "models--me--ecg" / "snapshots").iterdir()
    shutil.copy(tmp_path / "stranger" / "model" / "yaml.py", snapshot)  # by another program
    assert main(["pull", "me/ecg", str(tmp_path / "again")]) == 0
    for place in (out, tmp_path / "again"):
        assert {path.name for path in place.iterdir()} == {
            *("net.py", folder.CONFIG, folder.PREPROCESSING, folder.WEIGHTS, folder.CARD),
        }


@pytest.mark.parametrize(
    "name", ["yaml", "json", "numpy", "omnilead", "sitecustomize", "usercustomize"]
)
def test_code_that_would_replace_a_module_is_refused(name, pull_a_stranger, capsys):
    code, out = pull_a_stranger(f"{name}.py:Net", f"{name}.py")
    assert code == 2 and not out.exists()
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"omnilead hub: hf://me/ecg: its code file {name}.py " in err
    assert err.endswith("the model's owner must rename the file and train again\n")


def test_code_that_would_replace_a_module_is_not_pushed(server, saved_model, capsys):
    stranger = saved_model()
    config = folder.read_document(stranger / folder.CONFIG)
    config["objective"] = {"method": "torch.py:Mine"}
    (stranger / "torch.py").touch()
    folder.write_config(stranger, config)
    assert main(["push", str(stranger), "me/ecg"]) == 2
    assert "torch.py" in capsys.readouterr().err and not server.repos.get("me/ecg")


def test_a_pull_that_was_interrupted_can_be_run_again(
    server, saved_model, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    assert main(["push", str(saved_model().parent), "me/ecg"]) == 0

    full = OSError(errno.ENOSPC, "No space left on device")
    for stop, code in ((KeyboardInterrupt(), 130), (full, 2)):
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "copy", mock.Mock(side_effect=[None, stop]))
            assert main(["pull", "me/ecg", str(out)]) == code
        assert not list(out.iterdir())
    (out / ".omnilead-pull").mkdir()  # a kill
    assert capsys.readouterr().err == (
        "omnilead hub: interrupted: run the same command again\n"
        f"omnilead hub: OUT {out}: No space left on device: free disk space, or choose another\n"
    )
    assert main(["pull", "me/ecg", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == server.repos["me/ecg"].keys()


def test_a_damaged_download_is_fetched_again_once(server, saved_model, tmp_path, capsys):
    assert main(["push", str(saved_model().parent), "me/ecg"]) == 0
    cache = tmp_path / "cache" / "models--me--ecg"
    for number, name in enumerate((folder.WEIGHTS, folder.PREPROCESSING, folder.CONFIG)):
        digest = omnilead.load("hf://me/ecg").digest
        (file,) = cache.rglob(name)
        file.write_bytes(file.read_bytes()[:-9])
        assert main(["pull", "me/ecg", str(tmp_path / f"out{number}")]) == 0
        assert omnilead.load(tmp_path / f"out{number}").digest == digest
    server.repos["me/ecg"][folder.WEIGHTS] += b"damaged there"
    capsys.readouterr()
    shutil.rmtree(cache)
    assert main(["pull", "me/ecg", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "not mended by fetching it again" in said
    assert said.endswith(f"delete the Hub's cache, {cache}, or ask the model's owner\n")
    server.shutdown()
    server.server_close()
    assert main(["pull", "me/ecg", str(tmp_path / "out")]) == 2  # nor can it be fetched again
    assert f"the Hub's cache, {cache}" in capsys.readouterr().err


def test_failures_are_one_line(
    server,
    saved_model,
    tmp_path,
    monkeypatch,
    capsys,
):
    run, full = saved_model().parent, tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    server.repos = {"me/empty": {}, "me/ecg": {}}

    def says(*words):
        assert main([str(word) for word in words]) == 2
        err = capsys.readouterr().err
        assert err.startswith("omnilead hub: ") and err.count("\n") == 1
        return err

    assert "no such repository, or your token may not see it" in says(
        "pull", "me/none", tmp_path / "out"
    )
    assert "no such revision" in says("pull", "me/ecg@v9", tmp_path / "out")
    assert "is not an omnilead model" in says("pull", "me/empty", tmp_path / "out")
    assert "not an empty folder" in says("pull", "me/ecg", full)
    assert "Repo id must" in says("push", run, "no name")
    assert "no such folder: give the folder of a run or model" in says(
        "push", tmp_path / "none", "me/ecg"
    )
    (run / "model" / folder.WEIGHTS).write_bytes(b"damaged")
    assert "was changed or damaged" in says("push", run, "me/ecg") and not server.repos["me/ecg"]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "your token is wrong" in says("push", saved_model("other/model"), "me/new")
    server.shutdown()
    server.server_close()
    assert "the Hub cannot be reached" in says("push", tmp_path / "other", "me/new")
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "there is no token: `hf auth login`" in says("push", tmp_path / "other", "me/new")

"""Every command refuses a model folder that was damaged or changed."""

import errno
import fcntl
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

import omnilead
from omnilead.downstream import convert, embed, evaluate, finetune
from omnilead.engine.model import folder as folders
from omnilead.engine.model.folder import CONFIG, PREPROCESSING, SHA256_KEY, WEIGHTS, LoadError


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def edited(folder, name, **to):
    document = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(document | to))


def test_every_flipped_bit_of_a_folder_is_detected(saved_model, capsys):
    folder = saved_model()
    rng = np.random.default_rng(0)
    for name in (CONFIG, PREPROCESSING, WEIGHTS):
        whole = (folder / name).read_bytes()
        for bit in rng.choice(8 * len(whole), 40, replace=False).tolist():
            flip(folder / name, bit)
            try:
                omnilead.load(folder)
                noticed = "warning" in capsys.readouterr().err  # of the name sha256 itself
            except LoadError as error:
                noticed = name in str(error)
            equal = noticed or json.loads((folder / name).read_text()) == json.loads(whole)
            assert equal, f"bit {bit} of {name}"
            (folder / name).write_bytes(whole)


def test_every_command_refuses_a_changed_folder(saved_model, tmp_path, dataset, capsys):
    folder, data, out = saved_model(), dataset.root.url, tmp_path / "out"
    edited(folder, PREPROCESSING, scale="zscore")
    for main, arguments in (
        (embed.main, f"--model {folder} --data {data} --out {out}"),
        (evaluate.main, f"--model {folder} --data {data}"),
        (finetune.main, f"--start {folder} --data {data} --config diagnosis --out {out}"),
        (convert.main, f"to-fairseq {folder} {out}.pt"),
        (convert.main, f"to-onnx {folder} {out}.onnx"),
    ):
        assert main(arguments.split()) == 2
        out_text, err = capsys.readouterr()
        assert out_text == "" and err.count("\n") == 1 and str(folder / PREPROCESSING) in err


def test_hashes_are_those_of_sha256sum_and_only_the_card_may_be_edited(saved_model, capsys):
    folder = saved_model()
    document = json.loads((folder / CONFIG).read_text())
    sums = document[SHA256_KEY]
    assert sums.keys() == {path.name for path in folder.iterdir()}
    for name in (PREPROCESSING, WEIGHTS, "README.md"):
        assert sums[name] == folders.file_sha256(folder / name)
    (folder / "README.md").write_text("mine")
    (folder / CONFIG).write_text(json.dumps(document))  # other spaces
    omnilead.load(folder)
    assert capsys.readouterr().err == ""
    del document[SHA256_KEY]  # as older versions wrote
    (folder / CONFIG).write_text(json.dumps(document))
    omnilead.load(folder)
    err = capsys.readouterr().err
    assert err.startswith("warning: ") and err.count("\n") == 1 and str(folder) in err


def test_a_run_without_a_model_is_exported_by_the_command_that_trains_it(saved_model, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for settings, program in (
        ("train:\n  steps: 1\n", "pretrain"),
        ("task:\n  name: a\n", "finetune"),
    ):
        (run / "config.yaml").write_text(settings)
        saved_model()
        for damaged, says in ((False, "no model/ yet"), (True, "damaged .*copy it again, or")):
            if damaged:
                edited(run / "model", PREPROCESSING, scale="zscore")
            else:
                shutil.rmtree(run / "model")
            with pytest.raises(LoadError, match=f"{says}.*run omnilead {program} --export {run}$"):
                omnilead.load(run)
            saved_model()


def test_a_folder_with_a_shipped_models_name_is_said(saved_model, tmp_path, monkeypatch, capsys):
    shutil.copytree(saved_model(), tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    folders.note_folder_hides_shipped_model.cache_clear()
    for _ in range(2):
        omnilead.load("small")
    assert capsys.readouterr().err.count("note: small is the folder small here, not the mo") == 1


def test_weights_that_do_not_fit_on_the_disk_are_an_error_of_the_system(monkeypatch, tmp_path):
    def no_room(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", no_room)
    with pytest.raises(OSError, match="No space left on device") as error:
        folders.save_weights({}, tmp_path / WEIGHTS)
    assert error.value.errno == errno.ENOSPC


def write_number(folder, number):
    """Writes a model whose only weight is a number."""
    folders.write_model(folder, {"w": torch.tensor([float(number)])}, {}, {}, f"card {number}")


def test_two_writers_with_one_process_number_wait_for_each_other(tmp_path, monkeypatch):
    """As the first processes of two containers that share a disk have."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    saves, inside, go_on = folders.save_weights, threading.Semaphore(0), threading.Event()

    def slow(weights, path):
        inside.release()
        assert go_on.wait(60)
        saves(weights, path)

    monkeypatch.setattr(folders, "save_weights", slow)
    model = tmp_path / "model"
    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write_number, model, number) for number in (0, 1)]
        assert inside.acquire(timeout=60)
        assert not inside.acquire(timeout=0.2), "both write at once"
        go_on.set()
        assert [writer.result() for writer in writers] == [None, None]
    folders.verified_digest(model)
    assert f"card {int(folders.load_weights(model)['w'])}" == (model / "README.md").read_text()
    assert os.listdir(tmp_path) == ["model"]


def test_two_writers_where_folders_cannot_be_locked_do_not_mix_their_files(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.EBADF, "Bad")))
    saves, both, first_done = folders.save_weights, threading.Barrier(2), threading.Event()
    model = tmp_path / "model"

    def slow(weights, path):
        saves(weights, path)
        both.wait(60)  # both have written their weights
        if int(weights["w"]):
            assert first_done.wait(60)

    monkeypatch.setattr(folders, "save_weights", slow)
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(write_number, model, number) for number in (0, 1))
        first.result()
        folders.verified_digest(model)
        assert int(folders.load_weights(model)["w"]) == 0
        first_done.set()
        second.result()
    folders.verified_digest(model)
    assert int(folders.load_weights(model)["w"]) == 1
    assert os.listdir(tmp_path) == ["model"]


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    left = {f".model.{'0a' * 16}", f".model.old.{'0b' * 16}"}
    others = {f".models.{'0a' * 16}", ".model.mine", ".model.old.mine", f"model.{'0a' * 16}"}
    for name in left | others:
        (tmp_path / name).mkdir()
    write_number(tmp_path / "model", 1)
    assert set(os.listdir(tmp_path)) == others | {"model"}

"""Every command refuses a model folder that was damaged or changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import omnilead
from omnilead.engine import convert, embed, evaluate
from omnilead.engine.common import LEADS, ConfigError
from omnilead.engine.model.folder import (
    CONFIG,
    PREPROCESSING,
    SHA256,
    WEIGHTS,
    LoadError,
    file_sha256,
    seal,
)
from omnilead.engine.tasks.finetuning import read_start

Saved = Callable[..., Path]


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def edited(folder: Path, name: str, **to: Any) -> None:
    document = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(document | to))


def test_changed_files_are_refused_and_named(saved_model: Saved) -> None:
    folder = saved_model()
    model = json.loads((folder / CONFIG).read_text())["model"]
    for name, changes in (
        (PREPROCESSING, {"leads": list(LEADS[::-1])}),
        (PREPROCESSING, {"scale": "zscore"}),
        (CONFIG, {"model": model | {"heads": 8}}),
    ):
        whole = (folder / name).read_bytes()
        edited(folder, name, **changes)
        for load in (omnilead.load, read_start):
            with pytest.raises(LoadError, match=name) as caught:
                load(str(folder))
            assert str(folder / name) in str(caught.value) and "\n" not in str(caught.value)
        (folder / name).write_bytes(whole)


def test_every_flipped_bit_of_a_folder_is_detected(
    saved_model: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
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
            assert noticed or json.loads((folder / name).read_text()) == json.loads(whole), (
                f"bit {bit} of {name}"
            )
            (folder / name).write_bytes(whole)


def test_every_command_refuses_a_changed_folder(
    saved_model: Saved, tmp_path: Path, dataset: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = saved_model(), dataset.root.url
    edited(folder, PREPROCESSING, scale="zscore")
    for main, arguments in (
        (embed.main, ["--model", folder, "--data", data, "--out", tmp_path / "f.parquet"]),
        (evaluate.main, ["--model", folder, "--data", data]),
        (convert.main, ["to-fairseq", folder, tmp_path / "f.pt"]),
        (convert.main, ["to-onnx", folder, tmp_path / "f.onnx"]),
    ):
        assert main(list(map(str, arguments))) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and str(folder / PREPROCESSING) in err


def test_hashes_are_those_of_sha256sum_and_only_the_card_may_be_edited(
    saved_model: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved_model()
    document = json.loads((folder / CONFIG).read_text())
    sums = document[SHA256]
    assert sums.keys() == {path.name for path in folder.iterdir()}
    assert all(
        sums[name] == file_sha256(folder / name) for name in (PREPROCESSING, WEIGHTS, "README.md")
    )
    (folder / "README.md").write_text("mine")
    (folder / CONFIG).write_text(json.dumps(document))  # other spaces
    omnilead.load(folder)
    assert capsys.readouterr().err == ""
    del document[SHA256]  # as older versions wrote
    (folder / CONFIG).write_text(json.dumps(document))
    omnilead.load(folder)
    err = capsys.readouterr().err
    assert err.startswith("warning: ") and err.count("\n") == 1 and str(folder) in err


def test_embeddings_that_are_not_finite_are_refused(saved_model: Saved) -> None:
    folder = saved_model()
    weights = load_file(folder / WEIGHTS)
    weights["encoder.layers.0.fc1.weight"][3, 5] = torch.nan
    save_file(weights, folder / WEIGHTS)
    seal(folder, json.loads((folder / CONFIG).read_text()))
    with pytest.raises(ConfigError, match="not finite"):
        omnilead.load(folder).embed(np.random.default_rng(0).normal(0, 0.3, (12, 5000)), 500, LEADS)

"""What each lead adds: known by hand, the same as without the lead, and V1 to V3 for right bundle
branch block."""

import ast
import csv
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch

import omnilead
from omnilead.__main__ import main
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources
from omnilead.downstream.reports import why
from omnilead.engine.data.patients import patient_ids
from omnilead.engine.model.config import ModelConfig
from omnilead.engine.model.folder import write_model
from tests.conftest import REAL, save_probed

NET = """
from torch import nn

class Net(nn.Conv1d):
    width = 4

    def __init__(self, leads):
        super().__init__(leads, 4, 10, 10)

    def forward(self, x_RLT):
        return super().forward(x_RLT).mT
"""
HEADS = {
    "age": {"kind": "regression", "classes": ["age"], "center": [50.0], "scale": [3.0]},
    "risk": {"kind": "survival", "classes": ["risk"]},
}


@pytest.mark.parametrize("name", HEADS)
def test_of_a_linear_model_a_lead_adds_its_samples_times_the_weights(name, tmp_path, capsys):
    """For a value and a risk, of an array with two windows of 10 s at 100 Hz, of two leads."""
    shapes = {
        "encoder.weight": (4, 12, 10),
        "encoder.bias": (4,),
        "head.weight": (1, 4),
        "head.bias": (1,),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    document = {"model": asdict(ModelConfig(encoder="net.py:Net")), "trained": {"rlm": 0.5}}
    document["head"] = {"task": "t"} | HEADS[name]
    signals = {"fs_hz": 100.0, "segment_s": 10.0, "scale": "millivolt", "leads": list(LEADS)}
    write_model(tmp_path / "model", weights, document, signals, code={"net.py": NET.encode()})
    model = omnilead.load(tmp_path / "model", code=True)
    mv_LT = np.random.default_rng(0).normal(0.1, 0.3, (2, 6500))
    np.save(tmp_path / "a.npy", mv_LT)

    x_RLT = model.segments(mv_LT, 250, "II,V1")
    assert x_RLT.shape == (2, 12, 1000)
    weight_L10 = torch.einsum("d,dlk->lk", weights["head.weight"][0], weights["encoder.weight"])
    part_RLT = x_RLT * weight_L10.repeat(1, 100) / 100 * HEADS[name].get("scale", [1.0])[0]
    expected = part_RLT.sum(2).mean(0)[[1, 6]].tolist()
    value = model.predict(mv_LT, 250, "II,V1")[name]
    output, added = why.output_and_drops([1, 6], model, x_RLT, 0)
    assert output == pytest.approx(value, abs=1e-4) and added == pytest.approx(expected, abs=1e-4)

    words = ["show", tmp_path / "a.npy", "--fs", 250, "--leads", "II,V1", "--code", "--why", name]
    words += ["--png", tmp_path / "a.png", "--model", tmp_path / "model"]
    assert main([*map(str, words)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{name}: {value:.3g} in a, from 0 s"
    assert said[2] == f"logit or value {value:+.2f}, to which each lead adds:"
    assert [line.split() for line in said[3:5]] == [
        ["II", f"{expected[0]:+.2f}"],
        ["V1", f"{expected[1]:+.2f}"],
    ]


def test_a_lead_adds_what_predict_loses_without_it(dataset, tmp_path, capsys):
    data, model, table = dataset.root.url, tmp_path / "model", tmp_path / "few.csv"
    rows = np.unique(patient_ids([dataset])[0], return_index=True)[1][:24]
    lines = ["record,M,split"]
    for i, name in enumerate(dataset.column("record")[rows]):
        lines.append(f"{name},{i % 2},{('train', 'valid', 'test')[i // 2 % 3]}")
    table.write_text("\n".join(lines))
    save_probed("small", data, table, model, readout="mean+std+rhythm")
    words = ["show", data, "--crop", "3", "--model", str(model), "--png", str(tmp_path / "a.png")]
    assert main([*words, "--why", "M"]) == 0
    said = capsys.readouterr().out
    loaded, mv = omnilead.load(model), dataset[3].signal_mv
    with torch.no_grad():
        x_RLT = loaded.segments(mv, 500, LEADS)
        logit, score = loaded.logits(x_RLT).mean(), loaded.scores(x_RLT).mean()
        mv[LEADS.index("V2")] = 0
        without = loaded.logits(loaded.segments(mv, 500, LEADS)).mean()
    assert said.startswith(f"M: {score:.3g} in ") and f"value {logit:+.2f}," in said
    assert f"\n  V2  {logit - without:+7.2f}\n" in said
    assert (tmp_path / "a.png").stat().st_size > 10_000
    for change, says in (
        (["--why", "X"], "--why X is no output of the model: choose one of M"),
        (["--why", "M", "--crop", "9999"], "the dataset has crops 0 to"),
        (["--why", "M", "--model", "small"], "the model was only pre-trained"),
    ):
        assert main([*words, *change]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1


def part_of_ptbxl(folder):
    """An archive of the ECGs with complete right bundle branch block and of every tenth other one;
    the label of each record."""
    with open(REAL / "ptbxl" / "ptbxl_database.csv") as file:
        rows = list(csv.DictReader(file))
    labels, kept = {}, []
    for number, row in enumerate(rows):
        has = "CRBBB" in ast.literal_eval(row["scp_codes"])
        if not has and number % 10:
            continue
        kept.append(row)
        labels[f"HR{int(row['ecg_id']):05}"] = int(has), row["patient_id"]
        for suffix in (".hea", ".dat"):
            file = folder / f"{row['filename_hr']}{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REAL / "ptbxl" / f"{row['filename_hr']}{suffix}", file)
    with open(folder / "ptbxl_database.csv", "w") as file:
        table = csv.DictWriter(file, kept[0])
        table.writeheader()
        table.writerows(kept)
    return labels


@pytest.mark.skipif(not (REAL / "ptbxl").is_dir(), reason="no real ECGs in ../shared/ptbxl")
def test_for_right_bundle_branch_block_v1_to_v3_add_most(tmp_path):
    """In ECGs of people whom the head was not fitted on. By chance: in a quarter of them."""
    labels = part_of_ptbxl(tmp_path / "archive")
    options = ShardOptions(str(tmp_path / "data"), plan="all", quiet=True)
    dataset = shard(open_sources(str(tmp_path / "archive")), options)
    lines, tested = ["record,RBBB,split"], []
    for name, (has, patient) in labels.items():
        split = ("train", "valid", "test", "test")[int(float(patient)) % 4]
        lines.append(f"{name},{has},{split}")
        if has and split == "test":
            tested.append(name)
    (tmp_path / "rbbb.csv").write_text("\n".join(lines))
    save_probed("small", dataset.root.url, tmp_path / "rbbb.csv", tmp_path / "model")
    model, records = omnilead.load(tmp_path / "model"), list(dataset.column("record"))
    firsts, shares = [], []
    for name in tested:
        x_RLT = model.segments(dataset[records.index(name)].signal_mv, 500, LEADS)
        _, added = why.output_and_drops(range(12), model, x_RLT, 0)
        firsts.append(LEADS[int(np.argmax(added))])
        positive = np.maximum(added, 0)
        shares.append(positive[6:9].sum() / positive.sum())
    assert len(tested) >= 10
    assert np.mean([lead in ("V1", "V2", "V3") for lead in firsts]) > 0.7, firsts
    assert np.mean(shares) > 0.5, shares

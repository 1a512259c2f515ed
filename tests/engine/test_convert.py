"""engine.convert: exact both ways, strict about names, deaf to what a pickle asks for."""

import argparse
import ast
import collections
import json
import os
import stat
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import convert
from engine.model.config import ModelConfig, ObjectiveConfig
from engine.model.fairseq import their_settings, theirs
from engine.model.folder import seal
from engine.model.pretrainer import Pretrainer

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "parity" / "small_checkpoint.pt"
CONFIG = ModelConfig(
    conv=((16, 2), (32, 2)), width=24, layers=1, heads=2, ffn=32, position_kernel=8, position_groups=4, codes=8, code_width=16
)


def weights(spelled: str = "parametrizations") -> dict[str, Tensor]:
    model = Pretrainer(CONFIG, ObjectiveConfig(), generator=torch.Generator().manual_seed(0))
    return theirs(model.state_dict(), CONFIG, spelled)  # type: ignore[arg-type]


def saved(path: Path, **changes: Any) -> Path:
    content = {"args": None, "cfg": their_settings(CONFIG), "model": weights(), "optimizer_history": [{"num_updates": 7}]}
    torch.save(content | changes, path)
    return path


def same(one: Any, other: Any) -> bool:
    return list(one) == list(other) and all(torch.equal(one[k], other[k]) and one[k].dtype == other[k].dtype for k in one)


@pytest.mark.parametrize("spelled", ["parametrizations", "weight_g"])
def test_round_trip_is_exact(spelled: str, tmp_path: Path) -> None:
    first = saved(tmp_path / "a.pt", model={k: v.half() for k, v in reversed(weights(spelled).items())})
    assert convert.main(["from-fairseq", str(first), str(tmp_path / "out")]) == 0
    assert convert.main(["to-fairseq", str(tmp_path / "out"), str(tmp_path / "b.pt")]) == 0
    one, other = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
    assert same(one["model"], other["model"])
    assert (one["cfg"], one["optimizer_history"]) == (other["cfg"], other["optimizer_history"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md", "config.json", "model.safetensors", "preprocessing.json",
    ]  # fmt: skip


def test_the_authors_own_checkpoint(tmp_path: Path) -> None:
    if not REAL.is_file():
        pytest.skip("the authors' checkpoint is not here (../shared/parity)")
    assert convert.main(["from-fairseq", str(REAL), str(tmp_path / "out")]) == 0
    assert convert.main(["to-fairseq", str(tmp_path / "out"), str(tmp_path / "b.pt")]) == 0
    one, other = (torch.load(path, weights_only=True) for path in (REAL, tmp_path / "b.pt"))
    assert same(one["model"], other["model"]) and one["cfg"] == other["cfg"]


def test_the_converted_model_loads_and_computes(tmp_path: Path) -> None:
    convert.from_fairseq(saved(tmp_path / "a.pt"), tmp_path / "out")
    config = convert.config_of(json.loads((tmp_path / "out" / "config.json").read_text()))
    assert config == CONFIG
    model = Pretrainer(config, ObjectiveConfig()).eval()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    wanted = Pretrainer(CONFIG, ObjectiveConfig(), generator=torch.Generator().manual_seed(0)).eval()
    x = torch.randn(2, 12, 400)
    assert torch.equal(model.encoder(x), wanted.encoder(x))


def test_a_run_of_ours_becomes_a_checkpoint_of_theirs(tmp_path: Path) -> None:
    """RUN/model without anything of theirs in its config.json."""
    convert.from_fairseq(saved(tmp_path / "a.pt"), tmp_path / "run" / "model")
    document = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    del document["fairseq"]
    seal(tmp_path / "run" / "model", document)
    assert convert.main(["to-fairseq", str(tmp_path / "run"), str(tmp_path / "b.pt")]) == 0
    assert convert.main(["from-fairseq", str(tmp_path / "b.pt"), str(tmp_path / "again")]) == 0
    assert same(*(load_file(tmp_path / p / "model.safetensors") for p in ("run/model", "again")))


@pytest.mark.parametrize(
    "section, given, wanted",
    [
        ({}, "auto", "millivolt"),
        ({"normalize": True}, "auto", "zscore"),
        ({"data": "/x/mimic_iv_ecg/manifests"}, "auto", "zscore"),
        ({}, "zscore", "zscore"),
        ({"normalize": True}, "millivolt", "millivolt"),
    ],
)
def test_the_scale_of_the_input_is_recorded(section: dict[str, Any], given: str, wanted: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", cfg=their_settings(CONFIG) | {"task": section})
    assert convert.main(["from-fairseq", str(path), str(tmp_path / "out"), "--input", given]) == 0
    document = json.loads((tmp_path / "out" / "preprocessing.json").read_text())
    assert (document["scale"], document["fs_hz"], document["leads"][3]) == (wanted, 500, "aVR")


class Content:
    """As OmegaConf keeps settings: a class of another package, with nodes that hold values."""

    def __init__(self, content: Any) -> None:
        self._content = {k: Content(v) if isinstance(v, dict) else Value(v) for k, v in content.items()}


class Value:
    def __init__(self, value: Any) -> None:
        self._val = value


def test_settings_in_objects_are_read_without_their_classes(tmp_path: Path) -> None:
    for name, changes in (
        ("namespace", {"cfg": None, "args": argparse.Namespace(**their_settings(CONFIG)["model"])}),
        ("nodes", {"cfg": Content(their_settings(CONFIG))}),
        ("ordered", {"model": collections.OrderedDict(weights()), "extra_state": {"meters": Content({"a": 1})}}),
    ):
        path = saved(tmp_path / f"{name}.pt", **changes)
        assert convert.main(["from-fairseq", str(path), str(tmp_path / name)]) == 0
        assert convert.main(["to-fairseq", str(tmp_path / name), str(tmp_path / f"{name}.back.pt")]) == 0
        assert same(torch.load(tmp_path / f"{name}.back.pt", weights_only=True)["model"], weights())


class Malice:
    def __init__(self, function: Callable[..., Any], text: str) -> None:
        self.given = function, (text,)

    def __reduce__(self) -> Any:
        return self.given


def test_a_pickle_s_code_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "executed"
    path = saved(tmp_path / "a.pt", task_state=Malice(exec, f"open({str(trace)!r}, 'w')"))
    assert convert.main(["from-fairseq", str(path), str(tmp_path / "out")]) == 0  # its weights are sound
    for changes in ({"task_state": Malice(os.system, f"touch {trace}")}, {"model": Malice(exec, f"open({str(trace)!r}, 'w')")}):
        path = saved(tmp_path / "b.pt", **changes)
        assert convert.main(["from-fairseq", str(path), str(tmp_path / "other")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not trace.exists() and not (tmp_path / "other").exists()


def huge() -> dict[str, Tensor]:
    state = weights()
    state["encoder.layers.0.fc1.weight"] = torch.zeros(1).expand(60_000, 60_000)
    return state


ODD: dict[str, Callable[[], Tensor]] = {
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(24), 1.0, 0, torch.qint8),
    "meta": lambda: torch.empty(24, device="meta"),
    "complex": lambda: torch.ones(24, dtype=torch.complex64),
    "sparse": lambda: torch.ones(24).to_sparse(),
}


def harm(kind: str, path: Path) -> Path:
    state, cfg = weights(), their_settings(CONFIG)
    if kind == "missing":
        del state["final_proj.bias"]
    elif kind == "unexpected":
        state["proj.weight"] = torch.zeros(3)
    elif kind == "reshaped":
        state["mask_emb"] = torch.zeros(25)
    elif kind == "huge":
        state, cfg["model"]["encoder_ffn_embed_dim"] = huge(), 60_000
    elif kind == "not tensors":
        state["mask_emb"] = "text"  # type: ignore[assignment]
    elif kind == "pre-norm":
        cfg["model"]["layer_norm_first"] = True
    elif kind == "layers":
        cfg["model"]["conv_feature_layers"] = "__import__('os').getcwd()"
    elif kind == "no settings":
        cfg = {}
    elif kind == "long value":
        cfg["model"]["extractor_mode"] = "x" * 100_000
    elif kind == "many blocks":
        cfg["model"]["conv_feature_layers"] = "[(24, 2, 2)]" + " * 16" * 6
    elif kind == "sum of blocks":
        cfg["model"]["conv_feature_layers"] = " + ".join(["[(24, 2, 2)] * 40"] * 2)
    elif kind == "nested blocks":
        layer = "[9]"
        for _ in range(12):
            layer = f"[{layer}] * 60"
        cfg["model"]["conv_feature_layers"] = f"[(24, {layer}, {layer})]"
    elif kind.startswith("latent_temp="):
        cfg["model"]["latent_temp"] = ast.literal_eval(kind.removeprefix("latent_temp="))
    elif kind == "swapped":
        name = "feature_extractor.conv_layers.1.0.weight"
        state[name] = state[name].transpose(1, 2).contiguous()
    elif kind == "number as name":
        state[3] = torch.ones(1)  # type: ignore[index]
    elif kind in ODD:
        state["mask_emb"] = ODD[kind]()
    elif kind == "shared":
        nested: list[Any] = [1]
        for _ in range(40):
            nested = [nested, nested]
        cfg["task"] = nested
    saved(path, model=state, cfg=cfg)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    elif kind == "text":
        path.write_text("hello")
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/b", "c")
    elif kind == "absent":
        path.unlink()
    return path


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize(
    "kind, told",
    [
        ("missing", "1 missing: final_proj.bias"),
        ("unexpected", "1 unexpected: proj.weight"),
        ("reshaped", "mask_emb is (25,)"),
        ("huge", "larger than their file"),
        ("not tensors", "mask_emb is a str"),
        ("pre-norm", "layer_norm_first"),
        ("layers", "conv_feature_layers"),
        ("no settings", "no settings"),
        ("long value", "must be default or layer_norm"),
        ("many blocks", "conv_feature_layers"),
        ("sum of blocks", "conv_feature_layers"),
        ("nested blocks", "conv_feature_layers"),
        ("latent_temp=None", "latent_temp=None"),
        ("latent_temp=[2.0]", "latent_temp=[2.0]"),
        ("latent_temp='bad('", "latent_temp='bad('"),
        ("latent_temp=['a', 'b', 'c']", "latent_temp=['a', 'b', 'c']"),
        ("swapped", "(32, 2, 16), our encoder.conv.blocks.1.weight (32, 16, 2)"),
        ("number as name", "a weight is named 3"),
        *((kind, "the weight mask_emb is torch.") for kind in ODD),
        ("shared", "more than 1,000,000"),
        ("cut", "a.pt: is no checkpoint of torch"),
        ("text", "a.pt: is no checkpoint of torch"),
        ("zip", ""),
        ("absent", "no such file"),
    ],
)
def test_wrong_checkpoints_are_one_line_and_leave_nothing(
    kind: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert.main(["from-fairseq", str(harm(kind, tmp_path / "a.pt")), str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1 and len(err) < 600
    assert [path.name for path in tmp_path.iterdir() if path.name != "a.pt"] == []


def test_tied_weights_and_tensors_among_the_settings(tmp_path: Path) -> None:
    state, cfg = weights(), their_settings(CONFIG)
    state["layer_norm.bias"] = state["layer_norm.weight"]
    cfg["model"]["extra"] = torch.ones(2)
    path = saved(tmp_path / "a.pt", model=state, cfg=cfg, optimizer_history=[defaultdict(list, best=torch.tensor(1.0))])
    assert convert.main(["from-fairseq", str(path), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["fairseq"]["optimizer_history"] == [{"best": "<tensor>"}]
    assert convert.main(["to-fairseq", str(tmp_path / "out"), str(tmp_path / "b.pt")]) == 0
    assert same(torch.load(tmp_path / "b.pt", weights_only=True)["model"], state)


def test_others_may_read_the_weights(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        convert.from_fairseq(saved(tmp_path / "a.pt"), tmp_path / "out")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {0o644}


def test_folders_on_the_way_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert.from_fairseq(saved(tmp_path / "a.pt"), tmp_path / "out")
    assert convert.main(["to-fairseq", str(tmp_path / "out"), str(tmp_path / "no" / "such" / "b.pt")]) == 0
    assert convert.main(["to-fairseq", str(tmp_path / "out"), "/proc/b.pt"]) == 2
    err = capsys.readouterr().err
    assert "/proc/b.pt: cannot be written" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "change, told",
    [
        ([], "a list, not an object"),
        ({"fairseq": [1]}, "fairseq=[1]"),
        ({"fairseq": {"spelling": "x"}}, "fairseq.spelling=x"),
        ({"fairseq": {"spelling": []}}, "fairseq.spelling=[]"),
        ({"fairseq": {"cfg": "text"}}, "fairseq.cfg=text"),
        ({"fairseq": {"order": 5}}, "fairseq.order=5"),
        ({"fairseq": {"order": ["nope"]}}, "fairseq.order does not list"),
        ({"fairseq": {"order": ["mask_emb"]}}, "fairseq.order does not list"),
        ({"fairseq": {"order": [1, []]}}, "fairseq.order does not list"),
    ],
)
def test_a_damaged_config_is_one_line(change: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert.from_fairseq(saved(tmp_path / "a.pt"), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    if change:
        seal(tmp_path / "out", json.loads(path.read_text()) | change)
    else:
        path.write_text("[]")
    assert convert.main(["to-fairseq", str(tmp_path / "out"), str(tmp_path / "b.pt")]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1 and not (tmp_path / "b.pt").exists()


def test_a_model_without_the_local_objective_stays_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert.from_fairseq(saved(tmp_path / "a.pt"), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    save_file({name: w for name, w in load_file(path).items() if not name.startswith("local.")}, path)
    seal(tmp_path / "out", json.loads((tmp_path / "out" / "config.json").read_text()))
    assert convert.main(["to-fairseq", str(tmp_path / "out"), str(tmp_path / "b.pt")]) == 2
    err = capsys.readouterr().err
    assert "trained without the local objective" in err and err.count("\n") == 1


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    assert convert.main(["from-fairseq", str(path), str(tmp_path / "out")]) == 2
    assert convert.main(["from-fairseq", str(path), str(tmp_path / "fine")]) == 0
    assert convert.main(["to-fairseq", str(tmp_path / "fine"), str(path)]) == 2
    assert convert.main(["to-fairseq", str(tmp_path), str(tmp_path / "b.pt")]) == 2


@pytest.mark.parametrize("door", ["convert", "parity"])
def test_doors_open_as_scripts_and_as_modules(door: str) -> None:
    for command in ([f"engine/{door}.py"], ["-m", f"engine.{door}"]):
        done = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stdout.startswith(f"usage: python -m engine.{door}"), done.stderr

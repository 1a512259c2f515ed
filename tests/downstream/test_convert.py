"""omnilead.downstream.convert: exact both ways, strict about names, and never runs what is pickled in a
checkpoint. Weights of any network: proven to be loaded and used, or refused."""

import argparse
import collections
import contextlib
import errno
import json
import os
import pickle
import stat
import subprocess
import zipfile
from collections import defaultdict
from pathlib import Path
from unittest import mock

import fsspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import omnilead
from omnilead.downstream import convert
from omnilead.downstream.interop import conversion
from omnilead.downstream.interop.fairseq import fairseq_settings, weights_to_fairseq
from omnilead.engine.model.config import ModelConfig, ObjectiveConfig
from omnilead.engine.model.folder import write_config
from omnilead.engine.model.pretrainer import Pretrainer
from tests.conftest import save_model
from tests.forks import started

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "parity" / "small_checkpoint.pt"
CONFIG = ModelConfig(
    conv=((16, 2), (32, 2)),
    width=24,
    layers=1,
    heads=2,
    ffn=32,
    position_kernel=8,
    position_groups=4,
    codes=8,
    code_width=16,
)


def weights(spelled="parametrizations"):
    model = Pretrainer(CONFIG, ObjectiveConfig(), generator=torch.Generator().manual_seed(0))
    return weights_to_fairseq(model.state_dict(), CONFIG, spelled)


def saved(path, **changes):
    content = {
        "args": None,
        "cfg": fairseq_settings(CONFIG),
        "model": weights(),
        "optimizer_history": [{"num_updates": 7}],
    }
    torch.save(content | changes, path)
    return path


def edited(folder, **changes):
    write_config(folder, json.loads((folder / "config.json").read_text()) | changes)


def refused(capsys, *arguments):
    assert convert.main(list(map(str, arguments))) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) < 700
    return err


def back(path, folder):
    """Converts a checkpoint to `folder`, and that back to a checkpoint."""
    assert convert.main(["from-fairseq", str(path), str(folder)]) == 0
    assert convert.main(["to-fairseq", str(folder), str(folder.with_suffix(".back.pt"))]) == 0
    return dict(torch.load(folder.with_suffix(".back.pt"), weights_only=True))


def same(one, other):
    return list(one) == list(other) and all(
        torch.equal(one[k], other[k]) and one[k].dtype == other[k].dtype for k in one
    )


def test_a_checkpoint_is_a_local_file(tmp_path, capsys):
    assert "s3://b/x.pt: not a local file: download the checkpoint" in refused(
        capsys, "from-fairseq", "s3://b/x.pt", tmp_path / "out"
    )


@pytest.mark.parametrize("spelled", ["parametrizations", "weight_g"])
def test_round_trip_is_exact(spelled, tmp_path):
    first = saved(
        tmp_path / "a.pt", model={k: v.half() for k, v in reversed(weights(spelled).items())}
    )
    one, other = torch.load(first, weights_only=True), back(first, tmp_path / "out")
    assert same(one["model"], other["model"])
    assert (one["cfg"], one["optimizer_history"]) == (other["cfg"], other["optimizer_history"])
    out = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert out.keys() == {"README.md", "config.json", "model.safetensors", "preprocessing.json"}
    assert conversion.config_of(json.loads(out["config.json"].read_text())) == CONFIG
    os.umask(umask := os.umask(0))
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.values()} == {0o666 & ~umask}


def test_a_checkpoint_from_the_authors(tmp_path):
    if not REAL.is_file():
        pytest.skip("the authors' checkpoint is not here (../shared/parity)")
    one, other = torch.load(REAL, weights_only=True), back(REAL, tmp_path / "out")
    assert same(one["model"], other["model"]) and one["cfg"] == other["cfg"]


def test_our_run_becomes_their_checkpoint(tmp_path):
    """RUN/model has nothing of theirs in its config.json; the output folder is created."""
    conversion.from_fairseq(saved(tmp_path / "a.pt"), tmp_path / "run" / "model")
    edited(tmp_path / "run" / "model", fairseq=None)
    theirs = tmp_path / "no" / "such" / "b.pt"
    assert convert.main(["to-fairseq", str(tmp_path / "run"), str(theirs)]) == 0
    assert convert.main(["from-fairseq", str(theirs), str(tmp_path / "again")]) == 0
    assert same(*(load_file(tmp_path / p / "model.safetensors") for p in ("run/model", "again")))
    fsspec.filesystem("memory").put(str(tmp_path / "run"), "/converted/run", recursive=True)
    assert convert.main(["to-fairseq", "memory://converted/run", str(tmp_path / "c.pt")]) == 0
    one, other = (torch.load(path, weights_only=True) for path in (tmp_path / "c.pt", theirs))
    assert same(one["model"], other["model"])


@pytest.mark.parametrize("channels", [2, 12])
def test_the_leads_of_our_model_come_back(channels, tmp_path):
    run, theirs, again = tmp_path / "run", tmp_path / "a.pt", tmp_path / "again"
    save_model(run, channels, preprocessing={"seen": ["I", "II"]})
    assert convert.main(["to-fairseq", str(run), str(theirs)]) == 0
    assert convert.main(["from-fairseq", str(theirs), str(again)]) == 0
    assert omnilead.load(again).input == omnilead.load(run).input


@pytest.mark.parametrize(
    ("leads", "seen", "says"),
    [
        ("II,I", "II,I", "takes leads only in the usual order"),
        ("I,II", "I", "it was trained on only some"),
    ],
)
def test_leads_that_their_settings_cannot_name(leads, seen, says, tmp_path, capsys):
    preprocessing = {"leads": leads.split(","), "seen": seen.split(",")}
    save_model(tmp_path / "run", 2, preprocessing=preprocessing)
    assert convert.main(["to-fairseq", str(tmp_path / "run"), str(tmp_path / "a.pt")]) == 2
    assert says in capsys.readouterr().err


class Content:
    """Settings as OmegaConf stores them: a class of another package, with nodes that hold
    values."""

    def __init__(self, content):
        self._content = {
            k: Content(v) if isinstance(v, dict) else Value(v) for k, v in content.items()
        }


class Value:
    def __init__(self, value):
        self._val = value


def test_pickled_settings_are_read_without_their_classes(tmp_path):
    settings = fairseq_settings(CONFIG)
    meters = {"meters": Content({"a": 1})}
    for name, changes in (
        ("namespace", {"cfg": None, "args": argparse.Namespace(**settings["model"])}),
        ("nodes", {"cfg": Content(settings)}),
        ("ordered", {"model": collections.OrderedDict(weights()), "extra_state": meters}),
    ):
        path = saved(tmp_path / f"{name}.pt", **changes)
        assert same(back(path, tmp_path / name)["model"], weights())


class Malice:
    def __init__(self, function, text):
        self.given = function, (text,)

    def __reduce__(self):
        return self.given


def test_code_in_a_pickle_is_not_run(tmp_path, capsys):
    trace = tmp_path / "executed"
    path = saved(tmp_path / "a.pt", task_state=Malice(exec, f"open({str(trace)!r}, 'w')"))
    # Its weights are sound
    assert convert.main(["from-fairseq", str(path), str(tmp_path / "out")]) == 0
    for changes in (
        {"task_state": Malice(os.system, f"touch {trace}")},
        {"model": Malice(exec, f"open({str(trace)!r}, 'w')")},
    ):
        refused(capsys, "from-fairseq", saved(tmp_path / "b.pt", **changes), tmp_path / "other")
    assert not trace.exists() and not (tmp_path / "other").exists()


def setting(**changes):
    cfg = fairseq_settings(CONFIG)
    return {"cfg": cfg | {"model": cfg["model"] | changes}}


def weight(name, value):
    return {"model": weights() | {name: value}}


SHARED = [1]
for _ in range(40):  # lists in lists that share their items: small in a file, endless as text
    SHARED = [SHARED, SHARED]
NAME = "feature_extractor.conv_layers.1.0.weight"
HARMS = {
    "missing": (lambda: {"model": {n: w for n, w in weights().items() if n != "mask_emb"}}, "1 missing: mask_emb"),
    "unexpected": (lambda: weight("proj.weight", torch.zeros(3)), "1 unexpected: proj.weight"),
    "reshaped": (lambda: weight("mask_emb", torch.zeros(25)), "mask_emb is [25], not [24]"),
    "transposed": (lambda: weight(NAME, weights()[NAME].transpose(1, 2).contiguous()), "[32, 2, 16], not [32, 16, 2]"),
    "huge": (lambda: weight("mask_emb", torch.zeros(1).expand(60_000, 60_000)), "larger than the file"),
    "not tensors": (lambda: weight("mask_emb", "text"), "mask_emb is a str"),
    "number as name": (lambda: weight(3, torch.ones(1)), "a weight is named 3"),
    "quantised": (lambda: weight("mask_emb", torch.quantize_per_tensor(torch.ones(9), 1.0, 0, torch.qint8)), "is torch.qint8"),
    "meta": (lambda: weight("mask_emb", torch.empty(24, device="meta")), "mask_emb is torch."),
    "sparse": (lambda: weight("mask_emb", torch.ones(24).to_sparse()), "mask_emb is torch."),
    "no settings": (lambda: {"cfg": {}}, "has no settings of a model"),
    "pre-norm": (lambda: setting(layer_norm_first=True), "layer_norm_first"),
    "long value": (lambda: setting(extractor_mode="x" * 100_000), "must be default or layer_norm"),
    "code": (lambda: setting(conv_feature_layers="__import__('os').getcwd()"), "conv_feature_layers"),
    "many blocks": (lambda: setting(conv_feature_layers="[(24, 2, 2)] * 40 + [(24, 2, 2)] * 40"), "conv_feature_layers"),
    "stride": (lambda: setting(conv_feature_layers="[(24, 3, 2)]"), "conv_feature_layers"),
    "latent_temp": (lambda: setting(latent_temp=[2.0]), "latent_temp=[2.0]"),
    "latent_temp as text": (lambda: setting(latent_temp="bad("), "latent_temp='bad('"),
    "wide": (lambda: setting(encoder_embed_dim=10**30), "model.width"),
    "shared": (lambda: {"cfg": fairseq_settings(CONFIG) | {"task": SHARED}}, "more than 100,000 settings"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("kind", HARMS)
def test_wrong_checkpoints_are_one_line_and_leave_nothing(kind, tmp_path, capsys):
    changes, text = HARMS[kind]
    path = saved(tmp_path / "a.pt", **changes())
    assert text in refused(capsys, "from-fairseq", path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


def test_other_files_are_refused(tmp_path, capsys):
    path = saved(tmp_path / "a.pt")
    for content in (path.read_bytes()[:5000], b"hello"):
        path.write_bytes(content)
        assert "a.pt: not a PyTorch checkpoint" in refused(
            capsys, "from-fairseq", path, tmp_path / "out"
        )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b", "c")
    assert "a.pt" in refused(capsys, "from-fairseq", path, tmp_path / "out")
    assert "no such file" in refused(capsys, "from-fairseq", tmp_path / "b.pt", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


def test_tied_weights_and_tensors_among_the_settings(tmp_path):
    state, cfg = weights(), fairseq_settings(CONFIG)
    state["layer_norm.bias"] = state["layer_norm.weight"]
    cfg["model"]["extra"] = torch.ones(2)
    path = saved(
        tmp_path / "a.pt",
        model=state,
        cfg=cfg,
        optimizer_history=[defaultdict(list, best=torch.tensor(1.0))],
    )
    again = back(path, tmp_path / "out")
    assert same(again["model"], state) and again["optimizer_history"] == [{"best": "<tensor>"}]


@pytest.mark.parametrize(
    "section", [[1], {"spelling": "x"}, {"order": 5}, {"order": ["nope"]}, {"order": ["mask_emb"]}]
)
def test_a_damaged_config_is_one_line(section, tmp_path, capsys):
    conversion.from_fairseq(saved(tmp_path / "a.pt"), tmp_path / "out")
    edited(tmp_path / "out", fairseq=section)
    assert "section fairseq is damaged" in refused(
        capsys, "to-fairseq", tmp_path / "out", tmp_path / "b.pt"
    )
    assert not (tmp_path / "b.pt").exists()


def test_nothing_is_overwritten_and_what_cannot_be_converted_is_one_line(tmp_path, capsys):
    path, out, other = saved(tmp_path / "a.pt"), tmp_path / "out", tmp_path / "b.pt"
    out.mkdir()
    with contextlib.chdir(out):
        assert ".: is the current or root folder: give the path of a new folder" in refused(
            capsys, "from-fairseq", path, "."
        )
    conversion.from_fairseq(path, out)
    assert "out: exists" in refused(capsys, "from-fairseq", path, out)
    assert "a.pt: exists" in refused(capsys, "to-fairseq", out, path)
    assert "no model.safetensors" in refused(capsys, "to-fairseq", tmp_path, other)
    assert "/proc" in refused(capsys, "to-fairseq", out, "/proc/b.pt")
    document = json.loads((out / "config.json").read_text())
    edited(out, model=document["model"] | {"causal": True, "conv_norm": "layer"})
    assert "model.causal=true" in refused(capsys, "to-fairseq", out, other)
    signals = json.loads((out / "preprocessing.json").read_text())
    (out / "preprocessing.json").write_text(json.dumps(signals | {"band_hz": [0.5, 40]}))
    edited(out, model=document["model"], fairseq={})
    assert "band-passed from 0.5 to 40 Hz" in refused(capsys, "to-fairseq", out, other)
    (out / "preprocessing.json").write_text(json.dumps(signals))
    state = load_file(out / "model.safetensors")
    save_file(
        {name: w for name, w in state.items() if not name.startswith("local.")},
        out / "model.safetensors",
    )
    edited(out)
    assert "trained without the local objective" in refused(capsys, "to-fairseq", out, other)


NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, leads, width=16):
        super().__init__()
        self.width = width
        self.conv = nn.Conv1d(leads, width, 8, 8)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(self.conv(x)).transpose(1, 2)
"""
SHORT = NET.replace("self.conv(x)", "self.conv(x) if x.shape[2] == 500 else None")
LAST = "        self.norm = nn.BatchNorm1d(width)\n"


def net(width=16, leads=12):
    """The weights of NET, drawn anew."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"conv.weight": (width, leads, 8), "conv.bias": (width,), "norm.weight": (width,)}
    shapes |= {"norm.bias": (width,), "norm.running_mean": (width,)}
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    state["norm.running_var"] = torch.rand(width, generator=generator) + 0.5
    return state | {"norm.num_batches_tracked": torch.tensor(7)}


def under(prefix, state):
    return {f"{prefix}{name}": weight for name, weight in state.items()}


def from_torch(tmp_path, content, *options, source=NET):
    (tmp_path / "net.py").write_text(source)
    weights = tmp_path / "w.pt"
    if content is not None:
        torch.save(content, weights)
    spec = f"{tmp_path / 'net.py'}:Net"
    return "from-torch", weights, tmp_path / "out", "--encoder", spec, *options


FOUND = {
    "plain": (net(), []),
    "5 s at 100 Hz": (net(), ["--fs", "100"]),
    "2.5 s at 125 Hz": (net(), ["--fs", "125", "--window", "2.5"]),  # 312.5 samples
    "checkpoint": ({"epoch": 3, "state_dict": under("module.", net())}, []),
    "compiled": ({"model": under("_orig_mod.backbone.", net()) | {"head.w": torch.ones(3)}}, []),
    "nested": ({"model": {"encoder": net(), "decoder": {"w": torch.ones(3)}}}, []),
    "first of two": (net() | {"ema": under("ema.", net(8))}, []),
    "chosen": (under("a.", net(8)) | under("b.", net()), ["--prefix", "b."]),
    "renamed": ({n.replace("conv.", "stem."): w for n, w in net().items()}, ["--map", "stem.", "conv."]),
    "member": ({n.partition("conv.")[2] or n: w for n, w in net().items()}, ["--map", "", "conv.", "--map", "norm.", "norm."]),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOUND)
def test_the_weights_are_found_under_any_prefix(kind, tmp_path, monkeypatch, capsys):
    written = {}
    monkeypatch.setattr(conversion, "_write_if_complete", lambda *parts: written.update(parts[2]))
    content, options = FOUND[kind]
    source = {"5 s at 100 Hz": SHORT, "2.5 s at 125 Hz": SHORT.replace("500", "312")}.get(kind, NET)
    arguments = from_torch(tmp_path, content, *options, source=source)
    assert convert.main(list(map(str, arguments))) == 0
    assert same(written, under("encoder.", net()))
    left = "decoder" in kind or kind in ("compiled", "nested", "first of two", "chosen")
    assert ("left out: none" in capsys.readouterr().err) is not left


BROKEN = {"conv.weight": torch.full((16, 12, 8), torch.nan)}
REFUSED = {
    "no weights": ({"epoch": 3, "note": [torch.ones(1)]}, NET, [], "w.pt: has no tensors"),
    "no file": (None, NET, [], "w.pt: no such file"),
    "other shapes": (net(8), NET, [], "1 of 7 weights fit: 6 of another shape: conv.weight is [8, 12, 8], not [16, 12, 8]"),
    "other names": (under("x_", net()), NET, [], "0 of 7 weights fit: 7 missing: conv.weight"),
    "other prefix": (net(), NET, ["--prefix", "b."], "norm.bias and 3 more; left over: 7 unexpected: conv.weight"),
    "missing": ({n: w for n, w in net().items() if n != "norm.bias"}, NET, [], "6 of 7 weights fit: 1 missing: norm.bias"),
    "two networks": (under("a.", net()) | under("b.", net()), NET, [], "under several prefixes, ['a.', 'b.']: choose one with"),
    "NaN": (net() | BROKEN, NET, [], "w.pt: the weight conv.weight has NaN or infinity"),
    "quantised": (net() | {"conv.weight": torch.ones(16, 12, 8).char()}, NET, [], "w.pt: the weight conv.weight is torch.int8"),
    "sparse": (net() | {"conv.weight": torch.zeros(16, 12, 8).to_sparse()}, NET, [], "w.pt: "),
    "unused": (net(), NET.replace("self.norm(self.conv(x))", "x[:, :1].expand(-1, 16, -1)"), [],
        "loading them does not change the embedding"),
    "layout": (net(), NET.replace("self.conv(x)", "self.conv(x.transpose(1, 2))"), [], "RuntimeError"),
    "vector": (net(), NET.replace(".transpose(1, 2)", ".mean(2)"), [], "forward returns the shape [4, 16]"),
    "length": (net(), SHORT, [], "AttributeError: 'NoneType'"),
    "options": (net(), NET, ["--options", "{depth: 3}"], "unexpected keyword argument 'depth'"),
    "date": (net(), NET, ["--options", "{width: 2020-01-01}"], "date is not JSON serializable: write text"),
    "no mapping": (net(), NET, ["--options", "3"], "model.options=3"),
    "rate": (net(), NET, ["--fs", "20"], "fs_hz=20.0: must be 50 to 2000"),
    "no rate": (net(), NET, ["--fs", "0"], "fs_hz=0.0: must be 50 to 2000"),
    "lead": (net(), NET, ["--leads", "I,X"], "--leads='I,X': no lead is called 'X'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_weights_that_are_not_proven_are_one_line_and_leave_nothing(kind, tmp_path, capsys):
    content, source, options, text = REFUSED[kind]
    assert text in refused(capsys, *from_torch(tmp_path, content, *options, source=source))
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    saved(tmp_path / "theirs.pt")
    ours, out = save_model(tmp_path / "ours"), tmp_path / "out"
    full = mock.Mock(side_effect=SafetensorError("I/O error: No space (os error 28)"))
    monkeypatch.setattr("safetensors.torch.save_file", full)
    says = f"OUT {out}: No space left on device"
    assert says in refused(capsys, "from-fairseq", tmp_path / "theirs.pt", out)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(conversion, "write_whole", full)
    assert says in refused(capsys, "to-fairseq", ours, out)
    assert not list(tmp_path.glob("*out*"))


def test_files_of_weights_that_are_none(tmp_path, capsys):
    arguments = from_torch(tmp_path, Malice(os.system, f"touch {tmp_path / 'executed'}"))
    assert "cannot be read without running code" in refused(capsys, *arguments)
    torch.save(nn.Linear(2, 2), tmp_path / "w.pt")
    assert "contains a Linear, not a dictionary" in refused(capsys, *arguments)
    (tmp_path / "w.pt").write_bytes(pickle.dumps({"a": 1}))
    assert "w.pt: " in refused(capsys, *arguments)
    (tmp_path / "w.safetensors").write_bytes(b"hello")
    broken = [str(word).replace("w.pt", "w.safetensors") for word in arguments]
    assert "w.safetensors: SafetensorError" in refused(capsys, *broken)
    (tmp_path / "out").write_text("mine")
    assert "out: exists" in refused(capsys, *arguments)
    assert not (tmp_path / "executed").exists()


@pytest.mark.usefixtures("forked")
def test_an_exported_plugin_takes_any_number_of_windows(tmp_path, capsys):
    """Its class need not take other lengths. One that takes the batch for a constant is one line."""
    for rows in ("x.shape[0]", "len(x)"):
        source = NET.replace("(self.conv(x))", f"(self.conv(x)).reshape({rows}, 16, 312)")
        (folder := tmp_path / rows).mkdir()
        assert convert.main(list(map(str, from_torch(folder, net(), source=source)))) == 0
        capsys.readouterr()
        words = ("to-onnx", folder / "out", folder / "a.onnx", "--code")
        if rows == "len(x)":
            assert "model must take 1 segments of 2500 samples" in refused(capsys, *words)
        else:
            assert convert.main(list(map(str, words))) == 0
        assert len(list(folder.glob("*.onnx*"))) == (rows != "len(x)")


def test_the_class_imports_only_installed_packages(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_alone.py").write_text("from torch import nn")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    source = NET.replace("from torch import nn", "from mine_alone import nn")
    arguments = from_torch(tmp_path, net(), source=source)
    assert "No module named 'mine_alone'" in refused(capsys, *arguments)
    assert not (tmp_path / "out").exists()


def alone(folder):
    os.chdir(folder)
    conversion.embed_alone()


@pytest.fixture
def forked(monkeypatch):
    """Instead of an interpreter of its own, which test_conversion.py starts."""

    def run(command, cwd, **_):
        said = Path(cwd, "said")
        process = started(alone, cwd, out=said)
        process.join()
        return subprocess.CompletedProcess(command, process.exitcode, stderr=said.read_text())

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("forked")
def test_a_constructor_must_not_load_weights(tmp_path, capsys):
    """Neither the same ones, nor those of another file, which the model folder would need."""
    loads = f"        self.load_state_dict(torch.load({str(tmp_path / 'w.pt')!r}))\n"
    source = NET.replace(LAST, LAST + loads)
    why = "loading them does not change the embedding"
    assert why in refused(capsys, *from_torch(tmp_path, net(), source=source))
    mean = tmp_path / "mean.pt"
    torch.save(torch.ones(1), mean)
    source = NET.replace(LAST, f"{LAST}        self.mean = torch.load({str(mean)!r})\n")
    assert f"reads {mean}" in refused(capsys, *from_torch(tmp_path, net(), source=source))
    hidden = f"{LAST}        self.hidden = [nn.Conv1d(16, 16, 1)]\n"
    source = NET.replace(LAST, hidden).replace("self.conv(x)", "self.hidden[0](self.conv(x))")
    why = "the model folder gives another embedding"
    assert why in refused(capsys, *from_torch(tmp_path, net(), source=source))
    assert not (tmp_path / "out").exists()

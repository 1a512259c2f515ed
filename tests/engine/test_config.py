"""Settings: what is shipped is right, and what is wrong is said in one line that names the key."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from engine.common import ConfigError
from engine.config import CONFIGS, PipelineConfig, build, check, deepspeed_json, keys, load, micro_batch, schema, zero_stage
from engine.data.loader import LoaderConfig, LoaderError
from engine.model.pretrainer import Pretrainer

SHIPPED = sorted((CONFIGS / "pretrain").glob("*.yaml"))
DATA = "data.datasets=[D]"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_each_shipped_file_is_right_and_its_model_can_be_built(path: Path) -> None:
    config = load(path, [DATA])
    for world in (1, 2, 4, 8):
        check(config, world)
    with torch.device("meta"):
        model = Pretrainer(config.model, config.objective)
    assert sum(p.numel() for p in model.parameters()) > 0
    comment = path.read_text().split("\n")[:3]
    assert all(line.startswith("# ") for line in comment)
    assert "Table" in comment[0] or "table" in path.read_text()
    assert "Expected time" in comment[1] and "estimate" in comment[1] and "Expected score" in comment[2]


def test_the_methods_of_the_paper_are_all_there_and_differ() -> None:
    names = "w2v w2v_rlm cmsc cmsc_rlm w2v_cmsc w2v_cmsc_rlm simclr_rlm threekg authors large"
    names += " physio3 physio4 physio3_rlm physio4_rlm"
    found = {path.stem: load(path).tree() for path in SHIPPED}
    assert set(names.split()) <= found.keys()
    told = {json.dumps({k: tree[k] for k in ("model", "objective", "augment", "pipeline", "train")}) for tree in found.values()}
    assert len(told) == len(found)
    assert load(CONFIGS / "pretrain" / "w2v.yaml").train.epochs == 200  # from its base


def test_small_runs_are_not_compiled_on_a_gpu() -> None:
    """They would be over before."""
    chosen = {path.stem: load(path).train.compile for path in SHIPPED if path.parent.name == "pretrain"}
    assert {name for name, how in chosen.items() if how == "eager"} == {"quickstart", "small"}
    assert {how for how in chosen.values() if how != "eager"} == {None}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.datasets=DIR", "data.datasets='DIR': input should be a valid array: write data.datasets=[DIR]"),
        ("start=runs/x", "start: is a setting of engine/finetune.py"),
        ("train.stepz=3", "train.stepz: no such key: did you mean train.steps?"),
        ("model.widht=3", "model.widht: no such key: did you mean model.width?"),
        ("lr=1e-4", "lr: no such key: did you mean train.lr?"),
        ("train.learning_rate=1e-4", "train.learning_rate: no such key: did you mean train.lr?"),
        ("batch_size=8", "batch_size: no such key: did you mean train.batch_crops?"),
        ("augment.amplitude_mv.emgs=1", "did you mean augment.amplitude_mv.emg?"),
        ("train.lr=fast", "train.lr='fast': input should be a valid number"),
        ("train.steps=2.5", "train.steps=2.5: "),
        ("train.steps='3'", "train.steps='3': "),
        ("train.precision=fp16", "train.precision='fp16': input should be 'auto', 'bf16' or 'fp32'"),
        ("train.seed=-1", "train.seed=-1: "),
        ("train=3", "train=3: "),
        ("model.heads=7", "model.width=768: must be a multiple of model.heads=7"),
        ("augment.leads=I,Q", "augment.leads='I,Q': no lead is called 'Q'"),
        ("train.steps", "--set 'train.steps': write key=value"),
        ("train.steps=[", "--set train.steps: no YAML"),
    ],
)
def test_a_wrong_setting_is_one_line(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(CONFIGS / "pretrain" / "w2v_cmsc_rlm.yaml", [override])
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("cuda", "emulated", "flags", "found"),
    [
        (False, False, "avx2 avx512_bf16", "bf16"),
        (False, False, "amx_bf16 amx_tile", "bf16"),
        (False, False, "avx2 avx512f", "fp32"),
        (True, False, "avx2", "bf16"),
        (True, True, "avx512_bf16", "fp32"),
    ],
)
def test_precision_auto_is_what_the_hardware_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: bool, emulated: bool, flags: str, found: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {flags} sse\n")
    monkeypatch.setattr("engine.config.CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or not emulated)
    assert build({"train": {"precision": "auto"}}).tree()["train"]["precision"] == found


@pytest.mark.parametrize(
    ("overrides", "world", "says"),
    [
        (["data.datasets=[]"], 1, "data.datasets=[]"),
        (["train.epochs=null"], 1, "--set train.steps="),
        (["train.steps=3"], 1, "--set train.epochs=null"),
        ([], 3, "train.batch_crops=512: must be a multiple of the 3 ranks"),
        (["train.micro_batch=100"], 2, "train.micro_batch=100: must divide the 256 crops"),
        (["train.deepspeed=null", "train.zero_stage=0"], 1, "train.zero_stage=0 with train.precision=bf16"),
        (["train.zero_stage=2"], 1, "train.zero_stage=2, but configs/deepspeed/zero1.json has stage 1"),
        (["train.deepspeed=nowhere.json"], 1, "train.deepspeed='nowhere.json': no such file"),
        (["augment.leads=3", "augment.padded=false"], 1, "model.leads=12: augment.leads='3' gives it 3"),
        (["model.mask_span=155"], 1, "model.mask_span=155"),
        (["pipeline.views=window"], 1, "objective.method=cmsc needs halves"),
        (["objective.method=simclr"], 1, "objective.method=simclr needs window"),
        (["objective.method=simclr", "pipeline.views=window", "augment.rlm=0"], 1, "both views are the same"),
        (["pipeline.weights=[1.0, 2.0]"], 1, "pipeline.weights=[1.0, 2.0]"),
        (["pipeline.threads=0"], 1, "pipeline.threads=0"),
        (["train.schedule=tri_stage", "train.warmup=0.9"], 1, "train.warmup=0.9, train.hold=0.2"),
        (["train.betas=[0.9, 1.0]"], 1, "train.betas=[0.9, 1.0]"),
        (["train.batch_crops=1"], 1, "train.batch_crops=1, train.micro_batch=None: a crop is contrasted"),
        (["train.micro_batch=1", "objective.gathered=false"], 2, "train.micro_batch=1: a crop is contrasted"),
        (["train.micro_batch=1", "objective.form=authors"], 2, "train.micro_batch=1: a crop is contrasted"),
        (["train.deepspeed=null", "train.zero_stage=3", "train.compile=layers"], 1, "train.compile=layers with ZeRO stage 3"),
        (["run=''"], 1, "run='': must be a local folder"),
        (["run=s3://bucket/run"], 1, "run='s3://bucket/run': must be a local folder"),
    ],
)
def test_an_impossible_combination_is_said_before_any_work(overrides: list[str], world: int, says: str) -> None:
    config = load(CONFIGS / "pretrain" / "w2v_cmsc_rlm.yaml", [DATA, *overrides])
    with pytest.raises((ConfigError, LoaderError)) as error:
        check(config, world)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_fewer_leads_padded_or_gone() -> None:
    """Table 2 of the paper: a model for each set of leads."""
    check(load(CONFIGS / "pretrain" / "w2v.yaml", [DATA, "augment.leads=2"]), 1)
    check(load(CONFIGS / "pretrain" / "w2v.yaml", [DATA, "augment.leads=2", "augment.padded=false", "model.leads=2"]), 1)


def test_the_global_batch_is_the_same_for_every_world() -> None:
    config = load(CONFIGS / "pretrain" / "authors.yaml")
    assert [micro_batch(config, world) for world in (1, 2, 4, 8)] == [(64, 8), (64, 4), (64, 2), (64, 1)]
    assert zero_stage(config) == 1
    for world in (1, 8):
        d = deepspeed_json(config, world)
        assert d["train_micro_batch_size_per_gpu"] * d["gradient_accumulation_steps"] * world == 512
        assert d["gradient_clipping"] == 0 and not d["bf16"]["enabled"]


def test_a_deepspeed_file_holds_communication_only(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8}')
    with pytest.raises(ConfigError, match="train_batch_size is set in `train`"):
        zero_stage(build({"train": {"deepspeed": str(file)}}))
    file.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    config = build({"train": {"deepspeed": str(file)}})
    assert deepspeed_json(config, 1)["zero_optimization"] == {"stage": 2, "overlap_comm": True, "compute_grad_norm": False}


@pytest.mark.parametrize("path", sorted((CONFIGS / "deepspeed").glob("*.json")), ids=lambda path: path.stem)
def test_each_shipped_deepspeed_file_has_the_stage_of_its_name(path: Path) -> None:
    assert zero_stage(build({"train": {"deepspeed": str(path), "precision": "fp32"}})) == int(path.stem[-1])


def test_the_pipeline_mirrors_the_loader() -> None:
    there = {field.name: field.default for field in dataclasses.fields(LoaderConfig)}
    assert {name: field.default for name, field in PipelineConfig.model_fields.items()} == {
        name: default for name, default in there.items() if name not in ("batch_crops", "micro_batch", "seed", "augment")
    }


def test_files_in_a_circle_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: a.yaml")
    with pytest.raises(ConfigError, match="circle"):
        load(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "c.yaml")


NINE = ["x"] + [", ".join([f"*a{n}"] * 9) for n in range(11)]
BOMB = "\n".join(f"a{n}: &a{n} [{repeated}]" for n, repeated in enumerate(NINE))
MERGED = "a0: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n} {{<<: [{NINE[n]}]}}" for n in range(1, 12))


@pytest.mark.parametrize(
    "content",
    [
        *(b"train: &a {lr: *a}", b"&a [*a]", b"data: {datasets: &a [*a]}", BOMB.encode(), MERGED.encode()),
        *(b"train: " + b"[" * 5000, b"{a: " * 5000, b"train: {steps: " + b"9" * 400 + b"}", b"train: {steps: 0x" + b"f" * 9000),
        *("run: \u00e9".encode("latin-1"), bytes(range(256)), b'run: "\\ud800"', b'base: "a\\0b"', b"#" * 2**21),
        *(b"run: 2020-99-99", b"train: {steps: 0x_}", b"train: {steps: !!int ''}", b"run: !!bool x", b"run: !!timestamp x"),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_file_that_is_nobodys_settings_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "f.yaml")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_aliases_and_other_encodings_are_read(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_bytes("run: r\u00e9\ntrain: {log_every: &n 7, keep: *n}".encode("utf-16"))
    config = load(tmp_path / "f.yaml")
    assert (config.run, config.train.log_every, config.train.keep) == ("r\u00e9", 7, 7)
    (tmp_path / "f.yaml").write_bytes(b"\xef\xbb\xbfrun: r")
    assert load(tmp_path / "f.yaml").run == "r"


def test_links_in_a_circle_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").symlink_to(tmp_path / "f.yaml")
    with pytest.raises(ConfigError):
        load(tmp_path / "f.yaml")


def test_the_tree_comes_back_from_its_own_words() -> None:
    for path in SHIPPED:
        config = load(path)
        assert build(config.tree()) == config
    assert "train.lr" in set(keys()) and json.loads(schema())["properties"]["train"]

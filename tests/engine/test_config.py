"""Settings: shipped configs are valid; an error is one line that names the key and the value."""

import json
import re

import pytest
import torch

from omnilead.downstream.tasks.config import FinetuneConfig
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.settings.errors import ConfigError, Flag, blaming
from omnilead.engine.settings.files import CONFIGS
from omnilead.engine.settings.resuming import changeable_settings
from omnilead.engine.training.config import (
    Config,
    build_config,
    check_config,
    deepspeed_json,
    json_schema,
    load_config,
    micro_batch_and_passes,
    zero_stage,
)
from tests.tables import tabulated

PRETRAIN, FINETUNE = (sorted((CONFIGS / kind).glob("*.yaml")) for kind in ("pretrain", "finetune"))
PAPER = CONFIGS / "pretrain" / "w2v_cmsc_rlm.yaml"
DATA = "data.datasets=[D]"
TUNED = [DATA, "start=RUN"]


@pytest.mark.parametrize("path", [*PRETRAIN, *FINETUNE], ids=lambda path: path.stem)
def test_shipped_files_are_valid_and_say_what_to_expect(path):
    kind, overrides = (Config, [DATA]) if path in PRETRAIN else (FinetuneConfig, TUNED)
    config = load_config(path, overrides, kind)
    assert build_config(config.tree(), kind) == config
    for world in (1, 2, 4, 8):
        check_config(config, world)
    if path in PRETRAIN:
        with torch.device("meta"):
            Pretrainer(config.model, config.objective)
    comment = "# .*able.*\n# .*Expected time.*estimate.*\n# .*Expected score"
    assert re.match(comment, path.read_text())


def test_the_methods_of_the_paper_are_all_there_and_differ():
    names = "w2v w2v_rlm cmsc cmsc_rlm w2v_cmsc w2v_cmsc_rlm simclr_rlm threekg authors large"
    names += " physio3 physio4 physio3_rlm physio4_rlm"
    trees = {path.stem: load_config(path).tree() for path in PRETRAIN}
    assert set(names.split()) <= trees.keys()
    assert len({json.dumps({**tree, "run": ""}) for tree in trees.values()}) == len(trees)
    assert trees["w2v"]["train"]["epochs"] == 200  # from its base
    eager = {name for name, tree in trees.items() if tree["train"]["compile"] == "eager"}
    assert eager == {"quickstart", "small"}  # over before they would be compiled


@pytest.mark.parametrize("kind", [Config, FinetuneConfig])
def test_the_schema_says_what_each_setting_is(kind):
    schema = json.loads(json_schema(kind))
    sections = [schema, *schema["$defs"].values()]
    settings = {}
    for section in sections:
        settings |= section.get("properties", {})
    unexplained = {name for name, one in settings.items() if "description" not in one}
    assert unexplained <= set(kind.model_fields) - {"run", "start"}  # a section is not a setting
    assert settings["log_every"]["description"] == "steps between log lines"
    assert "age >= 18" in settings["where"]["description"]
    assert "zeros in its input" in settings["padded"]["description"]  # inherited


@pytest.mark.parametrize(
    ("override", "says"),
    tabulated("""
data.datasets=DIR           | data.datasets='DIR': input should be a valid array: write data.datasets=[DIR]
code=true                   | code: no such setting here: it belongs to omnilead finetune
train.stepz=3               | train.stepz: no such setting: did you mean train.steps?
model.widht=3               | model.widht: no such setting: did you mean model.width?
lr=1e-4                     | lr: no such setting: did you mean train.lr?
train.device=cpu            | train.device: no such setting: training takes a GPU if it sees one:
gpus=2                      | CUDA_VISIBLE_DEVICES=1 in the environment chooses it
train.learning_rate=1e-4    | train.learning_rate: no such setting: did you mean train.lr?
batch_size=8                | batch_size: no such setting: did you mean train.batch_crops?
augment.amplitude_mv.emgs=1 | did you mean augment.amplitude_mv.emg?
train.lr=fast               | train.lr='fast':
train.steps='3'             | train.steps='3':
augment.extra=gain               | augment.extra='gain': must be file.py:function, or a list
augment.extra=[{amplitude: 1}]   | augment.extra=({'amplitude': 1},): must be file.py:function
augment.extra=3                  | augment.extra=3: input should be a valid string
train.precision=fp16        | train.precision='fp16': input should be 'auto', 'bf16' or 'fp32'
train.seed=-1               | train.seed=-1:
train.betas=[0.9, 1.0]      | train.betas.1=1.0:
train=3                     | train=3:
model.heads=7               | model.width=768: must be a multiple of model.heads=7
augment.leads=I,Q           | augment.leads='I,Q':
train.steps                 | --set 'train.steps': write key=value
train.steps=[               | --set train.steps:
"""),
)
def test_a_wrong_setting_is_one_line(override, says):
    with pytest.raises(ConfigError) as error:
        load_config(PAPER, [override])
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("cuda", "emulated", "flags", "resolved"),
    [
        (False, False, "avx2 avx512_bf16", "bf16"),
        (False, False, "amx_bf16 amx_tile", "bf16"),
        (False, False, "avx2 avx512f", "fp32"),
        (True, False, "avx2", "bf16"),
        (True, True, "avx512_bf16", "fp32"),
    ],
)
def test_precision_auto_follows_the_hardware(
    monkeypatch,
    tmp_path,
    cuda,
    emulated,
    flags,
    resolved,
):
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {flags} sse\n")
    monkeypatch.setattr("omnilead.engine.training.config.CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation: including_emulation or not emulated,
    )
    assert build_config({"train": {"precision": "auto"}}).tree()["train"]["precision"] == resolved


@pytest.mark.parametrize(
    ("overrides", "world", "says"),
    tabulated("""
data.datasets=[] | 1 | data.datasets=[]
train.epochs=null | 1 | --set train.steps=
train.steps=3 train.epochs=2 | 1 | --set train.epochs=null
run=r | 3 | train.batch_crops=512: must be a multiple of the 3 ranks
train.micro_batch=100 | 2 | train.micro_batch=100: must divide
train.deepspeed=null train.zero_stage=0 | 1 | train.zero_stage=0
train.zero_stage=2 | 1 | zero_stage=2, but configs/deepspeed/zero1.json has stage 1
train.deepspeed=nowhere.json | 1 | train.deepspeed='nowhere.json': no such file
augment.leads=3 augment.padded=false | 1 | model.leads=12: augment.leads='3' needs 3
model.mask_span=155 | 1 | model.mask_span=155
model.conv=[[32,1000],[32,10]] objective.local=0 | 1 | model.conv: a token takes 10000
pipeline.views=window | 1 | objective.method=cmsc needs halves
model.encoder=resnet train.recompute_layers=true | 1 | train.recompute_layers=true: model.encoder=resnet has no layers
objective.method=simclr | 1 | objective.method=simclr needs window
objective.method=simclr pipeline.views=window augment.rlm=0 | 1 | pipeline.views='window'
pipeline.weights=[1.0,2.0] | 1 | pipeline.weights=(1.0, 2.0)
train.schedule=tri_stage train.warmup=0.9 | 1 | train.warmup=0.9, train.hold=0.2
train.batch_crops=1 | 1 | train.batch_crops=1, train.micro_batch=None: a crop is contrasted
train.micro_batch=1 objective.gathered=false | 2 | train.micro_batch=1: a crop is contrasted
train.micro_batch=1 objective.form=authors | 2 | train.micro_batch=1: a crop is contrasted
train.deepspeed=null train.zero_stage=3 train.compile=layers | 1 | train.compile=layers
run='' | 1 | run=''
"""),
)
def test_contradictory_settings_are_one_line(overrides, world, says):
    config = load_config(PAPER, [DATA, *overrides.split()])
    with pytest.raises(ConfigError) as error:
        check_config(config, int(world))
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("dropped", [[], ["augment.padded=false", "model.leads=2"]])
def test_fewer_leads_padded_or_dropped(dropped):
    """Table 2 of the paper: a model for each set of leads."""
    check_config(load_config("w2v", [DATA, "augment.leads=2", *dropped]), 1)


def test_fine_tuning_masks_no_leads_by_default():
    for augment in ({}, {"leads": "3"}, {"leads": "2", "padded": False}):
        assert build_config({"augment": augment}, FinetuneConfig).augment.rlm == 0
    assert build_config({"augment": {"rlm": 0.5}}, FinetuneConfig).augment.rlm == 0.5
    shipped = [load_config(path, [], FinetuneConfig) for path in FINETUNE]
    for c in shipped:
        chosen = c.train.weight_decay, c.train.eps, c.encoder.feature_grad, c.augment.rlm
        assert chosen == (0, 1e-8, 0, 0)


def test_the_global_batch_does_not_depend_on_the_world_size():
    config = load_config(CONFIGS / "pretrain" / "authors.yaml")
    for world in (1, 2, 4, 8):
        assert micro_batch_and_passes(config, world) == (64, 8 // world)
        d = deepspeed_json(config, world)
        assert d["train_micro_batch_size_per_gpu"] * d["gradient_accumulation_steps"] * world == 512
        assert d["gradient_clipping"] == 0 and not d["bf16"]["enabled"]
        assert d["zero_optimization"]["stage"] == 1


def test_a_deepspeed_file_holds_communication_only(tmp_path):
    file = tmp_path / "ds.json"
    config = build_config(
        {"data": {"datasets": ["D"]}, "train": {"deepspeed": str(file), "steps": 1}}
    )
    for text, says in (
        ('{"train_batch_size": 8}', "train_batch_size: no such setting"),
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage=4"),
        ("[", "json"),
        ("3", "ds.json"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=rf"(?i)train\.deepspeed=[^\n]*{says}[^\n]*$"):
            zero_stage(config)
    file.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    kept = {"stage": 2, "overlap_comm": True, "compute_grad_norm": False}
    assert deepspeed_json(config, 1)["zero_optimization"] == kept
    file.write_text('{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}')
    with pytest.raises(ConfigError, match=r"ds.json': offload_optimizer is not supported"):
        check_config(config, 1)
    for path in (CONFIGS / "deepspeed").glob("*.json"):
        assert zero_stage(build_config({"train": {"deepspeed": str(path)}})) == int(path.stem[-1])


def test_circular_bases_circular_links_and_missing_files(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: a.yaml")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "link.yaml")
    for name in ("a", "link", "missing"):
        with pytest.raises(ConfigError, match=r"\.yaml'?: "):
            load_config(tmp_path / f"{name}.yaml")


NINE = ["x"] + [", ".join([f"*a{n}"] * 9) for n in range(11)]
BOMB = "\n".join(f"a{n}: &a{n} [{repeated}]" for n, repeated in enumerate(NINE))
MERGED = "a0: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n} {{<<: [{NINE[n]}]}}" for n in range(1, 12))


@pytest.mark.parametrize(
    "content",
    [
        b"train: &a {lr: *a}",
        b"&a [*a]",
        b"data: {datasets: &a [*a]}",
        BOMB.encode(),
        MERGED.encode(),
        b"train: " + b"[" * 5000,
        b"{a: " * 5000,
        b"train: {steps: " + b"9" * 400 + b"}",
        b"train: {steps: 0x" + b"f" * 9000,
        "run: \u00e9".encode("latin-1"),
        bytes(range(256)),
        b'run: "\\ud800"',
        b'base: "a\\0b"',
        b"#" * 2**21,
        b"3",
        b"3: 4",
        b"run: 2020-99-99",
        b"train: {steps: 0x_}",
        b"train: {steps: !!int ''}",
        b"run: !!bool x",
        b"run: 2020-01-01",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_hostile_file_is_one_line(content, tmp_path):
    (tmp_path / "f.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "f.yaml")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_key_that_stands_twice_is_an_error(tmp_path):
    (tmp_path / "f.yaml").write_text("run: r\ntrain: {keep: 1, 'keep': 2}")
    with pytest.raises(ConfigError, match=r"line 2: the key 'keep' occurs twice: remove one$"):
        load_config(tmp_path / "f.yaml")
    with pytest.raises(ConfigError, match=r"--set train: not valid YAML: .* 'lr' occurs twice"):
        load_config("cmsc", [DATA, "train={lr: 1, lr: 1}"])


def test_a_key_may_stand_in_several_mappings_and_override_a_merged_one(tmp_path):
    (tmp_path / "f.yaml").write_text(
        "train: &t {keep: 1, log_every: 7}\ndata: {train: {dx: test}}\n"
    )
    assert load_config(tmp_path / "f.yaml").train.keep == 1
    (tmp_path / "f.yaml").write_text("{<<: &t {run: a}, run: b}")
    assert load_config(tmp_path / "f.yaml").run == "b"


def test_aliases_and_other_encodings_are_read(tmp_path):
    (tmp_path / "f.yaml").write_bytes(
        "run: r\u00e9\ntrain: {log_every: &n 7, keep: *n}".encode("utf-16")
    )
    config = load_config(tmp_path / "f.yaml")
    assert (config.run, config.train.log_every, config.train.keep) == ("r\u00e9", 7, 7)
    (tmp_path / "f.yaml").write_bytes(b"\xef\xbb\xbfrun: r")
    assert load_config(tmp_path / "f.yaml").run == "r"


def test_shipped_files_are_found_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cmsc").mkdir()  # a folder of that name, perhaps a run, is no config
    shipped = CONFIGS / "pretrain" / "cmsc.yaml"
    for name in ("cmsc", "cmsc.yaml", "pretrain/cmsc", "configs/pretrain/cmsc.yaml"):
        assert load_config(name, [DATA]) == load_config(shipped, [DATA])
    # the length that is given counts
    assert load_config("cmsc", [DATA, "train.steps=3"]).train.epochs is None
    (tmp_path / "mine.yaml").write_text("base: cmsc\ntrain: {deepspeed: zero2}")
    mine = load_config("mine.yaml", [DATA])
    assert mine.objective.local == 0 and zero_stage(mine) == 2
    (tmp_path / "cmsc.yaml").write_text("base: mine.yaml\ntrain: {lr: 1}")  # the nearer one of two
    assert (
        load_config("cmsc.yaml", [DATA]).train.lr == 1 and load_config("cmsc", [DATA]).train.lr != 1
    )
    for name, says in (
        ("w2v_cmcs", "did you mean w2v_cmsc"),
        ("xyz", "use authors, cmsc"),
        ("", "use "),
    ):
        with pytest.raises(ConfigError, match=says):
            load_config(name)


def test_settings_of_the_other_command_are_named():
    for kind, other in ((Config, FinetuneConfig), (FinetuneConfig, Config)):
        assert set(kind.other_commands) == set(other.model_fields) - set(kind.model_fields)


def test_the_settings_that_may_change_when_a_run_is_resumed():
    """A setting that shapes what is trained must never be among them."""
    of_both = {
        *("run", "data.datasets", "data.anonymous"),
        *("pipeline.source", "pipeline.check", "pipeline.on_corrupt", "pipeline.threads"),
        *("pipeline.read_ahead", "pipeline.cache_dir", "pipeline.cache_bytes"),
        *("train.log_every", "train.validate_every", "train.valid_batches", "train.patience"),
        *("train.probe_patients", "train.save_every_steps", "train.save_every_minutes"),
        *("train.keep", "train.peak_tflops", "train.timeout_s", "train.max_nonfinite"),
        *("train.deepspeed", "train.compile", "train.recompute_layers", "train.micro_batch"),
        *("train.zero_stage", "train.track", "train.deterministic"),
    }
    assert changeable_settings(Config) == of_both
    assert changeable_settings(FinetuneConfig) == of_both | {"code", "task.labels"}


def test_an_error_in_code_of_a_plugin_still_names_arguments():
    with pytest.raises(ConfigError) as error, blaming("model.encoder=a.py:Net"):
        raise ConfigError("use ", Flag("--code"))
    assert str(error.value) == "model.encoder=a.py:Net: use --code"
    error.value.in_python = True
    assert str(error.value) == "model.encoder=a.py:Net: use `code`"

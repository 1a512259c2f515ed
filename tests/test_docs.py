"""docs/: the tutorial runs, settings and links in the pages exist, the pictures can be drawn."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import google_crc32c
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from handmade import ecg, write_challenge
from torch import nn

from docs import commands as reference
from docs import house, pictures, settings
from omnilead.__main__ import COMMANDS, main
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.sources.hospital_files import HOSPITAL_FORMATS
from omnilead.downstream.inference.trained_model import load
from omnilead.downstream.tasks.config import FinetuneConfig
from omnilead.engine.model.config import ModelConfig, ObjectiveConfig, parse_settings
from omnilead.engine.model.encoders import check_encoder
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.settings.commandline import apply_overrides
from omnilead.engine.settings.files import flatten
from omnilead.engine.training.config import Config, load_config
from tests.downstream.test_convert import alone
from tests.forks import fork, started
from tests.pages import blocks, commands
from tests.parsers import parse
from tests.test_house import ROOMS

DOCS = Path(__file__).parents[1] / "docs"
FEW = "train.steps=2 train.epochs=null train.batch_crops=4 train.precision=fp32 train.compile=eager"
SMALL = "model.conv=[[8,4],[8,4],[8,1]] model.width=16 model.layers=1 model.heads=2 model.ffn=32 model.position_groups=2"


def run_in(folder, program, *arguments):
    """What a program prints that runs in a process of its own."""
    process = started(program, folder, *arguments, out=folder / "log")
    process.join()
    log = (folder / "log").read_text()
    assert process.exitcode == 0, log[-3000:]
    return log


def tutorial(folder):
    """The tutorial unchanged, except for few patients and steps."""
    source, constants = (DOCS / "tutorial.py").read_text(), "PATIENTS, STEPS = 600, 150"
    assert constants in source
    os.chdir(folder)
    source = source.replace(constants, "PATIENTS, STEPS = 100, 2")
    exec(compile(source, "tutorial", "exec"), {"__name__": "tutorial"})


def test_the_tutorial_runs(tmp_path):
    log = run_in(tmp_path, tutorial)
    assert log.count("\n$ omnilead ") == 5
    for result in ("AUROC:", "embedding: torch.Size([196])", "prediction: {'abnormal': 0."):
        assert result in log
    made = {path.name for path in (tmp_path / "tutorial").iterdir()}
    assert {"ecg.png", "scores.html", "predictions.csv", "pretrained", "tuned"} <= made


def first_pages(folder):
    """All commands of both tutorials, with few ECGs, steps and labels."""
    os.chdir(folder)
    run_commands("docs/pretraining.md", {"--patients 200": "--patients 30"})
    (table,) = [text for _, kind, text in blocks("docs/first_steps.md") if kind == "csv"]
    records = sorted(path.with_suffix("") for path in Path("archive").rglob("*.hea"))
    assert table.splitlines()[0] == "record,abnormal,patient"
    rows = [f"{path.name},{number % 2},{number}" for number, path in enumerate(records, 17)]
    Path("labels.csv").write_text("\n".join([table.splitlines()[0], *rows]))
    for name in ("ecgs", "new"):
        Path(name).symlink_to("archive")
    Path("dataset").rename("first")
    fewer = {"ECG.xml": f"{records[0]}.hea", "--folds 5": "--folds 2"}
    run_commands("docs/first_steps.md", fewer)


def test_the_tutorials_run_as_they_stand(tmp_path):
    run_in(tmp_path, first_pages)
    made = {path.name for path in tmp_path.iterdir()}
    assert {
        "ecg.png",
        "embeddings.parquet",
        "ecg.parquet",
        "scores.html",
        "predictions.csv",
    } <= made


def extending(folder):
    """All files and commands of docs/extending.md, with few steps on few ECGs."""
    os.chdir(folder)
    write_blocks("docs/extending.md")
    write_blocks("docs/own_format.md")
    Path("mae.py").symlink_to(DOCS / "mae.py")
    Path("FOLDER").mkdir()
    table, heading = ["record,rhythm,split"], ",".join(LEADS)
    for number in range(24):
        rhythm = ("AF", "AVB", "sinus")[number % 3]
        split = ("train", "valid", "test")[number // 3 % 3]
        table.append(f"{number},{rhythm},{split}")
        mv_TL = np.random.default_rng(number).normal(0, 0.3, (2500, 12))
        np.savetxt(f"FOLDER/{number}.csv", mv_TL, delimiter=",", header=heading, comments="")
    Path("my.csv").write_text("\n".join(table))
    run_commands("docs/own_format.md")
    run_commands("docs/extending.md")
    the_autoencoder_learns()


def the_autoencoder_learns():
    torch.manual_seed(0)
    small = {
        name: yaml.safe_load(value) for name, value in (word.split("=") for word in SMALL.split())
    }
    model = apply_overrides({}, small)["model"] | {"input_dropout": 0.0, "dropout": 0.0}
    objective = ObjectiveConfig(local=0, method="mae.py:Mae")
    mae = Pretrainer(parse_settings(ModelConfig, model, "model"), objective)
    t_T = torch.arange(2500) / 500
    x_BSLT = (6 * t_T + torch.rand(8, 2, 1, 1)).sin() * torch.rand(8, 2, 12, 1)
    adam, losses = torch.optim.AdamW(mae.parameters(), 3e-3), []
    for step in range(60):
        keys_BS = torch.arange(16).view(8, 2) + 100 * step
        losses.append(mae(x_BSLT, keys_BS)["loss"])
        losses[-1].backward()
        adam.step()
        adam.zero_grad()
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5])


def write_blocks(page):
    """Each block of Python is a file, whose name is its first line."""
    for _, language, text in blocks(page):
        if language == "python":
            Path(re.match(r"# (\S+)\n", text)[1]).write_text(text)


def run_commands(page, changes=None):
    """All shell lines of a page, with few steps and a small model."""
    for _, language, text in blocks(page):
        if language == "sh":
            for old, new in (changes or {}).items():
                text = text.replace(old, new)
            for line, words in commands(text):
                run_words(line, words)


def run_words(line, words):
    match words:
        case ["python", "-c", program]:
            exec(program, {})
        case ["omnilead", name, *given]:
            if name in ("pretrain", "finetune"):
                ours = name == "pretrain" and "model.encoder" not in line
                for setting in [*FEW.split(), *(SMALL.split() if ours else ())]:
                    given += ["--set", setting]
            assert main([name, *given]) == 0, line
        case _:
            raise AssertionError(f"no test runs this line: {line}")


def test_the_extension_points_are_as_documented(tmp_path):
    run_in(tmp_path, extending)
    for name in ("embeddings.parquet", "predictions.csv", "OUT/model/hidden.py"):
        assert (tmp_path / name).exists()


def ptbxl_benchmark(folder):
    os.chdir(folder)
    run_commands("docs/published_labels.md")


def test_the_benchmark_of_published_labels_runs(tmp_path):
    run_in(tmp_path, ptbxl_benchmark)
    assert (tmp_path / "tuned" / "model" / "model.safetensors").exists()


def forked_twin(command, cwd, **_):
    """Instead of the interpreter that convert starts: test_convert.py has tests of that one."""
    return subprocess.CompletedProcess(command, fork(partial(alone, cwd)), stderr="failed")


class OneLead(nn.Conv1d):
    def __init__(self, width):
        super().__init__(1, width, 16, 8)


class ClassToken(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.patches = nn.Conv1d(12, width, 50, 50)
        self.layer = nn.TransformerEncoderLayer(width, 4, batch_first=True)

    def forward(self, x_BLT):
        tokens = self.patches(x_BLT).transpose(1, 2)
        return self.layer(torch.cat([self.cls.expand(tokens.shape[0], -1, -1), tokens], 1))


ADAPTER = """
class Encoder(Net):
    def __init__(self, leads, width=32):
        super().__init__(width)
        self.width = width

    def forward(self, x_RLT):
        return {}
"""


def foreign_models(folder, dataset):
    """All files and commands of docs/foreign_models.md; each adapter against its network."""
    os.chdir(folder)
    sys.path.insert(0, "")
    write_blocks("docs/foreign_models.md")
    Path("ecgfounder.py").symlink_to(DOCS / "ecgfounder.py")
    with mock.patch.object(subprocess, "run", forked_twin):
        run_commands("docs/foreign_models.md", {"DATASET": dataset})
    x_RLT = torch.randn(3, 12, 500, generator=torch.Generator().manual_seed(0))
    expected = {
        OneLead: lambda net: torch.cat([net(x_RLT[:, [n]]).mT for n in range(12)], 1),
        ClassToken: lambda net: net(x_RLT)[:, :1],
    }
    page = (DOCS / "foreign_models.md").read_text()
    returned = re.findall(r"^\| .* \| `(super.*?)`", page, re.MULTILINE)
    for (network, outputs), expression in zip(expected.items(), returned, strict=True):
        exec(ADAPTER.format(expression), made := {"Net": network})
        own, net = made["Encoder"](12).eval(), network(32).eval()
        check_encoder(own, ModelConfig(), samples=500)
        net.load_state_dict(own.state_dict())
        torch.testing.assert_close(own(x_RLT), outputs(net))


@pytest.mark.slow
def test_weights_of_other_programs_are_converted_as_documented(dataset, tmp_path):
    run_in(tmp_path, foreign_models, dataset.root.url)
    for name in ("embeddings.parquet", "predictions.csv", "FOUNDER/ecgfounder.py", "founder.onnx"):
        assert (tmp_path / name).exists()


def in_lightning():
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.AvgPool1d(1000), nn.Flatten(), nn.Linear(60, 2))

        def training_step(self, batch, number):
            x, y = batch
            return nn.functional.binary_cross_entropy_with_logits(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    quiet = {"logger": False, "enable_checkpointing": False}
    return Net(), lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet)


def other_programs(folder, dataset, model):
    """All examples of docs/other_programs.md, one after the other, as they stand."""
    os.chdir(folder)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    Path("dataset").symlink_to(dataset)
    run_commands("docs/other_programs.md", {"DX dx": f"{model} dx"})
    page = (DOCS / "other_programs.md").read_text()
    x = ecg(5000)
    write_challenge(Path(), "A0001", x)
    at = {}
    for name, example in re.findall(r"## ([^\n]+)\n(?:[^#]*?)```py\n(.*?)```", page, re.DOTALL):
        at[name] = {"__name__": name}
        exec(compile(example, name, "exec"), at[name])
    assert len(at) == sum(kind == "python" for _, kind, _ in blocks("docs/other_programs.md"))
    here = Dataset.open("dataset")
    held_in = here.select(pretrain=True)
    assert len(at["PyTorch"]["crops"]) == len(here.select(dx="train"))
    assert at["PyTorch"]["y"].shape[1] == 2
    net, trainer = in_lightning()
    trainer.fit(net, at["PyTorch"]["loader"])
    assert trainer.global_step == -(-len(at["PyTorch"]["crops"]) // 16)
    others = at["webdataset, zarr, Hugging Face datasets"]
    assert others["facts"]["record"] and others["x_mv"].shape == (12, 5000)
    first_mv = here.read(held_in[0]) / 1000
    np.testing.assert_array_equal(others["first_mv"][0], first_mv)
    assert len(others["chosen"]) == len(held_in)
    np.testing.assert_array_equal(others["chosen_mv"], first_mv)
    expected = load(model).predict(x / 1000, fs_hz=500, leads=LEADS)
    assert at["ONNX Runtime"]["probabilities"] == pytest.approx(expected, abs=1e-4)


def test_our_shards_in_other_programs(dataset, saved_model, tmp_path):
    for name in ("lightning", "datasets", "onnxruntime", "onnxscript"):
        pytest.importorskip(name, reason="a package of the tests' group is not installed")
    head = {"task": "diagnosis", "kind": "multilabel", "classes": ["AF", "NSR"]}
    model = saved_model("DX", head=head | {"thresholds": [0.5, 0.5]})
    run_in(tmp_path, other_programs, dataset.root.url, str(model))


def test_commands_in_place_of_those_of_fairseq_signals_are_accepted():
    """test_readme.py has those that begin a line."""
    table = (DOCS / "other_programs.md").read_text().partition("## Your command")[2]
    typed = re.findall(r"`omnilead (\w+) ([^`]*)`", table)
    assert len(typed) >= 12
    for name, words in typed:
        args = parse(name, shlex.split(words))
        if getattr(args, "config", None):
            load_config(args.config, args.set, Config if name == "pretrain" else FinetuneConfig)
    for name in re.findall(r"`(\w+)`", table.partition("`omnilead pretrain --config w2v ")[2])[:3]:
        load_config(name, [], Config)


def test_the_reference_of_settings_is_current():
    text = settings.page_text()
    assert (DOCS / "settings.md").read_text() == text, "write it again: python -m docs.settings"
    assert "|  *(" not in text, "a setting has no comment beside it that says what it means"


def test_the_reference_of_commands_is_current():
    text = reference.page_text()
    assert (DOCS / "commands.md").read_text() == text, "write it again: python -m docs.commands"
    assert set(re.findall(r"^## (\w+)", text, re.MULTILINE)) == set(COMMANDS)
    assert "|  |" not in text, "an option says nothing"


def test_a_reader_written_from_the_specification_reads_a_dataset(dataset):
    """Of what docs/dataset_format.md states: columns, fields, addresses, checksums, members."""
    page = (DOCS / "dataset_format.md").read_text()
    tables = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    rows = re.findall(r"^\| (`.*?) \|", tables["samples.parquet"], re.MULTILINE)
    columns = [name for row in rows for name in re.findall("`(\\w+)`", row)]
    root = Path(dataset.root.url)
    table = pq.read_table(root / "samples.parquet")
    assert table.column_names == columns
    meta = json.loads((root / "dataset.json").read_text())
    fields = {
        name
        for row in re.findall(r"^\| (`.*?) \|", tables["dataset.json"], re.M)
        for name in re.findall("`(\\w+)`", row)
    }
    assert meta.keys() - {"fingerprint"} <= fields
    rest = json.dumps({name: meta[name] for name in meta if name != "fingerprint"}, sort_keys=True)
    assert hashlib.sha256(rest.encode()).hexdigest() == meta["fingerprint"]
    for name in ("samples.parquet", "rejects.csv"):
        facts = meta[name.partition(".")[0]]
        data = (root / name).read_bytes()
        assert facts == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    row, shard = table.slice(3, 1).to_pylist()[0], (root / "shards" / "00000.tar").read_bytes()
    assert hashlib.sha256(shard).hexdigest() == meta["shards"][0]["sha256"]
    assert shard.endswith(bytes(1024))
    crop = shard[row["offset"] : row["offset"] + 120_000]
    assert google_crc32c.value(crop) == row["crc32c"]
    halves = [google_crc32c.value(half) for half in (crop[:60_000], crop[60_000:])]
    assert halves[0] << 32 | halves[1] == row["waveform"]
    with tarfile.open(root / "shards" / "00000.tar") as tar:
        ecg, text = tar.getmembers()[6:8]
        facts = json.loads(tar.extractfile(text).read())
    assert ecg.name.startswith(f"{row['source']}-{row['record']}-") and ecg.name.endswith(".ecg")
    assert text.name == ecg.name.removesuffix("ecg") + "json" and ecg.offset_data == row["offset"]
    assert {ecg.mode, ecg.uid, ecg.mtime} == {0o644, 0}
    for key in ("crc32c", "waveform"):
        facts[key] = int(facts[key], 16)
    elsewhere = ("shard", "offset", "pretrain", "dx_role", "id_role")
    known = {key: row[key] for key in columns if key not in elsewhere}
    assert facts == known | {"label_names": facts["label_names"]}
    index = (root / "shards" / "00000.idx").read_text().splitlines()
    assert index[0] == f"v1.2 {meta['shards'][0]['crops']}"
    size = text.size
    assert (
        index[4]
        == f"ecg {row['offset']} 120000 {ecg.name} json {text.offset_data} {size} {text.name}"
    )


def test_every_page_is_in_the_site():
    config, _, nav = (DOCS.parent / "mkdocs.yml").read_text().partition("\nnav:")
    pages = {path.name for path in DOCS.glob("*.md")} | {"tutorial.md", "index.md"}
    assert set(re.findall(r": (\w+\.md)$", nav, re.MULTILINE)) == pages
    text = "".join(path.read_text() for path in DOCS.glob("*.md"))
    code = set(re.findall(r"\]\((\w+\.py)\)", text)) - {"tutorial.py"}
    assert set(re.findall(r"!/(\w+\.py)", config)) == code


def test_the_page_for_hospitals_names_every_format_and_command():
    text = (DOCS / "hospitals.md").read_text()
    assert all(f"(`{name}`)" in text for name in HOSPITAL_FORMATS)
    assert set(re.findall(r"^    omnilead (\w+)", text, re.MULTILINE)) <= set(COMMANDS)


def test_options_in_the_prose_of_the_page_on_comparing_exist(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    known, text = capsys.readouterr().out, (DOCS / "comparing.md").read_text()
    text = re.sub("omnilead (?:fit|predict) .*|show --why|`--plan [a-z]+`", "", text)
    named = set(re.findall("--[a-z][a-z-]*", text))
    assert len(named) >= 8 and named <= set(re.findall("--[a-z-]+", known))


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_links_and_tests_that_a_page_names_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in link or (DOCS / link).exists()
    for test in re.findall(r"test_\w+\.py", text):
        assert list(Path(__file__).parent.rglob(test))


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_lists_and_tables_begin_after_an_empty_line(page):
    """Else the site takes them for text."""
    text = re.sub("(?ms)^```.*?^```", "```", page.read_text())
    assert not re.search(r"(?m)^(?!- |\d+\. |  |\||#).+\n(?:- |\d+\. |\|).*", text)


def test_what_is_said_of_other_programs_has_a_source():
    text = (DOCS / "why.md").read_text()
    rows = re.findall(r"^\| ([A-Za-z][\w -]+?)(?: \(.*?\))? \| (.+) \|$", text, re.MULTILINE)
    others = {name: cells.split(" | ") for name, cells in rows if name != "omnilead"}
    assert len(others) == 9
    for cell in [cell for cells in others.values() for cell in cells]:
        assert re.search(r"\]\(https://|not found", cell), cell
    advice = dict(re.findall(r"^- \*\*(.+?)\.\*\* (.+?)(?=^- |^#|\Z)", text, re.M | re.S))
    sentences = {name: len(re.findall(r"\.(?=\s|\Z)", words)) for name, words in advice.items()}
    assert sentences == dict.fromkeys(others, 3)


@pytest.mark.parametrize("page", ["troubleshooting", "deviations"])
def test_settings_that_a_page_names_exist(page):
    text = (DOCS / f"{page}.md").read_text()
    known = {key for kind in (Config, FinetuneConfig) for key in flatten(kind().tree())}
    sections = {key.partition(".")[0] for key in known if "." in key}
    keys = set(re.findall(r"[`\s]([a-z]+\.[a-z_.]+)(?=[=:`])", text))
    named = {key for key in keys if key.partition(".")[0] in sections}
    assert len(named) >= 12 and named <= known | {"augment.threekg"}


def test_the_picture_of_the_house_names_every_folder(tmp_path):
    house.main(tmp_path / "house.svg")
    drawn = (tmp_path / "house.svg").read_text()
    rooms = [f"{wing}/{room}" for wing, names in ROOMS.items() for room in names]
    assert [room for room in rooms if f">{room}<" not in drawn] == []


def test_the_picture_of_the_house_does_not_depend_on_the_order_of_sets(tmp_path):
    below = ["engine/a", "engine/b"]
    members = {name: ["module"] for name in (*below, "engine/c")}
    for name, used in (("one.svg", below), ("two.svg", below[::-1])):
        house.draw_house(tmp_path / name, [below, ["engine/c"]], members, {"engine/c": used})
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()


def test_the_picture_of_the_wings_is_of_the_ecg_that_is_given(dataset):
    halves_BSLT = np.stack(np.hsplit(dataset[0].signal_mv.astype(np.float32), 2))[None]
    drawn = []
    for row in (0, 1):
        answers = dataset[row], halves_BSLT, "0badcafe", np.arange(324.0), {"AF": 0.25}
        drawn.append(pictures.draw_wings(*answers))
        words = [text.text for text in ElementTree.fromstring(drawn[-1]).iter() if text.text]
        assert {*ROOMS, "AF", "0.25", "a crop in a shard, crc32c 0badcafe"} <= set(words)
    assert drawn[0] != drawn[1]

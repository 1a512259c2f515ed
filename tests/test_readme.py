"""Every block of code on the pages that people write: Python runs, tables and YAML are read, commands
run or are at least parsed. A block that is none of these fails."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from handmade import ecg, write_challenge, write_files
from test_muse_xml import muse
from torch.distributed.run import get_args_parser

from omnilead.__main__ import main
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.sources.arrays import ArraySource
from omnilead.data_tools.synthetic.archive import synthesise
from omnilead.downstream.tasks.config import FinetuneConfig, TaskConfig
from omnilead.downstream.tasks.guess import guess_kind
from omnilead.downstream.tasks.join import join_sheet
from omnilead.engine.training.config import Config, load_config
from tests.conftest import save_model
from tests.downstream.evaluate.conftest import DIAGNOSIS
from tests.pages import PAGES, ROOT, blocks, commands
from tests.parsers import parse

RUN_BY = {  # the test that runs all blocks of these languages, as they stand
    "docs/clusters.md": ("test_clusters.py", "sh yaml"),
    "docs/extending.md": ("test_docs.py", "python sh"),
    "docs/first_steps.md": ("test_docs.py", "csv sh"),
    "docs/foreign_models.md": ("test_docs.py", "python sh"),
    "docs/other_programs.md": ("test_docs.py", "python sh"),
    "docs/own_format.md": ("test_docs.py", "python sh"),
    "docs/pretraining.md": ("test_docs.py", "sh"),
    "docs/published_labels.md": ("test_docs.py", "sh"),
}
NO_CODE = {
    "docs/dataset_format.md": "the files of a dataset",
    "docs/million.md": "what --dry-run prints",
}
PARSED = {  # but not run: commands, and those with a word
    "bench": "takes minutes; test_bench.py runs it",
    "convert": "needs somebody's weights or takes long; test_convert.py runs it",
    "finetune": "takes long; test_finetune.py runs it",
    "hub": "needs huggingface.co; test_hub.py runs it",
    "pretrain": "takes long; test_train.py runs it",
    "reproduce": "takes hours; test_reproduce.py runs it",
}
PARSED_WITH = {
    "://": "needs S3 or a cluster",
    "$B": "needs S3",
    "/data/": "needs a published archive",
    ".zip": "needs a published archive",
    "PTBXL": "needs a published archive; test_labels.py has a small one",
    "boosted": "takes long; test_fit.py runs it",
}
NOT_HERE = {  # programs
    "pip": "needs PyPI",
    "hf": "needs an account",
    "python3": "makes an environment",
    ".": "enters the environment",
}
IN_BASH = ("(umask", "grep", "wc", "python")
FEW = {"train.steps": 1, "train.epochs": None, "train.batch_crops": 4}  # of a training in Python
PROMISED = {  # by the comment beside a line
    "# not 0": "[1-9].*\n",
    "# 0 for each": "(\\S+:0\n)+",
    "# prints nothing": "",
}


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """What the pages name: archives, datasets, models, ECGs, tables."""
    place = tmp_path_factory.mktemp("things")
    synthesise(place / "more", patients=3, two_sessions=0, seed=9, progress=False)
    synthesise(place / "archive", patients=24, two_sessions=1, seed=7, progress=False)
    main(["shard", str(place / "archive"), "--out", str(place / "made")])
    dataset = Dataset.open(str(place / "made"))
    save_model(place / "RUN" / "model", head=DIAGNOSIS)
    write_challenge(place, "A", ecg(5000))
    person = "<PatientID>4711008150</PatientID>"  # too long to be in a shard by chance
    files = {
        "ECG.xml": muse(),
        "FOLDER/ward/1.xml": muse(person=person),
        "FOLDER/2.XML": muse(rate=250),
    }
    files |= {"ROOT/ecgs.npy": b"", "KEYFILE": bytes(range(32))}
    write_files(place, files)
    (place / "KEYFILE").chmod(0o600)
    np.save(place / "ROOT" / "ecgs.npy", np.stack([ecg(5000, seed) for seed in (1, 2)]) / 1000)
    rows = dict(zip(dataset.column("record"), dataset.column("patient"), strict=True))
    table = [f"{name},{at % 2},{patient or at}" for at, (name, patient) in enumerate(rows.items())]
    for name in ("my.csv", "labels.csv"):
        (place / name).write_text("\n".join(["record,abnormal,patient", *table]))
    (place / "FILE").write_text(f"patient\n{next(filter(None, rows.values()))}\n")
    same = {
        place / "archive": ("ecgs", "new", "MY_ECGS"),
        place / "made": ("dataset", "DATASET", "DS", "OLD"),
        place / "more": ("MORE", "NEW"),
        place / "RUN": ("MODEL", "TUNED", "OUT"),
    }
    for target, names in same.items():
        for name in names:
            (place / name).symlink_to(target)
    return place


@pytest.fixture
def here(things, tmp_path, monkeypatch):
    """A folder with them, for what a page does one after the other."""
    for path in things.iterdir():
        if path.is_dir():
            (tmp_path / path.name).symlink_to(path)
        else:
            shutil.copy2(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_code_runs_or_is_parsed(page, here):
    for line, language, text in blocks(page):
        try:
            check_block(page, language, text)
        except BaseException as error:
            error.add_note(f"{page}:{line}: a block of {language}")
            raise


@pytest.mark.parametrize("text", ["\n    frobnicate DATASET\n", "```text\nDATASET\n```\n"])
def test_a_block_that_nothing_runs_fails(text, monkeypatch):
    monkeypatch.setitem(PAGES, "docs/new.md", text)
    with pytest.raises(AssertionError, match="nothing runs or parses"):
        test_every_block_of_code_runs_or_is_parsed("docs/new.md", None)


def check_block(page, language, text):
    test, languages = RUN_BY.get(page, ("", ""))
    checks = {"python": run_python, "yaml": read_yaml, "csv": read_table, "sh": run_lines}
    if language in languages.split():
        (path,) = (ROOT / "tests").rglob(test)
        assert Path(page).name in path.read_text()
    elif language != "text" or page not in NO_CODE:
        assert language in checks, "nothing runs or parses this"
        checks[language](text)


def run_python(text):
    text = text.replace("batch_crops=512", "batch_crops=16")
    text = text.replace('pretrain("small", ', 'pretrain("small", **FEW, ')
    for name in re.findall(r'out="(\w+)"', text):
        make_own(Path(name), keep=False)
    if re.search("^for ", text, re.MULTILINE):  # endless
        text += "    break\n"
    exec(compile(text, "page", "exec"), {"__name__": "page", "FEW": FEW})
    if 'out="MODEL"' in text:  # which `fit` refuses to overwrite; README's shell lines come next
        shutil.rmtree("MODEL")


def read_yaml(text):
    """Of an archive of arrays; other kinds are on pages with tests of their own."""
    write_files(Path("arrays"), {"arrays.yaml": text})
    table = "ecg_id,patient_id,age,sex,row\nb,7,60,f,1\na,8,61,m,0\n"
    write_files(Path("arrays"), {"people.csv": table})
    with h5py.File("arrays/ecg.hdf5", "w") as file:
        file["tracings"] = np.stack([ecg(5000, seed).T[:, :4] for seed in (1, 2)]) / 1000
    source = ArraySource(folder("arrays"))
    read = map(source.read, source.keys())
    assert [(record.name, record.patient) for record in read] == [("a", "8"), ("b", "7")]


def read_table(text):
    """As labels of the dataset's records."""
    names = iter(Dataset.open("dataset").column("record")[::4])
    head, *rows = text.splitlines()
    rows = [re.sub("^[^,]*", next(names), row) for row in rows]
    Path("table.csv").write_text("\n".join([head, *rows]))
    for column in set(head.split(",")) - {"record", "patient", "fold", "split"}:
        task = guess_kind(TaskConfig(labels="table.csv", columns=(column,)))
        assert len(join_sheet(task, [Dataset.open("dataset")], "").cells) == len(rows)


def run_lines(text):
    for line, words in commands(text):
        match words:
            case [program, *_] if program in NOT_HERE:
                pass
            case ["make", target]:
                assert re.search(f"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            case ["dask", kind, *given]:
                started = pytest.importorskip(f"distributed.cli.dask_{kind}")
                started.main.make_context("dask", given)
            case ["omnilead", name, *given] | ["python", "-m", "omnilead", name, *given]:
                run_command(line, name, given)
            case ["torchrun", *given]:
                args = get_args_parser().parse_args(given)
                run_module(line, args.training_script, args.training_script_args)
            case ["deepspeed", *given]:
                if "--module" in given:
                    given = given[given.index("--module") + 1 :]
                module, *given = given
                run_module(line, module, given)
            case [program, *_] if program in IN_BASH:
                run_bash(line)
            case _:
                raise AssertionError(f"nothing runs or parses this line: {line}")


def run_module(line, module, given):
    name = re.fullmatch(r"(?:omnilead\.)?(?:engine|downstream)[./](\w+?)(?:\.py)?", module)[1]
    run_command(line, name, given)


def run_command(line, name, given):
    if name in PARSED or any(word in " ".join(given) for word in PARSED_WITH):
        args = parse(name, given)
        if name in ("pretrain", "finetune") and args.config:
            load_config(args.config, args.set, Config if name == "pretrain" else FinetuneConfig)
        return
    if name in ("synth", "remove"):
        make_own(Path(given[0]), keep=name == "remove")
    elif "--out" in given:
        make_own(Path(given[given.index("--out") + 1]), keep="--append" in given)
    assert main([name, *given]) == 0, line


def make_own(path, keep):
    """A command writes here, not into what other pages read, too."""
    if path.is_symlink() or path.is_file():
        target = path.resolve()
        path.unlink()
        if keep:
            shutil.copytree(target, path)


def run_bash(line):
    """grep ends with 1 if it finds nothing."""
    done = subprocess.run(["bash", "-c", line], stdout=subprocess.PIPE, text=True)
    assert done.returncode in (0, int(line.startswith("grep"))), line
    for promise, output in PROMISED.items():
        assert promise not in line or re.fullmatch(output, done.stdout), line + done.stdout


@pytest.mark.parametrize("packages", [True, False])
def test_bench_gpu_installs_only_what_python_cannot_import(packages, tmp_path):
    """Also without a registry: a python3 that has all packages is used as it is."""
    python, used = sys.executable, sys.executable
    if not packages:
        python, used = str(tmp_path / "python3"), ".venv/bin/python"
        Path(python).write_text("#!/bin/sh\nexit 1\n")
        Path(python).chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    command = ["make", "-n", "-f", ROOT / "Makefile", "bench-gpu", f"PYTHON={python}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert f"{used} -m benchmarks.run suite --device cuda" in printed
    (tests,) = re.findall(rf"{used} -m pytest -m gpu .*", printed)
    assert "-W default" in tests  # a warning of a library fails no test there
    assert ("pip install" in printed) == (not packages)


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z]+)", (ROOT / "README.md").read_text())) <= targets

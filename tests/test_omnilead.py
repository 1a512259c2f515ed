"""The command line: every command is found, explains each of its arguments without PyTorch, and
names options alike."""

import argparse
import importlib
import inspect
import json
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import omnilead
import omnilead.engine
from omnilead.__main__ import COMMANDS, main
from omnilead.data_tools.io.errors import DataError, Flag, UserError
from omnilead.engine.settings.errors import ConfigError
from tests.parsers import parser_of
from tests.tables import tabulated

ROOT = Path(__file__).parents[1]
# Every command's help in one process; fails with the heavy modules that were imported
HELP = """
import sys
from omnilead.__main__ import COMMANDS, main
for words in (["--help"], *([name, "--help"] for name in COMMANDS), *(word.split() for word in sys.argv[1:])):
    try:
        main(words)
    except SystemExit as ended:
        assert not ended.code
heavy = {"torch", "deepspeed", "pyarrow", "pydantic", "scipy", "matplotlib", "numpy"} & set(sys.modules)
sys.exit(", ".join(sorted(heavy)) or 0)
"""
# Wrong settings and paths in one process; fails with the heavy modules that were imported
WRONG = """
import sys
from omnilead.__main__ import main
heavy = {"torch", "deepspeed", "scipy.signal", "torch._dynamo", "pandas", "sklearn"}
for words in sys.argv[1:]:
    try:
        code = main(words.split())
    except SystemExit as ended:
        code = ended.code
    assert code == 2, words
    if heavy & set(sys.modules):
        sys.exit(f"{words}: {sorted(heavy & set(sys.modules))}")
"""


def parsers():
    for name in COMMANDS:
        parser = parser_of(name)
        yield parser.prog, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((one.prog, one) for one in action.choices.values())


PARSERS = dict(parsers())


def test_loading_a_model_imports_no_compiler_and_no_filters():
    """1.5 CPU-seconds of 3."""
    code = (
        "import sys, omnilead; omnilead.load('small'); "
        "print({'torch._dynamo', 'scipy.signal', 'deepspeed', 'matplotlib'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "set()\n", ended


def test_a_wrong_setting_or_path_is_said_before_pytorch_is_imported(dataset, tmp_path):
    """2 CPU-seconds of 2.5. On a GPU too, but for what comes after precision: auto."""
    (tmp_path / "bad.yaml").write_text("train: {steps: [}")
    out = f"--out {tmp_path / 'run'}"
    wrong = ["--set train.stepz=3", "--set train.lr=x", "--set augment.rlm=2", "--stepz 3"]
    wrong += ["--set train.epochs=1 train.steps=1", f"--config {tmp_path / 'bad.yaml'}"]
    wrong += [f"--data {tmp_path / 'nowhere'} {out}", f"--config {tmp_path / 'nowhere.yaml'}"]
    wrong += [f"--data {tmp_path / 'nowhere'} {out} --dry-run", f"--start {tmp_path / 'nowhere'}"]
    commands = [f"pretrain --config small {words}" for words in wrong[:-1]]
    commands += [f"pretrain {wrong[-1]}"]
    commands += ["finetune --config diagnosis --set train.stepz=3", "finetune --lr x"]
    commands += [f"finetune --task age --data {tmp_path / 'nowhere'} {out}"]
    wrong_files = files_that_are_not_there(dataset.root.url, tmp_path)
    commands += wrong_files
    ended = subprocess.run(
        [sys.executable, "-c", WRONG, *commands], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-500:]
    said = ended.stderr.splitlines()
    assert len(said) == len(commands), ended.stderr
    for line, says in zip(said[-len(wrong_files) :], wrong_files.values(), strict=True):
        assert says in line


def files_that_are_not_there(data, folder):
    """Commands, and what they say: of models, labels, and the user's own code."""
    (labels := folder / "labels.csv").write_text("record,v\nx,1\n")
    places = f"--data {data} --out {folder / 'run'}"
    pretrain = f"pretrain --config small {places} --set train.precision=fp32"
    finetune = f"finetune --start small {places}"
    model, head = f"{pretrain} --start {folder / 'no'}", f"{finetune} --labels {labels} --set"
    no_model = f"{folder / 'no'}: no such folder: give the folder of a run or model, or a shipped model: small"
    no_labels = f"{folder / 'no.csv'}: no such file: name a CSV or parquet file of labels"
    return {
        model: no_model,
        f"{model} --dry-run": no_model,
        f"finetune --start {folder / 'no'} --labels {labels} {places}": no_model,
        f"finetune --start {folder / 'no'} --config diagnosis {places}": no_model,
        f"finetune --start no.yaml --config diagnosis {places}": "'no.yaml': no such file or shipped",
        f"{finetune} --labels {folder / 'no.csv'}": no_labels,
        f"{finetune} --config diagnosis --labels {folder / 'no.csv'}": no_labels,
        f"{pretrain} augment.extra=no.py:louder": "augment.extra=no.py:louder: no such file no.py",
        f"{pretrain} objective.method=no.py:mine": "objective.method=no.py:mine: no such file no.py",
        f"{pretrain} model.encoder=no.py:Mine": "model.encoder=no.py:Mine: no such file no.py",
        f"{head} task.head=no.py:Head": "task.head=no.py:Head: no such file no.py",
    }


def test_showing_a_record_draws_nothing_unless_it_is_asked_to(archive):
    """0.8 CPU-seconds of 1.3."""
    record = next(archive.rglob("*.hea"))
    code = (
        "import sys; from omnilead.__main__ import main; main(sys.argv[1:]); "
        "sys.exit(', '.join({'torch', 'scipy.signal', 'matplotlib', 'pandas'} & set(sys.modules)))"
    )
    words = [sys.executable, "-c", code, "show", str(record)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert not ended.stderr.strip() and record.stem in ended.stdout


def test_help_of_every_command_imports_nothing_heavy():
    subcommands = [
        f"{prog.split(maxsplit=1)[1]} --help" for prog in PARSERS if prog.count(" ") == 2
    ]
    ended = subprocess.run(
        [sys.executable, "-c", HELP, *subcommands],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-500:]


@pytest.mark.parametrize("prog", PARSERS)
def test_every_argument_is_described_and_an_example_given(prog):
    parser = PARSERS[prog]
    missing = [
        action.dest
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert not missing
    assert f"{prog} " in f"{parser.description} {parser.epilog}"


@pytest.mark.parametrize(
    "option",
    ["--anonymous", "--config", "--device", "--model", "--on-corrupt", "--precision", "--source"],
)
def test_options_are_the_same_in_every_command(option):
    found = [
        action
        for parser in PARSERS.values()
        for action in parser._actions
        if option in action.option_strings
    ]
    assert (
        found
        and len({(one.metavar, one.nargs, one.type, tuple(one.choices or ())) for one in found})
        == 1
    )


@pytest.mark.parametrize(
    ("module", "command", "extra"),
    tabulated("""
s3fs            | verify s3://bucket/dataset | s3
distributed     | shard {archive} --out {tmp}/out --cluster tcp://127.0.0.1:1 | cluster
h5py            | shard {tmp} --source code15 --out {tmp}/out | formats
huggingface_hub | hub pull org/name {tmp}/out | hub
onnxruntime     | convert to-onnx {model} {tmp}/model.onnx | onnx
nvidia.dali     | pretrain --data {dataset} --out {tmp}/run --set pipeline.backend=dali --set train.precision=fp32 | cu13
"""),
)
def test_a_package_that_is_not_installed_is_one_line_with_its_extra(
    module, command, extra, archive, dataset, tmp_path, saved_model,
    monkeypatch, capsys,
):  # fmt: skip
    (tmp_path / "exams_part0.hdf5").touch()
    (tmp_path / "exams.csv").write_text(
        "exam_id,age,is_male,patient_id,trace_file\n1,40,True,1,exams_part0.hdf5\n"
    )
    monkeypatch.setitem(sys.modules, module, None)  # and what an earlier test's import of it left:
    if "." in module:
        monkeypatch.delattr(
            importlib.import_module(module.rpartition(".")[0]),
            module.rpartition(".")[2],
            raising=False,
        )
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    places = {
        "archive": archive,
        "dataset": dataset.root.url,
        "tmp": tmp_path,
        "model": saved_model(),
    }
    assert main(command.format(**places).split()) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert f"pip install 'omnilead[{extra}]'" in err


def test_version_and_a_command_that_does_not_exist(capsys):
    for arguments, code in ((["--version"], 0), (["pretrian"], 2), ([], 2)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
    out, err = capsys.readouterr()
    assert out == f"omnilead {omnilead.__version__}\n" and err.count("\n") == 2
    assert "'pretrian': did you mean pretrain? (--help shows all)" in err


@pytest.mark.parametrize(
    ("command", "mend"),
    tabulated("""
pretrain --steps 10             | --set train.steps=10
pretrain --lr=1e-3              | --set train.lr=1e-3
finetune --batch-size 64        | --set train.batch_crops=64
finetune --output_dir tuned     | --out
finetune --augment.rml 0.2      | --set augment.rlm=0.2
pretrain --dataa d              | --data
pretrain --qqqqqqqq             |
shard archive --out d --pln all | --plan
hub psh RUN org/name            | push
labels ptbxl a b --out d       |
"""),
)
def test_an_unknown_argument_gets_a_suggestion(command, mend, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    if mend:
        assert line.endswith(f": did you mean {mend}? (--help shows all)")
    else:
        assert "unrecognized arguments: " in line and "did you mean" not in line


@pytest.mark.parametrize("command", ["finetune --code --export RUN", "pretrain --set x=1 --schema"])
def test_export_and_schema_take_no_other_option(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert f"{command.split()[1]}: --export and --schema take no other option" in line


def test_a_run_in_a_bucket_is_exported_from_its_working_folder(capsys):
    with pytest.raises(SystemExit):
        main(["finetune", "--export", "s3://b/run"])
    assert "s3://b/run: give the run's working folder" in capsys.readouterr().err


OUT_OF_PYTHON = {"help", "local_rank", "command", "run"}  # what only a command has
FUNCTIONS = ("synth", "shard", "verify", "evaluate", "embed", "predict", "bench", "fit")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_words_and_defaults_of_its_command(name):
    parser = parser_of(name)
    options = {one.dest: one for one in parser._actions if one.dest not in OUT_OF_PYTHON}
    parameters = inspect.signature(getattr(omnilead, name)).parameters
    assert set(parameters) == set(options)
    for word, parameter in parameters.items():
        default = parameter.default
        if options[word].required or word in ("out", "sources", "dataset"):
            continue  # a file is required on the command line; in Python the result is returned
        assert (default or None) == (as_in_python(options[word].default) or None), word


def test_dir_lists_what_is_meant_to_be_used():
    listed = {name for name in dir(omnilead) if not name.startswith("_")}
    assert listed == {*FUNCTIONS, "Dataset", "finetune", "load", "pretrain"}


def test_a_wing_names_its_modules_that_are_no_commands():
    """Those directly in a wing. The engine's are all named."""
    commands = {module for module, _ in COMMANDS.values()}
    for wing in ("data_tools", "engine", "downstream"):
        modules = [path.stem for path in (ROOT / wing).glob("[!_]*.py")]
        if wing != "engine":
            modules = [name for name in modules if f"omnilead.{wing}.{name}" not in commands]
        about = importlib.import_module(f"omnilead.{wing}").__doc__
        assert sorted(modules) == sorted(re.findall(r"(\w+)\.py", about))


def as_in_python(default):
    """All cores are None in Python; a list is a tuple."""
    if default == (os.cpu_count() or 1):
        return None
    return tuple(default) if isinstance(default, list) else default


def test_from_python_alone(dataset, saved_model, tmp_path):
    """A notebook needs no shell: archive to dataset, embeddings, predictions and scores."""
    counts = omnilead.synth(tmp_path / "archive", patients=5)
    made = omnilead.shard(tmp_path / "archive", out=tmp_path / "made", workers=1)
    assert len(made) == sum(counts.values())
    assert omnilead.verify(tmp_path / "made", archive=tmp_path / "archive", workers=1) == []
    head = {"task": "diagnosis", "kind": "multilabel", "classes": ["AF", "NSR"]}
    model = saved_model(head=head | {"thresholds": [0.5, 0.5]}).parent
    table = omnilead.embed(model, data=tmp_path / "made")
    assert table["record"].to_pylist() == made.table(["record"])["record"].to_pylist()
    assert {"AF", "AF_predicted"} <= set(
        omnilead.predict(model, data=tmp_path / "made").column_names
    )
    written = omnilead.embed(model, data=tmp_path / "made", out=tmp_path / "e.parquet")
    assert pq.read_table(written.out).equals(table)
    pretrained = saved_model("pretrained/model").parent
    scores = omnilead.evaluate(pretrained, data=dataset.root.url, json=tmp_path / "scores.json")
    assert scores == json.loads((tmp_path / "scores.json").read_text())
    with pytest.raises(ConfigError, match="no lead is called 'X'"):
        omnilead.embed(model, data=tmp_path / "made", leads="X")
    with pytest.raises(DataError, match="so `dx_sources` has no effect"):
        omnilead.shard(tmp_path, out=tmp_path / "x", plan="all", dx_sources=["georgia"])


@pytest.mark.parametrize(
    ("name", "word", "value", "wrong"),
    tabulated("""
embed    | workers   | 0          | 0: must be a whole number of at least 1
embed    | per       | "crp"      | invalid choice: 'crp': did you mean crop?
predict  | fs_hz     | "fast"     | 'fast': must be a number
predict  | precision | "x"        | invalid choice: 'x' (choose from auto, fp32, bf16)
evaluate | batch     | -1         | -1: must be a whole number of at least 1
shard    | id_share  | 1.5        | 1.5: must be a number from 0 to 1
verify   | workers   | -1         | -1: must be a whole number of at least 1
bench    | share     | [1, "all"] | 'all': must be a number from 0.0001 to 1
"""),
)
def test_a_wrong_value_is_the_same_line_from_the_command_and_from_python(
    name, word, value, wrong, capsys
):
    value = json.loads(value)
    typed = value if isinstance(value, list) else [value]
    flag = "--fs" if word == "fs_hz" else f"--{word.replace('_', '-')}"
    with pytest.raises(SystemExit):
        main([name, flag, *map(str, typed)])
    line = f"omnilead {name}: argument {flag}: {wrong} (--help shows all)\n"
    assert capsys.readouterr().err == line
    with pytest.raises(UserError) as error:
        getattr(omnilead, name)("RUN", **{word: value})
    assert str(error.value) == f"argument `{word}`: {wrong}"


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("shard", {"out": "x", "plan": "all", "id_share": 0.1}, "so `id_share` has no effect: use `plan` paper"),
        ("shard", {"out": "x", "source": "none"}, "`source` none: unknown format: choose auto"),
        ("verify", {"patients": "p.csv"}, "`patients` p.csv applies to an archive.*add `archive` SRC"),
        ("predict", {"data": "e.npy"}, "`data` e.npy: the file does not state its sampling rate: give it with `fs_hz`"),
        ("embed", {"data": "e.npy", "out": "x.csv"}, "^`out` x.csv: must end in .parquet"),
        ("evaluate", {"data": "e.npy", "json": "no/x"}, "`json` no/x: the folder no does not exist"),
        ("finetune", {"data": "e.npy", "out": "x"}, "use `labels` my.csv, `task` NAME .* or `config` dia"),
        ("pretrain", {"data": [], "out": "x"}, "^data.datasets=..: name a dataset: `data` DATASET$"),
        ("pretrain", {"data": "d", "out": "x", "train.steps": 1, "train.epochs": 1}, "set only one: train.epochs=null"),
        # A command line stays one
        ("load", {}, "unfinished: has checkpoints but no model/ yet: run omnilead pretrain --export unf"),
        ("bench", {"data": "{dataset}", "tasks": ["ptbxl-form"], "out": "x"}, "`omnilead labels ptbxl SRC --out DIR`"),
    ],
)  # fmt: skip
def test_errors_name_arguments_in_python(
    name, given, says, archive, dataset, saved_model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    np.save("e.npy", np.zeros((12, 5000)))
    head = {"task": "rhythm", "kind": "binary", "classes": ["AF"], "thresholds": [0.5]}
    firsts = {
        "shard": archive,
        "verify": dataset.root.url,
        "bench": [str(saved_model("m", head=head))],
    }
    first = [] if name == "pretrain" else [firsts.get(name, tmp_path / "m")]
    if name == "load":
        Path("unfinished/checkpoints").mkdir(parents=True)
        first = ["unfinished"]
    given = {
        key: dataset.root.url if value == "{dataset}" else value for key, value in given.items()
    }
    function = getattr(omnilead, name)
    assert pickle.loads(pickle.dumps(function)) is function
    with pytest.raises(UserError, match=says) as error:
        function(*first, **given)
    assert name in ("bench", "load") or "--" not in str(error.value)


@pytest.mark.parametrize("name", ["hf://o/my--code", "no--out/x--set a--lr"])
def test_an_error_never_changes_a_name(name):
    with pytest.raises(UserError, match=r"no such|Cannot have") as error:
        omnilead.load(name)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("given", "typed", "in_python"),
    [
        ({"train.steps": 1, "train.epochs": 1}, "--set train.epochs=null", "train.epochs=null"),
        ({"config": "no--out"}, "--config 'no--out': no such", "`config` 'no--out': no such"),
        ({"train.lr": [1e-4, 1e-3]}, "--lr 0.0001 --out OUT", "`train.lr` 0.0001 `out` OUT"),
    ],
)
def test_a_setting_is_named_as_it_is_given(given, typed, in_python, tmp_path, capsys):
    with pytest.raises(UserError) as error:
        omnilead.pretrain(data="d", out=tmp_path / "x", **given)
    assert in_python in str(error.value) and "--set" not in str(error.value)
    words = ["--config", given["config"]] if "config" in given else []
    settings = {"data.datasets": ["d"], "run": str(tmp_path / "x"), **given}
    settings.pop("config", None)
    words += ["--set", *(f"{key}={json.dumps(value)}" for key, value in settings.items())]
    assert main(["pretrain", *words]) == 2
    assert typed in capsys.readouterr().err


def raised(place):
    """The error of a call, in the process that a worker is."""
    try:
        omnilead.embed("m", data="e.npy", out=place)
    except UserError as error:
        return error
    raise AssertionError


def test_an_error_is_the_same_in_another_process():
    place = "a--b.csv"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        error = pool.apply(raised, [place])
    assert str(error) == "`out` a--b.csv: must end in .parquet: use a--b.parquet"
    option, text = error.args
    assert isinstance(option, Flag) and option == "--out"
    assert f"{option}{text}" == "--out a--b.csv: must end in .parquet: use a--b.parquet"
    assert (error.code, type(error)) == (2, ConfigError)

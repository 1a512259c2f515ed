"""Fine-tuning for diagnosis and identification: what is trained, validated, exported, refused."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent / "training"))  # the helpers lie there
from ranks import TINY, curve, finetune, pretrain, rows

import omnilead
from omnilead.data_tools.build import ShardOptions, shard
from omnilead.data_tools.dataset import CLASSES, Dataset
from omnilead.data_tools.sources import open_sources
from omnilead.data_tools.splits import RoleSources
from omnilead.engine import evaluate
from omnilead.engine.common import ConfigError
from omnilead.engine.config import CONFIGS, build
from omnilead.engine.data.leakage import find_leak, split_of
from omnilead.engine.finetune import main
from omnilead.engine.model.encoder import Encoder, pool
from omnilead.engine.model.init_weights import initialise
from omnilead.engine.report.run_files import read_diagnostics
from omnilead.engine.tasks.classifier import Classifier
from omnilead.engine.tasks.config import FinetuneConfig, TaskConfig, TaskKind
from omnilead.engine.tasks.finetuning import (
    FinetuneTask,
    read_start,
    select_leads,
)
from omnilead.engine.tasks.labels import read_table, read_task
from omnilead.engine.tasks.recipe import finetuning
from omnilead.engine.tasks.targets import make_targets
from omnilead.engine.training import checkpoint
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.files import DIAGNOSTICS, LABELS
from omnilead.engine.training.task import best_metric

KINDS: dict[str, TaskKind] = {"diagnosis": "multilabel", "identification": "identity"}
GOLDEN = {
    "diagnosis": [0.705998, 0.695719, 0.687947, 0.676827],
    "identification": [249.5363, 242.2784, 236.9995, 240.1337],
}
EXACT = ("step", "crops_seen", "loss", "accuracy", "lr", "grad_norm")


@pytest.fixture(scope="module")
def base(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pre-trained model, with its settings beside it."""
    tmp = tmp_path_factory.mktemp("base")
    assert pretrain(tmp, dataset.root.url, train__steps=2, objective__local=0).ok
    return tmp / "run"


@pytest.mark.parametrize(
    ("task", "stage", "world"),
    [("diagnosis", 1, 1), ("identification", 3, 2), ("diagnosis", 0, 1), ("diagnosis", 3, 1)],
)
def test_evaluate_agrees_with_the_runs_validation(
    task: str, stage: int, world: int, dataset: Dataset, base: Path, tmp_path: Path
) -> None:
    ended = finetune(tmp_path, dataset.root.url, base, task, world=world, train__zero_stage=stage)
    assert ended.ok, ended.output
    assert ("no positive examples in validation, threshold 0.5: " in ended.output) == (
        task == "diagnosis"
    )
    run = tmp_path / "run"
    assert all(np.isfinite(value) for row in rows(run) for value in row.values())
    np.testing.assert_allclose([row["loss"] for row in rows(run)], GOLDEN[task], rtol=2e-4)
    valid, figure = (
        rows(run, "validation.jsonl"),
        "auroc" if task == "diagnosis" else "identification_accuracy",
    )
    best = max(valid[1:], key=lambda row: row[figure])
    assert valid[0]["step"] == 0 and json.loads((run / "run.json").read_text())["best"] == figure
    assert (run / "checkpoints" / "best").read_text() == f"step-{best['step']}"
    arrays, _ = read_diagnostics(run / DIAGNOSTICS)
    assert json.loads((run / "result.json").read_text())["converged"] is False
    assert arrays.keys() == {"samples_mv"} | (
        {"same_similarity", "other_similarity"} if task == "identification" else set()
    )
    assert (
        len(arrays.get("same_similarity", range(99))) >= len(dataset.select(identity="valid")) / 2
    )
    model, before = omnilead.load(run), omnilead.load(base)
    assert model.config["head"]["task"] == task and (model.head is not None) == (
        task == "diagnosis"
    )
    old = before.encoder.state_dict()
    new = model.encoder.state_dict()
    moved = [name for name, w in new.items() if not w.equal(old[name])]
    assert len(moved) > len(new) / 3 and not any(name.startswith("conv.") for name in moved)
    found, tested = (
        tmp_path / "found.json",
        "challenge" if task == "diagnosis" else "identification_accuracy",
    )
    how = ["--model", str(run), "--data", dataset.root.url, "--role", "valid", "--json", str(found)]
    assert evaluate.main(how) == 0
    assert json.loads(found.read_text())["score"] == pytest.approx(best[tested], abs=1e-6)


def test_a_resumed_run_and_two_ranks_are_the_same_run(
    dataset: Dataset, base: Path, tmp_path: Path
) -> None:
    how = {
        "train__save_every_steps": 1,
        "encoder__activation_dropout": 0.0,
        "encoder__feature_grad": 1.0,
    }
    assert finetune(tmp_path, dataset.root.url, base, "identification", "whole", **how).ok
    for steps in (2, 4):  # steps may grow at a fixed learning rate
        assert finetune(
            tmp_path, dataset.root.url, base, "identification", "parts", train__steps=steps, **how
        ).ok
    assert curve(tmp_path / "parts", EXACT) == curve(tmp_path / "whole", EXACT)
    ended = finetune(
        tmp_path, dataset.root.url, base, "identification", "two", 2, train__zero_stage=3, **how
    )
    assert ended.ok, ended.output
    whole, two = (
        [[row[key] for key in EXACT] for row in rows(tmp_path / name)] for name in ("whole", "two")
    )
    np.testing.assert_allclose(two, whole, rtol=2e-4)
    elsewhere = finetune(
        tmp_path,
        dataset.root.url,
        Path(CONFIGS / "pretrain" / "quickstart.yaml"),
        "identification",
        "whole",
    )
    assert f"cannot resume: start changed from {base} to " in elsewhere.one_line()


def test_a_folder_with_another_run_is_refused(
    dataset: Dataset, base: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(base, tmp_path / "pre")
    says = (
        "pre: holds another run, a pre-training (step 2): use --out NEW; only `omnilead pretrain` "
        "with the same"
    )
    assert says in finetune(tmp_path, dataset.root.url, base, "diagnosis", "pre").one_line()
    assert main(["--export", str(tmp_path / "pre")]) == 2 and says in capsys.readouterr().err
    assert finetune(tmp_path, dataset.root.url, base, "diagnosis", "dx", train__steps=1).ok
    says = (
        "dx: holds another run, a fine-tuning for diagnosis (step 1): use --out NEW; "
        "only `omnilead finetune`"
    )
    assert says in finetune(tmp_path, dataset.root.url, base, "identification", "dx").one_line()
    assert says in pretrain(tmp_path, dataset.root.url, name="dx").one_line()
    before = (tmp_path / "pre" / "metrics.jsonl").read_bytes()
    assert before == (base / "metrics.jsonl").read_bytes()


def test_the_first_best_step_is_exported_and_the_card_says_so(
    base: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The untrained model and steps with NaN are never the best; by the CinC score, another step is
    the best."""
    nan = float("nan")
    figures = iter(zip([0.9, nan, 0.3, 0.3, nan], [0.0, 0.1, 0.2, 0.3, 0.4], strict=True))
    monkeypatch.setattr(
        FinetuneTask,
        "validate",
        lambda *_: dict(zip(("auroc", "challenge"), next(figures), strict=True)),
    )
    ended = finetune(tmp_path, dataset.root.url, base, "diagnosis", train__steps=7)
    assert ended.ok, ended.output
    run = tmp_path / "run"
    # the last always
    assert [row["step"] for row in rows(run, "validation.jsonl")] == [
        0,
        2,
        4,
        6,
        7,
    ]
    assert (run / "checkpoints" / "best").read_text() == "step-4"
    card = (run / "model" / "README.md").read_text()
    assert (
        "AUROC in validation: 0.3000, at step 4. These are the weights of step 4, the best by it."
        in card
    )


def test_which_metric_chooses_the_best_step() -> None:
    assert best_metric(None, ("auroc", "challenge", "loss")) == ("auroc", 1)
    assert best_metric("challenge", ("auroc", "challenge", "loss")) == (
        "challenge",
        1,
    ) and best_metric("loss", ("loss",)) == (
        "loss",
        -1,
    )
    with pytest.raises(ConfigError, match=r"train\.best=auroc: .* use identification_accuracy"):
        best_metric("auroc", ("identification_accuracy",))


def test_random_weights_of_a_pretraining_file(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    changes = {
        "augment__leads": "2",
        "augment__padded": False,
        "augment__rlm": 0.5,
        "augment__noise": "physio3",
    }
    assert finetune(
        tmp_path, dataset.root.url, tmp_path / "tiny.yaml", "diagnosis", train__steps=1, **changes
    ).ok
    model = omnilead.load(tmp_path / "run")
    assert model.config["model"]["leads"] == 2 and model.preprocessing["leads"] == ["I", "II"]
    assert finetune(
        tmp_path, dataset.root.url, tmp_path / "tiny.yaml", "diagnosis", train__steps=2, **changes
    ).ok  # goes on
    (tmp_path / "tiny.yaml").write_text(TINY.replace("ffn: 32", "ffn: 64"))
    ended = finetune(
        tmp_path, dataset.root.url, tmp_path / "tiny.yaml", "diagnosis", train__steps=3, **changes
    )
    assert "finetuning.architecture.ffn changed from 32 to 64" in ended.one_line()


def test_fewer_channels_are_the_same_as_zeros(base: Path) -> None:
    begin = read_start(str(base))
    x_RLT, outputs = torch.randn(3, 12, 2500, generator=torch.Generator().manual_seed(1)), []
    for padded in (True, False):
        config = build(
            {"start": str(base), "augment": {"leads": "I,II,V2", "padded": padded, "rlm": 0.0}},
            FinetuneConfig,
        )
        encoder = Encoder(config.tuned(begin.model), mask=False).eval()
        encoder.load_state_dict(select_leads(begin, config))
        there = [0, 1, 7]
        x = (
            torch.zeros_like(x_RLT).index_copy(1, torch.tensor(there), x_RLT[:, there])
            if padded
            else x_RLT[:, there]
        )
        outputs.append(encoder(x))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [32, 64])  # with a projection, and without
def test_an_ecg_of_zeros_has_a_bounded_gradient(width: int) -> None:
    small = {
        "conv": [[16, 2], [32, 8]],
        "width": width,
        "layers": 4,
        "heads": 2,
        "ffn": 32,
        "position_kernel": 8,
    }
    encoder = Encoder(build({"model": small}).model, mask=False)
    initialise(encoder, torch.Generator().manual_seed(0))
    Classifier(encoder, TaskConfig(), 26)(
        torch.zeros(1, 2, 12, 640), torch.ones(1, 26), torch.ones(1, 2)
    )["loss"].backward()
    assert all(p.grad is None or float(p.grad.norm()) < 1e3 for p in encoder.parameters())


def test_arcface_with_learnt_scale_and_growing_margin(
    base: Path, dataset: Dataset, tmp_path: Path
) -> None:
    """Class vectors start at the means of their classes only once: a resumed run is the same
    run."""
    learned: dict[str, Any] = {
        "task__scale": "learned",
        "task__margin_warmup": 0.5,
        "task__class_vectors": "means",
    }
    margins: list[float] = []
    arguments = FinetuneTask.arguments

    def spy(self: FinetuneTask, *given: Any) -> Any:
        found = arguments(self, *given)
        margins.append(float(found[-1]))
        return found

    with mock.patch.object(FinetuneTask, "arguments", spy):
        ended = finetune(
            tmp_path,
            dataset.root.url,
            base,
            "identification",
            "whole",
            **learned,
            train__save_every_steps=1,
        )
    assert ended.ok and margins == [0.0, 0.5, 1.0, 1.0], ended.output
    whole = tmp_path / "whole"
    first, last = (
        checkpoint.full_weights(whole / "checkpoints" / f"step-{step}") for step in (2, 4)
    )
    assert (
        first["log_scale"] != last["log_scale"]
        and "log_scale" not in omnilead.load(whole).encoder.state_dict()
    )
    ended = finetune(
        tmp_path, dataset.root.url, base, "identification", "whole", **learned, train__steps=5
    )
    assert "train.steps changed from 4 to 5" in ended.one_line()
    shutil.copytree(whole, tmp_path / "part")
    for name in ("step-3", "step-4"):
        shutil.rmtree(tmp_path / "part" / "checkpoints" / name)
    (tmp_path / "part" / "checkpoints" / "latest").write_text("step-2")
    with mock.patch.object(FinetuneTask, "_begin_at_means", side_effect=AssertionError):
        ended = finetune(tmp_path, dataset.root.url, base, "identification", "part", **learned)
    assert ended.ok and curve(tmp_path / "part", EXACT) == curve(whole, EXACT), ended.output


def test_class_vectors_initialised_with_means(base: Path, dataset: Dataset, tmp_path: Path) -> None:
    # as a kill in the first save leaves it: not resumed
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    tree = {
        "start": str(base),
        "run": str(tmp_path),
        "train": {"precision": "fp32"},
        "task": {"kind": "identity", "class_vectors": "means"},
    }
    config = build(tree, FinetuneConfig)
    task = FinetuneTask(config, [dataset], Ranks(0, 1, torch.device("cpu"), None))
    model = task.model(torch.Generator().manual_seed(0))
    assert isinstance(model, Classifier) and model.training
    encoder = model.encoder.eval()
    y, rows_ = task.targets.y[0], task.labels.rows(0, "train")
    unit = {int(k): [] for k in np.unique(y[rows_])}  # type: ignore[var-annotated]
    for row in rows_:
        for half in range(dataset.column("halves")[row]):
            x_RLT = torch.from_numpy(
                dataset.read(row)[:, half * 2500 : half * 2500 + 2500] / 1000
            ).float()[None]
            with torch.no_grad():
                unit[int(y[row])].append(F.normalize(pool(encoder(x_RLT)), dim=-1)[0])
    mean_D = torch.stack([one for some in unit.values() for one in some]).mean(0)
    means_CD = torch.stack([torch.stack(some).mean(0) - mean_D for some in unit.values()])
    torch.testing.assert_close(
        model.head.weight.detach(), F.normalize(means_CD, dim=-1), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("task", ["diagnosis", "identification"])
def test_missing_halves_are_ignored(task: Any) -> None:
    config = FinetuneConfig(start="x").tuned(
        build({"model": {"width": 16, "layers": 1, "heads": 2, "ffn": 16}}).model
    )
    encoder = Encoder(config, mask=False)
    initialise(encoder, torch.Generator().manual_seed(0))
    model = Classifier(
        encoder, TaskConfig(kind=KINDS[task]), 26, torch.Generator().manual_seed(0)
    ).eval()
    x = torch.randn(2, 2, 12, 640)
    labels = (torch.rand(2, 26) > 0.5).float() if task == "diagnosis" else torch.tensor([3, 25])
    there = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    losses = model(x, labels, there)
    x[1, 1] = 1e3
    again = model(x, labels, there)
    assert losses["loss"].equal(again["loss"]) and losses["accuracy"].equal(again["accuracy"])
    alone = [
        model(x[i : i + 1, [s]], labels[i : i + 1], torch.ones(1, 1))["loss"]
        for i, s in ((0, 0), (0, 1), (1, 0))
    ]
    torch.testing.assert_close(losses["loss"], torch.stack(alone).mean())


def test_classes_are_numbered_by_patient(dataset: Dataset) -> None:
    known = read_task(TaskConfig(kind="identity"), [dataset])
    (patients,), targets = known.y, make_targets(known)
    (labels,), classes = targets.y, targets.outputs
    trained = dataset.select(identity="train")
    patients, labels = patients[trained], labels[trained]
    assert classes == len(np.unique(patients)) == labels.max() + 1
    assert ((labels[:, None] == labels) == (patients[:, None] == patients)).all()


@pytest.fixture(scope="module")
def other(dataset: Dataset, archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The same records with other roles."""
    out, sources = (
        str(tmp_path_factory.mktemp("other") / "seed1"),
        RoleSources.from_meta(dataset.meta),
    )
    return shard(
        open_sources(str(archive)), ShardOptions(out, seed=1, role_sources=sources, quiet=True)
    )


def test_datasets_with_contradictory_roles_are_refused(
    dataset: Dataset, other: Dataset, base: Path, tmp_path: Path
) -> None:
    assert [find_leak([dataset, dataset], role) for role in ("dx_role", "id_role", "pretrain")] == [
        None
    ] * 3
    assert "is trained on" in str(find_leak([dataset, other], "pretrain"))
    a, b = dataset.table().to_pydict(), other.table().to_pydict()
    for task, role in (("diagnosis", "dx_role"), ("identification", "id_role")):
        urls = [dataset.root.url, other.root.url]
        ended = finetune(tmp_path, urls[0], base, task, data__datasets=urls)
        ended.one_line()
        found = re.search(
            r"(record|patient) (\S+)/(\S+) is trained on in (\S+) and held out in (\S+):",
            ended.output,
        )
        assert found, ended.output
        kind, source, name, *where = found.groups()
        sides = []
        for table in (a, b) if where == urls else (b, a):
            rows_ = zip(table["source"], table[kind], table[role], strict=True)
            sides.append({r for s, n, r in rows_ if (s, n) == (source, name)})
        assert "train" in sides[0] and sides[1] & {"valid", "test", "gallery", "probe"}
    ended = finetune(
        tmp_path, dataset.root.url, base, "diagnosis", data__datasets=[dataset.root.url] * 2
    )
    assert ended.codes == [2] and "are the same data" in ended.output


def test_a_model_knows_the_splits_of_all_its_stages(
    dataset: Dataset, other: Dataset, base: Path, tmp_path: Path
) -> None:
    ended = finetune(tmp_path, other.root.url, base, "diagnosis", train__steps=1)
    assert ended.ok, ended.output
    model = omnilead.load(tmp_path / "run")
    assert model.history["splits"] == [split_of(other), split_of(dataset)]
    assert model.history["datasets"] == [other.fingerprint] and model.history["precision"] in (
        "fp32",
        "bf16",
    )
    assert finetune(tmp_path, other.root.url, base, "diagnosis", train__steps=2).ok  # goes on


def test_invalid_settings_are_one_line(
    dataset: Dataset, base: Path, archive: Path, tmp_path: Path
) -> None:
    bare = shard(
        open_sources(str(archive / "training" / "ningbo")),
        ShardOptions(str(tmp_path / "bare"), plan="all", quiet=True),
    )
    two = tmp_path / "two"
    assert finetune(tmp_path, dataset.root.url, base, "diagnosis", "two", augment__leads="2", train__steps=1,
                    augment__padded=False).ok  # fmt: skip
    cases: list[tuple[str, str, str, dict[str, Any]]] = [
        (bare.root.url, str(base), "no crop with dx=train", {}),
        (bare.root.url, str(base), "no crop with identity=train", {"task__kind": "identity"}),
        (dataset.root.url, "", "start='': name a pre-trained", {}),
        (dataset.root.url, str(tmp_path / "nothing"), "no such folder", {}),
        (dataset.root.url, str(two), "was trained on I,II only", {"augment__leads": "3"}),
        (dataset.root.url, str(base), "task.kind", {"task__kind": "sex"}),
        (dataset.root.url, str(base), "use halves", {"pipeline__views": "window"}),
    ]
    for data, begin, says, changes in cases:
        ended = finetune(
            tmp_path,
            data,
            Path(begin) if begin else Path(),
            "diagnosis",
            "bad",
            **({"start": begin} | changes),
        )
        assert says in ended.one_line()
    assert len(CLASSES) == 26


@pytest.fixture
def table(dataset: Dataset, tmp_path: Path) -> Path:
    """Numbers, text and zeros for every record except the first, whose cells are empty."""
    path = tmp_path / "mine.csv"
    names = list(dict.fromkeys(dataset.column("record")))
    cells = [f"{name},{i % 7}.5,{'abc'[i % 3]},{i % 2}" for i, name in enumerate(names[1:])]
    path.write_text("\n".join(["record,number,letter,odd", f"{names[0]},,,", *cells]))
    return path


@pytest.mark.parametrize(
    ("kind", "columns", "outputs", "figure"),
    [
        ("regression", ["number"], ["number"], "mae"),
        ("multiclass", ["letter"], ["a", "b", "c"], "auroc"),
        ("multilabel", ["odd"], ["odd"], "auroc"),
    ],
)
def test_a_users_own_label_table(
    kind: str,
    columns: list[str],
    outputs: list[str],
    figure: str,
    table: Path,
    dataset: Dataset,
    base: Path,
    tmp_path: Path,
) -> None:
    how: dict[str, Any] = {"task__kind": kind, "task__columns": columns, "task__labels": str(table)}
    how |= {"task__class_weights": "balanced"} if kind != "regression" else {}
    ended = finetune(tmp_path, dataset.root.url, base, "diagnosis", train__steps=2, **how)
    assert ended.ok, ended.output
    run = tmp_path / "run"
    head, state = (
        omnilead.load(run).config["head"],
        checkpoint.read_state(run / "checkpoints" / "step-2"),
    )
    assert (
        head["kind"] == kind
        and head["classes"] == outputs
        and head["definition"]["labels"] == "mine.csv"
    )
    assert figure in rows(run, "validation.jsonl")[1] and "loss" in rows(run)[0]
    known = read_task(TaskConfig(kind=kind, labels=str(table), columns=tuple(columns)), [dataset])  # type: ignore[arg-type]
    assert state["labels"]["sha256"] == known.facts["sha256"] and len(known.rows(0, "train")) < len(
        dataset
    )
    kept = read_table(str(run / LABELS))
    assert kept.equals(read_table(str(table)).select(["record", *columns]))  # no other column
    if kind == "regression":
        y = known.of("train")[:, 0]
        assert (head["center"], head["scale"]) == (
            pytest.approx([y.mean()]),
            pytest.approx([y.std()]),
        )
    elif kind == "multilabel":
        assert head["thresholds"] == state["best"]["thresholds"] and 0 < head["thresholds"][0] < 1
    how_scored = ["--model", str(run), "--data", dataset.root.url]
    table.rename(moved := tmp_path / "moved.csv")
    assert evaluate.main(how_scored) == 0  # the run keeps its labels
    moved.rename(table)
    table.write_text(
        table.read_text()
        .replace("0.5,a", "0.5,b")
        .replace(",1\n", ",0\n", 1)
        .replace("1.5", "2.5", 1)
    )
    ended = finetune(tmp_path, dataset.root.url, base, "diagnosis", train__steps=3, **how)
    assert "labels.sha256 changed from" in ended.one_line()


def test_early_stopping(
    base: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an interruption: the checkpoint knows the number of validations without
    improvement."""
    figures = iter([0.9, 0.5, 0.4, 0.3, float("nan")])  # at steps 0, 2, 4, 5, 6
    monkeypatch.setattr(FinetuneTask, "validate", lambda *_: {"auroc": next(figures)})
    how: dict[str, Any] = {"train__patience": 3}
    for steps in (5, 100, 100):  # the third finds it finished
        ended = finetune(tmp_path, dataset.root.url, base, "diagnosis", train__steps=steps, **how)
        assert ended.ok and "done:" in ended.output, ended.output
    run = tmp_path / "run"
    assert [row["step"] for row in rows(run)] == list(range(1, 7))
    assert (
        "converged: best auroc 0.5000 at step 2, and 3 validations since without improvement\n"
        in ended.output
    )
    result = json.loads((run / "result.json").read_text())
    assert result["converged"] and result["curve"] == [[0, 0.9], [2, 0.5], [4, 0.4], [5, 0.3]]
    assert (run / "checkpoints" / "best").read_text() == "step-2" and omnilead.load(run).history[
        "step"
    ] == 2


def test_a_run_has_one_learning_rate(base: Path, dataset: Dataset, tmp_path: Path) -> None:
    several = finetune(tmp_path, dataset.root.url, base, "diagnosis", train__lr=[1e-4, 3e-4])
    assert "train.lr=[0.0001, 0.0003]: a run has one learning rate" in several.one_line()
    assert not (tmp_path / "run").exists()
    one = build({"start": "x", "train": {"lr": [1e-4]}, "rates": []}, FinetuneConfig)
    assert one.train.lr == 1e-4  # `rates` is in the config.yaml of older runs


def test_labels_that_cannot_be_learnt_are_refused(
    dataset: Dataset, base: Path, tmp_path: Path
) -> None:
    names, path = list(dict.fromkeys(dataset.column("record"))), tmp_path / "mine.csv"
    cases = [
        (
            "binary",
            lambda i: "1",
            "the training split has only positives of v: nothing to tell apart",
        ),
        ("binary", lambda i: "0", "the training split has no positive of v: nothing to tell apart"),
        ("multiclass", lambda i: "a", "the training split has only a: nothing to tell apart"),
        ("regression", lambda i: "61", "all known values of v in the training split are equal"),
        (
            "binary",
            lambda i: str(i % 2) if i < 3 else "",
            "has no crop with a known label in the training split",
        ),
    ]
    absent = [f"X{i},1,train" for i in range(len(names) + 1)]
    strangers = (
        f"mine.csv: {len(absent)} (X0, X1, X2, ...) of {len(names) + len(absent)} records are not "
        "in the data, which has "
    )
    for kind, cell, says in cases:
        split = ["test" if i < 3 else "train" for i in range(len(names))]
        path.write_text(
            "\n".join(
                ["record,v,split", *(f"{n},{cell(i)},{split[i]}" for i, n in enumerate(names))]
            )
        )
        how = {"task__kind": kind, "task__labels": str(path), "data__datasets": [dataset.root.url]}
        ended = finetune(tmp_path, dataset.root.url, base, "diagnosis", "bad", **how)
        assert says in ended.one_line() and strangers not in ended.output
        with path.open("a") as file:  # most of its records are of another dataset
            file.write("\n".join(["", *absent]))
        line = finetune(tmp_path, dataset.root.url, base, "diagnosis", "bad", **how).one_line()
        assert 0 <= line.find(strangers) < line.find(says)


def test_settings_that_suit_the_labels(table: Path, dataset: Dataset, base: Path) -> None:
    given = {
        "start": str(base),
        "data.datasets": [dataset.root.url],
        "task.labels": str(table),
        "task.columns": ["odd"],
    }
    config = finetuning(None, given)
    t, crops = config.train, len(read_task(config.task, [dataset]).of("train"))
    assert (config.task.kind, config.task.name, t.batch_crops) == ("binary", "mine", crops // 10)
    assert (
        t.validate_every == crops // t.batch_crops
        and t.steps == 40 * t.validate_every
        and t.patience > 0
        and t.lr == 1e-3
    )
    mine = finetuning(
        None,
        given
        | {"task.columns": ["letter"], "train.epochs": 2, "train.lr": 1e-4, "train.batch_crops": 4},
    )
    assert (
        mine.task.kind == "multiclass"
        and mine.train.steps is None
        and (mine.train.lr, mine.train.batch_crops) == (1e-4, 4)
    )
    sex = finetuning(
        None, {"start": str(base), "data.datasets": [dataset.root.url], "task.name": "sex"}
    )
    assert sex.task.classes == ("F", "M") and sex.task.name == "sex"
    for wrong, says in (
        ({}, "--labels my.csv"),
        ({"task.name": "sax"}, "did you mean sex"),
        ({"task.labels": "x.csv"}, "x.csv"),
    ):
        with pytest.raises(ConfigError, match=says):
            finetuning(None, {"start": str(base), "data.datasets": [dataset.root.url], **wrong})

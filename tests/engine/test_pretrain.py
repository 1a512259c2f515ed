"""The door: what a user sees, finds in RUN/, and is told when something is wrong."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent / "training"))  # the helpers lie there
from ranks import Ended, curve, pretrain, rows, settings, start, wait

import engine
from data_tools.dataset import Dataset
from engine.config import CONFIGS, TrainConfig, build, load
from engine.data.augmenter import HALF
from engine.model.config import ModelConfig
from engine.model.draws import draw, row_keys
from engine.model.pretrainer import Pretrainer
from engine.objectives.contrastive import nt_xent
from engine.objectives.local import local_loss
from engine.training.distributed import Ranks
from engine.training.optimizer import GuardedAdamW
from engine.training.pretraining import Pretraining
from engine.training.schedule import lr_at

# DESIGN, section 7.
PROMISED = """step, crops_seen, epoch, loss, loss_local, loss_global, loss_diversity, loss_features, lr, grad_norm, crops_per_s,
data_wait_pct, mfu, code_perplexity, prob_perplexity, gumbel_tau, masked_share, accuracy_local, accuracy_global, skipped_steps,
memory_gb"""
# Loss and its norm of gradient, CPU, float32, one thread: made by this code, which parity holds against the authors'.
GOLDEN = [(16.06304, 9.375019), (14.901417, 9.037341), (14.309336, 8.874111), (15.655503, 7.937871), (14.872959, 7.613811)]


def run(tmp: Path, *arguments: str, **env: str) -> Ended:
    (tmp / "out.txt").unlink(missing_ok=True)
    return wait(tmp, start(tmp, arguments, **env))


def one_line(ended: Ended, code: int = 2) -> str:
    assert ended.codes == [code] and len(ended.output.strip().splitlines()) == 1, ended.output
    return ended.output


def test_a_run_leaves_what_was_promised(dataset: Dataset, tmp_path: Path) -> None:
    ended = pretrain(tmp_path, dataset.root.url, train__validate_every=3, train__log_every=2, train__keep=1)
    assert ended.ok, ended.output
    out = tmp_path / "run"
    assert [row["step"] for row in rows(out)] == [1, 2, 4, 6]
    assert all(list(row) == list(Pretraining.keys) == PROMISED.replace("\n", " ").split(", ") for row in rows(out))
    assert all(value is not None and np.isfinite(value) for row in rows(out) for value in row.values())
    valid = rows(out, "validation.jsonl")
    assert [row["step"] for row in valid] == [0, 3, 6] and len({row["loss"] for row in valid}) == 3
    trained = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows(out)}
    np.testing.assert_allclose([trained[step] for step in (1, 2, 4)], [GOLDEN[at] for at in (0, 1, 3)], rtol=2e-4)
    assert all(0 <= row["identification_accuracy"] <= 1 for row in valid)
    facts = json.loads((out / "run.json").read_text())
    assert facts["datasets"] == [dataset.fingerprint] and facts["best"] == "loss" and "dropout is off" in facts["validation"]
    assert facts["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # whatever it was built for
    assert facts["preprocessing_sha256"] == dataset.meta["preprocessing_sha256"] and facts["hardware"]["cores"] >= 1
    assert list((out / "tensorboard").iterdir())
    best = (out / "checkpoints" / "best").read_text()
    kept = {path.name for path in (out / "checkpoints").glob("step-*")}
    assert best == f"step-{min(valid[1:], key=lambda row: row['loss'])['step']}" and kept == {best, "step-6"}
    config = json.loads((out / "model" / "config.json").read_text())
    modes = {path.stat().st_mode for path in (out / "model").iterdir()}
    assert len(modes) == 1  # the weights are as open to others as the rest
    weights = load_file(out / "model" / "model.safetensors")
    model = Pretrainer(build({"model": config["model"]}).model, build({"objective": config["objective"]}).objective)
    model.load_state_dict(weights)  # its own names, all of them
    assert "not normalised" in (out / "model" / "README.md").read_text()
    assert engine.load(out).embed(dataset.read(0), 500, "12", "uV").shape == (model.encoder.width,)
    progress = [line for line in ended.output.splitlines() if line.startswith("step ")]
    assert len(progress) == 4 and all("crops/s, data wait" in line and "MFU" in line and "left" in line for line in progress)


def test_chance_is_what_random_representations_reach(dataset: Dataset) -> None:
    config = load(CONFIGS / "pretrain" / "quickstart.yaml", [f"data.datasets=[{dataset.root.url}]"])
    task = Pretraining(config, [dataset], Ranks(0, 1, torch.device("cpu"), None))
    chance, held = task.explained()["chance"], task.held_out.crops
    random, tokens = torch.Generator().manual_seed(0), config.model.tokens(HALF)
    keys_R = torch.from_numpy(row_keys(0, 0, np.arange(40))).flatten()
    draws = draw(config.model, keys_R, tokens, config.objective.negatives, sample_codes=False)
    x_RMP, y_RMP = (torch.randn(*draws.valid_RM.shape, 16, generator=random) for _ in range(2))
    loss, hits = local_loss(x_RMP, y_RMP, draws.times_RMM, draws.valid_RM, temperature=1e4)
    assert [chance["loss_local"], chance["accuracy_local"]] == pytest.approx([float(loss), float(hits)], rel=0.06)
    for name, crops in (("", config.train.batch_crops), ("valid/", held)):
        found = [nt_xent(torch.randn(crops, 2, 16, generator=random), 1e4, False) for _ in range(200)]
        loss, hits = (torch.stack(part).mean() for part in zip(*found, strict=True))
        assert chance[f"{name}loss_global"] == pytest.approx(float(loss), rel=1e-3)
        assert chance[f"{name}accuracy_global"] == pytest.approx(float(hits), rel=0.2)
    assert chance["valid/identification_accuracy"] == 1 / len(task.probe.pairs)


def test_export_on_demand_writes_the_same(dataset: Dataset, tmp_path: Path) -> None:
    assert pretrain(tmp_path, dataset.root.url, train__steps=2).ok
    before = load_file(tmp_path / "run" / "model" / "model.safetensors")
    (tmp_path / "run" / "model" / "model.safetensors").unlink()
    assert run(tmp_path, "--export", str(tmp_path / "run")).ok
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(before[name].equal(after[name]) for name in before)
    assert "has no checkpoint" in one_line(run(tmp_path, "--export", str(tmp_path / "nothing")))


def test_the_golden_curve(dataset: Dataset, tmp_path: Path) -> None:
    assert pretrain(tmp_path, dataset.root.url, train__steps=5).ok
    seen = [(row["loss"], row["grad_norm"]) for row in rows(tmp_path / "run")]
    np.testing.assert_allclose(seen, GOLDEN, rtol=2e-4, err_msg=repr(seen))


@pytest.mark.parametrize(
    "method",
    [
        {"objective__contrast": 0},
        {"objective__local": 0},
        {"objective__local": 0, "objective__method": "simclr", "pipeline__views": "window"},
        {"objective__local": 0, "objective__method": "3kg", "pipeline__views": "window", "augment__threekg": {}},
        {"objective__form": "authors", "objective__gathered": False, "train__micro_batch": 2, "model__mask_trim": True},
        {"augment__leads": "2", "augment__padded": False, "model__leads": 2, "augment__noise": "physio3"},
    ],
)
def test_every_method_trains_and_validates_on_two_ranks(method: dict[str, Any], dataset: Dataset, tmp_path: Path) -> None:
    how = {"train__steps": 2, "train__validate_every": 2, "train__zero_stage": 3, "train__probe_patients": 9}
    ended = pretrain(tmp_path, dataset.root.url, world=2, **method, **how)
    assert ended.ok, ended.output
    assert rows(tmp_path / "run")[-1]["skipped_steps"] == 0
    assert np.isfinite(rows(tmp_path / "run", "validation.jsonl")[0]["loss"])


def test_accumulation_is_one_large_batch_where_crops_do_not_meet(dataset: Dataset, tmp_path: Path) -> None:
    """Without diversity and CMSC, which look at all crops of a micro-batch together."""
    still = {f"model__{name}dropout": 0 for name in ("", "attention_", "input_", "feature_")}
    how = still | {"objective__contrast": 0, "objective__diversity": 0, "train__steps": 3}
    for name, micro in (("one", 8), ("four", 2)):
        assert pretrain(tmp_path, dataset.root.url, name, **how, train__micro_batch=micro).ok
    parts = ("loss", "loss_local", "loss_features", "grad_norm")
    one, four = ([[row[part] for part in parts] for row in rows(tmp_path / name)] for name in ("one", "four"))
    np.testing.assert_allclose(four, one, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler on a CPU")
def test_compiled_equals_eager(dataset: Dataset, tmp_path: Path) -> None:
    still = {f"model__{name}dropout": 0 for name in ("", "attention_", "input_", "feature_")}
    for how in ("eager", "layers"):  # the whole step takes minutes: test_pretrainer.py traces it
        ended = pretrain(tmp_path, dataset.root.url, how, **still, train__steps=3, train__compile=how)
        assert ended.ok, ended.output
    one, two = ([(row["loss"], row["grad_norm"]) for row in rows(tmp_path / how)] for how in ("eager", "layers"))
    np.testing.assert_allclose(two, one, rtol=2e-5)


def test_other_data_settings_or_batch_are_refused_by_name(dataset: Dataset, tmp_path: Path) -> None:
    assert pretrain(tmp_path, dataset.root.url, train__steps=1).ok
    before = curve(tmp_path / "run")
    for change, says in (
        ({"train__lr": 1e-4}, "train.lr was 0.001 and is 0.0001"),
        ({"train__batch_crops": 4}, "train.batch_crops was 8 and is 4"),
        ({"augment__rlm": 0.1}, "augment.rlm was 0.5 and is 0.1"),
        ({"train__zero_stage": 2}, "train.zero_stage was 1 and is 2"),
        ({"train__micro_batch": 4}, "train.micro_batch x ranks was 8 and is 4"),
    ):
        assert says in one_line(pretrain(tmp_path, dataset.root.url, **change))
    path = next((tmp_path / "run" / "checkpoints").glob("step-*")) / "state.json"
    state, manifest = json.loads(path.read_text()), path.parent / "manifest.json"
    for name, value, says in (
        ("datasets", ["0" * 64], "was trained on other data: data.datasets had fingerprints 000000000000"),
        ("preprocessing_sha256", "1" * 64, "another preprocessing: sha256 was 111111111111"),
    ):
        path.write_text(json.dumps(state | {name: value}))
        manifest.write_text(json.dumps({}))
        assert says in one_line(pretrain(tmp_path, dataset.root.url))
    assert curve(tmp_path / "run") == before  # nothing was lost


def test_wrong_input_is_one_line(dataset: Dataset, tmp_path: Path) -> None:
    assert "no dataset.json" in one_line(pretrain(tmp_path, str(tmp_path / "nowhere")))
    assert "did you mean train.steps" in one_line(run(tmp_path, "--set", "train.stesp=1"))
    assert "train.batch_crops=200: " in one_line(pretrain(tmp_path, dataset.root.url, train__batch_crops=200))
    (tmp_path / "file").write_text("")
    arguments = settings(tmp_path, dataset.root.url)
    for place in ("file", "file/run"):
        assert f"{place}: " in one_line(run(tmp_path, *arguments, "--set", f"run={tmp_path}/{place}"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "dataset.json").write_text("{}")
    assert "other: is a dataset" in one_line(run(tmp_path, *arguments, "--set", f"run={tmp_path}/other"))
    assert len(list((tmp_path / "other").iterdir())) == 1
    assert "WORLD_SIZE" in one_line(run(tmp_path, *arguments, WORLD_SIZE="0"))


def test_without_arguments_it_is_the_quick_start_or_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = one_line(run(tmp_path, "--local_rank=0"))
    assert (
        "python -m data_tools synth demo/archive" in said
        and "python -m data_tools shard demo/archive --out demo/dataset" in said
    )


def test_a_finished_run_is_finished(dataset: Dataset, tmp_path: Path) -> None:
    assert pretrain(tmp_path, dataset.root.url, train__steps=2).ok
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    ended = pretrain(tmp_path, dataset.root.url, train__steps=2)
    assert ended.ok and "done: " in ended.output
    assert "Global loss" in (tmp_path / "run" / "report.html").read_text()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_schedules() -> None:
    fixed, cosine, tri = (TrainConfig(schedule=name, lr=1.0) for name in ("fixed", "warmup_cosine", "tri_stage"))  # type: ignore[arg-type]
    assert {lr_at(fixed, step, 100) for step in range(100)} == {1.0}
    assert [round(lr_at(cosine, step, 100), 4) for step in (0, 5, 10, 55, 100)] == [0.01, 0.505, 1.0, 0.505, 0.01]
    assert [round(lr_at(tri, step, 100), 4) for step in (0, 10, 29, 30, 65, 100)] == [0.01, 1.0, 1.0, 1.0, 0.1, 0.01]


def test_the_optimiser_is_adamw_with_clipping_and_skips_what_is_not_finite() -> None:
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.arange(6.0).view(2, 3)), torch.nn.Parameter(torch.ones(4))] for _ in range(2))
    options = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}
    guarded, plain = GuardedAdamW(ours, clip_norm=0.5, **options), torch.optim.AdamW(theirs, **options)  # type: ignore[arg-type]
    for step in range(6):
        grads = [torch.randn_like(p) * (10 if step % 2 else 0.01) for p in ours]
        for mine, other, grad in zip(ours, theirs, grads, strict=True):
            mine.grad, other.grad = grad.clone(), grad.clone()
        if step == 3:
            ours[1].grad[0] = torch.inf  # type: ignore[index]
            before = [p.detach().clone() for p in ours]
            guarded.step()
            assert all(torch.equal(p, was) for p, was in zip(ours, before, strict=True))
            assert (float(guarded.skipped), float(guarded.in_a_row)) == (1, 1)
            continue
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        guarded.step()
        plain.step()
        torch.testing.assert_close(guarded.norm, norm)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    assert (float(guarded.skipped), float(guarded.in_a_row)) == (1, 0)


def test_the_authors_model_has_their_size() -> None:
    with torch.device("meta"):
        model = Pretrainer(ModelConfig(), build({}).objective)
    assert sum(p.numel() for p in model.parameters()) == 90_883_072


def test_a_collapse_is_said_once_and_early() -> None:
    task = SimpleNamespace(config=build({"model": {"codes": 320, "codebooks": 2}}), low_logs=0)
    said = [Pretraining.concern(task, {"code_perplexity": codes}) for codes in (600.0, 3.0, 3.0, 600.0, 3.0, 3.0, 3.0, 3.0)]
    assert [bool(one) for one in said] == [False] * 6 + [True, False]
    assert "3.0 of 640 codes" in said[6] and "Raise objective.diversity" in said[6]

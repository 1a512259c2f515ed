"""The training loop: every method trains; stopping, non-finite steps, bad crops, precision of what
is measured."""

import os
import re
import shutil
import signal
import time
import traceback
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import (
    EXACT,
    STILL,
    column,
    curve,
    nothing,
    pretrain,
    rows,
    run,
    settings,
    start,
    tuning,
    wait,
)
from torch.utils._python_dispatch import TorchDispatchMode

from omnilead.data_tools.dataset import Dataset
from omnilead.downstream.finetuning.task import FinetuneTask
from omnilead.engine.data.config import HALF
from omnilead.engine.data.order import DatasetRows, Order
from omnilead.engine.data.reader import CropReader
from omnilead.engine.model.draws import draw_for_step, row_keys
from omnilead.engine.model.objectives import local_loss, nt_xent
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.settings.files import CONFIGS
from omnilead.engine.settings.run_files import LOCK
from omnilead.engine.training import checkpoint, checkpoint_files, loop
from omnilead.engine.training.config import Config, build_config, load_config
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.loop import Loop
from omnilead.engine.training.pretraining import PretrainTask
from omnilead.engine.training.run_folder import RunFolder
from omnilead.engine.training.validation import training_selection
from tests.waiting import HANG_S, until


def newest_step(run):
    path = RunFolder(run).newest_checkpoint()
    return checkpoint_files.step_of(path) if path else 0


SIMCLR = {"objective__local": 0, "objective__method": "simclr", "pipeline__views": "window"}
TWO_LEADS = {"augment__leads": "2", "augment__padded": False, "model__leads": 2}
CPC = {"objective__local": 0, "objective__method": "cpc", "model__causal": True}
CPC |= {"model__conv_norm": "layer"}
AUTHORS = {"objective__form": "authors", "objective__gathered": False, "model__mask_trim": True}


@pytest.mark.parametrize(
    ("world", "method"),
    [
        (1, {"objective__contrast": 0}),
        (1, {"objective__local": 0}),
        (1, SIMCLR),
        (2, SIMCLR | {"objective__method": "3kg", "augment__threekg": {}}),
        (2, AUTHORS | {"train__micro_batch": 2}),
        (1, TWO_LEADS | {"augment__noise": "physio3"}),
        (2, CPC | {"model__kernels": "plain"}),
    ],
)
def test_every_method_trains_and_validates(world, method, training, tmp_path):
    how = {"train__steps": 2, "train__validate_every": 2, "train__zero_stage": 3}
    training(world=world, train__probe_patients=9, **method, **how).good()
    assert rows(tmp_path / "run")[-1]["skipped_steps"] == 0
    assert np.isfinite(rows(tmp_path / "run", "validation.jsonl")[0]["loss"])


def test_chance_equals_the_score_of_random_representations(dataset):
    config = load_config(
        CONFIGS / "pretrain" / "quickstart.yaml", [f"data.datasets=[{dataset.root.url}]"]
    )
    task = PretrainTask.prepare(config, [dataset], Ranks(0, 1, torch.device("cpu"), None))
    chance, held_out = task.explanations()["chance"], task.validation_loss.crops
    random, tokens = torch.Generator().manual_seed(0), config.model.tokens(HALF)
    keys_R = torch.from_numpy(row_keys(0, 0, np.arange(40))).flatten()
    draws = draw_for_step(
        config.model, keys_R, tokens, config.objective.negatives, sample_codes=False
    )
    x_RMP, y_RMP = (torch.randn(*draws.valid_RM.shape, 16, generator=random) for _ in range(2))
    loss, hits = local_loss(x_RMP, y_RMP, draws.times_RMM, draws.valid_RM, temperature=1e4)
    assert chance["loss_local"] == pytest.approx(float(loss), rel=0.06)
    assert chance["accuracy_local"] == pytest.approx(float(hits), rel=0.06)
    for prefix, crops in (("", config.train.batch_crops), ("valid/", held_out)):
        drawn = (torch.randn(crops, 2, 16, generator=random) for _ in range(200))
        found = [torch.stack(nt_xent(pair, 1e4, False)) for pair in drawn]
        loss, hits = torch.stack(found).mean(dim=0)
        assert chance[f"{prefix}loss_global"] == pytest.approx(float(loss), rel=1e-3)
        assert chance[f"{prefix}accuracy_global"] == pytest.approx(float(hits), rel=0.2)
    assert chance["valid/identification_accuracy"] == 1 / len(task.probe.pairs)


def test_gradient_accumulation_equals_one_large_batch(training, tmp_path):
    """Without diversity and CMSC, which look at all crops of a micro-batch together."""
    how = STILL | {"objective__contrast": 0, "objective__diversity": 0, "train__steps": 3}
    for name, micro in (("one", 8), ("four", 2)):
        training(name, **how, train__micro_batch=micro).good()
    for part in ("loss", "loss_local", "loss_features", "grad_norm"):
        one, four = (column(tmp_path / name, part) for name in ("one", "four"))
        np.testing.assert_allclose(four, one, rtol=2e-5)


class ReadNumbers(TorchDispatchMode):
    """Prints from where a number of a tensor is read: on a GPU, that waits for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            where = [f"{frame.name} in {frame.filename}" for frame in traceback.extract_stack()]
            print("a number is read:", *where[-8:-1], sep="\n", flush=True)
        return func(*args, **(kwargs or {}))


def print_numbers_read():
    step = Loop._step

    def watched(loop, batch):
        with ReadNumbers():
            return step(loop, batch)

    Loop._step = watched


@pytest.mark.parametrize("factors", [{}, {"stem": 0.1}])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_reads_no_number(stage, factors, training):
    """ZeRO 3 reads the zero that it is given for the norm, which is on the CPU."""
    how = {"train__zero_stage": stage, "train__lr_factors": factors, "train__precision": "bf16"}
    said = training(before=print_numbers_read, train__steps=3, **how).good()
    assert "a number is read" not in said, said


@pytest.mark.gpu
def test_compiled_equals_eager(training, tmp_path):
    """For a CPU, where nothing is compiled unless asked for, it would take a minute: test_pretrainer.py
    traces all of it."""
    small = {"model__layers": 1, "model__conv": [[8, 4], [8, 4]], "train__steps": 2}
    for how in ("eager", "layers"):
        training(how, before=nothing, **STILL, **small, train__compile=how).good()
    for part in ("loss", "grad_norm"):
        eager, compiled = (column(tmp_path / how, part) for how in ("eager", "layers"))
        np.testing.assert_allclose(compiled, eager, rtol=2e-5)


@pytest.mark.parametrize(
    ("task", "asked", "code"), [("pretraining", "SIGTERM", 0), ("diagnosis", "SIGINT", 130)]
)
def test_a_stop_signal_writes_a_checkpoint(task, asked, code, dataset, tmp_path):
    url, how = dataset.root.url, {"train__steps": 100_000}
    arguments = settings(tmp_path, url, **how)
    if task == "diagnosis":  # from random weights of those settings
        arguments = tuning(tmp_path, url, tmp_path / "tiny.yaml", task, **how)
    processes = start(tmp_path, arguments, world=2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
    os.kill(processes[1].pid, signal.Signals[asked])  # one rank is enough
    ended = wait(tmp_path, processes)
    assert ended.codes == [0, code] and "the same command resumes" in ended.output, ended.output
    assert newest_step(tmp_path / "run") == rows(tmp_path / "run")[-1]["step"] > 3


def no_more_data():
    """Every crop after the first steps takes for ever to read."""
    read, calls = CropReader._read_all, count()

    def stuck(*args):
        while next(calls) > 1:
            time.sleep(HANG_S)
        return read(*args)

    CropReader._read_all = stuck
    loop.SECOND_SIGNAL_S = 0


def test_a_second_interrupt_stops_a_run_that_waits_for_data(dataset, tmp_path):
    arguments = settings(tmp_path, dataset.root.url, train__steps=10**6)
    (process,) = start(tmp_path, arguments, before=no_more_data)
    output = tmp_path / "out.txt"
    until(lambda: output.exists() and "step 1/" in output.read_text())
    for said in ("Ctrl-C again", "stopped without a checkpoint: the same command continues"):
        os.kill(process.pid, signal.SIGINT)
        until(lambda said=said: said in output.read_text())
    assert wait(tmp_path, [process]).codes == [130] and not newest_step(tmp_path / "run")


def test_a_step_has_one_checkpoint(training, monkeypatch):
    """SIGTERM during a validation that turns out to be the best."""
    validate, save, written = PretrainTask.validate, checkpoint.Writer.save, []

    def asked(self, engine, between):
        measured = validate(self, engine, between)
        if engine.global_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return measured

    def counted(self, engine, state, *rest):
        written.append(state["step"])
        save(self, engine, state, *rest)

    monkeypatch.setattr(PretrainTask, "validate", asked)
    monkeypatch.setattr(checkpoint.Writer, "save", counted)
    output = training(train__validate_every=2, train__keep=1).good()
    assert "stopped after step 2" in output and written == [2]


def saved_steps(run):
    return sorted(checkpoint_files.step_of(path) for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("world", "when", "steps"),
    [
        (1, {"train__save_every_steps": 4}, [4, 8, 12, 14]),
        (2, {"train__save_every_steps": 4}, [4, 8, 12, 14]),
        (2, {"train__save_every_steps": 4, "train__keep": 3}, [8, 12, 14]),
        # the others hear of the first rank's clock one step later
        (2, {"train__save_every_minutes": 1e-6}, [2, 4, 6, 8, 10, 12, 14]),
    ],
)
def test_a_checkpoint_that_is_due_is_written_once(world, when, steps, training, tmp_path):
    training(world=world, **{"train__steps": 14, "train__keep": 99} | when).good()
    assert saved_steps(tmp_path / "run") == steps


def stop_in(method, step, call):
    """The last rank gets SIGTERM in its `call`-th forward pass of Loop's method after `step`."""
    forward, entered, calls = Pretrainer.forward, getattr(Loop, method), count(1)
    inside = False

    def enter(self, *args):
        nonlocal inside
        inside = self.progress.step == step
        return entered(self, *args)

    def stopped(self, *args):
        last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
        if inside and next(calls) == call and last:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, *args)

    setattr(Loop, method, enter)
    Pretrainer.forward = stopped


EXACT_TUNED = ["step", "crops_seen", "loss", "accuracy", "lr", "grad_norm"]


def ended_as(run, keys=EXACT):
    """What must be equal bit for bit at the end of a run."""
    state = checkpoint_files.read_state(RunFolder(run).newest_checkpoint())
    weights = (run / "model" / "model.safetensors").read_bytes()
    valid = rows(run, "validation.jsonl")
    best = (run / "checkpoints" / checkpoint_files.BEST).read_text()
    return curve(run, keys), valid, state["best"], state["stale"], best, weights


@pytest.mark.slow
@pytest.mark.parametrize(("world", "stage"), [(1, 1), (2, 2), (2, 3)])
def test_a_run_stopped_in_any_step_and_validation_ends_as_if_nothing_had_happened(
    world, stage, training, tmp_path
):
    """Both ranks stop at the same place, with nothing that an unfinished step has changed."""
    how = {"train__steps": 4, "train__batch_crops": 16, "train__micro_batch": 2}
    how |= {"train__validate_every": 2, "train__valid_batches": 4, "train__zero_stage": stage}
    how |= {"train__probe_patients": 60}
    training = partial(training, world=world, **how)
    training("whole").good()
    in_all = 8 // world
    late = world - 1  # ranks hear of it one micro-batch later
    for method, step, call, says in (
        ("_validate", 0, 1, "the validation of step 0 begins again; no checkpoint yet"),
        (
            "_step",
            0,
            2,
            f"step 1 begins again: {2 + late} of {in_all} micro-batches lost; no checkpoint",
        ),
        ("_validate", 2, 1, "the validation of step 2 begins again"),
        ("_validate", 2, 1, "the validation of step 2 begins again"),
        (
            "_step",
            2,
            1,
            f"step 3 begins again: {1 + late} of {in_all} micro-batches lost; the same",
        ),
        ("_validate", 4, 1, "the validation of step 4 begins again"),
    ):
        output = training("run", before=partial(stop_in, method, step, call)).good()
        assert f"stopped after step {step}; {says}" in output
        assert newest_step(tmp_path / "run") == step and not (tmp_path / "run" / "model").exists()
        assert RunFolder(tmp_path / "run").newest_checkpoint(pytest.fail) or not step
    training("run").good()
    assert ended_as(tmp_path / "run") == ended_as(tmp_path / "whole")
    assert saved_steps(tmp_path / "run") == saved_steps(tmp_path / "whole")


def stop_in_last_validation():
    validate = FinetuneTask.validate

    def stopped(self, engine, between):
        if engine.global_steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return validate(self, engine, between)

    FinetuneTask.validate = stopped


def test_a_step_whose_validation_is_repeated_may_be_the_best(dataset, tmp_path):
    """Its checkpoint then has the thresholds that are exported, as if it had been written later."""
    settings(tmp_path, dataset.root.url)  # random weights of these begin both
    how = {"train__steps": 2, "train__keep": 1}
    for name in ("whole", "run"):
        begin = tmp_path / "tiny.yaml"
        arguments = tuning(tmp_path, dataset.root.url, begin, "diagnosis", name, **how)
        if name == "run":
            output = run(tmp_path, arguments, before=stop_in_last_validation).good()
            assert "stopped after step 2; the validation of step 2 begins again" in output
            assert not (tmp_path / "run" / "checkpoints" / checkpoint_files.BEST).exists()
        run(tmp_path, arguments).good()
    assert ended_as(tmp_path / "run", EXACT_TUNED) == ended_as(tmp_path / "whole", EXACT_TUNED)
    state = checkpoint_files.read_state(RunFolder(tmp_path / "run").newest_checkpoint())
    assert state["best"]["step"] == 2 and state["best"]["thresholds"]


@pytest.mark.parametrize(
    ("stage", "factors"), [(0, {}), (1, {}), (3, {}), (1, {"stem": 0.1}), (3, {"stem": 0.1})]
)
def test_non_finite_steps_are_skipped_and_too_many_end_the_run(
    stage, factors, training, tmp_path, monkeypatch
):
    forward, calls = Pretrainer.forward, count(1)

    def poisoned(self, *args):
        losses = forward(self, *args)
        call = next(calls)
        if call in (3, 4) or call >= 8:
            losses["loss"] = losses["loss"] * float("nan")
        return losses

    monkeypatch.setattr(Pretrainer, "forward", poisoned)
    how = {"train__zero_stage": stage, "train__max_nonfinite": 5, "train__steps": 30}
    how |= {"train__lr_factors": factors}
    ended = training(**how)
    run = tmp_path / "run"
    assert column(run, "skipped_steps") == [0, 0, 1, 2, 2, 2, 2, 3, 4, 5, 6, 7]
    assert None not in column(run, "loss")[4:7]
    ended.last_line(1)
    assert "not finite in 5 steps in a row (train.max_nonfinite)" in ended.output
    assert "rows" in ended.output and newest_step(run) == 12  # the good steps are not lost


@pytest.mark.parametrize(
    ("what", "code", "says"),
    [
        (
            "return x if next(CALLS) < 4 else x / 0.0",
            1,
            "in each of its 3 steps the loss or a gradient was not finite",
        ),
        ("raise SystemExit(0)", 2, "end: SystemExit: 0"),
    ],
)
def test_a_run_that_has_learnt_nothing_is_no_success(what, code, says, training, tmp_path):
    """Neither if an augmentation spoils every step (but not the four trials before), nor if it leaves the
    program."""
    own = f"import itertools\nCALLS = itertools.count()\ndef end(x, draw):\n    {what}\n"
    (tmp_path / "own.py").write_text(own)
    ended = training(train__steps=3, augment__extra=f"{tmp_path / 'own.py'}:end")
    assert says in ended.last_line(code), ended.output
    assert not (tmp_path / "run" / "model").exists()


def test_a_rank_with_bad_crops_names_them(dataset, tmp_path):
    """A rank on its own saves what it has trained before."""
    shutil.copytree(dataset.root.url, tmp_path / "damaged")
    damaged = Dataset.open(str(tmp_path / "damaged"))
    config = load_config(tmp_path / "tiny.yaml", settings(tmp_path, damaged.root.url)[3::2], Config)
    order = Order((DatasetRows.select(damaged, training_selection(config)),), 8)
    row = int(order.places_of_rank(3, 1, 2).row[0])  # of rank 1, in the fourth step
    shard, offset, _ = damaged.addresses
    with open(tmp_path / "damaged" / "shards" / damaged.shards[shard[row]].name, "r+b") as file:
        file.seek(offset[row])
        file.write(bytes(200))
    for name, world, said in (
        ("two", 2, f"rank 1: .*crop {row} at byte"),
        ("one", 1, f"omnilead pretrain: /.*crop {row} at byte"),
    ):
        ended = pretrain(tmp_path, damaged.root.url, name, world)
        ended.last_line(*[1] * world)
        assert re.search(said, ended.output)
    assert newest_step(tmp_path / "one") == 3


def test_determinism_checkpoints_by_time_and_lost_output(training, tmp_path, monkeypatch):
    train, asked = Loop.train, []

    def noted(self, tracer):
        strict = torch.are_deterministic_algorithms_enabled()
        asked.append((strict, torch.backends.cudnn.allow_tf32))
        return train(self, tracer)

    monkeypatch.setattr(Loop, "train", noted)
    by_time = {"train__save_every_minutes": 1e-6, "train__keep": 9, "train__deterministic": True}
    training = partial(training, train__steps=2)
    training("plain").good()
    training("strict", **by_time).good()
    assert asked == [(False, False), (True, False)]
    saved = (tmp_path / "strict" / "checkpoints").glob("step-*")
    assert {path.name for path in saved} == {"step-1", "step-2"}
    output = training("unseen", before=full_output).good()
    assert output.count("\n") == 1 and "standard output: No space left" in output
    plain, strict, unseen = (curve(tmp_path / name) for name in ("plain", "strict", "unseen"))
    assert plain == strict == unseen


def full_output():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def little_memory():
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))


def test_a_long_run_on_a_cpu_is_estimated_before_its_first_step(training):
    said = training(train__steps=1, train__peak_tflops=1e-7).good()
    numbers = (
        r"estimate: (\d+) minutes on the CPU, .* \((\S+) GFLOP per crop at half the 0.0001 GFLOP/s"
    )
    found = re.search(numbers, said.partition("step 1/")[0])
    assert found and "of train.peak_tflops" in said
    minutes, gflop = map(float, found.groups())
    assert minutes == pytest.approx(8 * gflop / 0.5e-4 / 60, rel=0.01)
    assert "estimate" not in training("short", train__steps=1, train__peak_tflops=1e-6).good()


def test_out_of_memory_is_one_line(training):
    line = training(before=little_memory, pipeline__read_ahead=10**6).last_line(1)
    assert "omnilead pretrain: out of memory: lower train.micro_batch" in line


@pytest.mark.parametrize("replaced", [False, True])
def test_a_moved_or_replaced_run_ends_with_one_line(replaced, training, tmp_path, monkeypatch):
    """Another training may have begun in its place."""
    step = Loop._step

    def losing(self, batch):
        if self.progress.step == 3:
            run = self.folder.path
            run.rename(run.with_name("elsewhere"))
            if replaced:
                run.mkdir()
                (run / LOCK).touch()
        return step(self, batch)

    monkeypatch.setattr(Loop, "_step", losing)
    ended = training(train__steps=10_000, train__save_every_steps=5)
    assert "was moved or deleted" in ended.last_line(1) and "step 9/" not in ended.output
    run = tmp_path / "run"
    assert run.exists() == replaced and not (run / "checkpoints").exists()


def test_a_collapse_is_reported_once_and_early():
    task = SimpleNamespace(
        config=build_config({"model": {"codes": 320, "codebooks": 2}}), low_logs=0
    )
    codes = (600.0, 3.0, 3.0, 600.0, 3.0, 3.0, 3.0, 3.0)
    said = [PretrainTask.warning(task, {"code_perplexity": used}) for used in codes]
    assert [bool(one) for one in said] == [False] * 6 + [True, False]
    assert "3.0 of 640 codes" in str(said[6]) and "Raise objective.diversity" in str(said[6])
    said = [
        PretrainTask.warning(task, {"target_spread": one}) for one in (0.9, 0.04, 0.03, 0.02, 0.01)
    ]
    assert [bool(one) for one in said] == [False] * 3 + [True, False]
    assert "targets are collapsing" in str(said[3]) and "is 0.020 (target_spread)" in str(said[3])

"""Checkpoints: killed at any moment, damaged, forged, on a full disk, with code in their
pickles."""

import json
import os
import random
import resource
import shutil
import signal
import sys
from functools import partial
from itertools import count
from unittest import mock

import pytest
import torch
from handmade import flip
from ranks import column, curve, pretrain, run, settings, start

from omnilead.engine.pretrain import main
from omnilead.engine.training import checkpoint, checkpoint_files, export, loop
from omnilead.engine.training.checkpoint import FORBID_WEIGHTS_ONLY, FORCE_WEIGHTS_ONLY
from omnilead.engine.training.checkpoint_files import MANIFEST, CheckpointError, WriteError
from omnilead.engine.training.distributed import Ranks
from omnilead.engine.training.run_folder import RunFolder
from tests.forks import at_functions, death_at, started
from tests.waiting import until

ALONE = Ranks(0, 1, torch.device("cpu"), None)
KILLS, CALLS = 4, 150_000  # five steps and their checkpoints call as many functions
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def genuine(dataset, tmp_path_factory):
    """A run of three steps, each with its checkpoint."""
    tmp = tmp_path_factory.mktemp("genuine")
    how = {"train__save_every_steps": 1, "train__schedule": "fixed"}
    pretrain(tmp, dataset.root.url, train__steps=3, **how).good()
    return tmp / "run"


@pytest.fixture
def step(genuine, tmp_path):
    """The newest checkpoint of a copy, tmp_path / "run", which `resumed` continues."""
    shutil.copytree(genuine, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "step-3"


@pytest.fixture
def resumed(training, step):
    return partial(training, train__steps=4, train__schedule="fixed")


def made(root, *steps):
    for step in steps:
        (root / f"step-{step}").mkdir(parents=True)
        (root / f"step-{step}" / "state.json").write_text("{}")
        (root / f"step-{step}" / MANIFEST).write_text("{}")
        forge(root / f"step-{step}" / "state.json")


def forge(path, **changes):
    """Changes a JSON file and makes the manifest fit, as an attacker would."""
    if changes:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    manifest = json.loads((path.parent / MANIFEST).read_text())
    manifest[path.name] = {"bytes": path.stat().st_size, "crc32c": checkpoint_files.crc32c(path)}
    (path.parent / MANIFEST).write_text(json.dumps(manifest))


def one_line(error):
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    return str(error.value)


@pytest.mark.slow
def test_killed_at_any_time_it_resumes_and_ends_as_if_nothing_had_happened(
    dataset, training, tmp_path
):
    how = {"train__steps": 28, "train__save_every_steps": 1, "train__keep": 2}
    training("whole", **how).good()
    arguments = settings(tmp_path, dataset.root.url, "killed", **how)
    chance = random.Random(3)
    for _ in range(KILLS):
        die = partial(die_within, chance.randint(1, CALLS))
        (process,) = start(tmp_path, arguments, before=die)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it ended before the kill: lower CALLS"
        # the one that `latest` names is complete
        path = RunFolder(tmp_path / "killed").newest_checkpoint(pytest.fail)
        assert path is None or checkpoint_files.find_fault(path) is None
    run(tmp_path, arguments).good()
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")


def die_within(number):
    """Dies at the n-th call of a function in training or in its thread that writes, after the
    first checkpoint was copied."""
    save, die = checkpoint.Writer.save, death_at(number)

    def first(self, *args):
        save(self, *args)
        if not sys.getprofile():
            at_functions(die)

    checkpoint.Writer.save = first


@pytest.mark.parametrize("name", ["loader-rank0.json", "state.json", "manifest.json", "latest"])
def test_killed_between_any_two_files_of_a_checkpoint(name, training, tmp_path):
    training = partial(training, train__save_every_steps=2, train__steps=5)
    assert training(before=partial(die_before, name)).codes == [9]
    path = RunFolder(tmp_path / "run").newest_checkpoint(pytest.fail)
    assert path is not None and path.name == "step-2"
    assert "resumes after step 2" in training().good()
    assert column(tmp_path / "run") == [1, 2, 3, 4, 5]


def die_before(name):
    """Dies before the second checkpoint's file of this name exists."""
    written, calls = checkpoint.write_whole, iter(range(10))

    def deadly(path, text):
        if path.name == name and next(calls) == 1:
            os._exit(9)
        written(path, text)

    checkpoint.write_whole = deadly


def test_killed_while_the_progress_of_a_checkpoint_changes(step, monkeypatch):
    """It is whole, with the earlier progress."""
    before = checkpoint_files.read_state(step)
    progress = {"step": 3, "stale": 1, "best": {"step": 3, "loss": 0.5}}
    written = checkpoint.write_whole
    for dies_at in (checkpoint_files.BEST, checkpoint_files.MANIFEST, checkpoint_files.STATE):

        def deadly(path, text, dies_at=dies_at):
            if path.name == dies_at:
                raise KeyboardInterrupt
            written(path, text)

        monkeypatch.setattr(checkpoint, "write_whole", deadly)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.amend_progress(step.parent, progress)
        assert (
            checkpoint_files.find_fault(step) is None
            and checkpoint_files.read_state(step) == before
        )
    monkeypatch.setattr(checkpoint, "write_whole", written)
    checkpoint.amend_progress(step.parent, progress)
    assert (
        checkpoint_files.find_fault(step) is None
        and checkpoint_files.read_state(step) == before | progress
    )
    assert checkpoint_files.checkpoint_named(step.parent, checkpoint_files.BEST) == step
    flip(step / checkpoint_files.STATE, 20)
    assert "state.json: damaged" in checkpoint_files.find_fault(step)


def small_files():
    """Imitates a full disk: a file may grow to 60 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


@pytest.mark.parametrize("steps", [4, 10_000])
def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(steps, resumed, tmp_path):
    """Training knows of it at the next checkpoint at the latest."""
    ended = resumed(before=small_files, train__steps=steps, train__save_every_steps=2)
    last = ended.last_line(1)
    assert "File too large: free disk space" in last
    assert "the last good checkpoint is step-3" in last and column(tmp_path / "run")[-1] <= 7
    assert "resumes after step 3" in resumed().good()


def blocked(until_it):
    """The first file of a checkpoint is written when `until_it(writer)` is true."""
    write = checkpoint._PartFile.write

    def patched(self, data):
        if self.file.name.endswith(".pt"):
            until(partial(until_it, self.writer))
        write(self, data)

    checkpoint._PartFile.write = patched


def slow_disk(metrics):
    def next_is_due(writer):
        if len(metrics.read_text().splitlines()) >= 4:
            return True
        assert checkpoint_files.checkpoint_named(writer.root, checkpoint_files.LATEST) is None
        return False

    blocked(next_is_due)


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 1), (2, 2), (2, 3)])
def test_training_goes_on_while_a_checkpoint_is_written(world, stage, training, tmp_path):
    """It holds the step at which it was copied; the next one waits for it."""
    how = {"train__steps": 6, "train__keep": 9, "train__zero_stage": stage}
    training("whole", world, **how).good()
    how["train__save_every_steps"] = 2
    training("run", world, partial(slow_disk, tmp_path / "run" / "metrics.jsonl"), **how).good()
    root = tmp_path / "run" / "checkpoints"
    assert {path.name for path in root.glob("step-*")} == {"step-2", "step-4", "step-6"}
    assert not [path for path in root.rglob(".*") if path.is_file()]
    for step in ("step-4", "step-6"):
        shutil.rmtree(root / step)
    (root / "latest").write_text("step-2")
    assert "resumes after step 2" in training("run", world, **how).good()
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def slow_rank_1(out):
    """Writes nothing more, and the other rank soon gives up."""
    if os.environ["RANK"] == "1":
        blocked(lambda _: "rank 1 did not write its part" in out.read_text())
    else:
        write = checkpoint.Writer._wait_for_rank_manifests

        def impatient(self, path):
            self.settings = self.settings.model_copy(update={"timeout_s": 1.0})
            return write(self, path)

        checkpoint.Writer._wait_for_rank_manifests = impatient


def test_a_rank_that_does_not_write_its_part_ends_the_run(training, tmp_path):
    how = {"train__save_every_steps": 2, "train__steps": 10_000}
    ended = training(world=2, before=partial(slow_rank_1, tmp_path / "out.txt"), **how)
    assert ended.codes[0] == 2 and "Traceback" not in ended.output, ended.output
    assert "rank 1 did not write its part: if that rank still runs, put RUN" in ended.output
    assert RunFolder(tmp_path / "run").newest_checkpoint() is None


def stopped_in_write(number, times):
    """By a signal that comes while the second checkpoint is written."""
    loop.SECOND_SIGNAL_S = 0
    sent = count()

    def until_it(writer):
        second = checkpoint_files.checkpoint_named(writer.root, checkpoint_files.LATEST) is not None
        if second and writer.ends_s and next(sent) < times:
            os.kill(os.getpid(), number)
        return not second or next(sent) > times or not writer.ends_s

    blocked(until_it)


def test_sigterm_and_ctrl_c_while_a_checkpoint_is_written(training, tmp_path):
    how = {"train__save_every_steps": 2, "train__steps": 10_000}
    before = partial(stopped_in_write, signal.SIGTERM, 1)
    output = training("run", before=before, **how).good()
    newest = RunFolder(tmp_path / "run").newest_checkpoint(pytest.fail)
    assert f"stopped after {newest.name.replace('-', ' ')};" in output
    assert checkpoint_files.step_of(newest) >= 4
    ended = training("other", before=partial(stopped_in_write, signal.SIGINT, 10**6), **how)
    assert "stopped without a checkpoint" in ended.last_line(130)
    assert RunFolder(tmp_path / "other").newest_checkpoint(pytest.fail).name == "step-2"


def test_a_damaged_checkpoint_and_one_without_latest(resumed, step):
    flip(step / OPTIMIZER, 9_000)
    (step.parent / "latest").unlink()
    output = resumed().good()
    assert "resumes after step 2" in output and "latest" in output.splitlines()[0]
    assert f"{step / OPTIMIZER}: damaged" in output
    assert {path.name for path in step.parent.glob("step-*")} == {"step-2", "step-3", "step-4"}
    assert column(step.parents[1]) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "listed", [(), ("state.json", MODEL, "loader-rank0.json")], ids=["nothing", "not the optimizer"]
)
def test_a_manifest_that_does_not_list_every_file_means_damage(listed, resumed, step):
    flip(step / OPTIMIZER, 9_000)
    # left by an interrupted conversion: no damage
    (step / checkpoint_files.LATEST_UNIVERSAL).write_text("")
    assert "damaged: size or checksum" in str(checkpoint_files.find_fault(step))
    manifest = json.loads((step / MANIFEST).read_text())
    (step / MANIFEST).write_text(json.dumps({name: manifest[name] for name in listed}))
    output = resumed().good()
    assert "resumes after step 2" in output and "not listed in manifest.json" in output


def test_a_checkpoint_without_its_optimizer_is_not_resumed(resumed, step):
    (step / OPTIMIZER).unlink()
    manifest = json.loads((step / MANIFEST).read_text())
    del manifest[OPTIMIZER]
    (step / MANIFEST).write_text(json.dumps(manifest))
    assert "step-3" in resumed().one_line()


UNUSABLE = [None, b"", b"\xff\x00", b"../../elsewhere", b"step-", b"step-99", b"step-\xc2\xb2"]


@pytest.mark.parametrize("latest", [*UNUSABLE, b"step-" + b"9" * 5000], ids=lambda latest: "")
def test_without_a_usable_latest_the_newest_complete_one_counts(latest, tmp_path):
    root, said = tmp_path / "checkpoints", []
    made(root, 5, 10, 9)
    if latest is not None:
        (root / checkpoint_files.LATEST).write_bytes(latest)
    (root / "step-10" / MANIFEST).write_text(
        '{"gone.pt": {"bytes": 1, "crc32c": 1}, "state.json": {}}'
    )
    assert RunFolder(tmp_path).newest_checkpoint(said.append) == root / "step-9"
    (line,) = said
    assert "gone.pt" in line and "step-9" in line and ("latest" in line or "step-99" in line)


def test_damaged_checkpoints_are_refused_and_a_run_without_any_starts(tmp_path):
    assert RunFolder(tmp_path).newest_checkpoint() is None
    made(tmp_path / "checkpoints", 3)
    step = tmp_path / "checkpoints" / "step-3"
    for manifest in ("[]", "3", '{"a": 3}', '{"state.json": {}}', "[" * 100_000, "", "{}"):
        (step / MANIFEST).write_text(manifest)
        reason = checkpoint_files.find_fault(step)
        assert reason and "\n" not in reason
    with pytest.raises(CheckpointError):
        RunFolder(tmp_path).newest_checkpoint()


@pytest.mark.parametrize(
    ("keep", "left"), [(1, {5, 30, 40}), (2, {5, 20, 30, 40}), (9, {5, 10, 20, 30, 40})]
)
def test_only_checkpoints_up_to_the_newest_are_pruned(keep, left, tmp_path):
    """A run that resumed before step 40 keeps what it writes on its way there, and leaves step 40
    and copies alone."""
    made(tmp_path, 5, 10, 20, 30, 40)
    (tmp_path / "step-3.mine").mkdir()
    (tmp_path / checkpoint_files.BEST).write_text("step-5")
    checkpoint._prune(tmp_path, tmp_path / "step-30", keep)
    checkpoint_files.remove_leftovers(tmp_path, tmp_path / "step-31")
    names = {f"step-{step}" for step in left} | {"step-3.mine"}
    assert {path.name for path in tmp_path.glob("step-*")} == names


def test_two_processes_do_not_share_a_run(training, tmp_path):
    (tmp_path / "run").mkdir()
    with RunFolder(tmp_path / "run").locked(ALONE):
        for codes in ([2], [2, 2]):
            assert "another process trains here" in training(world=len(codes)).last_line(*codes)
    with (
        pytest.raises(CheckpointError, match=r"missing: .*--out RUN"),
        RunFolder(tmp_path / "missing").locked(ALONE),
    ):
        raise AssertionError


def test_the_model_is_written_under_the_runs_lock_and_ctrl_c_then_says_what_is_true(
    training, tmp_path, capsys
):
    run = tmp_path / "run"

    def interrupted(*_):
        with (
            pytest.raises(CheckpointError, match="another process"),
            RunFolder(run).locked(ALONE),
        ):
            raise AssertionError
        raise KeyboardInterrupt

    says = "omnilead pretrain: interrupted: the same command continues"
    with mock.patch.object(export, "write_export", interrupted):
        assert training(train__steps=1).last_line(130) == says
    with mock.patch.object(export, "write_export", side_effect=KeyboardInterrupt):
        assert main(["--export", str(run)]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == says
    assert not (run / "model").exists()
    training(train__steps=1).good()
    assert (run / "model").is_dir()


STATE = """{"step": 2, "crops_seen": 16, "skipped_steps": 0, "in_a_row": 0, "best": {}, "world": 1,
            "zero_stage": 1, "preprocessing_sha256": "0", "datasets": ["0"], "config": {}"""
WRONG = [
    *(f'"step": {step}' for step in ("-1", 2**64, '"2"', "2.0", "null", "true")),
    '"crops_seen": ' + "9" * 5000,
    '"world": 0',
    *(f'"code": {code}' for code in ('{"../../x.py": ""}', '{"x.txt": ""}', '["x.py"]', "3")),
    '"zero_stage": 4',
    '"datasets": "0"',
    '"config": []',
    '"best": {"step": "x"}',
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong[:30])
def test_a_forged_state_is_refused_by_name(wrong, tmp_path):
    (tmp_path / "state.json").write_text(f"{STATE}, {wrong}}}")
    with pytest.raises(CheckpointError) as error:
        checkpoint_files.read_state(tmp_path)
    assert "state.json" in one_line(error)


FORGED = ["", "[]", "{}", "null", "[" * 100_000, "\xff", '{"recipe": 3}']


@pytest.mark.parametrize("text", FORGED, ids=lambda text: text[:30])
def test_a_forged_loader_state_is_refused_by_name(text, tmp_path):
    (tmp_path / "loader-rank0.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError) as error:
        checkpoint_files.read_loader_state(tmp_path)
    assert "loader-rank0.json" in one_line(error)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("loader-rank0.json", {"crops_seen": 8}, "the loader's state is of step 1"),
        ("state.json", {"step": 1, "crops_seen": 8}, "state.json is of step 1"),
        ("state.json", {"config": {"train": {"lr": "x"}}}, "state.json: config: train.lr='x'"),
        ("state.json", {"crops_seen": 99}, "crops_seen=99, but 3 steps of 8 crops make 24"),
        ("state.json", {"world": 2}, "world=2, but 1 ranks wrote loader-rankR.json"),
    ],
)
def test_an_inconsistent_step_or_invalid_settings_in_a_checkpoint_are_one_line(
    name, changes, says, resumed, step
):
    forge(step / name, **changes)
    assert says in resumed().one_line()


def not_exported(run, capsys):
    assert main(["--export", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"crops_seen": 99}, "crops_seen=99, but 3 steps of 8 crops make 24"),
        ({"config": {"task": {}}}, "holds another run, a fine-tuning for None"),
        ({"code": ["x.py"]}, "code=['x.py']"),
        ({"code": {"../../../x.py": ""}}, "state.json: code."),
        ({"code": {"gone.py": ""}}, "code/gone.py: no such file"),
    ],
)
def test_a_forged_state_is_not_exported(changes, says, step, capsys):
    forge(step / "state.json", **changes)
    assert says in not_exported(step.parents[1], capsys)


class Payload:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


@pytest.fixture
def trace(tmp_path):
    """What a payload makes."""
    return tmp_path / "executed"


@pytest.fixture
def poisoned(request, step, trace):
    """A file of the newest checkpoint, with a payload that the manifest lists."""
    shutil.rmtree(step.parents[1] / "model")
    content = torch.load(step / MODEL, weights_only=True)
    content |= {"optimizer_state_dict": content["module"], "payload": Payload(trace)}
    torch.save(content, step / request.param)
    forge(step / request.param)
    return step / str(request.param)


RANK_1 = OPTIMIZER.replace("rank_0", "rank_1", 1)  # which one rank does not read


@pytest.mark.parametrize("poisoned", [MODEL, OPTIMIZER, RANK_1], indirect=True)
def test_no_training_runs_a_payload(poisoned, trace, resumed, tmp_path, capsys):
    run = tmp_path / "run"
    assert f"{poisoned.parent}: would run code" in not_exported(run, capsys)
    if poisoned.name != RANK_1:
        assert "would run code" in resumed().one_line()
    assert not trace.exists() and not (run / "model").exists()


def read_by_deepspeed(step, trace, out):
    """In a process of its own: export's zero_to_fp32 and the conversion for other ranks."""
    told = {}
    for read in (export.full_weights, checkpoint.to_universal):
        try:
            read(step)
            told[read.__name__] = "read"
        except (CheckpointError, WriteError) as error:
            told[read.__name__] = str(error)
    os.environ[FORBID_WEIGHTS_ONLY] = "1"
    torch.load(step / MODEL, weights_only=False)  # as it would be by anyone else
    told["before, after, environment"] = [
        trace.exists(),
        FORCE_WEIGHTS_ONLY in os.environ,
        os.environ[FORBID_WEIGHTS_ONLY],
    ]
    out.write_text(json.dumps(told))


@pytest.mark.parametrize("poisoned", [MODEL, OPTIMIZER], indirect=True)
def test_deepspeed_runs_no_payload(poisoned, trace, tmp_path):
    step, out = poisoned.parent, tmp_path / "told.json"
    started(read_by_deepspeed, step, trace, out, out=tmp_path / "out.txt").join()
    told = json.loads(out.read_text())
    found = [poisoned.name == MODEL, False, "1"]
    assert told.pop("before, after, environment") == found
    for text in told.values():
        assert f"{step}: would run code" in text and "\n" not in text


def test_a_planted_universal_folder_is_not_read(resumed, step, trace):
    planted = step / checkpoint.UNIVERSAL
    (planted / "zero" / "encoder.norm.weight").mkdir(parents=True)
    for place in (MODEL, "zero/encoder.norm.weight/fp32.pt"):
        torch.save(Payload(trace), planted / place)
    resumed(world=2).good()
    assert not trace.exists()


@pytest.mark.parametrize("kept", [slice(-300), slice(0), b"\x80\x02", b"hello"], ids=str)
def test_a_file_that_is_not_a_checkpoint_is_one_line(kept, step, capsys):
    file = step / MODEL
    file.write_bytes(file.read_bytes()[kept] if isinstance(kept, slice) else kept)
    forge(file)
    error = not_exported(step.parents[1], capsys)
    assert "step-3: cannot be read" in error or "step-3: holds more than weights" in error


def not_merged(*_):
    raise RuntimeError("basic_ios::clear: iostream error")


def fail_to_merge():
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main = not_merged


def test_a_full_disk_in_the_conversion_for_other_ranks_is_one_line(resumed, step):
    ended = resumed(world=2, before=fail_to_merge)
    ended.last_line(1, 1)
    says = "cannot be converted for another number of ranks: basic_ios"
    assert says in ended.output and not (step / ".universal").exists()

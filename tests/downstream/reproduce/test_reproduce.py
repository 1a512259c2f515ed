"""omnilead.downstream.reproduce: plans carried out by several workers, over kills, failures and
restarts."""

import fcntl
import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from omnilead.__main__ import main
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io import cluster
from omnilead.downstream.reproduce import __main__ as reproduce
from omnilead.downstream.reproduce import jobs, paper, start
from omnilead.downstream.reproduce.jobs import Job, WorkDir
from tests.data_tools.test_cluster import dask  # noqa: F401
from tests.forks import started
from tests.waiting import until

JOBS = 1 + 2 * 2 * 2 * 2  # one model; two rows, two columns, two seeds: fine-tuned and evaluated
ERROR = "engine/pretrain.py: loss is not finite: lower train.lr"


class Lab:
    """A folder for downstream.reproduce, whose jobs are fake.py."""

    def __init__(self, dataset, folder):
        self.data, self.out, self.fake = dataset.root.url, folder / "out", folder / "fake"
        self.fake.mkdir()
        for name in ("ran", "fail", "hang"):
            self.let(name, "")

    def let(self, what, jobs):
        (self.fake / what).write_text(jobs)

    def arguments(self, *more, rows=2):
        words = (
            f"--table 1 --data {self.data} --out {self.out} --scale smoke --seeds 2 --leads 12 1"
        )
        names = ("Random Init.", "W2V")[:rows]
        return [*words.split(), "--tasks", "Dx", "--rows", *names, *more]

    def main(self, *more, rows=2):
        return reproduce.main(self.arguments(*more, rows=rows))

    def ran(self):
        return (self.fake / "ran").read_text().splitlines()

    def all_ran_once(self, jobs):
        return len(self.ran()) == len(set(self.ran())) == jobs

    def hanging(self):
        (mark,) = until(lambda: list(self.fake.glob("hangs.*")))
        return psutil.Process(int(mark.suffix[1:]))

    def states(self):
        cells = json.loads((self.out / "table-1.json").read_text())["cells"]
        return Counter(cell["state"] for cell in cells)


@pytest.fixture
def lab(dataset, tmp_path, monkeypatch):
    made = Lab(dataset, tmp_path)
    use_fake_jobs(made.fake, monkeypatch)
    return made


def use_fake_jobs(fake, monkeypatch):
    program = str(Path(__file__).with_name("fake.py"))
    monkeypatch.setattr(jobs, "RUN_OMNILEAD", (program, str(fake)))
    monkeypatch.setattr(jobs, "POLL_S", 0.02)


def command(words, fake):
    """In a process of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_fake_jobs(fake, monkeypatch)
        return reproduce.main(words)


def test_jobs_run_once_a_failed_one_stops_no_other_and_is_retried(lab, capsys):
    lab.let("fail", "random-12/diagnosis-12-seed1 w2v-12")
    assert lab.main("--jobs", "2") == 1
    out, err = capsys.readouterr()
    kinds = "(1 pretrain, 8 finetune, 8 evaluate)"
    assert f"{JOBS} of {JOBS} jobs left {kinds}: about 26 s, 2 at a time\n" in out
    failed = ["finetune/random-12/diagnosis-12-seed1", "pretrain/w2v-12"]
    printed = [f"{name} failed: {ERROR}" for name in failed]
    assert sorted(err.splitlines()) == printed and len(lab.ran()) == 6
    assert lab.states() == {"done": 1, "part": 1, "failed": 2, "not asked": 66}
    lab.let("fail", "")
    assert lab.main("--jobs", "2") == 0
    assert lab.all_ran_once(JOBS) and lab.states() == {"done": 4, "not asked": 66}
    assert {path.parts[-3] for path in lab.out.rglob("checkpoints")} == {"pretrain"}
    assert json.loads((lab.out / "jobs" / "pretrain_w2v-12.json").read_text())["seconds"] > 0
    assert lab.main() == 0 and lab.all_ran_once(JOBS)  # nothing is left to run
    assert f"{JOBS} of {JOBS} jobs done" in capsys.readouterr().out


def test_a_killed_command_takes_its_jobs_down_and_continues_when_run_again(lab, tmp_path):
    lab.let("hang", "random-12/diagnosis-P-1-seed0")
    process = started(command, lab.arguments(rows=1), lab.fake, out=tmp_path / "log")
    job = lab.hanging()
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not job.is_running())
    lab.let("hang", "")
    assert lab.main(rows=1) == 0 and lab.all_ran_once(8)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_stop_signal_lets_jobs_save(number, code, lab, capsys):
    lab.let("hang", "random-12")

    def stop():
        try:
            lab.hanging()
        finally:
            os.kill(os.getpid(), number)

    threading.Thread(target=stop).start()
    assert lab.main(rows=1) == code
    (hung,) = lab.fake.glob("hangs.*")
    assert not psutil.pid_exists(int(hung.suffix[1:]))
    assert "0 of 8 jobs done; run the same command again" in capsys.readouterr().out
    assert lab.states() == {"not yet": 2, "not asked": 68}
    assert not list((lab.out / "jobs").glob("stop-*"))


def test_jobs_of_a_killed_dask_worker_run_on_another(lab, tmp_path, dask):  # noqa: F811
    address, (_, *workers) = dask
    lab.let("hang", "random-12/diagnosis-12-seed0")
    caller = started(
        command, lab.arguments("--cluster", address, rows=1), lab.fake, out=tmp_path / "log"
    )
    job = lab.hanging()
    lab.let("hang", "")
    os.kill(job.ppid(), signal.SIGKILL)
    until(lambda: not job.is_running())
    caller.join()
    assert caller.exitcode == 0, (tmp_path / "log").read_text()
    assert sum(worker.is_alive() for worker in workers) == 1
    assert lab.all_ran_once(8) and lab.states()["done"] == 2


def test_two_commands_never_run_the_same_job_at_once(lab, monkeypatch):
    waits = threading.Event()
    asleep = SimpleNamespace(sleep=lambda s: waits.set() or time.sleep(s), monotonic=time.monotonic)
    monkeypatch.setattr(jobs, "time", asleep)
    folder, stop = WorkDir(lab.out), lab.out / "stop"
    (lab.out / "jobs").mkdir(parents=True)
    words = (*jobs.RUN_OMNILEAD, "pretrain", "--set", f'run="{lab.out}/pretrain/x"')
    job = Job("pretrain/x", words, (), "pretrain/x/model")
    with open(folder.job_file(job, "lock"), "w") as held, jobs.local_executor(1) as executor:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = executor.submit(jobs.run_job, folder, job, words, stop)
        waits.wait()
        stop.touch()  # asked to stop, it does not wait for the other command
        assert waiting.result() == jobs.STOPPED
        stop.unlink()
        waits.clear()
        waiting = executor.submit(jobs.run_job, folder, job, words, stop)
        waits.wait()
        (lab.out / job.makes).mkdir(parents=True)  # the other command finishes it
        held.close()
        assert waiting.result() == "" and not lab.ran()


def test_each_worker_has_a_gpu_and_a_share_of_the_cores(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    together = threading.Barrier(4)
    with jobs.local_executor(4) as executor:
        futures = [
            executor.submit(lambda: (together.wait(), jobs._child_environment())[1])
            for _ in range(4)
        ]
    environments = [future.result() for future in futures]
    cores = str(max(1, len(os.sched_getaffinity(0)) // 4))
    assert Counter(environment["CUDA_VISIBLE_DEVICES"] for environment in environments) == {
        "3": 2,
        "5": 2,
    }
    assert {environment["OMP_NUM_THREADS"] for environment in environments} == {cores}


def test_a_moved_dataset_goes_on_and_changed_configs_are_refused(
    lab, tmp_path, monkeypatch, capsys
):
    assert lab.main(rows=1) == 0
    (tmp_path / "moved").symlink_to(lab.data)
    lab.data = tmp_path / "moved"
    assert lab.main(rows=1) == 0 and lab.all_ran_once(8)
    monkeypatch.setattr(paper, "settings_checksum", lambda *_: " changed")
    capsys.readouterr()
    assert lab.main(rows=1) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"than this plan's: {lab.out}/finetune/random-12/" in err
    assert "and 5 more: remove them, or use another --out" in err


def test_a_folder_of_an_earlier_version_goes_on(lab, capsys):
    """Its commands named data and runs by --set; what it depended on is the same, or refused."""
    assert lab.main() == 0
    place = lab.out / jobs.COMMANDS_FILE
    commands = json.loads(place.read_text())
    name = "pretrain/w2v-12"
    last = commands[name].split()[-1]
    earlier = f"omnilead pretrain --config w2v --set 'data.datasets=[\"DATA\"]' {last}"
    place.write_text(json.dumps(commands | {name: earlier}))
    assert lab.main() == 0 and lab.all_ran_once(JOBS)
    assert json.loads(place.read_text()) == commands
    place.write_text(json.dumps(commands | {name: f"{earlier}0"}))
    assert lab.main() == 2
    assert f"than this plan's: {lab.out}/{name}, " in capsys.readouterr().err


def test_dry_run_and_collect_only(lab, capsys):
    assert lab.main("--dry-run") == 0
    printed = capsys.readouterr().out
    assert not lab.out.exists() and printed.count("\nomnilead ") == JOBS
    assert printed.rstrip().endswith("about 51 s, 1 at a time")
    assert "# pretrain/w2v-12: about 3 s\nomnilead pretrain --config " in printed
    lab.let("fail", "finetune")
    assert lab.main(rows=1) == 1
    assert reproduce.main(["--table", "2", "--out", str(lab.out), "--collect-only"]) == 0
    text = (lab.out / "table-2.md").read_text()
    assert "..." in text and "Scale `smoke`" in text


def test_ctrl_c_before_a_job_runs_is_one_line(lab, monkeypatch, capsys):
    monkeypatch.setattr(
        start, "read_dataset_info", lambda url: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert lab.main() == 130
    assert capsys.readouterr().err.count("\n") == 1


SCALES = {
    "list": "pretrain: []",
    "empty": "[]",
    "typo": "pretrain: {model: {widht: 3}}",
    "typo2": "identification: {train: {stps: 6}}",
    "both": "diagnosis: {train: {steps: 6, epochs: 2}}",
    "three": "pretrain: 3",
    "long": "minutes: {pretrain: long}",
}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--table 5", "argument --table: invalid choice: 5"),
        ("--seeds 0", "argument --seeds: 0:"),
        ("--data=", "--data"),
        ("--data {tmp}/nothing", "nothing: does not exist"),
        ("--scale huge", "--scale 'huge'"),
        ("--rows W3V", "--rows 'W3V': table 1 has no such row: use Random Init., W2V, CMSC"),
        ("--cluster tcp://127.0.0.1:1", "--cluster tcp://127.0.0.1:1: no scheduler answers"),
        ("--out {tmp}/typo.yaml", "typo.yaml: this is a file or a dataset"),
        ("--out {data}", "this is a file or a dataset"),
        ("--out /proc/x", "/proc/x"),
        ("--out {used}", "scale was small and is smoke"),
        ("--out {changed}", "settings was {'pretrain': {}} and is {'pretrain': {'"),
        ("--scale {tmp}/typo.yaml", "model.widht"),
        ("--scale {tmp}/typo2.yaml --tasks Id", "train.stps"),
        ("--scale {tmp}/both.yaml", "train.steps=6, train.epochs=2.0"),
        ("--scale {tmp}/three.yaml", "three.yaml: pretrain is 3"),
        ("--scale {tmp}/long.yaml", "write a number for pretrain, finetune, evaluate"),
        ("--scale {tmp}/list.yaml", "list.yaml: pretrain is []: write a table"),
        ("--scale {tmp}/empty.yaml", "empty.yaml: settings must be a mapping"),
        ("--collect-only", "settings/data.json"),
        ("--out {used} --collect-only", "settings/data.json"),
    ],
)
def test_errors_are_one_line(words, says, lab, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    monkeypatch.setattr(jobs, "run_jobs", lambda *_: pytest.fail("jobs were run"))
    for name, text in SCALES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    folders = {"used": '{"scale": "small"}', "changed": '{"settings": {"pretrain": {}}}'}
    for name, text in folders.items():
        (tmp_path / name / "settings").mkdir(parents=True)
        (tmp_path / name / "settings/data.json").write_text(text)
        folders[name] = tmp_path / name
    try:
        code = lab.main(*words.format(tmp=tmp_path, data=lab.data, **folders).split())
    except SystemExit as error:
        code = error.code
    err = capsys.readouterr().err
    assert code == 2 and says in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("plan", "role", "says"),
    [
        ("paper", "dx train", "add records of CPSC 2018 or Georgia, or name other sources"),
        ("paper", "id gallery", "add PTB-XL, whose patients have several sessions, or name other"),
        ("paper", "id valid", "add more records"),
        ("all", "id train", "it was built with --plan all: use --plan paper"),
        ("paper-split", "dx test", "it was built with --plan paper-split: use --plan paper"),
    ],
)
def test_data_without_the_roles_are_one_line(plan, role, says, lab, dataset, monkeypatch, capsys):
    group, name = role.split()
    roles = json.loads(json.dumps(dataset.meta["roles"]))
    roles[group][name] = 0
    without = Dataset(dataset.root, dataset.meta | {"roles": roles, "plan": plan})
    monkeypatch.setattr(start.Dataset, "open", lambda url: without)
    assert lab.main("--dry-run") == 2
    line = f"omnilead reproduce: --data {lab.data}: no crop has the role {role}: {says}"
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize("roles", [3, {"dx": 3}, {"dx": {"train": "x"}}, {"pretrain": -1}, [[]]])
def test_forged_roles_of_a_folder_are_one_line(roles, lab, capsys):
    facts = {"scale": "smoke", "path": "x", "fingerprint": "x", "split": "paper", "roles": roles}
    (lab.out / "settings").mkdir(parents=True)
    (lab.out / "settings" / "data.json").write_text(json.dumps(facts))
    assert lab.main("--collect-only") == 2
    assert "data.json: missing or damaged" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cell_of_real_jobs(dataset, tmp_path, monkeypatch):
    """A few steps of pre-training and fine-tuning by the programs themselves, and a score that the
    table shows."""

    class Forked:
        """A job's process, forked from one that has imported torch."""

        def __init__(self, command, **_):
            self.process = started(main, command[5:], out=tmp_path / "log")
            self.terminate = self.process.terminate

        def poll(self):
            return self.process.exitcode

        def wait(self):
            self.process.join()
            return int(self.process.exitcode)

    monkeypatch.setattr(jobs.subprocess, "Popen", Forked)
    words = f"--table 2 --data {dataset.root.url} --out {tmp_path} --scale smoke --seeds 1"
    words += " --rows W2V+CMSC+RLM --leads 2 --tasks Dx"
    assert reproduce.main(words.split()) == 0
    cells = json.loads((tmp_path / "table-2.json").read_text())["cells"]
    (done,) = [cell for cell in cells if cell["state"] == "done"]
    assert (done["row"], done["column"], done["task"]) == ("W2V+CMSC+RLM", "2-lead", "Dx")
    scored = tmp_path / "scores/w2v_cmsc_rlm-2/diagnosis-2-seed0.json"
    score = json.loads(scored.read_text())["score"]
    assert done["mean"] == score
    assert f"{score:.3f} / 0.660 ± 0.003" in (tmp_path / "table-2.md").read_text()

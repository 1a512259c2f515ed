"""omnilead.engine.reproduce: plans carried out by several workers, over kills, failures and
restarts."""

import fcntl
import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from omnilead.data_tools import cluster
from omnilead.data_tools.dataset import Dataset
from omnilead.engine import evaluate, finetune, pretrain
from omnilead.engine.reproduce import __main__ as reproduce
from omnilead.engine.reproduce import jobs, plan, run
from omnilead.engine.reproduce.plan import Job
from omnilead.engine.reproduce.workdir import WorkDir
from tests.data_tools.test_cluster import Dask, dask  # noqa: F401
from tests.forks import started
from tests.waiting import until

JOBS = 1 + 2 * 2 * 2 * 2  # one model; two rows, two columns, two seeds: fine-tuned and evaluated
ERROR = "engine/pretrain.py: loss is not finite: lower train.lr"


class Lab:
    """A folder for engine.reproduce, whose jobs are fake.py."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self.data, self.out, self.fake = dataset.root.url, folder / "out", folder / "fake"
        self.fake.mkdir()
        for name in ("ran", "fail", "hang"):
            self.let(name, "")

    def let(self, what: str, jobs: str) -> None:
        (self.fake / what).write_text(jobs)

    def arguments(self, *more: str, rows: int = 2) -> list[str]:
        given = [
            "--table",
            "1",
            "--data",
            self.data,
            "--out",
            str(self.out),
            "--scale",
            "smoke",
            "--seeds",
            "2",
        ]
        return [
            *given,
            "--rows",
            *("Random Init.", "W2V")[:rows],
            "--leads",
            "12",
            "1",
            "--tasks",
            "Dx",
            *more,
        ]

    def main(self, *more: str, rows: int = 2) -> int:
        return reproduce.main(self.arguments(*more, rows=rows))

    def ran(self) -> list[str]:
        return (self.fake / "ran").read_text().splitlines()

    def hanging(self) -> psutil.Process:
        return psutil.Process(
            int(until(lambda: list(self.fake.glob("hangs-*")))[0].name.removeprefix("hangs-"))
        )

    def states(self) -> Counter[str]:
        return Counter(
            cell["state"] for cell in json.loads((self.out / "table-1.json").read_text())["cells"]
        )


@pytest.fixture
def lab(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(dataset, tmp_path)
    use_fake_jobs(made.fake, monkeypatch)
    return made


def use_fake_jobs(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in plan.PROGRAMS:
        monkeypatch.setitem(
            plan.PROGRAMS, kind, (str(Path(__file__).with_name("fake.py")), str(fake), kind)
        )
    monkeypatch.setattr(jobs, "POLL_S", 0.02)
    monkeypatch.setattr(run, "flops_per_s", lambda config: 1e10)


def command(given: list[str], fake: Path) -> int:
    """In a process of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_fake_jobs(fake, monkeypatch)
        return reproduce.main(given)


def test_jobs_run_once_a_failed_one_stops_no_other_and_is_retried(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.let("fail", "random-12/diagnosis-12-seed1 w2v-12")
    assert lab.main("--jobs", "2") == 1
    out, err = capsys.readouterr()
    assert f"{JOBS} jobs (1 pretrain, 8 finetune, 8 evaluate), {JOBS} to run: about " in out
    told = [
        f"omnilead reproduce: {name} failed: {ERROR}"
        for name in ("finetune/random-12/diagnosis-12-seed1", "pretrain/w2v-12")
    ]
    assert sorted(err.splitlines()) == told
    assert len(lab.ran()) == 6 and lab.states() == {
        "done": 1,
        "part": 1,
        "failed": 2,
        "not asked": 66,
    }
    lab.let("fail", "")
    assert lab.main("--jobs", "2") == 0
    assert len(lab.ran()) == len(set(lab.ran())) == JOBS and lab.states() == {
        "done": 4,
        "not asked": 66,
    }
    assert not list((lab.out / "finetune").rglob("checkpoints")) and list(
        (lab.out / "pretrain").rglob("checkpoints")
    )
    assert json.loads((lab.out / "jobs" / "pretrain_w2v-12.json").read_text())["seconds"] > 0
    assert lab.main() == 0 and len(lab.ran()) == JOBS  # nothing is left to run
    assert f"{JOBS} of {JOBS} jobs done" in capsys.readouterr().out


def test_a_killed_command_takes_its_jobs_down_and_continues_when_run_again(
    lab: Lab, tmp_path: Path
) -> None:
    lab.let("hang", "random-12/diagnosis-P-1-seed0")
    process = started(command, lab.arguments(rows=1), lab.fake, out=tmp_path / "log")
    job = lab.hanging()
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not job.is_running())
    lab.let("hang", "")
    assert lab.main(rows=1) == 0
    assert len(lab.ran()) == len(set(lab.ran())) == 8


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_stop_signal_lets_jobs_save(
    number: int, code: int, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.let("hang", "random-12")
    threading.Thread(target=lambda: (lab.hanging(), os.kill(os.getpid(), number))).start()
    assert lab.main(rows=1) == code
    (hung,) = lab.fake.glob("hangs-*")
    assert not psutil.pid_exists(int(hung.name.removeprefix("hangs-")))
    assert "0 of 8 jobs done; run the same command again" in capsys.readouterr().out
    assert lab.states() == {"not yet": 2, "not asked": 68} and not list(
        (lab.out / "jobs").glob("stop-*")
    )


def test_jobs_of_a_killed_dask_worker_run_on_another(lab: Lab, tmp_path: Path, dask: Dask) -> None:  # noqa: F811
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
    assert len(lab.ran()) == len(set(lab.ran())) == 8 and lab.states()["done"] == 2


def test_two_commands_never_run_the_same_job_at_once(lab: Lab) -> None:
    folder = WorkDir(lab.out)
    (lab.out / "jobs").mkdir(parents=True)
    job = Job(
        "pretrain/x",
        (*plan.PROGRAMS["pretrain"], "--set", f'run="{lab.out}/pretrain/x"'),
        (),
        "pretrain/x/model",
        1.0,
    )
    with open(folder.file(job, "lock"), "w") as held, jobs.on_this_machine(1) as executor:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = executor.submit(jobs.run_job, folder, job, lab.out / "stop")
        time.sleep(0.2)
        assert not lab.ran()
        (lab.out / job.result).mkdir(parents=True)  # the other command finishes it
        held.close()
        assert waiting.result() == "" and not lab.ran()


def test_each_worker_has_a_gpu_and_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    together = threading.Barrier(4)
    with jobs.on_this_machine(4) as executor:
        found = [
            executor.submit(lambda: (together.wait(), jobs._environment())[1]) for _ in range(4)
        ]
    assert sorted(future.result()["CUDA_VISIBLE_DEVICES"] for future in found) == [
        "3",
        "3",
        "5",
        "5",
    ]
    assert {future.result()["OMP_NUM_THREADS"] for future in found} == {
        str(max(1, len(os.sched_getaffinity(0)) // 4))
    }


def test_dry_run_and_collect_only(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.main("--dry-run") == 0
    told = capsys.readouterr().out
    assert (
        not lab.out.exists()
        and told.count("\nomnilead ") == JOBS
        and told.rstrip().endswith(" GB of results")
    )
    assert "# pretrain/w2v-12: about 10 s\nomnilead pretrain --config " in told
    lab.let("fail", "finetune")
    assert lab.main(rows=1) == 1
    assert reproduce.main(["--table", "2", "--out", str(lab.out), "--collect-only"]) == 0
    assert (
        "..." in (lab.out / "table-2.md").read_text()
        and "Scale `smoke`" in (lab.out / "table-2.md").read_text()
    )


def test_ctrl_c_before_a_job_runs_is_one_line(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "flops_per_s", lambda config: (_ for _ in ()).throw(KeyboardInterrupt))
    assert lab.main() == 130
    assert capsys.readouterr().err.count("\n") == 1


SCALES = {
    "typo": "pretrain: {model: {widht: 3}}",
    "typo2": "identification: {train: {stps: 6}}",
    "both": "diagnosis: {train: {steps: 6, epochs: 2}}",
    "three": "pretrain: 3",
}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--table 5", "argument --table: invalid choice: 5"),
        ("--seeds 0", "argument --seeds: '0'"),
        ("--data=", "--data"),
        ("--data {tmp}/nothing", "nothing: no dataset.json"),
        ("--scale huge", "--scale 'huge'"),
        ("--rows W3V", "--rows 'W3V'"),
        ("--cluster tcp://127.0.0.1:1", "--cluster tcp://127.0.0.1:1: no scheduler answers"),
        ("--out {tmp}/typo.yaml", "typo.yaml: is a file or a dataset"),
        ("--out {data}", "is a file or a dataset"),
        ("--out /proc/x", "/proc/x"),
        ("--out {used}", "data: scale was small and is smoke"),
        ("--scale {tmp}/typo.yaml", "model.widht"),
        ("--scale {tmp}/typo2.yaml --tasks Id", "train.stps"),
        ("--scale {tmp}/both.yaml", "train.steps=6, train.epochs=2.0"),
        ("--scale {tmp}/three.yaml", "three.yaml: pretrain: 3"),
        ("--collect-only", "settings/data.json"),
        ("--out {used} --collect-only", "settings/data.json"),
    ],
)
def test_errors_are_one_line(
    given: str,
    says: str,
    lab: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    monkeypatch.setattr(run, "run_jobs", lambda *_: pytest.fail("jobs were run"))
    for name, text in SCALES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    used = tmp_path / "used" / "settings"
    used.mkdir(parents=True)
    used.joinpath("data.json").write_text('{"scale": "small"}')
    try:
        code = lab.main(*given.format(tmp=tmp_path, data=lab.data, used=used.parent).split())
    except SystemExit as error:
        code = int(error.code or 0)
    err = capsys.readouterr().err
    assert code == 2 and says in err and err.count("\n") == 1, err


def test_data_without_the_roles_are_one_line(
    lab: Lab, dataset: Dataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(dataset.meta, "roles", {"pretrain": 5, "dx": {}, "id": {}})
    monkeypatch.setattr(run.Dataset, "open", lambda url: dataset)
    assert lab.main() == 2 and "no crop has the role dx train" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cell_of_real_jobs(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few steps of pre-training and fine-tuning by the programs themselves, and a score that the
    table shows."""

    class Forked:
        """A job's process, forked from one that has imported torch."""

        def __init__(self, command: list[str], **_: Any) -> None:
            program = {"pretrain": pretrain, "finetune": finetune, "evaluate": evaluate}[
                command[4].split(".")[-1]
            ]
            self.process = started(program.main, command[5:], out=tmp_path / "log")
            self.terminate = self.process.terminate

        def poll(self) -> int | None:
            return self.process.exitcode

        def wait(self) -> int:
            self.process.join()
            return int(self.process.exitcode)

    monkeypatch.setattr(jobs.subprocess, "Popen", Forked)
    monkeypatch.setattr(run, "flops_per_s", lambda config: 1e9)
    given = [
        "--table",
        "2",
        "--data",
        dataset.root.url,
        "--out",
        str(tmp_path),
        "--scale",
        "smoke",
        "--seeds",
        "1",
    ]
    assert reproduce.main([*given, "--rows", "W2V+CMSC+RLM", "--leads", "2", "--tasks", "Dx"]) == 0
    cells = json.loads((tmp_path / "table-2.json").read_text())["cells"]
    (done,) = [cell for cell in cells if cell["state"] == "done"]
    assert (done["row"], done["column"], done["task"]) == ("W2V+CMSC+RLM", "2-lead", "Dx")
    score = json.loads(
        (tmp_path / "scores" / "w2v_cmsc_rlm-2" / "diagnosis-2-seed0.json").read_text()
    )["score"]
    assert (
        done["mean"] == score
        and f"{score:.3f} / 0.660 ± 0.003" in (tmp_path / "table-2.md").read_text()
    )

"""engine.reproduce: plans carried out by several workers, over kills, failures and restarts."""

import fcntl
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_tools import cluster
from data_tools.dataset import Dataset
from engine import evaluate, finetune, pretrain, reproduce
from engine.reproduction import jobs, paper, plan
from engine.reproduction.plan import Job
from engine.reproduction.workdir import WorkDir
from tests.data_tools.test_cluster import Dask, dask  # noqa: F401
from tests.forks import started
from tests.waiting import until

JOBS = 1 + 2 * 2 * 2 * 2  # one model; two rows, two columns, two seeds: fine-tuned and evaluated
ERROR = "engine/pretrain.py: loss is not finite: lower train.lr"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "fake"
    folder.mkdir()
    for name in ("ran", "fail", "hang"):
        (folder / name).write_text("")
    use_fake(folder, monkeypatch.setattr, monkeypatch.setitem)
    return folder


def use_fake(folder: Path, set_attribute: Callable[..., None], set_item: Callable[..., None]) -> None:
    for kind in plan.PROGRAMS:
        set_item(plan.PROGRAMS, kind, (str(Path(__file__).with_name("fake.py")), str(folder), kind))
    set_attribute(jobs, "POLL_S", 0.02)
    set_attribute(reproduce, "flops_per_s", lambda config: 1e10)


def arguments(dataset: Dataset, tmp_path: Path, *more: str, rows: int = 2) -> list[str]:
    given = ["--table", "1", "--data", dataset.root.url, "--out", str(tmp_path / "out"), "--scale", "smoke", "--seeds", "2"]
    return [*given, "--rows", *("Random Init.", "W2V")[:rows], "--leads", "12", "1", "--tasks", "Dx", *more]


def command(given: list[str], fake: Path) -> int:
    """In a process of its own."""
    use_fake(fake, setattr, dict.__setitem__)
    return reproduce.main(given)


def ran(fake: Path) -> list[str]:
    return (fake / "ran").read_text().splitlines()


def hanging(fake: Path) -> psutil.Process:
    return psutil.Process(int(until(lambda: list(fake.glob("hangs-*")))[0].name.removeprefix("hangs-")))


def states(tmp_path: Path) -> Counter[str]:
    return Counter(cell["state"] for cell in json.loads((tmp_path / "out" / "table-1.json").read_text())["cells"])


def test_jobs_run_once_a_failed_one_stops_no_other_and_is_retried(
    dataset: Dataset, tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake / "fail").write_text("random-12/diagnosis-12-seed1 w2v-12")
    given = arguments(dataset, tmp_path, "--jobs", "2")
    assert reproduce.main(given) == 1
    out, err = capsys.readouterr()
    assert f"{JOBS} jobs (1 pretrain, 8 finetune, 8 evaluate), {JOBS} to run: about " in out
    told = [
        f"engine.reproduce: {name} failed: {ERROR}" for name in ("finetune/random-12/diagnosis-12-seed1", "pretrain/w2v-12")
    ]
    assert sorted(err.splitlines()) == told
    assert len(ran(fake)) == 6 and states(tmp_path) == {"done": 1, "part": 1, "failed": 2, "not asked": 66}
    (fake / "fail").write_text("")
    assert reproduce.main(given) == 0
    assert len(ran(fake)) == len(set(ran(fake))) == JOBS and states(tmp_path) == {"done": 4, "not asked": 66}
    out = tmp_path / "out"
    assert not list((out / "finetune").rglob("checkpoints")) and list((out / "pretrain").rglob("checkpoints"))
    assert json.loads((out / "jobs" / "pretrain_w2v-12.json").read_text())["seconds"] > 0
    assert reproduce.main(arguments(dataset, tmp_path)) == 0 and len(ran(fake)) == JOBS  # nothing is left to run
    assert f"{JOBS} of {JOBS} jobs done" in capsys.readouterr().out


def test_a_killed_command_takes_its_jobs_down_and_continues_when_run_again(
    dataset: Dataset, tmp_path: Path, fake: Path
) -> None:
    (fake / "hang").write_text("random-12/diagnosis-P-1-seed0")
    given = arguments(dataset, tmp_path, rows=1)
    process = started(command, given, fake, out=tmp_path / "log")
    job = hanging(fake)
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not job.is_running())
    (fake / "hang").write_text("")
    assert reproduce.main(given) == 0
    assert len(ran(fake)) == len(set(ran(fake))) == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_lets_jobs_save_and_exits_with_0(
    number: int, dataset: Dataset, tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake / "hang").write_text("random-12")
    threading.Thread(target=lambda: (hanging(fake), os.kill(os.getpid(), number))).start()
    assert reproduce.main(arguments(dataset, tmp_path, rows=1)) == 0
    (hung,) = fake.glob("hangs-*")
    assert not psutil.pid_exists(int(hung.name.removeprefix("hangs-")))
    assert "0 of 8 jobs done; run the same command again" in capsys.readouterr().out
    assert states(tmp_path) == {"not yet": 2, "not asked": 68}
    assert not list((tmp_path / "out" / "jobs").glob("stop-*"))


def test_jobs_of_a_killed_dask_worker_run_on_another(
    dataset: Dataset,
    tmp_path: Path,
    fake: Path,
    dask: Dask,  # noqa: F811
) -> None:
    address, (_, *workers) = dask
    (fake / "hang").write_text("w2v-12/diagnosis-12-seed0")
    caller = started(command, arguments(dataset, tmp_path, "--cluster", address), fake, out=tmp_path / "log")
    job = hanging(fake)
    (fake / "hang").write_text("")
    os.kill(job.ppid(), signal.SIGKILL)
    until(lambda: not job.is_running())
    caller.join()
    assert caller.exitcode == 0, (tmp_path / "log").read_text()
    assert sum(worker.is_alive() for worker in workers) == 1
    assert len(ran(fake)) == len(set(ran(fake))) == JOBS and states(tmp_path)["done"] == 4


def test_two_commands_never_run_the_same_job_at_once(tmp_path: Path, fake: Path) -> None:
    folder, stop = WorkDir(tmp_path), tmp_path / "stop"
    (tmp_path / "jobs").mkdir()
    job = Job("pretrain/x", (*plan.PROGRAMS["pretrain"], "--set", f'run="{tmp_path}/pretrain/x"'), (), 1.0, 1.0)
    with open(folder.file(job, "lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with jobs.on_this_machine(1) as executor:
            future = executor.submit(jobs.run_job, folder, job, stop)
            time.sleep(0.2)
            assert not ran(fake)
            (tmp_path / job.result).mkdir(parents=True)  # the other command finishes it
            held.close()
            assert future.result() == "" and not ran(fake)


def test_each_worker_has_a_gpu_and_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    together = threading.Barrier(4)
    with jobs.on_this_machine(4) as executor:
        found = [executor.submit(lambda: (together.wait(), jobs._environment())[1]) for _ in range(4)]
    assert sorted(future.result()["CUDA_VISIBLE_DEVICES"] for future in found) == ["3", "3", "5", "5"]
    assert {future.result()["OMP_NUM_THREADS"] for future in found} == {str(max(1, len(os.sched_getaffinity(0)) // 4))}


def test_dry_run_and_collect_only(dataset: Dataset, tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert reproduce.main(arguments(dataset, tmp_path, "--dry-run")) == 0
    told = capsys.readouterr().out
    assert not out.exists() and told.count("\npython ") == JOBS and told.rstrip().endswith(" GB of results")
    assert "# pretrain/w2v-12: about 10 s\npython " in told
    assert told.startswith("cd ") and (Path(told.splitlines()[0][3:]) / "engine" / "pretrain.py").is_file()
    (fake / "fail").write_text("finetune")
    assert reproduce.main(arguments(dataset, tmp_path, rows=1)) == 1
    assert reproduce.main(["--table", "2", "--out", str(out), "--collect-only"]) == 0
    assert "..." in (out / "table-2.md").read_text() and "Scale `smoke`" in (out / "table-2.md").read_text()


def test_ctrl_c_before_a_job_runs_is_one_line(
    dataset: Dataset, tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "run_jobs", interrupted)
    assert reproduce.main(arguments(dataset, tmp_path)) == 0
    assert capsys.readouterr().err.count("\n") == 1


DATA = ["--table", "1", "--data", "{data}"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--table", "5"], "argument --table: invalid choice: 5"),
        (["--table", "1", "--seeds", "0"], "argument --seeds: '0'"),
        (["--table", "1"], "--data"),
        (["--table", "1", "--data", "{bare}"], "no crop has the role dx train: it was built with --plan all"),
        (["--table", "1", "--data", "{tmp}/nothing"], "nothing: no dataset.json"),
        ([*DATA, "--scale", "huge"], "--scale 'huge'"),
        ([*DATA, "--rows", "W3V"], "--rows 'W3V'"),
        ([*DATA, "--cluster", "tcp://127.0.0.1:1"], "--cluster tcp://127.0.0.1:1: no scheduler answers"),
        ([*DATA, "--out", "{tmp}/other.yaml"], "other.yaml: is a file or a dataset"),
        ([*DATA, "--out", "{data}"], "is a file or a dataset"),
        ([*DATA, "--out", "/proc/x"], "/proc/x"),
        ([*DATA, "--out", "{used}"], "data: scale was small and is smoke"),
        ([*DATA, "--scale", "{tmp}/other.yaml"], "model.widht: no such key: did you mean"),
        ([*DATA, "--scale", "{tmp}/tuned.yaml", "--dry-run"], "train.stps: no such key: did you"),
        ([*DATA, "--scale", "{tmp}/both.yaml", "--dry-run"], "train.steps=6, train.epochs=2.0"),
        ([*DATA, "--scale", "{tmp}/three.yaml"], "three.yaml: pretrain: 3"),
        (["--table", "1", "--collect-only"], "settings/data.json"),
        (["--table", "1", "--out", "{used}", "--collect-only"], "settings/data.json"),
    ],
)
def test_what_is_wrong_is_one_line(
    given: list[str],
    says: str,
    dataset: Dataset,
    tmp_path: Path,
    fake: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    monkeypatch.setattr(reproduce, "run_jobs", lambda *_: pytest.fail("jobs were run"))
    (tmp_path / "other.yaml").write_text("pretrain: {model: {widht: 3}}\n")
    (tmp_path / "tuned.yaml").write_text("identification: {train: {stps: 6}}\n")
    (tmp_path / "both.yaml").write_text("diagnosis: {train: {steps: 6, epochs: 2}}\n")
    (tmp_path / "three.yaml").write_text("pretrain: 3\n")
    used = tmp_path / "used" / "settings"
    used.mkdir(parents=True)
    used.joinpath("data.json").write_text(json.dumps({"scale": "small"}))
    if "{bare}" in given:
        monkeypatch.setitem(dataset.meta, "roles", {"pretrain": 5, "dx": {}, "id": {}})
        monkeypatch.setitem(dataset.meta, "plan", "all")
        monkeypatch.setattr(reproduce.Dataset, "open", lambda url: dataset)
    for key, value in {"{tmp}": tmp_path, "{data}": dataset.root.url, "{used}": used.parent, "{bare}": tmp_path}.items():
        given = [text.replace(key, str(value)) for text in given]
    defaults = [] if "--out" in given else ["--out", str(tmp_path / "out")]
    defaults += [] if "--scale" in given else ["--scale", "smoke"]
    try:
        code = reproduce.main([*given, *defaults])
    except SystemExit as error:
        code = int(error.code or 0)
    err = capsys.readouterr().err
    assert code == 2 and says in err and err.count("\n") == 1, err


def test_a_package_without_the_papers_tables_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paper, "HERE", tmp_path / "configs" / "reproduce")
    paper.tables.cache_clear()
    assert reproduce.main(["--table", "1", "--out", str(tmp_path / "out"), "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and f"{tmp_path}/configs/reproduce: " in told and "pip install -e ." in told


@pytest.mark.slow
def test_a_cell_of_real_jobs(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps of pre-training and fine-tuning by the programs themselves, and a score that the table shows."""

    class Forked:
        """A job's process, forked from one that has imported torch."""

        def __init__(self, command: list[str], **_: Any) -> None:
            program = {"engine/pretrain.py": pretrain, "engine/finetune.py": finetune, "-m": evaluate}[command[3]]
            words = command[5 if command[3] == "-m" else 4 :]
            self.process = started(program.main, words, out=tmp_path / "log")
            self.terminate = self.process.terminate

        def poll(self) -> int | None:
            return self.process.exitcode

        def wait(self) -> int:
            self.process.join()
            return int(self.process.exitcode)

    monkeypatch.setattr(jobs.subprocess, "Popen", Forked)
    monkeypatch.setattr(reproduce, "flops_per_s", lambda config: 1e10)
    given = ["--table", "2", "--data", dataset.root.url, "--out", str(tmp_path), "--scale", "smoke", "--seeds", "1"]
    assert reproduce.main([*given, "--rows", "W2V+CMSC+RLM", "--leads", "2", "--tasks", "Dx"]) == 0, (
        tmp_path / "log"
    ).read_text()
    cells = json.loads((tmp_path / "table-2.json").read_text())["cells"]
    done = [cell for cell in cells if cell["state"] == "done"]
    assert [(cell["row"], cell["column"], cell["task"]) for cell in done] == [("W2V+CMSC+RLM", "2-lead", "Dx")]
    score = json.loads((tmp_path / "scores" / "w2v_cmsc_rlm-2" / "diagnosis-2-seed0.json").read_text())["score"]
    assert done[0]["mean"] == score and f"{score:.3f} / 0.660 ± 0.003" in (tmp_path / "table-2.md").read_text()

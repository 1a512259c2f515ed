"""engine.reproduce with doors that do nothing: plans carried out, by several workers, over kills, failures and restarts."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fake as doors

from data_tools.dataset import Dataset
from engine import reproduce
from engine.reproduction import claims, launch, paper
from tests.forks import CONTEXT
from tests.waiting import until


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "fake"
    folder.mkdir()
    for name in ("ran", "fail", "hang"):
        (folder / name).write_text("")
    monkeypatch.setenv("FAKE", str(folder))
    return folder


def arguments(dataset: Dataset, tmp_path: Path, *more: str) -> list[str]:
    given = ["--table", "1", "--data", dataset.root.url, "--out", str(tmp_path / "out"), "--scale", "smoke", "--seeds", "2"]
    return [*given, "--rows", "Random Init.", "W2V", "--leads", "12", "1", "--tasks", "Dx", *more]


JOBS = 1 + 2 * 2 * 2 * 2  # one model; two rows, two columns, two seeds: tuned and tested

UNFIT = "engine/pretrain.py: loss is not finite: lower train.lr"


def start(given: list[str], fake: Path, host: str = "", stale_s: float = 90.0, together: int = 1) -> Any:
    process = CONTEXT.Process(target=doors.worker, args=(given, str(fake), host, stale_s, together))
    process.start()
    return process


def ended(process: Any) -> int:
    process.join()
    return int(process.exitcode)


def ran(fake: Path) -> list[str]:
    return (fake / "ran").read_text().splitlines()


def states(tmp_path: Path) -> Counter[str]:
    return Counter(cell["state"] for cell in json.loads((tmp_path / "out" / "table-1.json").read_text())["cells"])


def test_two_workers_on_one_folder_do_every_job_once(dataset: Dataset, tmp_path: Path, fake: Path) -> None:
    given = arguments(dataset, tmp_path, "--worker")
    workers = [start(given, fake, host, together=2) for host in ("here", "there")]
    assert [ended(worker) for worker in workers] == [0, 0]
    assert len(ran(fake)) == len(set(ran(fake))) == JOBS
    assert states(tmp_path) == {"done": 4, "not asked": 66}
    assert not list((tmp_path / "out" / "finetune").rglob("checkpoints")) and list((tmp_path / "out").rglob("checkpoints"))
    owners = {json.loads(path.read_text())["where"] for path in (tmp_path / "out" / "jobs").glob("*.claim-1")}
    assert owners == {"here", "there"}
    assert ended(start(given, fake)) == 0 and len(ran(fake)) == JOBS  # nothing is left to do


@pytest.mark.parametrize("host", ["", "another"])
def test_a_killed_worker_takes_its_job_down_and_another_goes_on(
    host: str, dataset: Dataset, tmp_path: Path, fake: Path
) -> None:
    """On this host at once; of another host when its heartbeat has been silent for long enough."""
    (fake / "hang").write_text("random-12/diagnosis-P-1-seed0")
    given = arguments(dataset, tmp_path, "--worker")
    victim = start(given, fake, host)
    hanging = int(until(lambda: list(fake.glob("hangs-*")))[0].name.removeprefix("hangs-"))
    os.kill(victim.pid, signal.SIGKILL)
    ended(victim)
    until(lambda: not claims._alive(hanging))
    (fake / "hang").write_text("")
    assert ended(start(given, fake, stale_s=1.0 if host else 1e9)) == 0
    assert len(ran(fake)) == len(set(ran(fake))) == JOBS


def test_a_silent_worker_that_wakes_gives_up_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT_S", 0.05)
    first = claims.take(tmp_path, "job")
    assert first and claims.take(tmp_path, "job") is None and not first.lost
    with monkeypatch.context() as later:
        later.setattr(claims, "STALE_S", -1.0)  # as if it had been silent
        second = claims.take(tmp_path, "job")
    assert second
    until(lambda: first.lost)
    first.release()
    assert claims.held(tmp_path, "job") and not second.lost
    second.release()
    assert not claims.held(tmp_path, "job")
    assert claims.take(tmp_path, "job")


def test_many_hands_one_claim(tmp_path: Path) -> None:
    """Of all who see a job free at once, one gets it."""
    gate = CONTEXT.Barrier(4)
    answers = CONTEXT.Queue()
    hands = [CONTEXT.Process(target=_grab, args=(tmp_path, gate, answers, number)) for number in range(4)]
    for hand in hands:
        hand.start()
    got = [answers.get() for _ in hands]
    for hand in hands:
        ended(hand)
    for job in range(50):
        assert sum(job in mine for mine in got) == 1


def _grab(folder: Path, gate: Any, answers: Any, number: int) -> None:
    gate.wait()
    held = [(job, claims.take(folder, f"job{job}")) for job in range(50)]
    answers.put([job for job, claim in held if claim])
    gate.wait()  # lives until all have asked


def test_a_failed_job_is_named_the_others_go_on_and_run_again_it_is_retried(
    dataset: Dataset, tmp_path: Path, fake: Path
) -> None:
    (fake / "fail").write_text("random-12/diagnosis-12-seed1")
    given = arguments(dataset, tmp_path, "--worker")
    assert ended(start(given, fake)) == 1
    told = tmp_path / "out" / "jobs" / "finetune_random-12_diagnosis-12-seed1.failed"
    assert json.loads(told.read_text())["why"] == UNFIT
    assert len(ran(fake)) == JOBS - 2 and states(tmp_path) == {"done": 3, "part": 1, "not asked": 66}
    (fake / "fail").write_text("")
    assert ended(start(given, fake)) == 0
    assert len(ran(fake)) == len(set(ran(fake))) == JOBS and states(tmp_path)["done"] == 4 and not told.exists()


def test_the_command_itself_with_workers_here_and_by_ssh(
    dataset: Dataset, tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "COMMAND", (sys.executable, str(Path(doors.__file__))))
    monkeypatch.setattr(reproduce.cost, "speed", lambda plan, place: 1e10)
    (fake / "fail").write_text("w2v-12")
    assert reproduce.main(arguments(dataset, tmp_path, "--jobs", "2")) == 1
    out, err = capfd.readouterr()
    assert f"{JOBS} jobs (1 pretrain, 8 finetune, 8 evaluate), {JOBS} to do: about " in out and "of 2;" in out
    assert err.splitlines()[-1] == f"engine.reproduce: pretrain/w2v-12 failed: {UNFIT}"
    assert states(tmp_path) == {"done": 2, "failed": 2, "not asked": 66}
    assert any(json.loads(path.read_text())["seconds"] > 0 for path in (tmp_path / "out" / "jobs").glob("finetune*.json"))

    (fake / "fail").write_text("")
    ssh, hosts = tmp_path / "bin" / "ssh", tmp_path / "hosts"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\n[ "$3" = away ] && { echo "ssh: away: no route" >&2; exit 255; }\nexec sh -c "$4"\n')
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    hosts.write_text("near  # the only one\n\naway\n")
    monkeypatch.setenv("PYTHONPATH", str(launch.ROOT))  # of the fake doors alone: the command itself finds its own
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    assert reproduce.main(arguments(dataset, tmp_path, "--hosts", str(hosts))) == 0
    out, _ = capfd.readouterr()
    assert "away: ssh: away: no route" in out and "near: pretrain/w2v-12: done in" in out
    assert len(ran(fake)) == len(set(ran(fake))) == JOBS
    assert reproduce.main(arguments(dataset, tmp_path)) == 0  # nothing is left: nothing is started
    assert "17 of 17 jobs done" in capfd.readouterr().out


def test_asked_to_stop_it_lets_the_job_save_and_says_so(dataset: Dataset, tmp_path: Path, fake: Path) -> None:
    (fake / "hang").write_text("random-12/diagnosis-12-seed0")
    worker = start(arguments(dataset, tmp_path, "--worker", str(tmp_path / "stop")), fake)
    hanging = int(until(lambda: list(fake.glob("hangs-*")))[0].name.removeprefix("hangs-"))
    (tmp_path / "stop").touch()
    assert ended(worker) == 0 and not claims._alive(hanging)
    assert not list((tmp_path / "out" / "jobs").glob("*.failed"))
    (fake / "hang").write_text("")
    before = len(ran(fake))
    worker = start(arguments(dataset, tmp_path, "--worker"), fake)
    until(lambda: len(ran(fake)) > before)
    worker.terminate()
    assert ended(worker) == 0


def test_ctrl_c_before_a_worker_begins_is_one_line(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce.cost, "speed", interrupted)
    assert reproduce.main(arguments(dataset, tmp_path)) == 0
    assert capsys.readouterr().err == "engine.reproduce: stopped: the same command goes on\n"


def test_a_package_without_the_papers_tables_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paper, "HERE", tmp_path / "configs" / "reproduce")
    paper.tables.cache_clear()
    assert reproduce.main(["--table", "1", "--out", str(tmp_path / "out"), "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and f"{tmp_path}/configs/reproduce: " in told and "pip install -e ." in told
    with pytest.raises(SystemExit) as help_:
        reproduce.main(["--help"])
    assert help_.value.code == 0


def test_slurm_and_dry_run_and_collect(
    dataset: Dataset, tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reproduce.cost, "speed", lambda plan, place: 1e10)
    out = tmp_path / "out"
    assert reproduce.main(arguments(dataset, tmp_path, "--dry-run")) == 0
    told = capsys.readouterr().out
    assert not out.exists() and told.count("\npython ") == JOBS and told.rstrip().endswith(" GB")
    assert "# pretrain/w2v-12: about 10 s\npython " in told
    assert told.startswith("cd ") and (Path(told.splitlines()[0][3:]) / "engine" / "pretrain.py").is_file()

    assert reproduce.main(arguments(dataset, tmp_path, "--slurm", "--jobs", "8")) == 0
    assert capsys.readouterr().out == f"sbatch {out / 'reproduce.sbatch'}\n"
    script = (out / "reproduce.sbatch").read_text()
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=omnilead-table-1\n#SBATCH --array=0-7\n")
    assert subprocess.run(["bash", "-n", out / "reproduce.sbatch"], check=False).returncode == 0
    last = script.splitlines()[-1]
    assert last.startswith(f"exec {sys.executable} -m engine.reproduce --table 1 ") and last.endswith(f"--out {out} --worker")
    assert "--rows 'Random Init.' W2V --leads 12 1 --tasks Dx --seeds 2" in last

    assert reproduce.main(["--table", "2", "--out", str(out), "--collect-only"]) == 0
    assert "..." in (out / "table-2.md").read_text() and "Scale `smoke`" in (out / "table-2.md").read_text()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--table", "5"], "argument --table: invalid choice: 5"),
        (["--table", "1", "--seeds", "0"], "argument --seeds: '0': must be a whole number from 1"),
        (["--table", "1"], "--data: name the dataset"),
        (["--table", "1", "--data", "{bare}"], "no crop has the role dx train (it was built with --plan all)"),
        (["--table", "1", "--data", "{tmp}/nothing"], "nothing: no dataset.json"),
        (["--table", "1", "--data", "{data}", "--scale", "huge"], "--scale 'huge': no such scale"),
        (["--table", "1", "--data", "{data}", "--rows", "W3V"], "--rows 'W3V': table 1 has no such row"),
        (["--table", "1", "--data", "{data}", "--hosts", "{tmp}/empty"], "empty: names no host: write one a line"),
        (["--table", "1", "--data", "{data}", "--hosts", "{tmp}/none"], "none: No such file or directory"),
        (["--table", "1", "--collect-only"], "nothing was made here"),
        (
            ["--table", "1", "--data", "{data}", "--dry-run", "--out", "{tmp}/other.yaml"],
            "other.yaml: is a file: name a folder",
        ),
        (["--table", "1", "--data", "{data}", "--out", "{data}"], "is a dataset: name another folder"),
        (["--table", "1", "--data", "{data}", "--out", "/proc/x"], "/proc/x"),
        (
            ["--table", "1", "--data", "{data}", "--out", "{used}"],
            "data is not what it was begun with: scale was small and is smoke",
        ),
        (["--table", "1", "--data", "{data}", "--scale", "{tmp}/other.yaml"], "model.widht: no such key: did you mean"),
        (["--table", "1", "--data", "{data}", "--scale", "{tmp}/tuned.yaml", "--dry-run"], "train.stps: no such key: did you"),
        (
            ["--table", "1", "--data", "{data}", "--scale", "{tmp}/both.yaml", "--dry-run"],
            "train.steps=6, train.epochs=2.0",
        ),
        (["--table", "1", "--data", "{data}", "--scale", "{tmp}/three.yaml"], "three.yaml: 3: a stage is a table of keys and"),
        (["--table", "1", "--out", "{used}", "--collect-only"], "settings/data.json: is not as it was written"),
        (["--table", "1", "--out", "{tmp}/begun", "--collect-only"], "settings/data.json: is not as it was written ('scale')"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    given: list[str],
    says: str,
    dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(reproduce.cost, "speed", lambda plan, place: 1e10)
    monkeypatch.setattr(reproduce.launch, "local", lambda *_: pytest.fail("work was begun"))
    (tmp_path / "empty").write_text("# nobody\n")
    (tmp_path / "other.yaml").write_text("pretrain: {model: {widht: 3}}\n")
    (tmp_path / "tuned.yaml").write_text("identification: {train: {stps: 6}}\n")
    (tmp_path / "both.yaml").write_text("diagnosis: {train: {steps: 6, epochs: 2}}\n")
    (tmp_path / "three.yaml").write_text("pretrain: 3\n")
    (tmp_path / "begun" / "settings").mkdir(parents=True)
    (tmp_path / "begun" / "settings" / "data.json").write_text("{}")
    used, bare = tmp_path / "used" / "settings", tmp_path / "bare"
    used.mkdir(parents=True)
    used.joinpath("data.json").write_text(json.dumps({"scale": "small"}))
    if "{bare}" in given:
        monkeypatch.setitem(dataset.meta, "roles", {"pretrain": 5, "dx": {}, "id": {}})
        monkeypatch.setitem(dataset.meta, "plan", "all")
        monkeypatch.setattr(reproduce.Dataset, "open", lambda url: dataset)
    places = {"{tmp}": str(tmp_path), "{data}": dataset.root.url, "{used}": str(used.parent), "{bare}": str(bare)}
    for key, value in places.items():
        given = [text.replace(key, value) for text in given]
    defaults = [] if "--out" in given else ["--out", str(tmp_path / "out")]
    defaults += [] if "--scale" in given else ["--scale", "smoke"]
    try:
        code = reproduce.main([*given, *defaults])
    except SystemExit as error:
        code = int(error.code or 0)
    err = capsys.readouterr().err
    assert code == 2 and says in err and len(err.strip().splitlines()) == 1, err


@pytest.mark.slow
def test_a_cell_in_earnest(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real doors: a few steps of pre-training and fine-tuning, and a score that the table shows."""
    monkeypatch.setattr(reproduce.cost, "speed", lambda plan, place: 1e9)
    given = ["--table", "2", "--data", dataset.root.url, "--out", str(tmp_path), "--scale", "smoke", "--seeds", "1"]
    assert reproduce.main([*given, "--rows", "W2V+CMSC+RLM", "--leads", "2", "--tasks", "Dx"]) == 0
    cells = json.loads((tmp_path / "table-2.json").read_text())["cells"]
    done = [cell for cell in cells if cell["state"] == "done"]
    assert [(cell["row"], cell["column"], cell["task"]) for cell in done] == [("W2V+CMSC+RLM", "2-lead", "Dx")]
    score = json.loads((tmp_path / "scores" / "w2v_cmsc_rlm-2" / "diagnosis-2-seed0.json").read_text())["score"]
    assert done[0]["mean"] == score and f"{score:.3f} / 0.660 ± 0.003" in (tmp_path / "table-2.md").read_text()

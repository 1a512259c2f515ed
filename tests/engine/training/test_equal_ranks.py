"""Ranks that differ are refused before the first step, by one line that all of them say."""

import importlib.metadata
import os
import socket
from functools import partial
from pathlib import Path

import pytest
from ranks import TINY, TUNING, run, settings

from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources
from omnilead.data_tools.synthetic.archive import synthesise
from omnilead.engine.settings.files import CONFIGS
from omnilead.engine.settings.run_files import LOCK
from omnilead.engine.training import equal_ranks

GAIN = "def louder(x, draw): return x * 2\n"
LABELS = "record,odd\n"


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    """Another dataset, from fewer patients."""
    place = tmp_path_factory.mktemp("smaller")
    synthesise(place / "archive", patients=20, two_sessions=1, seed=3, progress=False)
    return shard(
        open_sources(str(place / "archive")),
        ShardOptions(str(place / "ds"), plan="all", quiet=True),
    )


@pytest.fixture
def folders(dataset, tmp_path):
    """One for each rank, in which it finds all that the settings name: here the same."""
    labels = LABELS + "".join(
        f"{record},{number % 2}\n"
        for number, record in enumerate(dict.fromkeys(dataset.column("record")))
    )
    found = [tmp_path / "rank-0", tmp_path / "rank-1"]
    for folder in found:
        folder.mkdir()
        (folder / "ds").symlink_to(dataset.root.url)
        (folder / "gain.py").write_text(GAIN)
        (folder / "labels.csv").write_text(labels)
        (folder / "pretrain.yaml").write_text(TINY)
        (folder / "task.yaml").write_text(TUNING.replace("TASK", f"{CONFIGS}/tasks/diagnosis.yaml"))
    return found


def enter(tmp_path):
    """The folder of this rank."""
    os.chdir(tmp_path / f"rank-{os.environ['RANK']}")


def words_of(tmp_path, **changes):
    """Of a pre-training."""
    words = settings(
        tmp_path, "ds", train__steps=1, **{"augment__extra": ["gain.py:louder"]} | changes
    )
    return ["--config", "pretrain.yaml", *words[2:]]


def tuning_words(tmp_path):
    words = words_of(
        tmp_path, start="pretrain.yaml", task__labels="labels.csv", task__kind="binary"
    )
    return ["task.yaml" if word == "pretrain.yaml" else word for word in words]


def refused(tmp_path, words, before=None):
    """The line that both ranks say. RUN has nothing in it but, at most, its lock."""
    line = run(tmp_path, words, 2, before or partial(enter, tmp_path)).one_line()
    assert f": rank 1 on {socket.gethostname()} has " in line
    assert {file.name for file in (tmp_path / "run").iterdir()} <= {LOCK}
    return line


def without_data(words):
    return [word for word in words if not word.startswith("data.datasets")]


def test_ranks_may_have_places_and_threads_of_their_own(folders, tmp_path):
    (folders[0] / "ds").rename(folders[0] / "copy")
    for folder, name in zip(folders, ("copy", "ds"), strict=True):
        own = f"data: {{datasets: [{name}]}}\npipeline: {{threads: {len(name)}}}\n"
        (folder / "pretrain.yaml").write_text(TINY + own)
    run(tmp_path, without_data(words_of(tmp_path)), 2, partial(enter, tmp_path)).good()


@pytest.mark.parametrize("make_words", [words_of, tuning_words])
def test_another_dataset(make_words, folders, smaller, dataset, tmp_path):
    (folders[1] / "ds").unlink()
    (folders[1] / "ds").symlink_to(smaller.root.url)
    there, here = smaller.fingerprint[:16], dataset.fingerprint[:16]
    says = f"another dataset at {smaller.root.url}: fingerprint {there} instead of {here}"
    assert says in refused(tmp_path, make_words(tmp_path))


def test_one_dataset_more(folders, smaller, tmp_path):
    names = f"[ds, {smaller.root.url}]"
    (folders[1] / "pretrain.yaml").write_text(f"{TINY}\ndata: {{datasets: {names}}}\n")
    (folders[0] / "pretrain.yaml").write_text(f"{TINY}\ndata: {{datasets: [ds]}}\n")
    says = f"another dataset at {smaller.root.url}: fingerprint {smaller.fingerprint[:16]} instead of none"
    assert says in refused(tmp_path, without_data(words_of(tmp_path)))


def test_other_settings(folders, tmp_path):
    own = f"{TINY}\nobjective: {{temperature: 0.5}}\naugment: {{rlm: 0.0}}\n"
    (folders[1] / "pretrain.yaml").write_text(own)
    says = "has augment.rlm=0.0 instead of 0.5, objective.temperature=0.5 instead of 0.1: give"
    assert says in refused(tmp_path, words_of(tmp_path))


def test_another_plugin(folders, tmp_path):
    (folders[1] / "gain.py").write_text(GAIN.replace("2", "3"))
    assert "has another gain.py: sha256 " in refused(tmp_path, words_of(tmp_path))


def test_other_labels(folders, tmp_path):
    table = folders[1] / "labels.csv"
    table.write_text(table.read_text().replace(",1", ",0", 1))
    assert "has labels.sha256=" in refused(tmp_path, tuning_words(tmp_path))


def enter_with_other_versions(tmp_path):
    enter(tmp_path)
    if os.environ["RANK"] == "1":
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.1" if name == "deepspeed" else version(name)


def enter_with_other_code(tmp_path):
    enter(tmp_path)
    equal_ranks.PACKAGE_ROOT = Path.cwd()


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (enter_with_other_versions, "has deepspeed 0.1 instead of 0."),
        (enter_with_other_code, "has other code of omnilead: sha256 "),
    ],
)
def test_other_versions(before, says, folders, tmp_path):
    (folders[1] / "engine").mkdir()
    (folders[1] / "engine" / "loop.py").write_text("steps = 1\n")
    assert says in refused(tmp_path, words_of(tmp_path), partial(before, tmp_path))


def test_the_code_of_omnilead_is_that_of_all_wings():
    code = equal_ranks._omnilead_code()
    assert all(
        name in code for name in (b"class Dataset:", b"def require_equal(", b"class FinetuneTask(")
    )

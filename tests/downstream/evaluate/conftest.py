"""A dataset, untrained models and calls of `omnilead evaluate` for its tests."""

import json
import re
from pathlib import Path

import pytest

from omnilead.data_tools.dataset import CLASSES, fingerprint
from omnilead.data_tools.sharding.roles import RoleSources
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources
from omnilead.data_tools.synthetic.archive import synthesise
from omnilead.downstream.evaluate import main
from omnilead.downstream.evaluation import (
    boosted,
    differences,
    embedders,
    probe,
    results,
)
from omnilead.downstream.inference import ecg_reader
from omnilead.downstream.tasks import metrics
from tests.conftest import save_model

DIAGNOSIS = {
    "task": "diagnosis",
    "kind": "multilabel",
    "classes": list(CLASSES),
    "thresholds": [0.5] * len(CLASSES),
}
IDENTIFICATION = {"task": "identification", "kind": "identity"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """One of the validation crops has only one half."""
    place = tmp_path_factory.mktemp("evaluate")
    synthesise(place / "archive", patients=100, two_sessions=1, seed=5, progress=False)
    options = ShardOptions(
        str(place / "dataset"), role_sources=RoleSources(id_share=1.0), quiet=True
    )
    dataset = shard(open_sources(str(place / "archive")), options)
    assert sorted(set(dataset.column("halves")[dataset.select(dx="valid")].tolist())) == [1, 2]
    return dataset


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("pretrained") / "model")


@pytest.fixture(scope="module")
def diagnostic(tmp_path_factory):
    """A model whose head has the classes in another order."""
    return save_model(
        tmp_path_factory.mktemp("diagnostic") / "model",
        head=DIAGNOSIS | {"classes": list(reversed(CLASSES))},
    )


def make_quick(patch):
    """Few resamples, random weights, penalties and trees, and a part for each batch."""
    patch.setattr(differences, "RESAMPLES", 20)
    patch.setattr(embedders, "RANDOM_DRAWS", 2)
    patch.setattr(probe, "PENALTY_STRENGTHS", probe.PENALTY_STRENGTHS[::6])
    patch.setattr(boosted, "BOOSTING_ROUNDS", 5)
    patch.setattr(ecg_reader, "BATCHES_PER_PART", 1)
    patch.setattr(
        results,
        "bootstrap_interval",
        lambda statistic, groups, n: metrics.bootstrap_interval(statistic, groups, n // 50),
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)


def quick_main(arguments):
    """In a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        return main(arguments)


@pytest.fixture
def copy(data, tmp_path):
    """The same dataset with changes in dataset.json."""

    def make(**changes):
        place = tmp_path / "copy"
        place.mkdir()
        for name in ("samples.parquet", "shards"):
            (place / name).symlink_to(Path(data.root.url) / name)
        meta = data.meta | changes
        (place / "dataset.json").write_text(json.dumps(meta | {"fingerprint": fingerprint(meta)}))
        return str(place)

    return make


@pytest.fixture
def evaluated(data, tmp_path, capsys):
    def run(model, *arguments):
        given = ["--model", model, "--data", data.root.url, "--json", tmp_path / "f.json"]
        code = main([str(word) for word in [*given, *arguments]])
        text, err = capsys.readouterr()
        assert (code, err) == (0, "")
        document = json.loads((tmp_path / "f.json").read_text())
        assert document["score"] == next(iter(document["metrics"].values()))
        shown = document.get("record", document)  # single halves only if they are asked for
        score = next(iter(shown["metrics"].values()))
        assert f"{score:.4f}" in text and f" {score:.3f} (" in text.splitlines()[1]
        assert "halves of 5 s" not in text
        assert all(remark in text.splitlines() for remark in document["remarks"])
        return document

    return run


@pytest.fixture
def refused(data, capsys):
    def run(pattern, model, *arguments, code=2):
        ended = main([str(a) for a in ("--model", model, "--data", data.root.url, *arguments)])
        out, err = capsys.readouterr()
        assert (ended, out, err.count("\n")) == (code, "", 1), err
        assert err.startswith("omnilead evaluate: ") and re.search(pattern, err), err

    return run

"""Crops made one by one on a CPU equal a whole batch made at once, also if bad crops are
replaced."""

import shutil

import numpy as np
import pytest
import torch
from loading import BACKENDS, CPU, NOISY, loader, some
from pydantic.dataclasses import dataclass as checked_dataclass
from shards_made import crops_of, tar_path

from omnilead.data_tools.dataset import Dataset, DatasetError
from omnilead.engine.common import ConfigError
from omnilead.engine.data import augmenter
from omnilead.engine.data.augment import STRICT, AugmentConfig, ThreeKG, augment
from omnilead.engine.data.augment_draws import draws
from omnilead.engine.data.augmenter import Augmenter, CropWriter, parameters
from omnilead.engine.data.order import Places


def at_once(dataset, batch, augment, views="halves"):
    augmenter, p = Augmenter(augment, views, 0, CPU), parameters(augment, views, 0, batch.places)
    crops = torch.from_numpy(crops_of(dataset, batch.places.row))
    return augmenter(crops, augmenter.to_device(p))


@pytest.mark.parametrize(
    ("views", "augment"),
    [
        *(("halves", AugmentConfig(noise=noise)) for noise in ("", "emg", "shift", "physio4")),
        ("halves", AugmentConfig(rlm=0)),
        ("halves", AugmentConfig(rlm=0, noise="physio4")),
        ("halves", AugmentConfig(noise="physio4", per_lead=True)),
        ("halves", AugmentConfig(noise="physio4", dependency=True)),
        ("halves", AugmentConfig(noise="physio4", leads="I,V1")),
        ("halves", AugmentConfig(noise="authors_physio4")),
        ("halves", AugmentConfig(noise="authors_physio4", dependency=False)),
        ("window", AugmentConfig(noise="physio4")),
        ("window", AugmentConfig(rlm=0, threekg=ThreeKG())),
    ],
)
def test_crop_by_crop_equals_the_whole_batch(views, augment, dataset):
    for batch, _ in some(loader(dataset, views=views, augment=augment), 2):
        assert torch.equal(batch.x_BSLT, at_once(dataset, batch, augment, views))


@checked_dataclass(frozen=True, config=STRICT)
class WithMore(AugmentConfig):
    upside_down: bool = False
    gain: float = 0.0


def drawn_too(*arguments, **how):
    """Added to what is drawn of a crop."""
    p = draws(*arguments, **how)
    gain = np.linspace(1, 2, 12, dtype=np.float32)[:, None]
    return p | {"gain": np.broadcast_to(gain, (len(arguments[3]), 2, 12, 1)).copy()}


def applied_too(x_BSLT, p, config, time):
    """Added to the reference."""
    x_BSLT = augment(x_BSLT, p, config, time)
    if getattr(config, "upside_down", False):
        x_BSLT = -x_BSLT
    return x_BSLT * p["gain"] if "gain" in p else x_BSLT


@pytest.mark.parametrize(
    ("config", "drawn"),
    [
        pytest.param(WithMore(upside_down=True), draws, id="a setting, nothing random"),
        pytest.param(WithMore(gain=1.0), drawn_too, id="a setting, and what is drawn for it"),
        pytest.param(AugmentConfig(), drawn_too, id="drawn without a setting"),
    ],
)
def test_an_augmentation_added_to_the_reference_is_applied_or_refused(
    config, drawn, dataset, monkeypatch
):
    """By the fast path of a CPU as well, and by DALI, neither of which knows it."""
    monkeypatch.setattr(augmenter, "draws", drawn)
    monkeypatch.setattr(augmenter, "augment", applied_too)
    (batch, _) = some(loader(dataset, augment=config), 1)[0]
    assert torch.equal(batch.x_BSLT, at_once(dataset, batch, config))
    with pytest.raises(
        ConfigError, match=r"dali: does not apply (upside_down|gain) \(augment\): set"
    ):
        some(loader(dataset, "dali", augment=config), 1)


@pytest.mark.parametrize("noise", ["", "physio4"])
@pytest.mark.parametrize("kind", [AugmentConfig, WithMore])
def test_what_is_off_does_not_cost_the_fast_path(kind, noise):
    one = Augmenter(kind(noise=noise), "halves", 0, CPU)
    places = Places(*np.zeros((3, 2), np.int64))
    p = one.to_device(parameters(one.config, "halves", 0, places))
    assert isinstance(one.writer(p, torch.empty(2, 2, 12, 2500)), CropWriter)


@pytest.mark.parametrize(
    ("augment", "threads"), [(NOISY, 1), (AugmentConfig(), 3), (AugmentConfig(leads="I"), 3)]
)
def test_a_replacement_crop_has_its_own_parameters(augment, threads, dataset, tmp_path):
    source = loader(dataset)
    rows = some(source, 2)[1][0].places.row
    damaged = damage(dataset, tmp_path / "copy", [rows[5]])
    skipping = loader(damaged, on_corrupt="skip", augment=augment, threads=threads)
    (before, _), (batch, _) = some(skipping, 2)
    assert before.skipped == ()
    assert [bad[:3] for bad in batch.skipped] == [(5, 0, rows[5])]
    assert batch.places.row.tolist() == [*rows[:5], source.order.rows[0].after(rows[5]), *rows[6:]]
    assert torch.equal(batch.x_BSLT, at_once(dataset, batch, augment))


@pytest.mark.parametrize(
    ("backend", "per_lead"), [("torch", False), ("torch", True), ("dali", False)]
)
def test_batches_before_a_bad_crop_are_returned_before_the_error(
    backend, per_lead, dataset, tmp_path
):
    augment, taken = AugmentConfig(noise="shift", per_lead=per_lead), []
    whole = some(loader(dataset, backend, augment=augment), 4)
    bad, worse = whole[2][0].places.row[5], whole[3][0].places.row[7]
    source = loader(damage(dataset, tmp_path / "copy", [worse, bad]), backend, augment=augment)
    with pytest.raises(DatasetError, match=f"crop {bad} at byte"):
        taken += (batch.x_BSLT.clone() for batch, _ in source)
    source.close()
    # dali asks ahead
    assert backend == "dali" or all(
        torch.equal(x, batch.x_BSLT) for x, (batch, _) in zip(taken, whole[:2], strict=True)
    )


def damage(dataset, copy, rows):
    """A copy of the dataset in which these crops are damaged."""
    shutil.copytree(dataset.root.url, copy)
    damaged = Dataset.open(str(copy))
    for row in rows:
        path, offset = tar_path(damaged, row)
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(bytes(200))
    return damaged


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replacement_crop_has_the_same_role(backend, dataset, tmp_path):
    """No held-out patient is trained on because a neighbouring crop is bad, and every signal
    belongs to its row."""
    source = loader(dataset, pretrain=True)
    taking_part = source.order.rows[0].row(np.arange(len(source.order.rows[0])))
    source.close()
    bad = taking_part[np.append(np.diff(taking_part) > 1, True)]  # others follow in the dataset
    bad = {*bad.tolist(), int(taking_part[0])}  # the last one's substitute is bad as well
    assert 3 < len(bad) < len(taking_part) - 8
    damaged = damage(dataset, tmp_path / "copy", bad)
    changes = {"on_corrupt": "skip", "augment": AugmentConfig(rlm=0), "batch_crops": 8}
    skipped = set()
    steps = source.order.crops_per_epoch // 8
    for batch, _ in some(loader(damaged, backend, pretrain=True, **changes), steps):
        assert set(batch.places.row.tolist()) <= {*taking_part.tolist()} - bad
        halves = crops_of(dataset, batch.places.row).reshape(8, 12, 2, 2500).swapaxes(1, 2)
        np.testing.assert_allclose(batch.x_BSLT, halves / 1000.0, rtol=1e-6)
        for one in batch.skipped:
            assert one.reason.endswith("it fails its crc32c: restore the file")
            skipped.add(one.row)
    assert len(bad) - 8 <= len(skipped) and skipped <= bad  # an epoch leaves out less than a batch

"""Crops made one by one on a CPU equal a whole batch made at once, also if bad crops are
replaced."""

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from loading import BACKENDS, CPU, NOISY, loader, same, some

from omnilead.data_tools.dataset import Dataset, DatasetError
from omnilead.engine.data.augment import AugmentConfig, ThreeKG
from omnilead.engine.data.augmenter import Augmenter, Views, parameters
from omnilead.engine.data.loader import Batch


def at_once(
    dataset: Dataset, batch: Batch, augment: AugmentConfig, views: Views = "halves"
) -> torch.Tensor:
    augmenter, p = Augmenter(augment, views, 0, CPU), parameters(augment, views, 0, batch.places)
    crops = torch.from_numpy(np.stack([dataset.read(int(row)) for row in batch.places.row]))
    return augmenter(crops, augmenter.to_device(p))


@pytest.mark.parametrize(
    ("views", "augment"),
    [
        *(
            ("halves", AugmentConfig(rlm=rlm, noise=noise))
            for rlm in (0, 0.5)
            for noise in ("", "emg", "shift", "physio4")
        ),
        ("halves", AugmentConfig(noise="physio4", per_lead=True)),
        ("halves", AugmentConfig(noise="physio4", dependency=True)),
        ("halves", AugmentConfig(noise="physio4", leads="I,V1")),
        ("halves", AugmentConfig(noise="authors_physio4")),
        ("halves", AugmentConfig(noise="authors_physio4", dependency=False)),
        ("window", AugmentConfig(noise="physio4")),
        ("window", AugmentConfig(rlm=0, threekg=ThreeKG())),
    ],
)
def test_crop_by_crop_equals_the_whole_batch(
    views: Views, augment: AugmentConfig, dataset: Dataset
) -> None:
    for batch, _ in some(loader(dataset, views=views, augment=augment), 2):
        assert torch.equal(batch.x_BSLT, at_once(dataset, batch, augment, views))


@pytest.mark.parametrize(
    ("augment", "threads"), [(NOISY, 1), (AugmentConfig(), 3), (AugmentConfig(leads="I"), 3)]
)
def test_a_replacement_crop_has_its_own_parameters(
    augment: AugmentConfig, threads: int, dataset: Dataset, tmp_path: Path
) -> None:
    source = loader(dataset)
    rows = some(source, 2)[1][0].places.row
    damaged = damage(dataset, tmp_path / "copy", [rows[5]])
    (before, _), (batch, _) = some(
        loader(damaged, on_corrupt="skip", augment=augment, threads=threads), 2
    )
    assert before.skipped == ()
    assert [bad[:3] for bad in batch.skipped] == [(5, 0, rows[5])]
    assert batch.places.row.tolist() == [*rows[:5], source.order.rows[0].after(rows[5]), *rows[6:]]
    assert torch.equal(batch.x_BSLT, at_once(dataset, batch, augment))


@pytest.mark.parametrize(
    ("backend", "per_lead"), [("torch", False), ("torch", True), ("dali", False)]
)
def test_batches_before_a_bad_crop_are_returned_before_the_error(
    backend: str, per_lead: bool, dataset: Dataset, tmp_path: Path
) -> None:
    changes = {"augment": AugmentConfig(noise="shift", per_lead=per_lead)}
    whole = some(loader(dataset, backend, **changes), 4)
    damaged = damage(
        dataset, tmp_path / "copy", [whole[3][0].places.row[7], whole[2][0].places.row[5]]
    )
    source, taken = loader(damaged, backend, **changes), []
    with pytest.raises(DatasetError, match=f"crop {whole[2][0].places.row[5]} at byte"):
        taken += (
            (dataclasses.replace(batch, x_BSLT=batch.x_BSLT.clone()), state)
            for batch, state in source
        )
    source.close()
    assert backend == "dali" or same(whole[:2], taken)  # which asks ahead


def damage(dataset: Dataset, copy: Path, rows: Iterable[int]) -> Dataset:
    """A copy of the dataset in which these crops are damaged."""
    shutil.copytree(dataset.root.url, copy)
    damaged = Dataset.open(str(copy))
    shard, offset, _ = damaged.addresses
    for row in rows:
        with open(copy / "shards" / damaged.shards[shard[row]]["name"], "r+b") as file:
            file.seek(offset[row])
            file.write(bytes(200))
    return damaged


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replacement_crop_has_the_same_role(
    backend: str, dataset: Dataset, tmp_path: Path
) -> None:
    """No held-out patient is trained on because a neighbouring crop is bad, and every signal
    belongs to its row."""
    source = loader(dataset, pretrain=True)
    taking_part = source.order.rows[0].row(np.arange(len(source.order.rows[0])))
    source.close()
    bad = taking_part[np.append(np.diff(taking_part) > 1, True)]  # others follow in the dataset
    bad = {*bad.tolist(), int(taking_part[0])}  # the last one's substitute is bad as well
    assert 3 < len(bad) < len(taking_part) - 8
    damaged = damage(dataset, tmp_path / "copy", bad)
    changes = {
        "pretrain": True,
        "on_corrupt": "skip",
        "augment": AugmentConfig(rlm=0),
        "batch_crops": 8,
    }
    steps = source.order.crops_per_epoch // 8
    skipped = set()
    for batch, _ in some(loader(damaged, backend, **changes), steps):
        assert set(batch.places.row.tolist()) <= {*taking_part.tolist()} - bad
        for x_SLT, row in zip(batch.x_BSLT, batch.places.row.tolist(), strict=True):
            halves = dataset.read(row).reshape(12, 2, 2500).transpose(1, 0, 2)
            np.testing.assert_allclose(x_SLT.numpy(), halves / 1000.0, rtol=1e-6)
        assert all(
            bad.reason.endswith("it fails its crc32c: restore the file") for bad in batch.skipped
        )
        skipped |= {bad.row for bad in batch.skipped}
    assert len(bad) - 8 <= len(skipped) and skipped <= bad  # an epoch leaves out less than a batch

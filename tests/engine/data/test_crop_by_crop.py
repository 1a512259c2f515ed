"""Bad crops, which are replaced or end the run, in batches that are made crop by crop on a CPU."""

import shutil

import numpy as np
import pytest
import torch
from loading import BACKENDS, NOISY, loader, some
from shards_made import crops_of, tar_path

from omnilead.data_tools.dataset import Dataset, DatasetError
from omnilead.engine.data.augmentations import AugmentConfig


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
    assert batch.places.row.tolist() == [
        *rows[:5],
        source.order.rows[0].next_selected_row(rows[5]),
        *rows[6:],
    ]
    augmenter = skipping.augmenter
    p = augmenter.to_device(augmenter.draw_parameters(batch.places))
    crops = torch.from_numpy(crops_of(dataset, batch.places.row))
    assert torch.equal(batch.x_BSLT, augmenter(crops, p))


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
            assert one.reason.endswith("crc32c: restore the file")
            skipped.add(one.row)
    assert len(bad) - 8 <= len(skipped) and skipped <= bad  # an epoch leaves out less than a batch

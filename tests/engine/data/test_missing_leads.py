"""Missing leads reach the model as zeros, whatever noise is added to the others."""

from typing import Any

import numpy as np
import pytest
import torch
from loading import BACKENDS, CPU, loader, some

from omnilead.data_tools.dataset import LEADS, Dataset
from omnilead.engine.data import augmenter
from omnilead.engine.data.augment import AugmentConfig, ThreeKG
from omnilead.engine.data.loader import Loader, LoaderConfig

ADDING = {
    "paper": AugmentConfig(rlm=0, noise="physio4"),
    "masked": AugmentConfig(noise="physio3", rlm_keep_one=True),
    "authors": AugmentConfig(rlm=0, noise="authors_physio3"),
    "3kg": AugmentConfig(rlm=0, threekg=ThreeKG(time_mask=0.25)),
    "few": AugmentConfig(rlm=0, noise="wander", leads="I,V3,V6", padded=False),
}


def test_missing_leads_are_read_from_the_table(dataset: Dataset, small: Dataset) -> None:
    named = dataset.table(["missing_leads"])["missing_leads"].to_pylist()
    bits = augmenter.missing_leads(dataset)
    assert [
        [lead for i, lead in enumerate(LEADS) if bit >> i & 1] for bit in bits.tolist()
    ] == named
    assert any(named) and not augmenter.missing_leads(small).any()
    row = next(row for row, leads in enumerate(named) if leads)
    lacks = [LEADS.index(lead) for lead in named[row]]
    assert (
        augmenter.none_measured(dataset, lacks)[row]
        and not augmenter.none_measured(dataset, range(12))[row]
    )
    assert augmenter.measured_leads([small]) is None


@pytest.mark.parametrize(
    ("backend", "augment"),
    [*(("torch", one) for one in ADDING.values()), *((b, ADDING["paper"]) for b in BACKENDS[1:])],
)
def test_leads_that_were_not_measured_stay_zero(
    backend: str, augment: AugmentConfig, dataset: Dataset
) -> None:
    """Over an epoch; crops without missing leads are not affected by crops that have some."""
    source = loader(dataset, backend, augment=augment)
    bits, steps = augmenter.missing_leads(dataset), source.steps_per_epoch
    blind = loader(dataset, backend, augment=augment)
    blind.measured = None
    met = 0
    for (batch, _), (other, _) in zip(some(source, steps), some(blind, steps), strict=True):
        for x, y, row in zip(batch.x_BSLT, other.x_BSLT, batch.places.row.tolist(), strict=True):
            lacks = torch.tensor([bool(bits[row] >> lead & 1) for lead in augment.output_leads])
            met += int(lacks.sum())
            assert not x[:, lacks].any() and (
                backend == "dali" or augment.rlm_keep_one or torch.equal(x[:, ~lacks], y[:, ~lacks])
            )
    assert met or augment.leads != "12"


@pytest.mark.parametrize("backend", BACKENDS)
def test_missing_leads_are_looked_up_by_dataset(
    backend: str, small: Dataset, ten: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    bits = {
        one.root.url: rng.integers(0, 2**12, len(one)).astype(np.uint16) for one in (small, ten)
    }
    monkeypatch.setattr(augmenter, "missing_leads", lambda one: bits[one.root.url])
    config: dict[str, Any] = {
        "backend": backend,
        "batch_crops": 8,
        "augment": AugmentConfig(rlm=0, noise="wander"),
    }
    if backend == "dali":
        pytest.importorskip("nvidia.dali", reason="the extra cu13 or cu12 is not installed")
    for batch, _ in some(Loader(LoaderConfig(**config), (small, ten), CPU), 6):
        assert set(batch.places.dataset.tolist()) == {0, 1}
        of = [
            bits[(small, ten)[d].root.url][row]
            for d, row in zip(batch.places.dataset, batch.places.row, strict=True)
        ]
        lacks = torch.from_numpy(np.array(of)[:, None] >> np.arange(12) & 1 == 1)
        zero = (batch.x_BSLT == 0).all(-1).all(1)
        assert torch.equal(zero, lacks) and lacks.any() and not lacks.all()


def test_keep_one_keeps_a_measured_lead(small: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        augmenter, "missing_leads", lambda one: np.full(len(one), 0b111111110111, np.uint16)
    )  # aVR alone is there
    augment = AugmentConfig(rlm=0.9, rlm_keep_one=True)
    for batch, _ in some(loader(small, augment=augment), 4):
        there = batch.x_BSLT.any(-1)
        assert there[:, :, LEADS.index("aVR")].all() and there.sum(-1).eq(1).all()


def test_without_noise_the_table_is_not_read(dataset: Dataset) -> None:
    """It would cost 2 bytes per crop and reading the column."""
    assert loader(dataset, augment=AugmentConfig()).measured is None

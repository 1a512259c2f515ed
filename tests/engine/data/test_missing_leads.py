"""Missing leads reach the model as zeros, whatever noise is added to the others."""

import dataclasses

import numpy as np
import pytest
import torch
from loading import BACKENDS, CPU, loader, some

from omnilead.data_tools.ecg.constants import LEADS
from omnilead.engine.data import augmenter
from omnilead.engine.data.augmentations import AugmentConfig
from omnilead.engine.data.augmentations.threekg import ThreeKG
from omnilead.engine.data.loader import Loader

ADDING = {
    "paper": AugmentConfig(rlm=0, noise="physio4"),
    "masked": AugmentConfig(noise="physio3", rlm_keep_one=True),
    "authors": AugmentConfig(rlm=0, noise="authors_physio3"),
    "3kg": AugmentConfig(rlm=0, threekg=ThreeKG(time_mask=0.25)),
    "wander": AugmentConfig(rlm=0, noise="wander"),
    "few": AugmentConfig(rlm=0, noise="wander", leads="I,V3,V6", padded=False),
}


def test_missing_leads_are_read_from_the_table(dataset, small):
    named = dataset.table(["missing_leads"])["missing_leads"].to_pylist()
    bits = [sum(1 << LEADS.index(lead) for lead in leads) for leads in named]
    assert augmenter.missing_leads(dataset).tolist() == bits and any(bits)
    row = next(row for row, leads in enumerate(named) if leads)
    lacks = [LEADS.index(lead) for lead in named[row]]
    assert augmenter.crops_without_leads(dataset, lacks)[row]
    assert not augmenter.crops_without_leads(dataset, range(12))[row]
    assert augmenter.measured_leads_lookup([small]) is None
    # without noise no zero can change: the column is not read
    assert loader(dataset, augment=AugmentConfig()).augmenter.measured_leads is None


@pytest.mark.parametrize(
    ("backend", "augment"),
    [*(("torch", one) for one in ADDING.values()), *((b, ADDING["paper"]) for b in BACKENDS[1:])],
)
def test_leads_that_were_not_measured_stay_zero(backend, augment, dataset):
    """Over an epoch; crops without missing leads are not affected by crops that have some."""
    source, blind = (loader(dataset, backend, augment=augment) for _ in range(2))
    bits, steps = augmenter.missing_leads(dataset), source.steps_per_epoch
    blind.augmenter = dataclasses.replace(blind.augmenter, measured_leads=None)
    met = 0
    for (batch, _), (other, _) in zip(some(source, steps), some(blind, steps), strict=True):
        for x, y, row in zip(batch.x_BSLT, other.x_BSLT, batch.places.row.tolist(), strict=True):
            lacks = torch.tensor([bool(bits[row] >> lead & 1) for lead in augment.output_leads])
            met += int(lacks.sum())
            assert not x[:, lacks].any()
            if backend == "torch" and not augment.rlm_keep_one:
                assert torch.equal(x[:, ~lacks], y[:, ~lacks])
    assert met or augment.leads != "12"


@pytest.mark.parametrize("backend", BACKENDS)
def test_missing_leads_are_looked_up_by_dataset(backend, small, ten, monkeypatch):
    pair, rng = (small, ten), np.random.default_rng(3)
    bits = {one.root.url: rng.integers(0, 2**12, len(one)).astype(np.uint16) for one in pair}
    monkeypatch.setattr(augmenter, "missing_leads", lambda one: bits[one.root.url])
    config = loader(small, backend, batch_crops=8, augment=ADDING["wander"]).config
    for batch, _ in some(Loader(config, pair, CPU), 6):
        assert set(batch.places.dataset.tolist()) == {0, 1}
        places = zip(batch.places.dataset, batch.places.row, strict=True)
        of = [bits[pair[d].root.url][row] for d, row in places]
        lacks = torch.from_numpy(np.array(of)[:, None] >> np.arange(12) & 1 == 1)
        zero = (batch.x_BSLT == 0).all(-1).all(1)
        assert torch.equal(zero, lacks) and lacks.any() and not lacks.all()


def test_keep_one_keeps_a_measured_lead(small, monkeypatch):
    only_avr = np.full(len(small), 0b111111110111, np.uint16)
    monkeypatch.setattr(augmenter, "missing_leads", lambda _: only_avr)
    augment = AugmentConfig(rlm=0.9, rlm_keep_one=True)
    for batch, _ in some(loader(small, augment=augment), 4):
        there = batch.x_BSLT.any(-1)
        assert there[:, :, LEADS.index("aVR")].all() and there.sum(-1).eq(1).all()

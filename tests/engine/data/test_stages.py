"""Every stage of the augmentations, alone and beside every other: torch's general path, its fast path
on a CPU and DALI give the same. A stage is in these tests because it is in STAGES."""

from dataclasses import fields
from functools import reduce
from itertools import chain, combinations
from typing import get_type_hints

import numpy as np
import pytest
import torch
from loading import CPU, loader, some
from shards_made import crops_of

from omnilead.engine.data.augmentations import STAGES, AugmentConfig
from omnilead.engine.data.augmentations.stage import Random, Stage
from omnilead.engine.data.augmenter import Augmenter, missing_leads
from omnilead.engine.data.order import Places
from omnilead.engine.data.stage_timer import StageTimer
from omnilead.engine.data.writer import CropWriter, SingleCropWriter, crop_writer
from omnilead.engine.model.draws import ModelStream
from omnilead.engine.settings.counter import RandomStream
from omnilead.engine.training.config import build_config


def together(*examples):
    """Settings that switch on the stages of all these examples."""
    settings = reduce(dict.__or__, examples, {"rlm": 0.0})
    kinds = dict.fromkeys(example["noise"] for example in examples if "noise" in example)
    return settings | {"noise": ",".join(kinds)}


FIRST = {stage.__name__: stage.examples[0] for stage in STAGES}
ALONE = {
    f"{stage.__name__} {example} {views}": (together(example), views)
    for stage in STAGES
    for example in stage.examples
    for views in ("halves", "window")
}
PAIRS = {
    f"{one} and {other}": (together(FIRST[one], FIRST[other]), "halves")
    for one, other in combinations(FIRST, 2)
}
ALL = {f"all, {views}": (together(*FIRST.values()), views) for views in ("halves", "window")}
CASES = ALONE | PAIRS | ALL


def configured(settings):
    return build_config({"augment": settings}).augment


@pytest.mark.parametrize(("settings", "views"), CASES.values(), ids=CASES)
def test_every_path_gives_the_same_and_missing_leads_stay_zero(settings, views, dataset):
    config, lacking = configured(settings), missing_leads(dataset)
    rows = np.arange(8) + np.flatnonzero(lacking)[0] - 4
    how = {"views": views, "augment": config, "batch_crops": 8, "rows": [rows]}
    source = loader(dataset, **how)
    ((batch, _),) = some(source, 1)
    crops = torch.from_numpy(crops_of(dataset, batch.places.row))

    def at_once(augmenter):
        return augmenter(crops, augmenter.to_device(augmenter.draw_parameters(batch.places)))

    general = at_once(source.augmenter)
    assert torch.equal(batch.x_BSLT, general)
    assert not torch.equal(general, at_once(Augmenter(configured({"rlm": 0.0}), views, 0, CPU)))
    lacking_BL = lacking[batch.places.row][:, None] >> np.array(config.output_leads) & 1 == 1
    assert not general.transpose(1, 2)[torch.from_numpy(lacking_BL)].any()
    if config.padded:
        assert lacking_BL.any()
    ((by_dali, _),) = some(loader(dataset, "dali", **how), 1)
    np.testing.assert_allclose(by_dali.x_BSLT, general, atol=1e-5)
    assert torch.equal(by_dali.x_BSLT.any(-1), general.any(-1))  # masked leads are exactly zero


def test_the_fast_path_is_taken_where_it_can_be():
    fast = [
        stage.examples[0]
        for stage in STAGES
        if stage(configured(together(stage.examples[0]))).fits_single_crop_writer
    ]
    assert {"rlm": 0.5} in fast and {"noise": "emg"} in fast and len(fast) >= 5
    slow = [stage.examples[0] for stage in STAGES if stage.examples[0] not in fast]
    for examples in (fast, *([*fast, one] for one in slow)):
        augmenter = Augmenter(configured(together(*examples)), "halves", 0, CPU)
        plan = augmenter.plan(Places(*np.zeros((3, 2), np.int64)))
        out = torch.empty(2, 2, len(augmenter.config.output_leads), 2500)
        kind = SingleCropWriter if examples is fast else CropWriter
        assert type(crop_writer(augmenter, plan, out, StageTimer())) is kind


def test_no_two_stages_share_random_numbers_parameters_or_settings():
    streams = [stage.stream for stage in STAGES if stage.stream] + list(RandomStream)
    assert len(set(streams)) == len(streams) and max(streams) < min(ModelStream)
    names = []
    for stage in STAGES:
        alone = [stage(configured(together(example))) for example in stage.examples]
        assert all(one.active for one in alone), stage
        mine = set(chain(*(one.draw(Random(0, *np.zeros((2, 1), int))) for one in alone)))
        assert stage.stream or not mine, stage
        names += mine
    assert len(set(names)) == len(names)
    parts = {get_type_hints(stage)["settings"] for stage in STAGES}
    of_stages = {one.name for part in parts for one in fields(part)}
    assert {one.name for one in fields(AugmentConfig)} == of_stages | {"extra"}


def test_a_stage_without_a_formula_is_not_left_out_without_a_word():
    class Forgotten(Stage):
        active = True

    with pytest.raises(TypeError, match=r"abstract method.* active"):
        Stage(AugmentConfig())
    with pytest.raises(TypeError, match=r"Forgotten: has neither apply\(\) nor wave\(\)"):
        Forgotten(AugmentConfig()).apply(torch.ones(1), {}, None)

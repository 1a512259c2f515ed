"""RUN/diagnostics.npz: what the report draws beside the curves, by every kind of run."""

from itertools import combinations

import numpy as np
import pytest
import torch

from omnilead.engine.common import DIAGNOSTICS
from omnilead.engine.model.config import ModelConfig, ObjectiveConfig
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.training.validation import MAX_PAIRS, Capture, pairs, thinned

SMALL = ModelConfig(conv=((16, 2),) * 4, width=32, layers=1, heads=4, ffn=48, position_kernel=16, position_groups=4, codes=8,
                    code_width=16, projection=16)  # fmt: skip


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_every_pair_counts_once():
    c_AD = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    names, c = [3, 1, 3, 3, 2, 1, 9], c_AD.numpy()
    every = {True: [], False: []}
    for i, j in combinations(range(7), 2):
        every[names[i] == names[j]].append(cosine(c[i], c[j]))
    same, others = pairs(c_AD, torch.tensor(names))
    np.testing.assert_allclose(same, every[True], atol=1e-6)
    np.testing.assert_allclose(others, every[False], atol=1e-6)
    assert len(thinned(torch.randn(3 * MAX_PAIRS + 1))) <= MAX_PAIRS
    for count in (0, MAX_PAIRS):
        assert len(thinned(torch.randn(count))) == count


def test_diagnostics_use_the_same_cosines_as_the_loss():
    """The cosines are complete: if each negative is drawn once, the loss of the batch follows from
    them alone."""
    objective = ObjectiveConfig(negatives=1, diversity=0.0, features=0.0, contrast=0.0)
    model = Pretrainer(SMALL, objective, generator=torch.Generator().manual_seed(0)).eval()
    x_BSLT = torch.randn(2, 2, 12, 640, generator=torch.Generator().manual_seed(1))
    keys_BS = torch.arange(4).view(2, 2)
    with Capture(model) as seen, torch.no_grad():
        losses = model(x_BSLT, keys_BS, torch.tensor(1.0))
    found, draws = seen.similarities(views=2), seen.draws
    assert draws is not None and seen.compared is not None
    valid, times = draws.valid_RM.numpy(), draws.times_RMM.numpy() > 0
    used = found["code_usage"].sum() / SMALL.codebooks
    assert len(found["positive_similarity"]) == valid.sum() == used
    context, target = (x.numpy() for x in seen.compared[:2])
    codes, own, other, loss = seen.compared.quantized.codes_RMG.numpy(), [], [], []
    for r in range(4):
        of_row = []
        for i in np.flatnonzero(valid[r]):
            drawn = [j for j in np.flatnonzero(times[r, i]) if (codes[r, i] != codes[r, j]).any()]
            cosines = [cosine(context[r, i], target[r, j]) for j in (i, *drawn)]
            own.append(cosines[0])
            other += cosines[1:]
            scaled = np.array(cosines) / objective.temperature
            of_row.append(np.log(np.exp(scaled).sum()) - scaled[0])
        loss.append(np.mean(of_row))
    np.testing.assert_allclose(found["positive_similarity"], own, atol=1e-5)
    np.testing.assert_allclose(found["negative_similarity"], other, atol=1e-5)
    assert float(losses["loss_local"]) == pytest.approx(np.mean(loss), rel=1e-4)
    assert len(found["same_similarity"]) == 2 and len(found["other_similarity"]) == 4


def test_a_run_on_two_ranks_in_bf16_writes_diagnostics(training, tmp_path):
    how = {"train__zero_stage": 3, "train__precision": "bf16", "train__steps": 1}
    training(world=2, **how).good()
    found = np.load(tmp_path / "run" / DIAGNOSTICS)
    assert found["samples_mv"].shape == (4, 2, 12, 2500) and found["code_usage"].shape == (2, 8)
    for name in ("positive", "negative", "same", "other"):
        assert (abs(found[f"{name}_similarity"]) <= 1.001).all()
    # of rank 0's four crops
    assert len(found["same_similarity"]) == 4 and len(found["other_similarity"]) == 6 * 4
    own = len(found["positive_similarity"])
    assert own < found["code_usage"][0].sum() < 3 * own

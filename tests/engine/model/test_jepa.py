"""Joint-embedding prediction: blocks, loss, and the average that is predicted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import SMALL, keys, seeded, waves
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from omnilead.engine.model.config import ModelConfig, ObjectiveConfig
from omnilead.engine.model.draws import row_keys
from omnilead.engine.model.encoders import encoder_flops
from omnilead.engine.model.jepa import draw_blocks, flops_added_by_jepa
from omnilead.engine.settings.errors import ConfigError

TOKENS = 50  # of 800 samples
LAYER = replace(SMALL, conv_norm="layer")
S4 = ModelConfig(encoder="s4", options={"width": 48, "layers": 2, "bidirectional": True})
JEPA = ObjectiveConfig(local=0, method="jepa", options={"momentum": 0.75})


def jepa():
    return seeded(LAYER, JEPA)


def test_its_flops_are_those_of_its_passes():
    config = replace(S4, options=S4.options | {"dropout": 0.0})
    model = seeded(config, JEPA).train()
    with FlopCounterMode(display=False) as counter:
        model(waves(1, 1600), keys(1))["loss"].backward()
    windows, tokens = 2, 800
    encoder = encoder_flops(model.encoder, config, False, 1600, windows=1)
    ours = windows * (encoder + flops_added_by_jepa(encoder, tokens, 48))
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.1)


def row_of_keys(rows):
    return torch.from_numpy(row_keys(0, 0, np.arange(rows), 1)).flatten()


def test_blocks_have_the_lengths_and_places_of_the_recipe():
    hidden_RN, weight_RN = draw_blocks(row_of_keys(4000), 100)
    assert (weight_RN.sum(1) >= 4 * 15).all() and (weight_RN.sum(1) <= 4 * 20).all()
    assert hidden_RN[weight_RN > 0].all() and (~hidden_RN).any(1).all()
    unhidden = hidden_RN & (weight_RN == 0)  # outside the context, and not predicted
    assert 0.03 < float(unhidden.float().mean()) < 0.07  # 7.5 %, less what is predicted
    weight_N = weight_RN.float().mean(0)
    assert_close(weight_N, weight_N.flip(0), rtol=0, atol=0.1)  # no end is favoured
    with pytest.raises(
        ConfigError, match=r"a window has 19 tokens, but objective\.method=jepa needs at least 20"
    ):
        draw_blocks(row_of_keys(1), 19)


def test_blocks_depend_on_nothing_but_the_crop():
    keys_R = row_of_keys(9)
    whole, last = draw_blocks(keys_R, TOKENS), draw_blocks(keys_R[-2:], TOKENS)
    assert all(all_rows[-2:].equal(rows) for all_rows, rows in zip(whole, last, strict=True))
    assert len({tuple(row.tolist()) for row in whole[0]}) == 9


def test_the_loss_is_that_of_the_formula():
    model = jepa().eval()
    x_BSLT, keys_BS = waves(3), keys(3)
    out = model(x_BSLT, keys_BS)
    losses, targets = [], []
    for x_LT, key in zip(x_BSLT.flatten(0, 1), keys_BS.flatten(), strict=True):
        hidden_1N, weight_1N = draw_blocks(key[None], TOKENS)
        z_1NF, _ = model.encoder.features(x_LT[None])
        predicted_1ND = model.plugin.predictor(model.encoder.context(z_1NF, hidden_1N))
        target_1ND = F.layer_norm(model.encoder(x_LT[None]), (LAYER.width,))
        targets.append(target_1ND[0])
        tokens = []
        for n, times in enumerate(weight_1N[0].tolist()):
            error = F.smooth_l1_loss(predicted_1ND[0, n], target_1ND[0, n])
            tokens += [error] * times
        losses.append(torch.stack(tokens).mean())
    assert_close(out["loss"], torch.stack(losses).mean())
    assert_close(out["target_spread"], torch.cat(targets).std(0).mean().detach())


def test_the_prediction_does_not_see_what_is_hidden():
    model = jepa().eval()
    x_BSLT, keys_BS = waves(2), keys(2)
    hidden_RN, _ = draw_blocks(keys_BS.flatten(), TOKENS)
    of_sample_RT = hidden_RN.repeat_interleave(800 // TOKENS, 1).unflatten(0, (2, 2))
    other_BSLT = torch.where(of_sample_RT[:, :, None], -x_BSLT, x_BSLT)
    model.plugin.targets = lambda x_RLT, dtype: torch.zeros(4, TOKENS, LAYER.width)  # of neither
    assert_close(model(other_BSLT, keys_BS)["loss"], model(x_BSLT, keys_BS)["loss"])


def test_the_target_is_an_average_without_gradient():
    model = jepa().train()
    before = {name: w.clone() for name, w in model.encoder.named_parameters()}
    losses = model(waves(3), keys(3))
    losses["loss"].backward()
    assert all(w.grad.isfinite().all() for w in model.parameters() if w.grad is not None)
    assert not any(name.startswith("plugin.target") for name, _ in model.named_parameters())
    with torch.no_grad():
        for w in model.encoder.parameters():
            w.add_(1)
    model.after_step()
    for name, w in before.items():
        assert_close(model.plugin.target.get_buffer(name), w + 0.25)
    model.plugin.after_step(model.encoder, momentum=0)
    for name, w in model.encoder.named_parameters():
        assert_close(model.plugin.target.get_buffer(name), w.detach())


def test_the_target_has_the_encoders_statistics():
    model = seeded(replace(S4, options=S4.options | {"norm": "batch"}), JEPA).train()
    model(waves(2), keys(2))
    model.after_step()
    name = "stem.0.norm.running_mean"
    mean = model.encoder.get_buffer(name)
    assert mean.any() and model.plugin.target.get_buffer(name).equal(mean)


@pytest.mark.parametrize("config", [LAYER, S4])
def test_small_steps_are_kept_in_bf16(config):
    """Of 0.004 times a small difference bf16 keeps nothing."""
    model = seeded(config, JEPA)
    for p in model.parameters():
        p.data = p.data.bfloat16()
    name = "layers.0.linear.weight" if config.encoder else "layers.0.fc1.weight"
    weight, average = model.encoder.get_parameter(name), model.plugin.target.get_buffer(name)
    with torch.no_grad():
        weight.add_(weight.sign() * 1e-2)
    start = average.clone()
    for _ in range(3):
        model.after_step()
    assert average.dtype == torch.float32
    assert_close(average, weight.float() + (start - weight.float()) * 0.75**3)
    losses = model(waves(2).bfloat16(), keys(2))
    losses["loss"].backward()
    assert losses["loss"].isfinite() and weight.grad.isfinite().all()


def test_dropout_changes_the_prediction_and_not_the_target():
    model = seeded(replace(LAYER, dropout=0.5), JEPA).train()
    x_RLT = waves(2).flatten(0, 1)
    one, two = (model.plugin.targets(x_RLT, torch.float32) for _ in range(2))
    assert one.equal(two)
    assert not model.encoder(x_RLT).equal(model.encoder(x_RLT))


@pytest.mark.parametrize(
    "config",
    [replace(LAYER, layers=1), replace(S4, options=S4.options | {"dropout": 0.0, "layers": 1})],
)
def test_it_is_one_graph(config):
    model = seeded(config, JEPA).train()
    eager = model(waves(2), keys(2))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(waves(2), keys(2))
    assert_close(dict(compiled), dict(eager))


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (LAYER, {"momentum": 1.0}, "momentum=1.0: must be at least 0 and less than 1"),
        (LAYER, {"momenta": 1.0}, "momenta"),
        (replace(LAYER, causal=True), {}, "sees earlier and later ones: set model.causal=false"),
        (ModelConfig(encoder="s4", options={"width": 48}), {}, "sees earlier and later ones"),
        (ModelConfig(encoder="resnet"), {}, "a class of yours needs features.. and context"),
    ],
)
def test_what_cannot_be_is_said(model, options, said):
    with pytest.raises(ConfigError, match=f"objective.method=jepa.*{said}"):
        seeded(model, replace(JEPA, options=options))

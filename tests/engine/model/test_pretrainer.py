"""A whole step: golden numbers, learning, every method, other encoders, low precision, one
graph."""

import copy
from dataclasses import replace

import pytest
import torch
from tiny import SMALL, STILL, by_numpy, keys, seeded, waves
from torch import nn
from torch.testing import assert_close

from omnilead.engine.model.config import ModelConfig, ObjectiveConfig
from omnilead.engine.model.draws import Draws, draw_for_step
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.training.train import compile_model, recompute_layers

GOLDEN = {
    "loss": 6.714488,
    "loss_local": 4.815771,
    "loss_diversity": 0.1407744,
    "loss_features": 0.009498719,
    "accuracy_local": 0.04753464,
    "prob_perplexity": 27.49522,
    "code_perplexity": 15.16531,
    "masked": 196,
    "masked_share": 0.49,
    "loss_global": 1.789653,
    "accuracy_global": 0.625,
    "grad": 2.975036,
}
# Loss and norm of the gradient of ten steps with dropout, float32 on a CPU.
CURVE = [
    (6.768626, 2.743508),
    (6.652479, 1.941247),
    (6.667246, 2.077028),
    (6.462405, 2.613627),
    (6.044433, 4.386055),
    (5.464172, 3.823433),
    (5.164070, 3.214021),
    (4.998110, 2.667914),
    (4.788863, 1.161112),
    (4.799133, 0.667173),
]


def step(model, crops=4):
    ids_B = torch.arange(crops) // 2
    return dict(model(waves(crops), keys(crops), torch.tensor(2.0), ids_B=ids_B))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_golden_losses_and_gradient():
    """Numbers from when this code agreed with the authors' (tests/engine/test_parity.py); they
    reveal changed results."""
    model = by_numpy(seeded())
    out = step(model)
    norm = nn.utils.get_total_norm(gradients(model, out["loss"]))
    values = {name: float(value.detach()) for name, value in (out | {"grad": norm}).items()}
    assert values == pytest.approx(GOLDEN, rel=2e-4)


def test_the_golden_curve():
    """Optimisations must not silently change results: draws, dropout masks, losses, gradients."""
    model = by_numpy(seeded(replace(SMALL, **dict.fromkeys(STILL, 0.1))))
    sgd, values = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9), []
    torch.manual_seed(0)
    for epoch in range(len(CURVE)):
        loss = model(waves(4), keys(4, epoch), torch.tensor(2.0))["loss"]
        norm = nn.utils.get_total_norm(gradients(model, loss))
        sgd.step()
        values += [float(loss.detach()), float(norm)]
    assert values == pytest.approx([number for pair in CURVE for number in pair], rel=1e-5)


def test_only_the_loss_has_a_gradient_and_it_is_the_weighted_sum():
    out = step(seeded(objective=ObjectiveConfig(local=2, diversity=0.3, features=5, contrast=0.5)))
    assert [name for name, value in out.items() if value.requires_grad] == ["loss"]
    weights = {"local": 2, "diversity": 0.3, "features": 5, "global": 0.5}
    expected = sum(w * out[f"loss_{name}"] for name, w in weights.items())
    assert_close(out["loss"].detach(), expected)


def test_spare_slots_change_nothing():
    """M slots, some invalid, give the same as exactly one slot per masked token."""
    model = seeded()
    padded = draw_for_step(replace(SMALL, mask_trim=True), keys(4).flatten(), 50, 100)
    used = int(padded.valid_RM.sum(1)[0])
    assert padded.valid_RM[:, :used].all() and used < padded.valid_RM.shape[1]
    assert padded.noise_RMGV is not None
    slots = (padded.slot_RM, padded.valid_RM, padded.times_RMM[:, :, :used], padded.noise_RMGV)
    tight = Draws(padded.mask_RN, *(part[:, :used] for part in slots))
    results = []
    for draws in (padded, tight):
        out = model(waves(4), tau=torch.tensor(2.0), draws=draws)
        grads = gradients(model, out["loss"])
        results.append([*out.values(), *(grad.clone() for grad in grads)])
    assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "objective",
    [
        ObjectiveConfig(contrast=0),
        ObjectiveConfig(local=0),
        ObjectiveConfig(local=0, method="simclr", detach_norm=True),
        ObjectiveConfig(local=0, method="3kg"),
        ObjectiveConfig(form="authors", gathered=False),
    ],
    ids=["w2v", "cmsc", "simclr", "3kg", "authors"],
)
def test_every_method_learns(objective):
    torch.manual_seed(0)
    model = seeded(replace(SMALL, layers=1), objective)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    x, ids, losses = waves(8), torch.arange(8), []
    for epoch in range(25):
        loss = model(x, keys(8, epoch), torch.tensor(2.0), ids_B=ids)["loss"]
        gradients(model, loss)
        optimiser.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5]), losses


BOTH = {"age": 0.5, "sex": 2.0}
LABELS = torch.tensor([[0.5, 1.0], [-1.0, torch.nan], [torch.nan, 0.0], [torch.nan, torch.nan]])


@pytest.mark.parametrize("pure", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "how",
    [
        {"contrast": 0},
        {},
        {"local": 0, "method": "simclr"},
        {"local": 0, "method": "3kg"},
        {"local": 0, "method": "cpc", "options": {"steps": 2}},
    ],
    ids=["w2v", "w2v_cmsc", "simclr", "3kg", "cpc"],
)
def test_age_and_sex_are_losses_beside_every_objective(how, pure):
    """They add to the loss, reach the encoder, and change neither other losses nor initial weights."""
    config = replace(SMALL, causal=True, conv_norm="layer")
    off = seeded(config, ObjectiveConfig(**how))
    on = seeded(config, ObjectiveConfig(**how, attributes=BOTH))
    if pure:
        off, on = off.bfloat16(), on.bfloat16()
    inputs = waves(4), keys(4), torch.tensor(2.0), torch.arange(4) // 2
    without, out = off(*inputs), on(*inputs, LABELS)
    for name in without.keys() - {"loss"}:
        assert without[name].equal(out[name])
    added = float((out["loss"] - without["loss"]).detach())
    assert added == pytest.approx(float(0.5 * out["loss_age"] + 2 * out["loss_sex"]), abs=1e-5)
    grads = torch.autograd.grad(out["loss"] - without["loss"], on.encoder.parameters())
    before = torch.autograd.grad(off(*inputs)["loss"], off.encoder.parameters())
    assert all(grad.isfinite().all() for grad in grads)
    assert not all(map(torch.allclose, grads, before))
    for name, tensor in off.state_dict().items():
        assert tensor.equal(on.state_dict()[name])


def test_one_of_age_and_sex_and_who_forgets_them():
    model = seeded(SMALL, ObjectiveConfig(local=0, attributes={"sex": 1.0}))
    losses = model(waves(4), attributes_B2=LABELS)
    assert "loss_sex" in losses and "loss_age" not in losses
    with pytest.raises(ValueError, match="pass attributes_B2"):
        model(waves(4))


def test_an_objective_of_patients_asks_for_them():
    for objective in (ObjectiveConfig(local=0, method="3kg"), ObjectiveConfig(form="authors")):
        with pytest.raises(ValueError, match=f"{objective.method}.*{objective.form}.*pass ids_B"):
            seeded(objective=objective)(waves(2), keys(2), torch.tensor(2.0))


@pytest.mark.parametrize("pure", [False, True], ids=["autocast", "weights"])
def test_bf16_is_finite_and_near(pure):
    exact, model = step(seeded().eval()), seeded().eval()
    if pure:
        model = model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=not pure):
        out = step(model)
    assert all(grad.isfinite().all() for grad in gradients(model, out["loss"]))
    for name in ("loss_local", "loss_features", "loss_global"):
        assert float(out[name]) == pytest.approx(float(exact[name]), rel=0.05)
        assert out[name].dtype == torch.float32


def test_dropout_drops_and_evaluation_does_not():
    names = ["dropout", "activation_dropout", "attention_dropout", "input_dropout"]
    model = seeded(replace(SMALL, **dict.fromkeys(names, 0.2)))
    assert step(model)["loss"] != step(model)["loss"]
    model.eval()
    assert step(model)["loss"] == step(model)["loss"]


def test_initial_weights_follow_the_generator_alone():
    one, other = seeded(), seeded()
    assert_close(dict(one.state_dict()), dict(other.state_dict()), rtol=0, atol=0)
    assert float(one.encoder.layers[0].fc1.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert_close(one.encoder.position.weight(), one.encoder.position.direction)


@pytest.mark.parametrize("how", ["layers", "step"])
def test_nothing_in_a_step_breaks_the_graph(how):
    """One graph, or one for each part, for any draws: only traced, as compiling would take
    minutes."""
    torch._dynamo.reset()  # or the graph of a model that another test compiled counts as the first
    model = seeded(replace(SMALL, conv=((32, 4),) * 2, layers=1))
    compiled = copy.deepcopy(model)
    compile_model(compiled, how, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for epoch in range(2):
            results = []
            for one in (compiled, model):
                loss = one(waves(2), keys(2, epoch), torch.tensor(2.0 - 0.1 * epoch))["loss"]
                results.append([loss.detach(), *gradients(one, loss)])
            assert_close(*results, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "how", ["plain eager", "auto eager", "plain layers", "auto layers", "auto step"]
)
def test_a_gpu_computes_what_a_cpu_does(how, monkeypatch):
    kernels, compiled = how.split()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    losses, grads = [], []
    for device in ("cpu", "cuda"):
        model = seeded(replace(SMALL, kernels=kernels)).to(device)
        compile_model(model, compiled if device == "cuda" else "eager")
        out = model(waves(4).to(device), keys(4).to(device), torch.tensor(2.0).to(device))
        grads.append([grad.cpu() for grad in gradients(model, out["loss"])])
        losses.append({name: value.detach().cpu() for name, value in out.items()})
    assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    for expected, got in zip(*grads, strict=True):
        assert_close(got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.gpu
def test_a_gpu_draws_what_a_cpu_does():
    mine, theirs = (
        [part.cpu() for part in draw_for_step(SMALL, keys(16).flatten().to(device), 50, 20)]
        for device in ("cuda", "cpu")
    )
    assert_close(mine[:4], theirs[:4], rtol=0, atol=0)
    assert_close(mine[4], theirs[4], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kernels", "dtype", "how"),
    [
        ("auto", torch.float32, "eager"),
        ("auto", torch.bfloat16, "eager"),
        ("plain", torch.float32, "eager"),
        ("auto", torch.float32, "layers"),
    ],
)
def test_layers_that_are_computed_again_change_no_loss(kernels, dtype, how):
    """Dropout included: bit for bit, gradients too."""
    config = replace(SMALL, dropout=0.1, attention_dropout=0.1, activation_dropout=0.1)
    config = replace(config, layers=4, kernels=kernels)

    def step(recomputes):
        model = seeded(config).to(dtype)
        if recomputes:
            recompute_layers(model)
        compile_model(model, how, backend="aot_eager")
        kept = {}

        def keep(x):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model(waves(4).to(dtype), keys(4), torch.tensor(2.0))["loss"]
        loss.backward()
        return loss, [p.grad for p in model.parameters()], sum(kept.values())

    (loss, grads, every), (again, same, fewer) = step(False), step(True)
    assert again.equal(loss) and loss.isfinite()
    assert all(one.equal(other) for one, other in zip(grads, same, strict=True))
    assert fewer < 0.6 * every


@pytest.mark.gpu
def test_a_gpu_computes_layers_again_with_equal_losses():
    config = replace(SMALL, dropout=0.1, attention_dropout=0.1, layers=4)
    losses, peaks = [], []
    for recomputes in (False, True):
        model = seeded(config).to("cuda", torch.bfloat16)
        if recomputes:
            recompute_layers(model)
        compile_model(model, "layers")
        given = waves(64).to("cuda", torch.bfloat16), keys(64).cuda(), torch.tensor(2.0).cuda()
        for _ in range(2):  # the first compiles
            torch.manual_seed(0)
            torch.cuda.reset_peak_memory_stats()
            loss = model(*given)["loss"]
            loss.backward()
        losses.append(loss.item())
        peaks.append(torch.cuda.max_memory_allocated())
    assert losses[0] == losses[1] and peaks[1] < peaks[0]


def test_an_encoder_without_layers_cannot_compute_them_again():
    model = Pretrainer(ModelConfig(encoder="resnet"), ObjectiveConfig(local=0))
    with pytest.raises(ConfigError, match=r"train\.recompute_layers=true: ResNet has no layers"):
        recompute_layers(model)

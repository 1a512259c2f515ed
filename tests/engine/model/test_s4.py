"""S4: the authors' numbers, a plain reference in float64, chunks, one graph, wrong options."""

import json
import math
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import by_numpy, keys, waves
from torch import nn
from torch.testing import assert_close

from omnilead.downstream.interop.ecg_cpc import options_and_weights
from omnilead.engine.model import s4
from omnilead.engine.model.config import ModelConfig, ObjectiveConfig
from omnilead.engine.model.cpc import Float32Product, sampled_loss
from omnilead.engine.model.encoders import build_encoder, check_encoder, encoder_flops, has_dropout
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.model.s4 import S4, StateSpace, hippo_legs_matrices
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.training.config import load_config
from omnilead.engine.training.train import compile_model
from tests.tables import tabulated

REFERENCE = Path(__file__).parents[3].parent / "shared" / "parity" / "ecg_cpc_small"
SMALL = {"width": 16, "layers": 2, "states": 4, "length": 40}
# Loss and norm of the gradient
GOLDEN = {"ecg_cpc": (2305.116, 4632.377), "s4_cpc": (1854.046, 3660.730)}
CPC = ObjectiveConfig(local=0, method="cpc", options={"form": "sampled", "negatives": 8})


@pytest.fixture(scope="module")
def authors():
    """Their state_dict, their numbers and their settings."""
    if not REFERENCE.is_dir():
        pytest.skip("the authors' numbers are not here (../shared/parity)")
    with np.load(REFERENCE / "eval.npz") as arrays:
        results = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    state = load_file(REFERENCE / "state_dict.safetensors")
    return state, results, json.loads((REFERENCE / "cfg.json").read_text())


def with_their_weights(state, **other_options):
    options, weights = options_and_weights(state)
    encoder = S4(12, **{**options, "dropout": 0.0, **other_options})
    encoder.load_state_dict(weights)
    return encoder


def assert_near(ours, theirs, limit=5e-6):
    assert (ours - theirs).abs().max() <= limit * theirs.abs().max()


def test_every_block_the_context_and_the_loss_are_the_authors(authors):
    state, results, cfg = authors
    encoder = with_their_weights(state).eval()
    assert (encoder.width, len(encoder.layers)) == (cfg["width"], cfg["layers"])
    z_RND, _ = encoder.features(results["x"])
    assert_near(z_RND, results["stem"])
    for number, layer in enumerate(encoder.layers, 1):
        before = results[f"s4_{number - 1}" if number > 1 else "stem"]
        assert_near(layer(before), results[f"s4_{number}"])
    c_RND = encoder(results["x"])
    assert_near(c_RND, results["context"])
    predicted_RND = c_RND @ state["head_ssl.proj.0.weight"].T
    assert_near(predicted_RND, results["predicted"])
    ahead = cfg["steps"]
    loss = sampled_loss(predicted_RND[:, :-ahead], z_RND, results["idx"][..., 1:], ahead)
    assert_near(loss, results["loss"], 1e-6)
    assert_near(encoder(results["x_2"]), results["context_2"])  # twice as long
    assert_near(encoder(results["x"][..., :230]), c_RND[:, :115])  # and shorter


def test_the_gradients_are_the_authors(authors):
    state, results, cfg = authors
    encoder, ahead = with_their_weights(state).train(), cfg["steps"]
    head = state["head_ssl.proj.0.weight"].clone().requires_grad_()
    z_RND, _ = encoder.features(results["x"])
    predicted_RnD = (encoder.context(z_RND, None) @ head.T)[:, :-ahead]
    loss = sampled_loss(predicted_RnD, z_RND, results["idx"][..., 1:], ahead)
    assert_near(loss.detach(), results["loss_train"], 1e-6)
    loss.backward()
    gradients = {name.removeprefix("grad_"): g for name, g in results.items() if "grad_" in name}
    assert_near(head.grad, gradients.pop("head_ssl.proj.0.weight"))
    # The gradient of C turns as C does, when it is converted beside what is frozen
    _, converted = options_and_weights(state | gradients)
    for name, p in encoder.named_parameters():
        assert_near(p.grad, converted[name].view_as(p))


def by_spectra(space, u_RND):
    """The output by a kernel as long as the input and its spectrum, in float64."""
    a, b = hippo_legs_matrices(space.states)
    p = b / math.sqrt(2)
    values, vectors = np.linalg.eig(a + np.outer(p, p))
    kept = np.argsort(-values.imag)[: space.states // 2]
    vectors = vectors[:, kept] / np.linalg.norm(vectors[:, kept], axis=0)
    along_p = vectors.conj().T @ p
    basis = torch.from_numpy(vectors * (along_p / np.abs(along_p))).conj()
    _, tokens, width = u_RND.shape
    kernels = []
    for d in range(width):
        half = math.exp(space.log_dt[d].double()) / 2 * a
        left = np.linalg.inv(np.eye(len(a)) - half)
        step = left @ (np.eye(len(a)) + half)
        correction = np.linalg.inv(np.eye(len(a)) - np.linalg.matrix_power(step, space.length))
        states = [left @ b * math.exp(space.log_dt[d].double())]
        for _ in range(tokens - 1):
            states.append(step @ states[-1])
        driven = torch.from_numpy(correction @ np.stack(states, 1))
        c = torch.view_as_complex(space.C[:, d].double().contiguous())
        kernels.append(2 * (c @ (basis.T @ driven.to(basis.dtype))).real)
    kernel_wND = torch.stack(kernels, 2)

    def convolved(x_RND, kernel_ND):
        spectrum = torch.fft.rfft(x_RND, 2 * tokens, 1) * torch.fft.rfft(kernel_ND, 2 * tokens, 0)
        return torch.fft.irfft(spectrum, 2 * tokens, 1)[:, :tokens]

    y_RND = convolved(u_RND, kernel_wND[0]) + space.D.double() * u_RND
    if len(kernel_wND) == 2:
        delayed = torch.cat([torch.zeros_like(kernel_wND[1, :1]), kernel_wND[1, :-1]])
        y_RND = y_RND + convolved(u_RND.flip(1), delayed).flip(1)
    return y_RND


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("chunk", "tokens"), [(32, 1), (32, 32), (32, 75), (7, 75), (128, 75)])
def test_any_chunk_is_the_convolution_with_the_whole_kernel(chunk, tokens, bidirectional):
    torch.manual_seed(0)
    space = StateSpace(5, 8, 50, bidirectional)
    space.chunk = chunk
    space.compute_frozen_buffers()
    u_RND = torch.randn(3, tokens, 5, requires_grad=True)
    y_RND = space(u_RND)
    weights_RND = torch.randn_like(y_RND)
    ours = torch.autograd.grad((y_RND * weights_RND).sum(), [u_RND, space.C, space.D])
    expected_RND = by_spectra(space, u_RND.double())
    inputs = [u_RND, space.C, space.D]
    expected = torch.autograd.grad((expected_RND * weights_RND).sum(), inputs)
    assert_near(y_RND.double(), expected_RND, 2e-6)
    for gradient, expected_gradient in zip(ours, expected, strict=True):
        assert_near(gradient, expected_gradient, 1e-5)


def test_what_c_is_stored_for_changes_nothing_but_how_it_is_stored():
    spaces = []
    for length in (30, 300):
        torch.manual_seed(0)
        spaces.append(StateSpace(6, 8, length))
    one, other = spaces
    assert not torch.allclose(one.C, other.C, rtol=0.1)
    u_RND = torch.randn(2, 50, 6)
    assert_close(one(u_RND), other(u_RND), rtol=1e-4, atol=1e-5)


def test_what_is_frozen_follows_its_steps_and_stays_float32():
    one, other = StateSpace(6, 8, 30), StateSpace(6, 8, 30)
    u_RND = torch.randn(2, 50, 6)
    with torch.device("meta"):
        loaded = StateSpace(6, 8, 30)
    loaded.load_state_dict(one.state_dict(), assign=True)
    other.load_state_dict(one.state_dict())
    assert other(u_RND).equal(one(u_RND)) and loaded(u_RND).equal(one(u_RND))
    assert one.state_dict().keys() == {"C", "D", "log_dt"}
    exact_RND = one(u_RND)
    one.bfloat16()
    assert one.C.dtype == torch.bfloat16 and one.log_dt.equal(other.log_dt)
    assert_near(one(u_RND.bfloat16()).float(), exact_RND, 0.03)


def encoder_of(**options):
    config = ModelConfig(encoder="s4", options=SMALL | options)
    return build_encoder(config, generator=torch.Generator().manual_seed(0)), config


def test_a_numpy_that_gives_complex_eigenvalues(monkeypatch):
    """numpy 2.5 does, also of real ones."""
    real = np.linalg.eig
    expected = StateSpace(3, 4, 40)
    monkeypatch.setattr(np.linalg, "eig", lambda a: [part.astype(complex) for part in real(a)])
    space = StateSpace(3, 4, 40)
    space.load_state_dict(expected.state_dict())
    assert_close(dict(space.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=0)


@pytest.mark.parametrize("norm", ["batch", "layer", "group"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_who_sees_what(norm, bidirectional):
    encoder, config = encoder_of(norm=norm, bidirectional=bidirectional)
    for dtype in (torch.float32, torch.bfloat16):
        build, _ = encoder_of(norm=norm, bidirectional=bidirectional)
        for part in build.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.to(dtype)
        assert check_encoder(build, config, masked=True, dtype=dtype, samples=601) == 301
    x_RLT = torch.randn(2, 12, 600)
    changed_RLT = x_RLT.clone()
    changed_RLT[..., 302:] += 1.0
    differs_N = (encoder.eval()(x_RLT) != encoder(changed_RLT)).any(2)[0]
    assert differs_N[151:].all()
    sees_ahead = bool(differs_N[:150].any())
    assert sees_ahead == (bidirectional or norm == "group") and encoder.causal == (not sees_ahead)


def test_dropout_drops_a_channel_of_a_row_for_all_times():
    encoder, config = encoder_of()
    assert has_dropout(encoder, config)
    dropped_RND = encoder.layers[0].dropout.train()(torch.ones(50, 7, 16))
    assert dropped_RND.eq(dropped_RND[:, :1]).all() and dropped_RND.unique().tolist() == [0, 1.25]
    assert 0.15 < dropped_RND.eq(0).float().mean() < 0.25


def test_fewer_leads_equal_all_with_the_others_zero():
    encoder, _ = encoder_of(kernels=[5, 3], strides=[3, 2])
    two, x_RLT = torch.randn(2, 2, 613), torch.zeros(2, 12, 613)
    x_RLT[:, [1, 7]] = two
    fewer = S4(2, **SMALL, kernels=[5, 3], strides=[3, 2]).eval()
    fewer.load_state_dict(S4.select_leads(encoder.state_dict(), (1, 7), 12))
    assert_close(fewer(two), encoder.eval()(x_RLT))


def test_size_and_cost_are_the_papers():
    config = ModelConfig(encoder="s4", options={"norm": "batch"})
    objective = ObjectiveConfig(local=0, method="cpc", options={"form": "sampled"})
    model = Pretrainer(config, objective)
    assert sum(p.numel() for p in model.parameters()) == 3_194_880
    forward = encoder_flops(model.encoder, config, False, samples=600, windows=1) / 3
    assert forward == pytest.approx(1.741e9, rel=0.06)  # theirs is without the convolution


@pytest.mark.parametrize(("name", "expected"), GOLDEN.items())
def test_golden_losses_and_gradients_of_the_shipped_recipes(name, expected):
    """Numbers from when this code agreed with the authors'."""
    config = load_config(name)
    options = config.model.options | SMALL | {"dropout": 0.0}
    model = by_numpy(Pretrainer(replace(config.model, options=options), config.objective))
    for layer in model.encoder.layers:
        layer.space.log_dt.copy_(torch.linspace(-6.9, -2.3, SMALL["width"]))
        layer.space.compute_frozen_buffers()
    x_BSLT = waves(3, config.input.samples)[:, : config.windows]
    loss = model(x_BSLT, keys(3)[:, : config.windows])["loss"]
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert [float(loss.detach()), float(norm)] == pytest.approx(expected, rel=1e-4)


def test_a_step_is_one_graph():
    """A break, or a number that the host reads, is an error. Equal losses and gradients."""
    losses, gradients = [], []
    for compiled in (False, True):
        config = ModelConfig(encoder="s4", options=SMALL | {"dropout": 0.0, "layers": 1})
        model = Pretrainer(config, CPC, generator=torch.Generator().manual_seed(0))
        if compiled:
            model.compile(fullgraph=True, backend="aot_eager")
        x_BSLT = torch.randn(2, 2, 12, 150, generator=torch.Generator().manual_seed(1))
        loss = model(x_BSLT, keys(2))["loss"]
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad for p in model.parameters()])
    torch._dynamo.reset()  # other tests count what is compiled
    assert_close(*losses)
    assert_close(*gradients)


def test_without_a_compiler_for_its_kernels_a_gpu_takes_products(monkeypatch, capsys):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    for error, works in ((RuntimeError("Failed to find\nC compiler"), False), (None, True)):
        s4.triton_kernels_compile.cache_clear()
        monkeypatch.setattr(s4, "filter_chunks", mock.Mock(side_effect=error))
        assert [s4.triton_kernels_compile(), s4.triton_kernels_compile()] == [works, works]
    s4.triton_kernels_compile.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert "S4 runs slower" in line and "Failed to find C compiler: install gcc" in line


@pytest.mark.parametrize("attributes", [{}, {"age": 1.0}])
def test_predictive_coding_is_compiled_with_its_encoder(attributes):
    """What else needs the encoder has it compiled, too."""
    config = ModelConfig(encoder="s4", options=SMALL)
    model = Pretrainer(config, replace(CPC, attributes=attributes))
    compile_model(model, "layers", backend="eager")
    assert model.plugin._compiled_call_impl
    assert ("context" in vars(model.encoder)) == bool(attributes)


def test_a_gradient_of_a_gradient_is_an_error():
    """It would be wrong."""
    space = StateSpace(3, 4, 40)
    loss = space(torch.randn(1, 5, 3)).square().sum()
    (grad,) = torch.autograd.grad(loss, space.C, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_products_of_any_number_of_tokens_are_padded(monkeypatch):
    """As on a GPU, where sizes of 8 are twice as fast."""
    bmm, sizes = torch.bmm, []

    def product(a, b, out_dtype=None):
        sizes.append((a.shape[1], b.shape[2]))
        return bmm(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "bmm", product)
    a, b = (torch.randn(2, n, 4).bfloat16().requires_grad_() for n in (3, 10))
    s, expected = Float32Product.apply(a, b), a.float() @ b.float().transpose(1, 2)
    assert s.dtype == torch.float32 and sizes == [(8, 16)]
    assert_close(s, expected)
    grad = torch.randn(2, 3, 10)
    found, wanted = (torch.autograd.grad(x, [a, b], grad) for x in (s, expected))
    assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["eager", "layers"])
@pytest.mark.parametrize("recipe", ["s4_cpc", "s4_jepa"])
def test_a_gpu_computes_what_a_cpu_does_and_never_waits(recipe, how):
    config, losses, grads = load_config(recipe), [], []
    options = config.model.options | {"width": 48, "layers": 2, "dropout": 0.0}
    for device in ("cpu", "cuda"):
        model_config = replace(config.model, options=options)
        model = Pretrainer(
            model_config, config.objective, generator=torch.Generator().manual_seed(0)
        ).to(device)
        compile_model(model, how if device == "cuda" else "eager")
        given = waves(4, config.input.samples).to(device), keys(4).to(device)
        out = model(*given)
        out["loss"].backward()
        losses.append({name: value.detach().cpu() for name, value in out.items()})
        grads.append([p.grad.cpu() for p in model.parameters()])
        if device == "cuda":
            with no_waiting():
                model(*given)["loss"].backward()
    assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    for expected, got in zip(*grads, strict=True):
        assert_close(got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@contextmanager
def no_waiting():
    """Waiting for the GPU is an error."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("states", "width", "tokens"), [(8, 512, 313), (4, 130, 1), (16, 7, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_recurrence_on_a_gpu_is_the_convolution(dtype, states, width, tokens, bidirectional):
    """In bfloat16 to its rounding, and twice the same."""
    torch.manual_seed(0)
    space, u_RND = StateSpace(width, states, 300, bidirectional), torch.randn(3, tokens, width)
    grad_RND, results = torch.randn_like(u_RND), []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype), ("cuda", dtype)):
        space, given = space.to(device, kind), u_RND.to(device, kind).requires_grad_()
        assert space.in_registers == (device == "cuda")
        y_RND = space(given)
        found = torch.autograd.grad(y_RND, [given, space.C, space.D], grad_RND.to(device, kind))
        results.append([part.detach().cpu().float() for part in (y_RND, *found)])
    assert_close(results[1], results[2], rtol=0, atol=0)
    limit = 5e-6 if dtype == torch.float32 else 2e-2
    for got, expected in zip(results[1], results[0], strict=True):
        assert_near(got, expected, limit)


@pytest.mark.parametrize(
    ("options", "says"),
    tabulated("""
{"states": 7}                | states=7: must be even and at least 2: states are conjugate pairs
{"states": 64}               | states=64: must be at most 16
{"norm": "none"}             | norm='none': use layer, batch, group
{"kernels": [3]}             | kernels=[3], strides=[2, 1, 1, 1]: give each convolution a kernel and a stride of at least 1
{"strides": [2, 1, 1, 0]}    | strides=[2, 1, 1, 0]: give each convolution a kernel and a stride of at least 1
{"dropout": 1.0}             | dropout=1.0: width, layers
{"width": 12, "norm": "group"} | width=12: must be a multiple of 8
{"depth": 2}                 | unexpected keyword argument 'depth'
"""),
)
def test_wrong_options_are_one_line(options, says):
    with pytest.raises(ConfigError) as raised:
        encoder_of(**json.loads(options))
    assert says in str(raised.value) and "model.encoder=s4" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "objective", "says"),
    [
        (
            {"bidirectional": True},
            {},
            "for s4 use the options bidirectional=false and norm=layer or batch",
        ),
        (
            {"norm": "group"},
            {},
            "for s4 use the options bidirectional=false and norm=layer or batch",
        ),
        ({}, {"form": "some"}, "form='some': use all or sampled"),
        (
            {},
            {"form": "sampled", "steps": 3},
            "form=sampled has no option steps: use ahead, negatives",
        ),
        ({}, {"form": "sampled", "ahead": 0}, "ahead=0, negatives=128: both must be at least 1"),
    ],
)
def test_what_predictive_coding_cannot_do_is_one_line(options, objective, says):
    config = ModelConfig(encoder="s4", options=SMALL | options)
    with pytest.raises(ConfigError, match="method=cpc") as raised:
        Pretrainer(config, replace(CPC, options=objective))
    assert says in str(raised.value) and "\n" not in str(raised.value)

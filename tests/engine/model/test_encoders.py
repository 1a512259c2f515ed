"""Other encoders: the ResNet, the requirements on custom encoders, and the cost of a step."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny import SMALL
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from omnilead.engine.model.config import ModelConfig, ObjectiveConfig, flops_per_crop
from omnilead.engine.model.encoder import Encoder
from omnilead.engine.model.encoders import (
    build_encoder,
    check_encoder,
    encoder_flops,
    has_dropout,
    initialise,
)
from omnilead.engine.model.pretrainer import Pretrainer
from omnilead.engine.model.resnet import ResNet
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.files import read_plugin_files
from omnilead.engine.training.pretraining import ProductsInFloat32, examine_objective
from omnilead.engine.training.task import describe_encoder
from tests.tables import tabulated

OWN = """
import torch
from torch import nn

class Good(nn.Module):
    width, feature_width = 8, 4

    def __init__(self, leads, scale=1.0):
        super().__init__()
        self.conv, self.out, self.scale = nn.Conv1d(leads, 4, 25, 25), nn.Linear(4, 8), scale

    def forward(self, x):
        return self.context(self.features(x)[0], None)

    def features(self, x):
        z = self.scale * self.conv(x).transpose(1, 2)
        return z, z.square().mean()

    def context(self, z, mask):
        return self.out(z if mask is None else z.masked_fill(mask[..., None], 0))

class Wide(Good):
    width = 9

class Flat(Good):
    def forward(self, x):
        return super().forward(x).mean(1)

class NotANumber(Good):
    def forward(self, x):
        return super().forward(x / x.std((1, 2), keepdim=True))

class Mixing(Good):
    def forward(self, x):
        return super().forward(x - x.mean(0))

class Seeing(Good):
    def context(self, z, mask):
        return self.out(z)

class Single(Good):
    def forward(self, x):
        return self.context(self.features(x), None)

    def features(self, x):
        return super().features(x)[0]

class Raising(Good):
    def forward(self, x):
        return self.conv(x[:, :5])

class Twelve(Good):
    def __init__(self, leads):
        super().__init__(12)

class NoModule:
    width = 8
    def __init__(self, leads): pass

class Weightless(nn.Module):
    width = 8
    def __init__(self, leads): super().__init__()
"""
OBJECTIVES = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self, encoder, scale=1.0):
        super().__init__()
        self.out, self.scale = nn.Linear(encoder.width, 1), scale

    def forward(self, encoder, x_BSLT, keys_BS):
        y = self.scale * self.out(encoder(x_BSLT.flatten(0, 1)))
        return {"near": y.square().mean(), "far": 1 + y.mean()}

class One(Two):
    def forward(self, *given): return super().forward(*given)["near"]

class Bare(nn.Module):
    def __init__(self, encoder): super().__init__()
    def forward(self, encoder, x_BSLT, keys_BS): return encoder(x_BSLT[:, 0]).std()

class Nothing(Two):
    def forward(self, *given): return {}

class Number(Two):
    def forward(self, *given): return 1.5

class Cut(Two):
    def forward(self, *given): return {"near": super().forward(*given)["near"].detach()}

class Rows(Two):
    def forward(self, encoder, x_BSLT, keys_BS): return encoder(x_BSLT[:, 0]).mean((1, 2))

class Root(Two):
    def forward(self, *given): return {"near": (-super().forward(*given)["near"]).sqrt()}

class Taken(Two):
    def forward(self, *given): return {"local": super().forward(*given)["near"]}

class Flat(Two):
    def forward(self, *given): return super().forward(*given)["near"] + float("inf")

class Head(Two):
    def forward(self, encoder, x_BSLT, keys_BS): return self.out.weight.square().sum()

class Keeper(Two):
    def __init__(self, encoder):
        super().__init__(encoder)
        self.encoder = encoder
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture(scope="module")
def objectives(own):
    path = own.with_name("objectives.py")
    path.write_text(OBJECTIVES)
    return path


def pretrainer(own, objectives, name, **options):
    objective = ObjectiveConfig(
        local=0, contrast=0.5, method=f"{objectives}:{name}", options=options
    )
    return Pretrainer(of(own, "Good"), objective, generator=torch.Generator().manual_seed(3))


def of(own, name, **settings):
    return ModelConfig(encoder=f"{own}:{name}", **settings)


def test_a_custom_encoder_trains_with_every_objective(own):
    config = replace(of(own, "Good", options={"scale": 2.0}), codes=8, code_width=8, projection=8)
    first, second = (
        build_encoder(config, generator=torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert first.scale == 2.0 and first.conv.weight.equal(second.conv.weight)  # type: ignore[union-attr]
    for dtype in (torch.float32, torch.bfloat16):
        assert check_encoder(first, config, True, dtype) == 100
    keys = torch.arange(4).view(2, 2)
    for objective in (ObjectiveConfig(), ObjectiveConfig(local=0, method="simclr")):
        model = Pretrainer(config, objective, generator=torch.Generator().manual_seed(3))
        assert model.encoder.conv.weight.equal(first.conv.weight)  # type: ignore[union-attr]
        model(torch.randn(2, 2, 12, 2500), keys, torch.tensor(1.0))["loss"].backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with pytest.raises(
        ConfigError,
        match=r"objective.local=1.0: ResNet lacks features\(\), context\(\) or feature_width",
    ):
        Pretrainer(ModelConfig(encoder="resnet", options={"widths": [8, 8]}), ObjectiveConfig())


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (
            "Wide",
            {},
            "shape [4, 100, 8] for an input [4, 12, 2500]: return the shape [4, tokens, 9]",
        ),
        ("Flat", {}, "forward returns the shape [4, 8]"),
        ("NotANumber", {}, "forward returns NaN or infinity for windows of noise and zeros"),
        ("Mixing", {}, "must depend on that row alone"),
        ("Seeing", {}, "the output of context depends on the features of masked tokens"),
        ("Single", {}, "features returns the shape [100, 4]"),
        ("Raising", {}, "own.py:Raising: RuntimeError: "),
        (
            "Twelve",
            {"leads": 2},
            "can it take 2 leads? augment.padded=true gives it 12, others zero",
        ),
        ("Good", {"options": {"depth": 3}}, "unexpected keyword argument 'depth'"),
        ("Good", {"mask_span": 99}, "model.mask_span=99: too long for 100 tokens"),
        ("NoModule", {}, "must be an nn.Module"),
        ("Weightless", {}, "has no weights: an encoder needs parameters"),
        ("Absent", {}, "has no attribute 'Absent'"),
    ],
)
def test_errors_of_a_custom_encoder_are_reported_at_the_start(name, settings, words, own):
    config = of(own, name, **settings)
    with pytest.raises(ConfigError) as raised:
        check_encoder(build_encoder(config), config, masked=True)
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert name != "Raising" or "(own.py, line " in str(raised.value)


def test_an_objective_of_one_s_own(own, objectives):
    model = pretrainer(own, objectives, "Two", scale=3.0)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    assert examine_objective(model, torch.float32) == ["loss_near", "loss_far"]
    assert examine_objective(model, torch.bfloat16) == ["loss_near", "loss_far"]
    assert all(w.equal(before[name]) for name, w in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    x_BSLT, keys_BS = torch.randn(2, 2, 12, 2500), torch.arange(4).view(2, 2)
    out = model(x_BSLT, keys_BS)
    y = 3 * model.plugin.out(model.encoder(x_BSLT.flatten(0, 1)))
    assert_close(out["loss"], 0.5 * (y.square().mean() + 1 + y.mean()))
    assert list(out) == ["loss", "loss_near", "loss_far"] and not out["loss_near"].requires_grad
    for name in ("One", "Bare"):
        assert examine_objective(pretrainer(own, objectives, name), torch.float32) == [
            "loss_global"
        ]
    both = ObjectiveConfig(method=f"{objectives}:Two")
    model = Pretrainer(replace(SMALL, codes=8, layers=1), both)
    names = {f"loss_{name}" for name in ("local", "diversity", "features", "near", "far")}
    assert names < set(model(x_BSLT, keys_BS))


def test_an_examination_in_bf16_multiplies_in_float32(own, objectives):
    dtypes = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if operation.__name__ in ("mm.default", "addmm.default"):
                dtypes.extend(x.dtype for x in args)
            return operation(*args, **(kwargs or {}))

    with Record():
        assert examine_objective(pretrainer(own, objectives, "One"), torch.bfloat16)
    assert set(dtypes) == {torch.float32}
    a, b, bias = torch.randn(3, 64, 64).bfloat16()
    with ProductsInFloat32():
        product, layer = a @ b.T, F.linear(a, b, bias)
        with pytest.raises(RuntimeError, match="same dtype"):
            a @ b.float()
    assert product.equal((a.float() @ b.T.float()).bfloat16())
    assert layer.equal(F.linear(a.float(), b.float(), bias.float()).bfloat16())


@pytest.mark.parametrize(
    ("name", "says"),
    tabulated("""
Nothing | returns []: return one loss or more
Number  | loss 'global' is not a scalar tensor
Rows    | loss 'global' is not a scalar tensor
Cut     | loss 'near' is not a scalar tensor with a gradient
Root    | gives the encoder no gradient, or one that is not finite
Flat    | or one that is not finite
Head    | gives the encoder no gradient
Taken   | returns ['local']: return one loss or more, and call none diversity, features, local
Keeper  | holds the encoder's weights
Absent  | has no attribute 'Absent'
"""),
)
def test_errors_of_an_objective_are_reported_at_the_start(name, says, own, objectives):
    with pytest.raises(ConfigError) as raised:
        examine_objective(pretrainer(own, objectives, name), torch.float32)
    message = str(raised.value)
    assert says in message and f"objective.method={objectives}:{name}" in message
    assert "\n" not in message


def test_predictive_coding_needs_a_causal_encoder():
    objective = ObjectiveConfig(local=0, method="cpc")
    for config in (SMALL, ModelConfig(encoder="resnet", options={"widths": [8, 8]})):
        with pytest.raises(ConfigError, match=r"method=cpc.*does not look ahead: set model.causal"):
            Pretrainer(config, objective)
    causal = replace(SMALL, causal=True, conv_norm="layer")
    for options in ({"steps": 0}, {"temperature": 0}, {"temperature": -0.1}):
        with pytest.raises(
            ConfigError, match=r"objective\.method=cpc, .*: steps must be at least 1"
        ):
            Pretrainer(causal, replace(objective, options=options))
    model = Pretrainer(causal, replace(objective, options={"steps": 156}))
    with pytest.raises(
        ConfigError, match=r"objective\.method=cpc: steps=156: must be less than the 156 tokens"
    ):
        examine_objective(model, torch.float32)
    model = Pretrainer(causal, replace(objective, options={"steps": 155}))
    assert examine_objective(model, torch.float32) == ["loss_global"]
    sampled = replace(objective, options={"form": "sampled"})
    with pytest.raises(ConfigError, match=r"method=cpc: ahead=14: must be less than the 14 tokens"):
        examine_objective(Pretrainer(causal, sampled), torch.float32, samples=14 * 16)
    model = Pretrainer(causal, sampled)
    assert examine_objective(model, torch.float32, samples=15 * 16) == ["loss_global"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"encoder": "resnt"}, "model.encoder='resnt': use resnet, s4, your own file.py:Class"),
        ({"options": {"widths": [8]}}, ": set model.encoder"),
        ({"encoder": "gone.py:Net"}, "no such file gone.py"),
        (
            {"encoder": "resnet", "options": {"widths": [12, 24]}},
            ": must be two or more multiples of 8",
        ),
    ],
)
def test_invalid_encoder_settings_are_refused(settings, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        build_encoder(ModelConfig(**settings))


def test_files_with_the_same_name_are_separate_modules_and_changes_are_reloaded(
    tmp_path,
):
    code = "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self, leads):\n"
    code += "        super().__init__(leads, 1)\n"
    widths = []
    for folder, width in (("a", 8), ("b", 16), ("a", 24)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "net.py").write_text(f"{code}        self.width = {width}\n")
        widths.append(build_encoder(ModelConfig(encoder=f"{tmp_path / folder}/net.py:Net")).width)
    assert widths == [8, 16, 24] and not list(tmp_path.rglob("__pycache__"))


def test_a_file_of_code_has_a_name_that_can_be_published():
    with pytest.raises(ConfigError, match=r"--encoder=my net\.py:Net: name the file with"):
        read_plugin_files([("--encoder", "my net.py:Net")], "")


def test_the_resnet():
    config = ModelConfig(encoder="resnet", options={"widths": [16, 24, 32]})
    encoder = build_encoder(config, generator=torch.Generator().manual_seed(0)).eval()
    for dtype in (torch.float32, torch.bfloat16):
        assert check_encoder(encoder, config, dtype=dtype) == 157
    two, x = torch.randn(2, 2, 1237), torch.zeros(2, 12, 1237)
    x[:, [1, 7]] = two
    fewer = ResNet(2, [16, 24, 32]).eval()
    fewer.load_state_dict(ResNet.select_leads(encoder.state_dict(), (1, 7), 12))
    torch.testing.assert_close(fewer(two), encoder(x))
    described = describe_encoder(config)
    assert "1-D residual network" in described and "widths=[16, 24, 32]" in described


@pytest.mark.parametrize(
    ("millions", "options"),
    [
        (1.0, {"widths": (32, 48, 80, 96, 128)}),
        (6.7, {}),
        (20.1, {"widths": (96, 192, 320, 448, 576)}),
    ],
)
def test_parameters_of_the_resnets(millions, options):
    with torch.device("meta"):
        parameters = ResNet(**options).parameters()
    assert round(sum(p.numel() for p in parameters) / 1e6, 1) == millions


class Grouped(nn.Module):
    """Operations that torch's counter gets wrong: backward of grouped convolutions, fused
    attention, recurrent layers."""

    width = 16

    def __init__(self):
        super().__init__()
        self.conv, self.group = nn.Conv1d(12, 16, 50, 50), nn.Conv1d(16, 16, 5, padding=2, groups=4)
        self.recurrent = nn.GRU(16, 16, batch_first=True)

    def forward(self, x):
        y = self.group(self.conv(x)).transpose(1, 2)
        z = self.recurrent(nn.functional.scaled_dot_product_attention(y, y, y))[0]
        return z


def test_flops_are_counted():
    # 50 tokens of 5 s
    forward = 2 * 50 * (12 * 50 * 16 + 4 * 5 * 16 + 2 * 50 * 16 + 2 * 3 * 16 * 16)
    own = ModelConfig(encoder="own.py:Grouped")
    assert encoder_flops(Grouped(), own, local=False) == 2 * 3 * forward
    plain = replace(SMALL, kernels="plain")
    encoder = Encoder(plain)
    initialise(encoder)
    for local in (False, True):
        expected = flops_per_crop(plain, local=local)
        assert encoder_flops(encoder, plain, local) == expected
        # the authors' encoder, as if it were another
        counted = encoder_flops(encoder, replace(plain, encoder="own.py:Encoder"), local)
        assert counted == pytest.approx(expected, rel=1e-9)
    assert has_dropout(None, ModelConfig()) and not has_dropout(Grouped(), own)
    assert has_dropout(ResNet(widths=(8, 8)), ModelConfig(encoder="resnet"))

"""task.head=attention against attention written out; a frozen encoder is only read."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from omnilead.downstream.tasks.classifier import AttentionHead, Classifier, build_head
from omnilead.downstream.tasks.config import TaskConfig
from omnilead.engine.model.config import ModelConfig
from omnilead.engine.model.encoders import build_encoder
from omnilead.engine.settings.errors import ConfigError

S4 = {"width": 16, "layers": 2, "states": 4, "length": 40}


class Hidden(nn.Sequential):
    def __init__(self, width, outputs, size):
        super().__init__(nn.Linear(width, size), nn.Linear(size, outputs))


def attention(head, c_RND):
    """Keys and values of all tokens, as in torch.nn.MultiheadAttention with one query."""
    query_map_DD, key_map_DD, value_map_DD = head.maps
    query_D = query_map_DD @ head.query
    keys_RND, values_RND = c_RND @ key_map_DD.T, c_RND @ value_map_DD.T
    size, means = len(query_D) // head.heads, []
    for first in range(0, len(query_D), size):
        part = slice(first, first + size)
        scores_RN = keys_RND[..., part] @ query_D[part] / size**0.5
        weights_RN = scores_RN.exp() / scores_RN.exp().sum(1, keepdim=True)
        means.append((weights_RN[..., None] * values_RND[..., part]).sum(1))
    return torch.cat(means, 1) @ head.linear.weight.T


@pytest.mark.parametrize(("width", "options"), [(32, {}), (30, {"heads": 3}), (7, {"heads": 1})])
def test_each_head_weighs_the_tokens_by_its_query(width, options):
    torch.manual_seed(0)
    head = AttentionHead(width, 5, **options).double()
    assert head.heads == options.get("heads", 16)
    c_RND = 3 * torch.randn(4, 11, width, dtype=torch.float64)
    found, expected = head(c_RND), attention(head, c_RND)
    assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), list(head.parameters())),
        torch.autograd.grad(expected.square().sum(), list(head.parameters())),
        strict=True,
    ):
        assert_close(one, other)


def test_options_of_a_head():
    for width, heads, fits in ((100, 16, 4), (100, 0, 1), (100, -5, 1)):
        mend = f"100 wide, 5 outputs: heads={heads}: .* use task.head_options={{heads: {fits}}}"
        with pytest.raises(ConfigError, match=mend):
            build_head("attention", {"heads": heads}, width, 5)
    with pytest.raises(
        ConfigError, match=r"'queries': 9}, .*unexpected keyword argument 'queries'"
    ):
        build_head("attention", {"queries": 9}, 32, 5)
    own = build_head("own.py:Hidden", {"size": 3}, 32, 5, kind=Hidden)
    assert own[0].out_features == 3
    for head in ("", "start"):
        with pytest.raises(ConfigError, match="the linear layer takes no options"):
            TaskConfig(head=head, head_options={"heads": 4})


def test_a_frozen_encoder_is_left_as_it_is_and_has_no_backward_pass():
    """Not even the statistics of its batch norm move, and only the head has gradients."""
    x_BSLT = torch.randn(3, 2, 12, 80, generator=torch.Generator().manual_seed(0))
    labels_BK = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    flops = {}
    for frozen in (True, False):
        encoder = build_encoder(ModelConfig("s4", S4), generator=torch.Generator().manual_seed(0))
        before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
        task = TaskConfig(head="attention", head_options={"heads": 4})
        model = Classifier(encoder, task, 2, frozen=frozen).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1.0)
        for _ in range(2):
            with FlopCounterMode(display=False) as counter:
                losses = model(x_BSLT, labels_BK, torch.ones(3, 2))
                losses["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        flops[frozen] = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tokens = model.encode(x_BSLT.flatten(0, 1))
        forward = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            model.head(tokens).sum().backward()
        same = [tensor.equal(before[name]) for name, tensor in encoder.state_dict().items()]
        assert all(same) == frozen
        assert (flops[frozen] == forward + counter.get_total_flops()) == frozen
    assert flops[False] / flops[True] > 2

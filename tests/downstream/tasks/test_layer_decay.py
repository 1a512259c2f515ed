"""The learning rates of fine-tuning fall layer by layer, in every encoder."""

from pathlib import Path

import pytest

from omnilead.downstream.tasks.classifier import Classifier, lr_shares_and_weights
from omnilead.downstream.tasks.config import TaskConfig
from omnilead.engine.model.config import ModelConfig
from omnilead.engine.model.encoders import build_encoder
from omnilead.engine.settings.errors import ConfigError

LISTED = """
import torch
from torch import nn

class Parts(nn.Module):
    width = 4
    def __init__(self, leads):
        super().__init__()
        self.token = nn.Parameter(torch.ones(4))
        self.first, self.gelu, self.second = nn.Conv1d(leads, 4, 25, 25), nn.GELU(), nn.Linear(4, 4)
    def forward(self, x):
        return self.second(self.gelu(self.first(x)).transpose(1, 2)) + self.token

class Counted(Parts):
    layers = 2  # not a list
    def __init__(self, leads):
        super().__init__(leads)
        self.blocks = nn.Sequential(self.second, nn.GELU(), nn.Linear(4, 4))

class Single(Parts):
    def __init__(self, leads):
        super().__init__(leads)
        self.second = nn.Identity()
"""
SHARES = {
    "": {  # three layers
        "conv.blocks.0.weight": 0.125,
        "project.weight": 0.125,
        "position.gain": 0.125,
        "layers.0.attention.qkv.weight": 0.25,
        "layers.1.norm1.bias": 0.5,
        "layers.2.fc2.weight": 1,
    },
    "resnet": {  # two stages
        "stem.weight": 0.25,
        "norm.bias": 0.25,
        "blocks.0.conv1.weight": 0.5,
        "blocks.1.norm2.weight": 1,
    },
    "listed.py:Parts": {
        "token": 0.25,
        "first.weight": 0.5,
        "second.bias": 1,
    },
    "listed.py:Counted": {
        "first.bias": 0.25,
        "second.bias": 0.5,
        "blocks.2.bias": 1,
    },
}


@pytest.mark.parametrize("encoder", SHARES)
def test_each_layer_has_its_share_of_the_learning_rate(encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("listed.py").write_text(LISTED)
    options = {"widths": [8, 16, 24]} if encoder == "resnet" else {}
    config = ModelConfig(encoder=encoder, options=options, width=48, heads=2, ffn=32, layers=3)
    model = Classifier(build_encoder(config), TaskConfig(), 5)
    frozen = next(model.encoder.parameters()).requires_grad_(False)
    names = {p: name for name, p in model.named_parameters()}
    groups = lr_shares_and_weights(model, 0.5)
    found = {names[p]: share for share, group in groups for p in group}
    assert names.keys() - {frozen} == {p for _, group in groups for p in group}
    assert sum(len(group) for _, group in groups) == len(found)
    for name, share in SHARES[encoder].items():
        expected = None if name == names[frozen].removeprefix("encoder.") else share
        assert found.get(f"encoder.{name}") == expected, name
    assert found["head.weight"] == groups[-1][0] == 1
    single = Classifier(build_encoder(ModelConfig(encoder="listed.py:Single")), TaskConfig(), 5)
    with pytest.raises(ConfigError, match=r"layer_decay=0\.5: Single has fewer than two layers"):
        lr_shares_and_weights(single, 0.5)

"""Models as they lie on disk, small and untrained, for the tests of whatever uses one."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

Saved = Callable[..., Path]


@pytest.fixture
def saved_model(tmp_path: Path) -> Saved:
    return lambda folder="run/model", **how: save_model(tmp_path / folder, **how)


def save_model(
    folder: Path, leads: int = 12, head: dict[str, Any] | None = None, preprocessing: dict[str, Any] | None = None, **model: Any
) -> Path:
    """As engine.training.export writes it. `preprocessing`: what differs; `model`: of ModelConfig."""
    import torch
    from safetensors.torch import save_file

    from engine.model.config import ModelConfig
    from engine.model.pretrainer import Pretrainer
    from engine.objectives.config import ObjectiveConfig
    from engine.pipelines.leads import LEADS

    small = {
        "conv": ((16, 2),) * 4,
        "width": 32,
        "layers": 2,
        "heads": 4,
        "ffn": 48,
        "position_kernel": 16,
        "position_groups": 4,
    }
    config = ModelConfig(**{"leads": leads, "codes": 8, "code_width": 16, "projection": 16, **small, **model})
    objective = ObjectiveConfig()
    seeded = torch.Generator().manual_seed(0)
    weights = dict(Pretrainer(config, objective, generator=seeded).state_dict())
    if head and head.get("classes"):
        weights["head.weight"] = torch.randn(len(head["classes"]), config.width, generator=seeded)
        weights["head.bias"] = torch.randn(len(head["classes"]), generator=seeded)
    document = {"format_version": 1, "model": asdict(config), "objective": asdict(objective), "trained": {"step": 1}}
    signal = {"fs_hz": 500, "leads": list(LEADS[:leads]), "segment_s": 5.0, "scale": "millivolt", "sha256": "0"}
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(document | ({"head": head} if head else {})))
    (folder / "preprocessing.json").write_text(json.dumps(signal | (preprocessing or {})))
    return folder

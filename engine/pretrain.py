"""Pre-train an ECG encoder: W2V + CMSC + random lead masking (Oh et al., CHIL 2022) and its
baselines.

    omnilead pretrain --data DATASET --out RUN                the quick start: a small model, a minute or two on a CPU
    omnilead pretrain --config w2v_cmsc_rlm --data DATASET --out RUN --set train.steps=1000
    omnilead pretrain --start MODEL --data MORE --out RUN2 --set train.steps=1000         continues from another model's weights
    deepspeed --module omnilead.engine.pretrain --config w2v_cmsc_rlm ...     on all GPUs of this machine
    torchrun --nproc-per-node 8 --module omnilead.engine.pretrain --config F ...       the same
    deepspeed --hostfile H --no_ssh --node_rank I --master_addr A --module omnilead.engine.pretrain ...   many nodes
    omnilead pretrain --export RUN                            writes RUN/model from the newest checkpoint
    omnilead pretrain --schema                                JSON schema of the settings

In a clone of the repository `deepspeed engine/pretrain.py` is the same program, and `python
engine/pretrain.py` in one process.

RUN/ holds config.yaml, run.json, metrics.jsonl, validation.jsonl, tensorboard/, checkpoints/ and
finally model/, report.html. Started again with the same RUN, training resumes from the last
checkpoint: bit for bit with the same number of ranks; with another number, batches are the same and
losses are equal to rounding. An error names data or settings that have changed. In Python: run =
omnilead.pretrain("w2v_cmsc_rlm", data="DATASET", out="RUN", **{"train.steps": 1000}) SIGTERM or
Ctrl-C: stops after the micro-batch with a checkpoint of the last whole step, exit 0 or 130. Exit 2:
a setting or a file is wrong. Exit 1: the run failed.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from omnilead.engine.command import SHORTCUTS, command
from omnilead.engine.commandline import interruptible, leave

if TYPE_CHECKING:
    from omnilead.engine.run import Data, TrainingRun


def classes() -> tuple[Any, Any, Any]:
    from omnilead.engine.config import Config
    from omnilead.engine.training.continuing import ContinuedTask, read_config

    return Config, ContinuedTask, read_config


def pretrain(
    config: str | Path | None = None,
    *,
    data: "Data | Sequence[Data]",
    out: str | os.PathLike[str],
    **settings: Any,
) -> "TrainingRun":
    """Pre-trains an encoder. Called again with the same `out` it resumes, or returns the finished
    run.

    config: a shipped configuration by name, or a YAML file; by default the quick start, or with
    `start` that model's own architecture and objective. data: a dataset or several. out: RUN, where
    everything is written. settings: those of --set, by their dotted names: start="RUN",
    **{"train.steps": 1000, "augment.rlm": 0.5}. Ctrl-C writes a checkpoint and raises
    KeyboardInterrupt. Other errors have one-line messages, such as engine.common.ConfigError.
    """
    from omnilead.engine.run import trained

    return trained(*classes(), config, data, out, settings)


main = partial(
    command, "pretrain", __doc__, classes, "quickstart, or what --start was trained with", SHORTCUTS
)

if __name__ == "__main__":
    interruptible("omnilead pretrain")
    leave(main())

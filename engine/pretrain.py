"""Pre-train an ECG encoder: W2V + CMSC + random lead masking (Oh et al., CHIL 2022) and its baselines.

    deepspeed engine/pretrain.py                              the quick start: a small model, a minute or two on a CPU
    deepspeed engine/pretrain.py --config configs/pretrain/w2v_cmsc_rlm.yaml --set data.datasets=[DATASET] --set run=RUN
    torchrun --nproc-per-node 8 engine/pretrain.py --config F ...             the same; plain python too, for one process
    deepspeed --hostfile H --no_ssh --node_rank I --master_addr A engine/pretrain.py --config F ...      on each of many nodes
    python engine/pretrain.py --export RUN                    RUN/model from the newest checkpoint
    python engine/pretrain.py --schema                        JSON schema of the settings

RUN/ holds config.yaml, run.json, metrics.jsonl, validation.jsonl, tensorboard/, checkpoints/ and in the end model/, report.html
Started again with the same RUN, training resumes from the last checkpoint: bit for bit with the same number of ranks; with
another number of ranks the batches are the same, and losses are equal to rounding. Other data or settings are refused by name.
SIGTERM or Ctrl-C: a checkpoint at the next step, exit 0. Exit 2: a setting or a file is wrong. Exit 1: the run failed.
"""

import sys
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from engine.common import interruptible

if __name__ == "__main__":
    interruptible("engine/pretrain.py")

from engine.config import QUICKSTART, Config
from engine.training.distributed import leave
from engine.training.pretraining import PretrainTask
from engine.training.train import command

main = partial(command, "engine/pretrain.py", __doc__, Config, PretrainTask, QUICKSTART)

if __name__ == "__main__":
    leave(main())

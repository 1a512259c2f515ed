"""Fine-tune a pre-trained ECG encoder: diagnosis (26 classes of the CinC 2021 Challenge) or patient identification (ArcFace).

    omnilead finetune --config diagnosis --start RUN --data DATASET --out DX
    omnilead finetune --config identification --start RUN --data DATASET --out ID
    ... --set augment.leads=3                                 on three leads, the others zero; 12, 6, 3, 2, 1 or I,II,V2
    ... --set augment.leads=3 --set augment.padded=false      a model of three leads
    ... --start w2v_cmsc_rlm.yaml                             its architecture with random weights, for comparison
    omnilead finetune --export RUN                            RUN/model from the best checkpoint
    omnilead finetune --schema                                JSON schema of the settings

Also under `deepspeed --module engine.finetune` or torchrun. RUN/ has the same files as in pre-training, and resumes the same
way. RUN/model/ is the step that validates best (train.best); `omnilead evaluate --model DX --data DATASET` tests it.
SIGTERM or Ctrl-C: a checkpoint at the next step, exit 0. Exit 2: a setting or a file is wrong. Exit 1: the run failed.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from engine.common import RUN_CODE, interruptible, leave
from engine.training.command import SHORTCUTS, command

CODE = "code", {"action": "store_const", "const": True, "help": RUN_CODE["help"]}


def classes() -> tuple[Any, Any]:
    from engine.config import FinetuneConfig
    from engine.training.finetuning import FinetuneTask

    return FinetuneConfig, FinetuneTask


main = partial(command, "finetune", __doc__, classes, None, SHORTCUTS | {"--code": CODE})

if __name__ == "__main__":
    interruptible("engine/finetune.py")
    leave(main())

"""Fine-tune a pre-trained ECG encoder: diagnosis (26 classes of the CinC 2021 Challenge) or patient identification (ArcFace).

    deepspeed engine/finetune.py --config configs/finetune/diagnosis.yaml --set start=RUN --set data.datasets=[DATASET]
    deepspeed engine/finetune.py --config configs/finetune/identification.yaml --set start=RUN --set data.datasets=[DATASET]
    ... --set augment.leads=3                                 on three leads, the others zero; 12, 6, 3, 2, 1 or I,II,V2
    ... --set augment.leads=3 --set augment.padded=false      a model of three leads
    ... --set start=configs/pretrain/w2v_cmsc_rlm.yaml        its architecture with random weights, for comparison
    python engine/finetune.py --export RUN                    RUN/model from the best checkpoint
    python engine/finetune.py --schema                        JSON schema of the settings

Starts under deepspeed, torchrun or plain python. RUN/ has the same files as in pre-training, and resumes the same way.
RUN/model/ is the step that validates best (train.best); `python -m engine.evaluate --model RUN --data DATASET` tests it.
SIGTERM or Ctrl-C: a checkpoint at the next step, exit 0. Exit 2: a setting or a file is wrong. Exit 1: the run failed.
"""

import sys
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from engine.common import interruptible

if __name__ == "__main__":
    interruptible("engine/finetune.py")

from engine.config import FinetuneConfig
from engine.training.distributed import leave
from engine.training.finetuning import FinetuneTask
from engine.training.train import command

main = partial(command, "engine/finetune.py", __doc__, FinetuneConfig, FinetuneTask, None)

if __name__ == "__main__":
    leave(main())

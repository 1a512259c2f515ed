"""Fine-tune a pre-trained ECG encoder on your own table of labels, on a shipped task, or with a
config.

    omnilead finetune --start RUN --data DATASET --labels my.csv --out OUT       a column `record` and one for each label
    omnilead finetune --start RUN --data DATASET --labels my.csv --columns rhythm --kind multiclass --out OUT
    omnilead finetune --start RUN --data DATASET --task age --out AGE            also sex, diagnosis, identification ...
    omnilead finetune --start RUN --data DATASET --config diagnosis --out DX     the paper's settings; also identification
    ... --set augment.leads=3                                 on three leads, others set to zero; 12, 6, 3, 2, 1 or I,II,V2
    ... --set augment.leads=3 --set augment.padded=false      a model with three input leads
    ... --start w2v_cmsc_rlm.yaml                             its architecture with random weights, for comparison
    omnilead finetune --export RUN                            RUN/model from the best checkpoint
    omnilead finetune --schema                                JSON schema of the settings

Labels are 0 and 1, true and false, text or numbers; an empty cell is unknown. A column `fold` or
`split` splits the records; without one, patients are split 8:1:1. Without --config, batch size,
steps and learning rate are chosen to suit the data, with early stopping. It also runs under
`deepspeed --module omnilead.downstream.finetune` or torchrun (there write --set start=RUN, since
torchrun takes --start as its own option). OUT/ has the files of a pre-training run, and
labels.parquet, the columns of the table that were used; it resumes in the same way. OUT/model/ is the best step by validation
(train.best): `omnilead evaluate --model OUT ...` tests it. In Python:
`tuned = omnilead.finetune("RUN", data="DATASET", labels="my.csv", out="OUT")`. SIGTERM or Ctrl-C
stops it after the micro-batch, with a checkpoint of the last whole step and exit code 0 or 130.
Exit 2: a setting or a file is wrong. Exit 1: the run failed.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from omnilead.data_tools.io.commands import run_as_omnilead
from omnilead.data_tools.io.options import Option
from omnilead.downstream.after_training import AFTER_TRAINING
from omnilead.downstream.inference import options as shared
from omnilead.engine.pretrain import train_run
from omnilead.engine.run import SHORTCUTS, Shortcuts, run_from_python, run_training_command
from omnilead.engine.settings.files import File

if TYPE_CHECKING:
    from omnilead.data_tools.dataset import Data
    from omnilead.downstream.finetuning.task import FinetuneTask
    from omnilead.downstream.tasks.config import FinetuneConfig
    from omnilead.engine.run import TrainingRun

FINETUNE_SHORTCUTS: Shortcuts = {
    "labels": (
        "task.labels",
        Annotated[str, Option("a table of labels, CSV or parquet, with a column `record`", "CSV")],
    ),
    "task": (
        "task.name",
        Annotated[
            str, Option("a shipped task such as age or ptbxl-form, or a YAML file", "NAME|F")
        ],
    ),
    "kind": ("task.kind", shared.Kind),
    "columns": ("task.columns", shared.Columns),
    "positive": ("task.positive", shared.Positive),
    "lr": ("train.lr", Annotated[Sequence[float], Option("learning rate", "RATE")]),
    "code": ("code", shared.Code),
}


def finetune_task_class() -> "type[FinetuneTask]":
    from omnilead.downstream.finetuning.task import FinetuneTask

    return FinetuneTask


def config_class_and_reader() -> "tuple[type[FinetuneConfig], Callable[..., FinetuneConfig]]":
    from omnilead.downstream.finetuning.choose_settings import read_settings
    from omnilead.downstream.tasks.config import FinetuneConfig

    return FinetuneConfig, read_settings


def finetune(
    start: File,
    *,
    data: "Data | Sequence[Data]",
    out: File,
    labels: File | None = None,
    task: str | None = None,
    kind: str | None = None,
    columns: Sequence[str] | None = None,
    positive: str | None = None,
    config: str | Path | None = None,
    **settings: Any,
) -> "TrainingRun":
    """Fine-tunes a run or a model on a table of labels, a shipped task or a config. If `out`
    already holds this run, resumes it.

    The arguments are the options of `omnilead finetune`. `settings` are those that the command
    takes with --set, by their dotted names. Without `config`, batch size, steps and learning rate
    are chosen to suit the data. Ctrl-C writes a checkpoint and raises KeyboardInterrupt. Other
    errors, such as engine.settings.errors.ConfigError, have one-line messages.
    """
    of_task = {
        "labels": labels,
        "name": task,
        "kind": kind,
        "columns": list(columns) if columns else None,
        "positive": positive,
    }
    settings |= {f"task.{name}": value for name, value in of_task.items() if value is not None}
    settings["start"] = start
    return run_from_python(
        train_run,
        finetune_task_class,
        config_class_and_reader,
        config,
        data,
        out,
        settings,
        AFTER_TRAINING,
    )


main = partial(
    run_training_command,
    "finetune",
    __doc__,
    train_run,
    finetune_task_class,
    config_class_and_reader,
    None,
    {**SHORTCUTS, **FINETUNE_SHORTCUTS},
    after=AFTER_TRAINING,
)

if __name__ == "__main__":
    run_as_omnilead("finetune")

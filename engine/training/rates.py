"""Fine-tunes with several learning rates, one run after another; the best by validation becomes
RUN.

    train_rates(config, FinetuneTask)         # with one rate: engine.training.train.train

RUN/lr-RATE/ are runs like any other, so an interrupted one resumes; RUN/rates.json holds the result
of each.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from omnilead.data_tools.cli import say
from omnilead.engine.common import ConfigError, environment, write_whole
from omnilead.engine.config import FinetuneConfig, RunConfig
from omnilead.engine.report.run_report import RESULT, write_report
from omnilead.engine.training.task import TrainingTask
from omnilead.engine.training.train import train

RATES = "rates.json"
NOT_COPIED = shutil.ignore_patterns("model", "checkpoints", ".*", "tensorboard")


def train_rates(config: RunConfig, task: type[TrainingTask], profile: int = 0) -> bool:
    run, rates = Path(config.run), config.rates if isinstance(config, FinetuneConfig) else ()
    if (run / ("checkpoints" if rates else RATES)).exists():
        raise ConfigError(
            f"{run}: was started with {'one' if rates else 'several'} --lr: give the same, or use "
            "--out NEW"
        )
    if not rates:
        return train(config, task, profile)
    if not config.train.validate_every:
        raise ConfigError(
            "train.validate_every=0: a learning rate is chosen by validation: --set "
            "train.validate_every=100"
        )
    if environment()[1] > 1:
        raise ConfigError(
            f"{len(rates)} learning rates need a single process: start a run for each: --lr "
            f"{rates[0]:g}"
        )
    tried: list[dict[str, Any]] = []
    for rate in rates:
        place, t = run / f"lr-{rate!r}", config.train.model_copy(update={"lr": rate})
        if not train(
            config.model_copy(update={"run": str(place), "train": t, "rates": ()}), task, profile
        ):
            return False
        if not (place / RESULT).is_file():
            raise ConfigError(
                f"{run}: nothing was validated, so no best learning rate can be chosen: give one: "
                f"--lr {rate:g}"
            )
        tried.append({"lr": rate, "run": place.name} | json.loads((place / RESULT).read_text()))
        write_whole(run / RATES, json.dumps(tried, indent=1) + "\n")
    best = max(tried, key=lambda row: row["best"] if row["higher_is_better"] else -row["best"])
    shutil.copytree(run / best["run"], run, ignore=NOT_COPIED, dirs_exist_ok=True)
    shown = [
        [f"{row['lr']:g}", row["step"], f"{row['best']:.4f}", "yes" if row["converged"] else "no"]
        for row in tried
    ]
    facts = json.loads((run / "run.json").read_text())
    write_whole(run / "run.json", json.dumps(facts | {"rates": shown}, indent=1) + "\n")
    shutil.rmtree(run / ".model", ignore_errors=True)
    shutil.rmtree(run / "model", ignore_errors=True)
    shutil.copytree(run / best["run"] / "model", run / ".model").replace(
        run / "model"
    )  # last: what has a model is whole
    end = {max(rates): ", the highest tried", min(rates): ", the lowest tried"}.get(best["lr"], "")
    say("\n".join(f"lr {row['lr']:g}: {row['text']}" for row in tried))
    say(f"done: {run / 'model'} is that of lr {best['lr']:g}{end}, {write_report(run)}")
    return True

"""Show the state of a training run on one screen: step, loss, speed, where the time goes, the last
checkpoint, and the time left.

    omnilead status RUN
    watch -n 10 omnilead status RUN
    omnilead status s3://bucket/run
    omnilead status RUN --html          also writes RUN/report.html, one page with the training curves

It only reads RUN's files, so it works on any machine that sees them, during training and
afterwards. Of a run in a bucket it shows what the last checkpoint uploaded.
"""

import fcntl
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from omnilead.data_tools.io.commands import run_as_omnilead, run_command
from omnilead.data_tools.io.errors import UserError
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.storage import RemoteFolder
from omnilead.data_tools.io.terminal import print_result, say
from omnilead.engine.run import AfterTraining
from omnilead.engine.settings.commandline import parse_options
from omnilead.engine.settings.errors import ConfigError, Facts
from omnilead.engine.settings.metrics import label_of
from omnilead.engine.settings.run_files import (
    LOCK,
    METRICS,
    PROMETHEUS,
    RUN_FACTS,
    VALIDATION,
    CropsAndSeconds,
    crops_and_seconds,
    number_or_nan,
    read_metric_rows,
)

LATEST = "checkpoints/latest"
RECENT_S = 60.0
# After so many seconds without a log line the screen asks whether the training hangs. On most
# machines compiling and validating take less
SILENT_S = 300.0


def crops_per_s(measured: list[CropsAndSeconds]) -> float:
    seconds = sum(seconds for _, seconds in measured)
    return sum(crops for crops, _ in measured) / seconds if seconds else math.nan


def last_minute(measured: list[CropsAndSeconds]) -> list[CropsAndSeconds]:
    """Returns the last items of `measured` that together take at least a minute; all, if they take
    less."""
    seconds = 0.0
    for i in reversed(range(len(measured))):
        seconds += measured[i][1]
        if seconds >= RECENT_S:
            return measured[i:]
    return measured


def read_gauges(run: Path) -> dict[str, float]:
    """Returns the values that the training last wrote for Prometheus; {} for a run of an earlier
    version, which wrote none."""
    path = run / PROMETHEUS
    text = path.read_text(errors="replace") if path.is_file() else ""
    pattern = re.compile(r"^omnilead_(\w+)\{.*\} ([-+.e\d]+)$", re.MULTILINE)
    return {name: float(value) for name, value in pattern.findall(text)}


def is_training(run: Path) -> bool:
    """True if a process on this machine trains in this folder. The test takes a shared lock,
    because with an exclusive lock two tests at the same time would take each other for a
    training."""
    try:
        with open(run / LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock file, or its file system has no locks
        pass
    return False


def last_checkpoint(latest: Path) -> str:
    if not latest.is_file():
        return "none yet"
    return f"{latest.read_text().strip()}, {file_age(latest)} ago"


def file_age(file: Path) -> timedelta:
    """Returns the time since the file was last modified."""
    return timedelta(seconds=int(time.time() - file.stat().st_mtime))


def download(url: str, run: Path) -> None:
    """Downloads the small files of a run in a bucket. Each file gets the time of its upload, because
    the screen shows how old some of them are."""
    place = RemoteFolder(url)
    names = set(place.names())
    for name in names & {METRICS, VALIDATION, PROMETHEUS, RUN_FACTS, LATEST}:
        file = run / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(place.read_range(name, 0, place.size(name)))
        uploaded_s = place.fs.modified(place.path(name)).timestamp()
        os.utime(file, (uploaded_s, uploaded_s))
    if any(name.startswith("model/") for name in names):
        (run / "model").mkdir()


def screen_lines(run: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yields (label, text) for each line of the screen. `run`: a local folder with the run's files.
    `name`: the run as the user named it."""
    if not (run / METRICS).is_file():
        raise ConfigError(f"{name}: no {METRICS}: give the folder of a pretrain or finetune run")
    rows, _ = read_metric_rows(run / METRICS)
    if not rows:
        raise ConfigError(f"{name}/{METRICS}: has no step yet: wait until the first step is logged")
    row, step = rows[-1], rows[-1]["step"]
    total = json.loads((run / RUN_FACTS).read_text())["steps"]
    training = is_training(run)
    if step == total and (run / "model").is_dir() and not training:
        state = "finished"
    elif "://" in name:
        state = f"as uploaded {file_age(run / METRICS)} ago"
    elif training:
        state = "training"
    else:
        state = "not training on this machine; the same command resumes it"
    yield "run", f"{name}: {state}"
    progress = f"{step:,} of {total:,} ({100 * step / total:.1f} %)"
    yield "step", f"{progress}, epoch {number_or_nan(row['epoch']):.2f}"
    yield from describe_losses(row, read_metric_rows(run / VALIDATION).rows)
    recent = crops_per_s(last_minute(crops_and_seconds(rows)))
    yield "speed", describe_speed(row, rows, recent)
    yield "time", describe_time(read_gauges(run), row, rows)
    yield "checkpoint", last_checkpoint(run / LATEST)
    if number_or_nan(row["skipped_steps"]) > 0:
        yield "skipped", f"{row['skipped_steps']:,} steps whose loss or gradient was not finite"
    if step < total and recent > 0:
        seconds = (total - step) * row["crops_seen"] / step / recent
        yield "left", f"{timedelta(seconds=int(seconds))} of training, without validation"
    silent_s = time.time() - (run / METRICS).stat().st_mtime
    if training and silent_s > SILENT_S:
        yield (
            "silent",
            f"nothing logged for {timedelta(seconds=int(silent_s))}: is it validating, or hanging?",
        )


def describe_speed(row: Facts, rows: list[Facts], recent: float) -> str:
    overall, mfu_pct = crops_per_s(crops_and_seconds(rows)), 100 * number_or_nan(row["mfu"])
    text = f"{recent:,.1f} crops/s in the last minute of training, {overall:,.1f} over the run"
    return f"{text}, MFU {mfu_pct:.1f} %"


def describe_losses(row: Facts, validations: list[Facts]) -> Iterator[tuple[str, str]]:
    parts = [f"{number_or_nan(row['loss']):.4f}"]
    for name, value in row.items():
        if name.startswith("loss_") and value is not None:
            parts.append(f"{name[5:]} {value:.4g}")
    yield "loss", ", ".join(parts)
    for held_out in validations[-1:]:
        scores = []
        for name, value in held_out.items():
            if name not in ("step", "crops_seen"):
                scores.append(f"{label_of(name)} {number_or_nan(value):.4g}")
        yield "validation", f"{', '.join(scores)} at step {held_out['step']:,}"


def describe_time(gauges_now: dict[str, float], row: Facts, rows: list[Facts]) -> str:
    """Says what share of the training waits for data, and what share of the time since the start is
    not training. The times of the loader's own stages are in RUN/metrics.prom and TensorBoard."""
    text = f"{number_or_nan(row['data_wait_pct']):.1f} % of training waits for data"
    since = [line for line in rows if line["step"] > gauges_now.get("first_step", math.inf)]
    elapsed_s = gauges_now.get("logged_at_seconds", 0.0) - gauges_now.get("started_at_seconds", 0.0)
    if since and elapsed_s > 0:
        trained_s = sum(seconds for _, seconds in crops_and_seconds(rows)[-len(since) :])
        other_share = max(0.0, 1 - trained_s / elapsed_s)
        text += f"; {100 * other_share:.0f} % of the time since the start is validation, saving and the like"
    return text


def main(arguments: Sequence[str] | None = None, after: AfterTraining | None = None) -> int:
    options = parse_options(status, "status", __doc__, arguments)
    return run_command("omnilead status", lambda: status(**options, after=after), explain_failure)


def explain_failure(error: Exception) -> UserError | None:
    """Returns the error that the user sees; None if it is a bug. Damaged files raise several kinds
    of errors, which all become a ConfigError."""
    if isinstance(error, OSError | ValueError | LookupError | TypeError):
        return ConfigError(str(error))
    return error if isinstance(error, UserError) else None


def _write_report(run: str, after: AfterTraining | None) -> None:
    if not after:
        raise ConfigError("--html: reports are made by omnilead.downstream, which is not installed")
    if "://" in run:
        raise ConfigError(
            f"{run}: --html writes into the run's folder, which must be local: give its working folder"
        )
    say(str(after.write_report(Path(run))))


def status(
    run: Annotated[str, Option("the folder of a run; s3:// works too", "RUN")],
    *,
    html: Annotated[bool, Option("also write RUN/report.html")] = False,
    after: AfterTraining | None = None,
) -> int:
    name = run.rstrip("/") or "/"
    if html:
        # first, so that a run too damaged for the screen still gets a report
        _write_report(name, after)
    with tempfile.TemporaryDirectory() as copies:
        folder = Path(name)
        if "://" in name:
            folder = Path(copies)
            download(name, folder)
        lines = [f"{what:<11} {text}\n" for what, text in screen_lines(folder, name)]
    return print_result("".join(lines))


if __name__ == "__main__":
    run_as_omnilead("status")

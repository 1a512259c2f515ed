"""The doors of engine.reproduce without the work: what the real ones read and leave behind, in milliseconds.

A folder named by FAKE holds: ran (a line for each run that ended), fail (words: a run whose name holds one fails) and hang (the
same: it never ends). The module is also the command of a worker that knows these doors.
"""

import json
import os
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from engine.common import describe_leads, parse_leads

HERE = Path(__file__).resolve()


def door(kind: str, arguments: list[str]) -> int:
    fake = Path(os.environ["FAKE"])
    given = dict(zip(arguments[::2], arguments[1::2], strict=True)) if kind == "evaluate" else {}
    sets = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in arguments if "=" in pair)}
    run = Path(sets["run"] if sets else given["--model"])
    name = f"{kind} {run.parent.name}/{run.name}" if kind != "pretrain" else f"{kind} {run.name}"
    print(f"warning: this is {name}", file=sys.stderr)
    if any(word in name for word in (fake / "hang").read_text().split()):
        (fake / f"hangs-{os.getpid()}").touch()
        time.sleep(10**6)
    if any(word in name for word in (fake / "fail").read_text().split()):
        print("engine/pretrain.py: loss is not finite: lower train.lr", file=sys.stderr)
        return 1
    if kind == "evaluate":
        assert (run / "model").is_dir() and given["--role"] == "test"
        score = zlib.crc32(name.encode()) % 1000 / 1000
        data = json.loads(Path(given["--data"], "dataset.json").read_text())["fingerprint"]
        of = {"model": str(run), "data": data, "leads": describe_leads(parse_leads(given["--leads"]))}
        Path(given["--json"]).write_text(json.dumps({"score": score, "metrics": {}, "intervals": {}} | of))
    else:
        start = Path(sets.get("start", sets["run"]))
        assert kind == "pretrain" or start.suffix == ".yaml" or (start / "model").is_dir()
        assert kind == "pretrain" or start.suffix != ".yaml" or start.is_file()
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        time.sleep(0.02)
        (run / "model").mkdir()
    with (fake / "ran").open("a") as out:
        out.write(name + "\n")
    return 0


def patch() -> None:
    from engine.reproduction import claims, cost, launch, plan, work

    plan.DOORS.update({kind: (str(HERE), kind) for kind in plan.DOORS})
    launch.COMMAND = (sys.executable, str(HERE))
    launch.POLL_S = work.POLL_S = 0.02
    claims.BEAT_S = 0.1
    cost.speed = lambda plan, place: 1e10


def worker(arguments: Sequence[str], fake: str, host: str = "", stale_s: float = 90.0, together: int = 1) -> None:
    """In a process of its own: engine.reproduce with these doors, once so many are there."""
    os.environ["FAKE"] = fake
    patch()
    from engine import reproduce
    from engine.reproduction import claims

    claims.STALE_S = stale_s
    if host:
        claims.here = lambda: host
    Path(fake, f"worker-{os.getpid()}").touch()
    while len(list(Path(fake).glob("worker-*"))) < together:
        time.sleep(0.005)
    sys.exit(reproduce.main(arguments))


if __name__ == "__main__":
    if sys.argv[1] in ("pretrain", "finetune", "evaluate"):
        sys.exit(door(sys.argv[1], sys.argv[2:]))
    worker(sys.argv[1:], os.environ["FAKE"])

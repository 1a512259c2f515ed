"""Stands in for pretrain, finetune and evaluate: reads and writes what they do, in milliseconds.

python fake.py FOLDER KIND ...     FOLDER/ran: a line for each job that ended; fail, hang: words in the names of jobs that do so
"""

import json
import os
import sys
import time
import zlib
from pathlib import Path


def main(fake, kind, arguments):
    pairs = dict(zip(arguments[::2], arguments[1::2], strict=True))
    run = Path(pairs["--model" if kind == "evaluate" else "--out"])
    name = f"{kind} {run.parent.name}/{run.name}" if kind != "pretrain" else f"{kind} {run.name}"
    print(f"warning: this is {name}", file=sys.stderr)
    if any(word in name for word in (fake / "hang").read_text().split()):
        (fake / f"hangs.{os.getpid()}").touch()
        time.sleep(10**6)
    if any(word in name for word in (fake / "fail").read_text().split()):
        print("engine/pretrain.py: loss is not finite: lower train.lr\n", file=sys.stderr)
        return 1
    if kind == "evaluate":
        assert (run / "model").is_dir() and pairs["--role"] == "test"
        score = {"score": zlib.crc32(name.encode()) % 1000 / 1000, "metrics": {}}
        Path(pairs["--json"]).write_text(json.dumps(score))
    else:
        if kind == "finetune":
            start = Path(pairs["--start"])
            assert start.is_file() if start.suffix == ".yaml" else (start / "model").is_dir()
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        (run / "model").mkdir()
    with (fake / "ran").open("a") as out:
        out.write(name + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))

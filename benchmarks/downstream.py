"""What pre-training is worth: tables of engine.reproduce -> one record, with every score behind them.

    python -m benchmarks.downstream synthetic=DIR synthetic=DIR2 real=DIR3 [--out F.json]

DIR is one that `python -m engine.reproduce --table 1 --out DIR` has filled. A result is one row, task and set of leads on one
archive, over the seeds of fine-tuning.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import spread
from benchmarks.run import environment, refuse, save
from engine.common import Parser
from engine.evaluation.metrics import over_seeds
from engine.reproduction.paper import TASKS, tables

METRICS = {"Dx": ("challenge", "auroc", "auprc"), "Id": ("accuracy", "top5", "chance")}


def main(arguments: list[str] | None = None) -> int:
    parser = Parser("python -m benchmarks.downstream", description=__doc__.split("\n")[0])
    parser.add_argument("archives", nargs="+", metavar="NAME=DIR", help="what to call it, and where engine.reproduce wrote")
    parser.add_argument("--table", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    record = environment() | gather([text.partition("=")[::2] for text in options.archives], options.table)
    return save(record, options.out)


def gather(archives: list[tuple[str, str]], number: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    inputs: dict[str, list[dict[str, Any]]] = {}
    seeds = 0
    for name, place in archives:
        path = Path(place) / f"table-{number}.json"
        if not path.is_file():
            refuse(f"{name}={place}: no {path.name} in it: run engine.reproduce --table {number} --out {place}")
        table = json.loads(path.read_text())
        data = {key: value for key, value in table["data"].items() if key != "path"}
        files = sorted(path for path in (Path(place) / "settings").glob("*.json") if path.stem != "data")
        runs = {path.stem: json.loads(path.read_text()) for path in files}
        inputs.setdefault(name, []).append({"protocol": table["protocol"], "data": data, "runs": runs})
        for cell in table["cells"]:
            if cell["state"] == "done":
                results[f"{name}: {cell['row']}, {cell['task']}, {cell['column']}"] = result(cell, Path(place))
                seeds = max(seeds, cell["seeds_done"])
    if not results:
        refuse(f"no cell of table {number} is done: run engine.reproduce --table {number} again, it goes on")
    return {
        "benchmark": "downstream",
        "config": {"device": "cpu", "table": number, "repeats": seeds},
        "input": {"archive": " and ".join(inputs), "archives": inputs},
        "results": results,
    }


def result(cell: dict[str, Any], place: Path) -> dict[str, Any]:
    """The score's spread, and the means of all metrics over the same evaluations."""
    evaluated = [json.loads(path.read_text()) for path in evaluations(cell, place)]
    metrics = {name: over([one["metrics"][name] for one in evaluated]) for name in METRICS[cell["task"]]}
    score = spread(cell["scores"]) | over(cell["scores"]) | {"each": cell["scores"]}
    return {"score": score, "metrics": metrics, "n": evaluated[0]["n"]}


def over(seeds: list[float]) -> dict[str, float | None]:
    mean, interval = over_seeds(seeds)
    return {"mean": mean, "interval": interval if len(seeds) > 1 else None}


def evaluations(cell: dict[str, Any], place: Path) -> list[Path]:
    """Those of the cell, as engine.reproduction.plan names them."""
    table = tables()[cell["table"]]
    row = table.rows[cell["row"]]
    model = f"{'random' if row.random else row.pretrain}-{12 if table.padded else cell['leads']}"
    leads = cell["column"].removesuffix("-lead")
    files = sorted((place / "scores" / model).glob(f"{TASKS[cell['task']]}-{leads}-seed[0-9].json"))
    return files[: len(cell["scores"])]  # there may be more than this table asked for


if __name__ == "__main__":
    sys.exit(main())

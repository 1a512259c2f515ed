"""Copy the run with the best validation score, of several fine-tuned runs that differ in their learning rate.

    python -m benchmarks.trials NAME=RUN ... --of PREFIX --out OUT

NAME is PREFIX-RATE; runs with other names are left out. OUT becomes a copy of the best run, without its
checkpoints. Its run.json lists the rates that were tried.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import program_parser
from omnilead.downstream.reproduce.jobs import read_json, write_json
from omnilead.engine.settings.commandline import run_on_ranks
from omnilead.engine.settings.errors import ConfigError

IGNORE_CHECKPOINTS = shutil.ignore_patterns("checkpoints", "tensorboard", ".*")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = program_parser("trials", __doc__)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--of", required=True, metavar="PREFIX", help="of the names")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    runs = runs_named(options.runs, f"{options.of}-")
    return run_on_ranks("benchmarks.trials", lambda: copy_best(runs, options.out))


def runs_named(texts: Sequence[str], prefix: str) -> dict[str, Path]:
    """Returns {NAME without `prefix`: RUN} of those texts NAME=RUN whose NAME begins with `prefix`."""
    runs = (text.partition("=") for text in texts)
    return {
        name.removeprefix(prefix): Path(run) for name, _, run in runs if name.startswith(prefix)
    }


def copy_best(runs: dict[str, Path], out: Path) -> int:
    """Copies the run with the best validation score to `out`. `runs`: {learning rate: run}."""
    results: dict[str, Any] = {}
    for rate, run in runs.items():
        results[rate] = json.loads((run / "result.json").read_text())
    if not results:
        raise ConfigError("--of PREFIX: no run has a name PREFIX-RATE: check the names before =")

    def validation_score(rate: str) -> float:
        """Returns the score of a run, negated if lower is better."""
        best = float(results[rate]["best"])
        return best if results[rate]["higher_is_better"] else -best

    chosen = runs[max(results, key=validation_score)]
    tried = []
    for rate, result in results.items():
        converged = "yes" if result["converged"] else "no"
        tried.append([f"{float(rate):g}", result["step"], f"{result['best']:.4f}", converged])
    partial = out.with_name(f".{out.name}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(chosen, partial, ignore=IGNORE_CHECKPOINTS)
    write_json(partial / "run.json", read_json(partial / "run.json") | {"rates": tried})
    partial.replace(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare our model with the authors': run it with their weights, inputs and random draws, and
compare the results.

    omnilead parity DIR [--json F]

DIR holds, for each case NAME: NAME_cfg.json (their settings), NAME_state_dict.safetensors, and
NAME_eval.npz, NAME_train.npz or both. These hold the inputs source [R, L, T], mask_indices,
neg_idxs, patient_id, segment (train also gumbel_noise and temp) and the authors' results. With
train.npz there may be NAME_train_grads_of_sum_loss.safetensors and
NAME_state_dict_after_3_steps.safetensors. Missing or unknown results are listed as not compared.
Prints the largest error of every quantity; for tensors it is relative to the largest number in the
reference. Exit 0: all errors are within their limits. Exit 1: one is not. Exit 2: DIR cannot be
read.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from omnilead.data_tools.cli import echo, tell
from omnilead.engine.commandline import command_parser, interruptible
from omnilead.engine.common import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("parity", __doc__)
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="the authors' settings, weights, inputs and results",
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write the table as JSON too")
    args = parser.parse_args(arguments)
    from omnilead.engine.interop.parity import compare

    try:
        comparisons = compare(args.folder)
        if args.json:
            rows = [asdict(comparison) | {"holds": comparison.holds} for comparison in comparisons]
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    except (ConfigError, OSError) as error:
        tell(f"omnilead parity: {error}")
        return 2
    width = max(len(comparison.quantity) for comparison in comparisons)
    for one in comparisons:
        verdict = "" if one.holds else "  DOES NOT HOLD"
        echo(f"{one.case:<12} {one.quantity:<{width}} {one.error:9.1e} <= {one.limit:.0e}{verdict}")
    failed = sum(not comparison.holds for comparison in comparisons)
    echo(f"{len(comparisons) - failed} of {len(comparisons)} quantities agree")
    return 1 if failed else 0


if __name__ == "__main__":
    interruptible("omnilead parity")
    sys.exit(main())

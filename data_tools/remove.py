"""Remove patients from a dataset, and check every byte; exit 0 only if it had them all.

    omnilead remove dataset --patients withdrawn.txt

FILE has the ids of a dataset, or with --pseudonymize those of its archive.
"""

import os
from collections.abc import Sequence
from typing import Annotated

from omnilead.data_tools.ecg.pseudonyms import read_key
from omnilead.data_tools.io.commands import parse_options, run_as_omnilead, run_command
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.shared_options import CORES, DatasetPath, Workers
from omnilead.data_tools.io.terminal import echo, interactive


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__, "remove", remove, arguments)
    resume = ": run the same command again to continue"
    return run_command("remove", lambda: remove(**options), resume=resume)


def remove(
    dataset: DatasetPath,
    *,
    patients: Annotated[
        str,
        Option(
            "a file with one patient on each line, as in the dataset: PATIENT or SOURCE/PATIENT",
            "FILE",
        ),
    ],
    pseudonymize: Annotated[
        str | None,
        Option("the key file of the dataset, if FILE has the original ids", "KEYFILE"),
    ] = None,
    forget: Annotated[
        bool,
        Option("keep no hashes of those who were ever removed: --append can then bring them back"),
    ] = False,
    workers: Workers = None,
) -> int:
    from omnilead.data_tools.sharding.removal import remove as remove_patients

    url, key = os.fspath(dataset), read_key(pseudonymize) if pseudonymize else None
    how = workers or CORES, not interactive(), forget
    made, missing = remove_patients(url, patients, key, *how)
    echo(f"{url}: version {made.version}, {len(made):,} crops are left; every byte was checked")
    echo(
        "which models have seen them: omnilead seen RUN/model --data FILES, with files of their ECGs"
    )
    return 1 if missing else 0


if __name__ == "__main__":
    run_as_omnilead("remove")

"""Write an archive's published labels as tables, or a copy of your own table with pseudonyms.

    omnilead labels ptbxl archive --out labels

docs/published_labels.md lists the tables.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from omnilead.data_tools.ecg.pseudonyms import read_key
from omnilead.data_tools.io.commands import parse_options, run_as_omnilead, run_data_command
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.shared_options import Anonymous
from omnilead.data_tools.io.terminal import is_interactive, say


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__, "labels", labels, arguments)
    return run_data_command("labels", lambda: labels(**options), "--out", options["out"])


def labels(
    archive: Annotated[
        Literal[
            "ptbxl",
            "code15",
            "physionet2021",
            "ecg-arrhythmia",
            "physionet2011",
            "mimic-iv-ecg",
            "table",
        ],
        Option(
            "the archive's format; `table` gives the records of your own table their pseudonyms"
        ),
    ],
    src: Annotated[
        str,
        Option(
            "folder or s3:// address of the archive, whose signals are not read; or your table",
            "SRC",
        ),
    ],
    *,
    out: Annotated[str, Option("where to write the tables", "DIR")],
    pseudonymize: Annotated[
        str | None, Option("the key file that the dataset was made with", "KEYFILE")
    ] = None,
    anonymous: Anonymous = False,
) -> int:
    from omnilead.data_tools.published_labels.tables import write_labels

    key = read_key(pseudonymize) if pseudonymize else None
    for line in write_labels(archive, src, out, key, anonymous, not is_interactive()):
        # say() raises no error, so all tables are written even if the reader closes the pipe
        say(line)
    return 0


if __name__ == "__main__":
    run_as_omnilead("labels")

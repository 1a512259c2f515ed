"""Malformed records, each made from a good one, and the expected result of reading it.

REFUSED   the damage, and the reason in rejects.csv
READ      read as intended: missing leads, flags, classes
ORPHANS   signals without a header

Only a few of the header's fields are covered here; test_wfdb_header.py covers the others.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.io
from handmade import ecg, header, mat

from omnilead.data_tools.ecg.record import LEADS
from tests.tables import tabulated

SECRET = "Dr. Dolores Quijote saw this on 3 May"


@dataclass
class Made:
    """A record about to be written; `x` is what it means, in microvolts. None: no such file is
    written."""

    place: Path
    name: str
    x: np.ndarray
    hea: object = None
    mat: object = None

    def write(self):
        for data, ending in ((self.hea, "hea"), (self.mat, "mat")):
            if data is not None:
                self.path(ending).write_bytes(data.encode() if isinstance(data, str) else data)

    def path(self, ending):
        return self.place / f"{self.name}.{ending}"

    def store(self, stored, **options):
        self.hea, self.mat = header(self.name, stored, **options), mat(stored)


def nothing(made):
    pass


def edit(old, new, count=-1):
    """Of the header."""

    def change(made):
        words = old.replace("NAME", made.name)
        assert words in str(made.hea)
        made.hea = str(made.hea).replace(words, new.replace("NAME", made.name), count)

    return change


def put(ending, data):
    return lambda made: setattr(made, ending, data)


def redo(x=lambda x: x, stored=lambda x: x, **options):
    """The same record with other samples, or stored otherwise."""

    def change(made):
        made.x = x(made.x)
        made.store(stored(made.x).astype(np.int16), **options)

    return change


def level_4(kind=30, name=b"val\0", dtype="<i2", imaginary=0, axis=1):
    def change(made):
        head = np.array([kind, *made.x.shape[::axis], imaginary, len(name)], "<i4")
        made.mat = head.tobytes() + name + made.x.T.astype(dtype).tobytes()

    return change


def level_5(made):
    path = made.place.parent / "level5.mat"
    scipy.io.savemat(path, {"val": made.x})
    made.mat = path.read_bytes()
    path.unlink()


def link(ending, target):
    """The file is a link to a sound one, inside the archive or outside."""

    def change(made):
        real = made.place / target
        real.parent.mkdir(exist_ok=True, parents=True)
        made.write()
        if not real.exists():
            made.path(ending).rename(real)
        made.path(ending).unlink(missing_ok=True)
        made.path(ending).symlink_to(real)
        made.hea = made.mat = None

    return change


def instead(ending, make):
    def change(made):
        setattr(made, ending, None)
        make(made.path(ending))

    return change


class Refused(NamedTuple):
    change: Callable
    reason: str
    # The reason as a plain WFDB folder, or the leads that the record then lacks
    plain: object = None


NO_MATLAB = "not the expected MATLAB file"
NO_TWELVE = "not twelve leads"
OUTSIDE = "../../../../outside/secret"
# Name of the case, text of the header, in its place, reason, reason as a plain folder
EDITS = """
negative gain               | 1000.0(0)/mV | -1000(0)/mV     | gain
100 samples of 5000         | 500 5000     | 500 100         | too short
fewer samples than the file | 500 5000     | 500 4000        | file too large
more samples than the file  | 500 5000     | 500 6000        | signal file size
most samples                | 500 5000     | 500 2000000     | signal file size
rate without a ratio        | 500 5000     | 499.97 5000     | sampling rate
offset missing              | 16x1+24      | 16              | file too large
offset 22                   | +24          | +22             | file too large
offset 26                   | +24          | +26             | signal file size
format 212 of a mat         | 16x1+24      | 212+24          | not the expected MATLAB file
format 80 of a mat          | 16x1+24      | 80+24           | not the expected MATLAB file
format 99 of a mat          | 16x1+24      | 99+24           | not the expected MATLAB file
duplicated lead             | 0 V6         | 0 V5            | not twelve leads | duplicated lead
another name inside         | NAME 12      | NAMEx 12        | record name differs from file
a path upwards              | NAME.mat     | ../g1/NAME.mat  | signal file name
another file                | NAME.mat     | a.mat           | signal file name | missing file
"""
REFUSED = {name: Refused(edit(old, new), *reasons) for name, old, new, *reasons in tabulated(EDITS)}
REFUSED |= {
    "val transposed": Refused(level_4(axis=-1), NO_MATLAB),
    "another variable": Refused(level_4(name=b"ecg\0"), NO_MATLAB),
    "a complex matrix": Refused(level_4(imaginary=1), NO_MATLAB),
    "float64 mat": Refused(level_4(0, dtype="<f8"), "file too large"),
    "MATLAB level 5": Refused(level_5, "file too large"),
    "text in the mat": Refused(put("mat", b"<html>404 Not Found</html>"), "signal file size"),
    "empty mat": Refused(put("mat", b""), "signal file size"),
    "two formats": Refused(edit("16x1+24", "212+24", 1), "mixed signal formats"),
    "two offsets": Refused(edit("16x1+24", "16x1+0", 1), NO_MATLAB),
    "unknown lead": Refused(edit(" V6\n", " V7\n"), NO_TWELVE, ("V6",)),
    "only unknown leads": Refused(redo(leads="ABCDEFGHJKLM"), NO_TWELVE, "no known lead"),
    "eleven signals": Refused(redo(lambda x: x[:11], leads=LEADS[:11]), NO_TWELVE, ("V6",)),
    "thirteen signals": Refused(
        redo(stored=lambda x: np.vstack([x, x[:1]]), leads=(*LEADS, "breath")), NO_TWELVE, ()
    ),
    "a huge token": Refused(edit("# Sx", "x" * 100_000), "file too large"),
    "empty header": Refused(put("hea", ""), "empty header"),
    "two files": Refused(edit("NAME.mat", "NAMEb.mat", 1), "signal file name", NO_MATLAB),
    "no mat": Refused(put("mat", None), "missing file"),
    "mat links inside": Refused(link("mat", "../../../linked/inside.mat"), "not a regular file"),
    "mat links outside": Refused(link("mat", f"{OUTSIDE}.mat"), "not a regular file"),
    "header links outside": Refused(link("hea", f"{OUTSIDE}.hea"), "not a regular file"),
    "mat is a pipe": Refused(instead("mat", os.mkfifo), "not a regular file"),
    "header is a pipe": Refused(instead("hea", os.mkfifo), "not a regular file"),
    "mat is a folder": Refused(instead("mat", Path.mkdir), "not a regular file"),
    "under 5 s": Refused(redo(lambda x: x[:, :2499]), "too short"),
    "all invalid": Refused(redo(lambda x: np.full_like(x, -32768)), "no valid lead"),
    "all 7": Refused(redo(lambda x: 0 * x + 7), "no valid lead"),
    "half flat, half invalid": Refused(
        redo(lambda x: 0 * x + np.repeat([3, -32768], 6)[:, None]), "no valid lead"
    ),
}
# Files that are no record at all: nothing a folder of WFDB headers would even look at.
ORPHANS = {
    "no header": Refused(put("hea", None), "no header"),
    "header is a folder": Refused(instead("hea", Path.mkdir), "no header"),
}


def invalid_sample(made):
    made.x[7, 4321] = -32768
    made.store(made.x)
    made.x[7] = 0


def one_flat(made):
    made.x[6] = 11
    made.store(made.x)


def latin_comment(made):
    made.hea = str(made.hea).encode() + b"# \xe9\xff\x00 # Dx: 1\n"


def wrong_checksum(made):
    made.x[9, 1234] += 20
    made.mat = mat(made.x)


def wrong_first(made):
    made.x[9, [0, 1]] = made.x[9, [1, 0]]
    made.mat = mat(made.x)


class Read(NamedTuple):
    change: Callable
    reasons: object = ()  # in rejects.csv
    missing: tuple = ()
    dx: tuple = ("426783006",)


ORDER = [7, 2, 11, 0, 5, 9, 1, 10, 3, 8, 6, 4]
READ = {
    "good": Read(nothing),
    "permuted leads": Read(redo(stored=lambda x: x[ORDER], leads=[LEADS[i] for i in ORDER])),
    "unit uV": Read(redo(form="16x1+24 1(0)/uV 16 0")),
    "unit V": Read(redo(stored=lambda x: x // 10, form="16x1+24 100000(0)/V 16 0")),
    "no unit": Read(redo(form="16+24 1000 16 0")),
    "baseline": Read(redo(stored=lambda x: x // 5 - 100, form="16+24 200(-100)/mV 16 0")),
    "one invalid sample": Read(invalid_sample, ["lead not measured"], ("V2",)),
    "one flat lead": Read(one_flat, ["flat lead"]),
    "date on the record line": Read(edit("500 5000", "500 5000 05-Feb-2020 11:39:16")),
    "latin comments": Read(latin_comment),
    "five seconds": Read(redo(lambda x: x[:, :2500])),
    "27 seconds": Read(redo(lambda x: ecg(13_500, 7))),
    "words for codes": Read(
        redo(comments=["#Age: NaN", "#Dx: I-AVB,Normal"]), dx=("270492004", "426783006")
    ),
    "a secret for a code": Read(
        redo(comments=[f"# Dx: {SECRET},426783006", f"# Hx: {SECRET}"]),
        ["diagnosis without a code"],
    ),
    "wrong checksum": Read(wrong_checksum, ["checksum differs"]),
    "wrong first value": Read(wrong_first, ["first value differs"]),
}
CASES = [*REFUSED, *READ, *ORPHANS]
NAMES = {case: f"E{number:05d}" for number, case in enumerate(CASES, 1)}

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

import numpy as np
import scipy.io
from handmade import dat, ecg, header, mat

from omnilead.data_tools.record import LEADS

SECRET = "Dr. Dolores Quijote saw this on 3 May"


@dataclass
class Made:
    """A record about to be written; `x` is what it means, in microvolts. None: no such file is
    written."""

    place: Path
    name: str
    x: np.ndarray
    hea: str | bytes | None
    mat: bytes | None

    def write(self) -> None:
        for data, ending in ((self.hea, "hea"), (self.mat, "mat")):
            if data is not None:
                self.path(ending).write_bytes(data.encode() if isinstance(data, str) else data)

    def path(self, ending: str) -> Path:
        return self.place / f"{self.name}.{ending}"

    def redo(self, x: np.ndarray, stored: np.ndarray | None = None, **options: object) -> None:
        """The same record with other samples, or stored otherwise."""
        stored = x if stored is None else stored
        self.x, self.hea, self.mat = x, header(self.name, stored, **options), mat(stored)  # type: ignore[arg-type]


Change = Callable[[Made], object]


def edit(old: str, new: str, count: int = -1) -> Change:
    def change(made: Made) -> None:
        assert isinstance(made.hea, str)
        words = old.replace("NAME", made.name)
        assert words in made.hea
        made.hea = made.hea.replace(words, new.replace("NAME", made.name), count)

    return change


def record_line(line: str) -> Change:
    return lambda made: setattr(
        made, "hea", "\n".join([line.replace("NAME", made.name), *str(made.hea).split("\n")[1:]])
    )


def put(**files: object) -> Change:
    """put(mat=...) and put(hea=...): the contents, or a function of the record that gives them."""

    def change(made: Made) -> None:
        for ending, data in files.items():
            setattr(made, ending, data(made) if callable(data) else data)

    return change


def level_4(kind: int, x: np.ndarray, name: bytes = b"val\0", imaginary: int = 0) -> bytes:
    return np.array([kind, *x.shape, imaginary, len(name)], "<i4").tobytes() + name + dat(x)


def level_5(made: Made) -> bytes:
    path = made.place.parent / "level5.mat"
    scipy.io.savemat(path, {"val": made.x})
    data = path.read_bytes()
    path.unlink()
    return data


def link(ending: str, target: str) -> Change:
    """The file is a link to a sound one, inside the archive or outside."""

    def change(made: Made) -> None:
        real = made.place / target
        real.parent.mkdir(exist_ok=True, parents=True)
        made.write()
        if not real.exists():
            made.path(ending).rename(real)
        made.path(ending).unlink(missing_ok=True)
        made.path(ending).symlink_to(real)
        made.hea = made.mat = None

    return change


def instead(ending: str, make: Callable[[Path], object]) -> Change:
    def change(made: Made) -> None:
        setattr(made, ending, None)
        make(made.path(ending))

    return change


def leads(new: dict[str, str]) -> Change:
    """Other names on the signal lines."""

    def change(made: Made) -> None:
        lines = [line.rpartition(" ") for line in str(made.hea).split("\n")]
        made.hea = "\n".join(
            f"{head}{blank}{new.get(last, last) if '.mat' in head else last}"
            for head, blank, last in lines
        )

    return change


def one_more(made: Made) -> None:
    made.redo(made.x, np.vstack([made.x, made.x[:1]]), leads=(*LEADS, "breath"))


GAIN = "1000.0(0)/mV"
# name: (what is done to a good record, reason of the refusal[, the reason as a plain WFDB folder,
# or the leads it then lacks])
REFUSED: dict[str, tuple[Change, str] | tuple[Change, str, str | tuple[str, ...]]] = {
    "negative gain": (edit(GAIN, "-1000(0)/mV", 1), "gain"),
    "unit kV": (edit("/mV", "/kV"), "unknown unit"),
    "100 samples of 5000": (record_line("NAME 12 500 100"), "too short"),
    "fewer samples than the file": (record_line("NAME 12 500 4000"), "file too large"),
    "more samples than the file": (record_line("NAME 12 500 6000"), "signal file size"),
    "most samples": (record_line("NAME 12 500 2000000"), "signal file size"),
    "rate without a ratio": (record_line("NAME 12 499.97 5000"), "sampling rate"),
    "offset missing": (edit("16x1+24", "16"), "file too large"),
    "offset 22": (edit("+24", "+22"), "file too large"),
    "offset 26": (edit("+24", "+26"), "signal file size"),
    "val transposed": (put(mat=lambda made: level_4(30, made.x.T)), "not the expected MATLAB file"),
    "another variable": (
        put(mat=lambda made: level_4(30, made.x, b"ecg\0")),
        "not the expected MATLAB file",
    ),
    "a longer variable name": (
        put(mat=lambda made: level_4(30, made.x, b"value\0")),
        "file too large",
    ),
    "a complex matrix": (
        put(mat=lambda made: level_4(30, made.x, imaginary=1)),
        "not the expected MATLAB file",
    ),
    "unsigned samples": (put(mat=lambda made: level_4(40, made.x)), "not the expected MATLAB file"),
    "big-endian": (put(mat=lambda made: level_4(1030, made.x)), "not the expected MATLAB file"),
    "float64 mat": (
        put(mat=lambda made: level_4(0, made.x)[:24] + made.x.T.astype("<f8").tobytes()),
        "file too large",
    ),
    "MATLAB level 5": (put(mat=level_5), "file too large"),
    "text in the mat": (put(mat=b"<html>404 Not Found</html>"), "signal file size"),
    "empty mat": (put(mat=b""), "signal file size"),
    **{
        f"format {code} of a mat": (edit("16x1+24", f"{code}+24"), "not the expected MATLAB file")
        for code in (212, 80, 99)
    },
    "two formats": (edit("16x1+24", "212+24", 1), "mixed signal formats"),
    "two offsets": (edit("16x1+24", "16x1+0", 1), "not the expected MATLAB file"),
    "duplicated lead": (leads({"II": "I"}), "not twelve leads", "duplicated lead"),
    "unknown lead": (leads({"V6": "V7"}), "not twelve leads", ("V6",)),
    "only unknown leads": (
        leads({lead: f"ch{i}" for i, lead in enumerate(LEADS)}),
        "not twelve leads",
        "no known lead",
    ),
    "eleven signals": (
        lambda made: made.redo(made.x[:11], leads=LEADS[:11]),
        "not twelve leads",
        ("V6",),
    ),
    "thirteen signals": (one_more, "not twelve leads", ()),
    "a huge token": (put(hea=lambda made: made.hea + "x" * 100_000), "file too large"),
    "empty header": (put(hea=""), "empty header"),
    "another name inside": (record_line("NAMEx 12 500 5000"), "record name differs from file name"),
    "a path upwards": (edit("NAME.mat", "../g1/NAME.mat"), "signal file name"),
    "another file": (edit("NAME.mat", "elsewhere.mat"), "signal file name", "missing file"),
    "two files": (
        edit("NAME.mat", "NAMEb.mat", 1),
        "signal file name",
        "not the expected MATLAB file",
    ),
    "no mat": (put(mat=None), "missing file"),
    "mat links inside": (link("mat", "../../../linked/inside.mat"), "not a regular file"),
    "mat links outside": (link("mat", "../../../../outside/secret.mat"), "not a regular file"),
    "header links outside": (link("hea", "../../../../outside/secret.hea"), "not a regular file"),
    "mat is a pipe": (instead("mat", os.mkfifo), "not a regular file"),
    "header is a pipe": (instead("hea", os.mkfifo), "not a regular file"),
    "mat is a folder": (instead("mat", Path.mkdir), "not a regular file"),
    "under 5 s": (lambda made: made.redo(ecg(2499)), "too short"),
    "all invalid": (lambda made: made.redo(np.full_like(made.x, -32768)), "no valid lead"),
    **{
        f"all {uv}": (lambda made, uv=uv: made.redo(np.full_like(made.x, uv)), "no valid lead")
        for uv in (0, 7)
    },
    "half flat, half invalid": (
        lambda made: made.redo(np.repeat([3, -32768], 6)[:, None] + 0 * made.x),
        "no valid lead",
    ),
}
# Files that are no record at all: nothing a folder of WFDB headers would even look at.
ORPHANS: dict[str, tuple[Change, str]] = {
    "no header": (put(hea=None), "no header"),
    "header is a folder": (instead("hea", Path.mkdir), "no header"),
}


def invalid_sample(made: Made) -> None:
    made.x[7, 4321] = -32768
    made.redo(made.x)
    made.x[7] = 0


def one_flat(made: Made) -> None:
    made.x[6] = 11
    made.redo(made.x)


def spoil_checksum(made: Made) -> None:
    made.x[9, 1234] += 20
    made.mat = mat(made.x)


def spoil_first(made: Made) -> None:
    made.x[9, [0, 1]] = made.x[9, [1, 0]]
    made.mat = mat(made.x)


def permuted(made: Made) -> None:
    order = np.random.default_rng(3).permutation(12)
    made.redo(made.x, made.x[order], leads=[LEADS[i] for i in order])


def comment(*lines: str) -> Change:
    return lambda made: made.redo(made.x, comments=lines)


def stored_as(form: str, digital: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda made: made.redo(made.x, digital(made.x).astype(np.int16), form=form)


# name: (what is done, missing leads, reasons in rejects.csv, diagnoses)
NSR = ("426783006",)
READ: dict[str, tuple[Change, tuple[str, ...], set[str], tuple[str, ...]]] = {
    "good": (lambda made: None, (), set(), NSR),
    "permuted leads": (permuted, (), set(), NSR),
    "capital leads": (lambda made: made.redo(made.x, leads=[lead.upper() for lead in LEADS]), (), set(), NSR),
    "unit uV": (stored_as("16x1+24 1(0)/uV 16 0", lambda x: x), (), set(), NSR),
    "unit V": (stored_as("16x1+24 100000(0)/V 16 0", lambda x: x // 10), (), set(), NSR),
    "no unit": (stored_as("16+24 1000 16 0", lambda x: x), (), set(), NSR),
    "gain 200 and baseline": (stored_as("16+24 200(-100)/mV 16 0", lambda x: x // 5 - 100), (), set(), NSR),
    "no baseline but zero": (stored_as("16+24 1000/mV 16 77", lambda x: x + 77), (), set(), NSR),
    "one invalid sample": (invalid_sample, ("V2",), {"lead not measured"}, NSR),
    "one flat lead": (one_flat, (), {"flat lead"}, NSR),
    "unsigned checksums": (lambda made: made.redo(made.x, unsigned=True), (), set(), NSR),
    "date on the record line": (record_line("NAME 12 500 5000 05-Feb-2020 11:39:16"), (), set(), NSR),
    "name with mat": (record_line("NAME.mat 12 500 5000"), (), set(), NSR),
    "latin comments": (put(hea=lambda made: made.hea.encode() + b"# \xe9\xff\x00 # Dx: 1\n"), (), set(), NSR),
    "eight seconds": (lambda made: made.redo(ecg(4000, 5)), (), set(), NSR),
    "five seconds": (lambda made: made.redo(ecg(2500, 6)), (), set(), NSR),
    "27 seconds": (lambda made: made.redo(ecg(13_500, 7)), (), set(), NSR),
    "words for codes": (comment("#Age: NaN", "#Dx: I-AVB,Normal"), (), set(), ("270492004", "426783006")),
    "a secret for a code": (comment(f"# Dx: {SECRET},426783006", f"# Hx: {SECRET}"), (), {"diagnosis without a code"}, NSR),
    "wrong checksum": (spoil_checksum, (), {"checksum differs"}, NSR),
    "wrong first value": (spoil_first, (), {"first value differs"}, NSR),
}  # fmt: skip

CASES = [*REFUSED, *READ, *ORPHANS]
NAMES = {case: f"E{number:05d}" for number, case in enumerate(CASES, 1)}

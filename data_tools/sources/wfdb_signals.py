"""The signals of a WFDB record. Format 16, used by all ECG archives, is read directly, other
formats by `wfdb`."""

import posixpath
import tempfile
from pathlib import Path

import numpy as np

from omnilead.data_tools.errors import ReadError
from omnilead.data_tools.record import EcgRecord, parse_dx
from omnilead.data_tools.sources.wfdb_header import WfdbHeader
from omnilead.data_tools.storage import Folder

# header of a MATLAB level-4 file with the one variable `val`: five int32 words, then "val\\0"
MAT_OFFSET = 24
# format -> n; the value -2**n means not measured
INVALID_BITS = {
    16: 15,
    24: 23,
    32: 31,
    61: 15,
    80: 7,
    160: 15,
    212: 11,
    310: 9,
    311: 9,
    508: 7,
    516: 15,
    524: 23,
}
# format -> (bytes, samples) of its smallest unit, to compute a file's size; FLAC has none
UNITS = {
    8: (1, 1),
    16: (2, 1),
    24: (3, 1),
    32: (4, 1),
    61: (2, 1),
    80: (1, 1),
    160: (2, 1),
    212: (3, 2),
}
UNITS |= {310: (4, 3), 311: (4, 3)}
FLAC = (508, 516, 524)
MAX_FALLBACK_VALUES = 8_000_000  # because wfdb converts to int64


def own_name(name: str, key: str) -> str:
    """The name in the header. It must be the file's name: a renamed copy could count as another
    patient's ECG."""
    stem = posixpath.basename(key).removesuffix(".hea")
    if name != stem:
        raise ReadError("record name differs from file name", f"{name} in {stem}.hea")
    return stem


def read_record(root: Folder, key: str, header: WfdbHeader, name: str, source: str) -> EcgRecord:
    """Read the record of a parsed header. A wrong checksum or first value gives a warning."""
    place = posixpath.dirname(key)
    if len(set(header.formats)) > 1:
        raise ReadError("mixed signal formats", ", ".join(map(str, header.formats)))
    if header.formats[0] == 16 and len(set(header.files)) == 1 and len(set(header.offsets)) == 1:
        signal = _read_format_16(root, posixpath.join(place, header.files[0]), header)
        warnings = _compare(header, signal)
    else:
        signal, warnings = _read_with_wfdb(root, place, header), []
    bits = INVALID_BITS.get(header.formats[0])
    invalid = None if bits is None else -(2**bits)
    rest = source, None, header.age, header.sex, parse_dx(header.dx), tuple(warnings)
    return EcgRecord(
        name,
        signal,
        header.fs_hz,
        header.leads,
        "mV",
        header.gains,
        header.baselines,
        invalid,
        *rest,
    )


def _read_format_16(root: Folder, name: str, header: WfdbHeader) -> np.ndarray:
    signals, offset = len(header.leads), header.offsets[0]
    size = offset + 2 * signals * header.samples
    data = root.read(name, size)
    if len(data) != size:
        raise ReadError("signal file size", f"{len(data)} bytes, {size} announced")
    if name.lower().endswith(".mat"):
        words = np.frombuffer(data[:20], "<i4").tolist() if len(data) >= MAT_OFFSET else []
        if (
            offset != MAT_OFFSET
            or words != [30, signals, header.samples, 0, 4]
            or data[20:24] != b"val\0"
        ):
            raise ReadError("not the expected MATLAB file", f"offset {offset}, words {words}")
    interleaved = np.frombuffer(data, "<i2", offset=offset).reshape(header.samples, signals)
    return np.ascontiguousarray(interleaved.T)  # later steps work lead by lead


def _compare(header: WfdbHeader, signal: np.ndarray) -> list[tuple[str, str]]:
    sums = np.add.reduce(signal, axis=1, dtype=np.int16).astype(
        np.int64
    )  # overflows as the format's checksum does
    first = signal[:, 0] - np.array(header.initials)
    differing = {
        "checksum differs": (sums - header.checksums) % 65536,
        "first value differs": first,
    }  # some sums are signed
    return [
        (
            reason,
            f"{np.count_nonzero(difference)} leads, first "
            f"{header.leads[int(np.argmax(difference != 0))][:8]}",
        )
        for reason, difference in differing.items()
        if difference.any()
    ]


def _checked(root: Folder, place: str, file: str, header: WfdbHeader) -> bytes:
    """Read a file and check its size against format and length: `wfdb` itself accepts longer files,
    and MATLAB files."""
    code = header.formats[0]
    offsets = {
        offset for name, offset in zip(header.files, header.offsets, strict=True) if name == file
    }
    if file.lower().endswith(".mat"):
        raise ReadError("not the expected MATLAB file", f"format {code}, offsets {sorted(offsets)}")
    if len(offsets) > 1 or code not in (*UNITS, *FLAC):
        raise ReadError("signal format", f"{code}, offsets {sorted(offsets)}")
    if code in FLAC:
        return root.read(posixpath.join(place, file), 8 * MAX_FALLBACK_VALUES)
    values = header.samples * header.files.count(file)
    unit, per_unit = UNITS[code]
    smallest, largest = (
        -(-values * unit // per_unit),
        -(-values // per_unit) * unit,
    )  # the last unit may be incomplete
    data = root.read(posixpath.join(place, file), max(offsets) + largest)
    if len(data) < max(offsets) + smallest:
        raise ReadError(
            "signal file size", f"{len(data)} bytes, {max(offsets) + smallest} announced"
        )
    return data


def _read_with_wfdb(root: Folder, place: str, header: WfdbHeader) -> np.ndarray:
    """Let `wfdb` read a copy of the checked files in a temporary folder, so that it sees no links,
    paths or other files."""
    import wfdb

    if len(header.leads) * header.samples > MAX_FALLBACK_VALUES:
        raise ReadError(
            "too long for its format", f"{header.samples} samples of format {header.formats[0]}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        for file in dict.fromkeys(header.files):
            Path(scratch, file).write_bytes(_checked(root, place, file, header))
        lines = [f"x {len(header.leads)} {header.fs_hz} {header.samples}"]
        columns = header.files, header.formats, header.offsets, header.initials, header.checksums
        for i, (file, code, offset, first, checksum) in enumerate(zip(*columns, strict=True)):
            lines.append(
                f"{file} {code}{f'+{offset}' if offset else ''} 1(0)/mV 16 0 {first} {checksum} 0 "
                f"s{i}"
            )
        Path(scratch, "x.hea").write_text("\n".join(lines) + "\n")
        try:
            record = wfdb.rdrecord(str(Path(scratch, "x")), physical=False)
        except Exception as error:  # a broken file may raise anything
            raise ReadError(
                "wfdb cannot read it", f"format {header.formats[0]}: {type(error).__name__}"
            ) from None
    signal = np.asarray(record.d_signal).T
    if signal.shape != (len(header.leads), header.samples):
        raise ReadError(
            "signal file size", f"{signal.shape[1]} samples, {header.samples} announced"
        )
    return signal

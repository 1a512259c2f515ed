"""Write the two files of a synthetic WFDB record: header and signal."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_record(
    path: Path,
    digital: np.ndarray,
    record_line: str,
    signal_line: str,
    leads: Sequence[str],
    checksums: type[np.integer],
    comments: Sequence[str] = (),
    first_bytes: bytes = b"",
) -> None:
    """Writes the header and the signal file. `digital`: [samples, leads]. `record_line`: the header's first
    line without the name. `signal_line`: suffix, format and unit of the signal file, the same for all
    leads. `first_bytes`: what the signal file has before the samples."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A sum in int16 overflows, as WFDB's checksums do
    sums = np.ascontiguousarray(digital.T).sum(1, dtype=np.int16).view(checksums)
    rows = zip(leads, digital[0].tolist(), sums.tolist(), strict=True)
    lines = [f"{path.name} {record_line}"]
    for lead, initial, checksum in rows:
        lines.append(f"{path.name}{signal_line} 16 0 {initial} {checksum} 0 {lead}")
    suffix = signal_line.split()[0]
    path.with_suffix(suffix).write_bytes(first_bytes + digital.astype("<i2", copy=False).tobytes())
    path.with_suffix(".hea").write_bytes("\n".join([*lines, *comments, ""]).encode())

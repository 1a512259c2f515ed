"""Records and archives written byte by byte from the formats' documentation, without the
project's own writers; helpers that build datasets and read them back."""

import json
import shutil
from pathlib import Path

import numpy as np

from omnilead.data_tools.dataset import fingerprint
from omnilead.data_tools.ecg.record import LEADS
from omnilead.data_tools.sharding.finishing import read_rejects
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources

GEORGIA = """# Age: 78
# Sex: Female
# Dx: 426783006
# Rx: Unknown
# Hx: Unknown
# Sx: Unknown""".splitlines()


def ecg(samples=5000, seed=0):
    """int16 [12, samples], microvolts: no lead flat, limb leads as Einthoven wants them, all
    divisible by 10."""
    x = np.random.default_rng(seed).integers(-90, 90, (12, samples)) * 20
    i, ii = x[0], x[1]
    x[2], x[3], x[4], x[5] = ii - i, -(i + ii) // 2, i - ii // 2, ii - i // 2
    return x.astype(np.int16)


def header(
    name,
    x,
    form="16x1+24 1000.0(0)/mV 16 0",
    file="",
    fs="500",
    leads=LEADS,
    comments=GEORGIA,
    unsigned=False,
):
    """`form` is all between a signal line's file name and its first value."""
    sums = x.astype(np.int64).sum(axis=1).astype(np.uint16 if unsigned else np.int16)
    rows = zip(leads, x[:, 0], sums, strict=True)
    lines = [
        f"{file or name + '.mat'} {form} {first} {checksum} 0 {lead}"
        for lead, first, checksum in rows
    ]
    return "\n".join([f"{name} {len(x)} {fs} {x.shape[1]}", *lines, *comments, ""])


def mat(x):
    """MATLAB level 4: int16, rows, columns, real, length of the name; `val`; column by column."""
    return np.array([30, *x.shape, 0, 4], "<i4").tobytes() + b"val\0" + dat(x)


def dat(x):
    """WFDB's format 16: sample by sample, lead after lead."""
    return np.ascontiguousarray(x.T).astype("<i2").tobytes()


def write_challenge(place, name, x, **options):
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.hea").write_text(header(name, x, **options))
    (place / f"{name}.mat").write_bytes(mat(x))


def build(archive, out, **options):
    sources = open_sources(str(archive))
    return shard(sources, ShardOptions(str(out), quiet=True, **options))


def write_files(root, contents):
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        (root / name).write_bytes(data)
    return root


def files(root):
    """Relative path -> contents."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def as_earlier_format(made, out):
    """A dataset as an earlier omnilead said that it is. -> its folder."""
    shutil.copytree(made.root.url, out)
    meta = json.loads((out / "dataset.json").read_text()) | {"format_minor": 1}
    meta["fingerprint"] = fingerprint(meta)
    (out / "dataset.json").write_text(json.dumps(meta))
    return out


def flip(path, at, bit=0x10):
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def crops_of(dataset):
    """(source, record) -> its rows of samples.parquet in order, each with its samples as `x`."""
    found = {}
    for row, facts in enumerate(dataset.table().to_pylist()):
        found.setdefault((facts["source"], facts["record"]), []).append(
            facts | {"x": dataset.read(row)}
        )
    return {name: sorted(rows, key=lambda row: row["start_s"]) for name, rows in found.items()}


def rejected(dataset):
    """Record and reason of every line of rejects.csv."""
    return [(record, reason) for _, record, reason, _ in read_rejects(dataset)]


def everything_in(dataset):
    """All bytes of all files, their names, and what the compressed tables say."""
    table, content = dataset.table(), files(Path(dataset.root.url))
    return b"\n".join(
        [*content.values(), str([*content, table.to_pydict(), table.schema.metadata]).encode()]
    )


def found_in(content, words):
    both = ("utf-8", "utf-16-le")
    return [word for word in words if any(word.encode(how) in content for how in both)]

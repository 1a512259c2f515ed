"""Opens arrays in files that need not be trusted: .npy (memory-mapped), .npz, HDF5 and zarr.

    open_array(folder("ROOT"), "ecg.hdf5", "tracings")     # can be indexed; has shape and dtype

No pickle is loaded, no code is run, no link to another file is followed, and no chunk takes more than
MAX_ARRAY_CHUNK bytes when it is unpacked. A file that breaks these rules raises a ReadError.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ..io.errors import DataError, ReadError, StorageError, machine_error, one_line
from ..io.npz import npz_array, npz_names, open_npy
from ..io.storage import Folder
from .zip_folder import is_in_zip

ARRAY_ENDINGS = (".npy", ".npz", ".zarr", ".h5", ".hdf5")
MAX_ARRAY_CHUNK = 64 * 2**20  # bytes; limited because a chunk is always decompressed as a whole
MAX_ZARR_META_BYTES = 2**20
LOCAL_ONLY = (
    "arrays are only read from a local disk: copy them there, and unpack them if they are in a zip"
)
ZARR_META_FILES = ("zarr.json", ".zarray")
# Codecs that only compute. Other codecs may run any code: one of zarr's loads pickles
SAFE_CODECS = {"blosc", "bytes", "crc32c", "gzip", "lz4", "sharding_indexed", "shuffle"}
SAFE_CODECS |= {"transpose", "zlib", "zstd"}
# Names of chunk grids and key encodings in zarr.json
NON_CODEC_NAMES = {"regular", "default", "v2"}


def path_inside(root: Folder, name: str) -> Path:
    """Return the path of a file or folder inside `root`. Links and paths with `..` are refused."""
    if root.remote or is_in_zip(root, name):
        raise StorageError(f"{root.url}/{name}: {LOCAL_ONLY}")
    place = root.path(name)
    if os.path.realpath(place) != place or not os.path.exists(place):
        raise ReadError(
            "not a regular file", f"{name}: does not exist, or its path has a link or `..`"
        )
    return Path(place)


@contextmanager
def array_errors(part: str) -> Iterator[None]:
    """Turn any error that a damaged file causes in this context into a ReadError."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        if failure := machine_error(error):
            raise failure from None
        raise ReadError("unreadable file", f"{part}: {one_line(str(error), 160)}") from None


def open_array(root: Folder, part: str, name: str) -> Any:
    """Open an array in a file. `name`: the array's name in the file; "" if the file is a single array."""
    path, place = path_inside(root, part), f"{part}/{name}".rstrip("/")
    with array_errors(part):
        if part.endswith(".npy"):
            if name:
                raise ReadError(
                    "unexpected array shape", f"{part}: a single array, which has no {name}"
                )
            return open_npy(path)
        if part.endswith(".npz"):
            return npz_array(path, name)
        if part.endswith(".zarr"):
            return ZarrArray(_open_zarr(root, place), root.path(place), place)
        return open_hdf5(open_hdf5_file(root, part), part, name)


def arrays_in(root: Folder, part: str) -> dict[str, Any]:
    """Open the arrays in a file that are in no group, and return them by name. Only the first 20 names are
    looked at. If the file is a single array, its name is ""."""
    path, names = path_inside(root, part), [""]
    with array_errors(part):
        if part.endswith(".npz"):
            names = npz_names(path)
        elif not part.endswith((".npy", ".zarr")):
            names = list(open_hdf5_file(root, part))
    if len(names) == 1:
        return {names[0]: open_array(root, part, names[0])}
    arrays = {}
    for name in names[:20]:
        with suppress(ReadError):  # the name may be that of a group
            arrays[name] = open_array(root, part, name)
    return arrays


def open_hdf5_file(root: Folder, part: str) -> Any:
    try:
        import h5py
    except ImportError:
        raise StorageError(
            "HDF5 files need the extra formats: pip install 'omnilead[formats]'"
        ) from None
    path = path_inside(root, part)
    if not path.is_file():
        raise ReadError("not a regular file", f"{part}: not an HDF5 file")
    with array_errors(part):
        return h5py.File(path, "r")


def open_hdf5(file: Any, part: str, name: str) -> Any:
    """Open a dataset in an HDF5 file. Soft and external links are refused before they are followed,
    because even opening a target can do harm."""
    import h5py

    member = file
    for word in name.split("/"):
        link = member.get(word, getlink=True) if isinstance(member, h5py.Group) else None
        if link is None:
            raise ReadError("unexpected HDF5 shape", f"{part}: has no {name}")
        if not isinstance(link, h5py.HardLink):
            raise ReadError("HDF5 points elsewhere", f"{part}: {name} is a soft or external link")
        member = member[word]
    if not isinstance(member, h5py.Dataset):
        raise ReadError("unexpected HDF5 shape", f"{part}: {name} is not a dataset")
    if member.is_virtual or member.external:
        raise ReadError(
            "HDF5 points elsewhere", f"{part}: {name} is stored in other datasets or files"
        )
    if member.chunks and math.prod(member.chunks) * member.dtype.itemsize > MAX_ARRAY_CHUNK:
        what = f"{part}: {member.name} {member.shape} in chunks of {member.chunks}, which are too large"
        raise ReadError("unexpected HDF5 shape", what)
    return member


class ZarrArray:
    """A zarr array that refuses to read from missing chunk files, for which the zarr package returns zeros."""

    def __init__(self, array: Any, folder: str, name: str) -> None:
        self.array, self.folder, self.name = array, folder, name
        self.shape, self.dtype = array.shape, array.dtype
        self.file_shape = array.shards or array.chunks

    def __getitem__(self, selection: Any) -> Any:
        axes = selection if isinstance(selection, tuple) else (selection,)
        axes += (slice(None),) * (len(self.shape) - len(axes))
        files = []
        for index, length, size in zip(axes, self.shape, self.file_shape, strict=True):
            if isinstance(index, slice):
                first, stop, _ = index.indices(length)
                files.append(range(first // size, -(-stop // size)))
            else:
                files.append(range(index // size, index // size + 1))
        for numbers in product(*files):
            file = self.array.metadata.encode_chunk_key(numbers)
            if not os.path.isfile(f"{self.folder}/{file}"):
                why = "if it was all zeros, save the array with write_empty_chunks"
                raise ReadError("missing chunk", f"{self.name}/{file}: {why}")
        return self.array[selection]


def _open_zarr(root: Folder, place: str) -> Any:
    import zarr

    path_inside(root, place)
    for meta in ZARR_META_FILES:
        if root.exists(f"{place}/{meta}"):
            facts = json.loads(root.read(f"{place}/{meta}", MAX_ZARR_META_BYTES))
            if others := set(_codec_and_other_names(facts)) - SAFE_CODECS - NON_CODEC_NAMES:
                raise ReadError(
                    "zarr codec", f"{place}: not supported: {', '.join(sorted(map(str, others)))}"
                )
    if any(os.path.islink(root.path(name)) for name in root.names(place)):
        raise ReadError("zarr points elsewhere", f"{place}: contains links, which are not followed")
    array = zarr.open_array(root.path(place), mode="r")
    if math.prod(array.chunks) * array.dtype.itemsize > MAX_ARRAY_CHUNK:
        raise ReadError(
            "unexpected zarr shape", f"{place}: in chunks of {array.chunks}, which are too large"
        )
    return array


def _codec_and_other_names(meta: Any) -> Iterator[Any]:
    """Yield all names and ids, such as those of codecs, in the metadata of a zarr array."""
    if isinstance(meta, list):
        for part in meta:
            yield from _codec_and_other_names(part)
    elif isinstance(meta, dict):
        for key, value in meta.items():
            if key in ("name", "id"):
                yield value
            elif key != "attributes":
                yield from _codec_and_other_names(value)


def strip_padding(signal_LT: np.ndarray) -> np.ndarray:
    """Remove the samples at both ends that are 0 in all leads."""
    measured = np.flatnonzero(np.any(signal_LT != 0, axis=0))
    if not len(measured):
        raise ReadError("no valid lead", "all samples are 0")
    return signal_LT[:, measured[0] : measured[-1] + 1]

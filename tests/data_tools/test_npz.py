"""Damaged and hostile .npy and .npz files give a one-line error and allocate no memory."""

import zipfile

import numpy as np
import pytest

from omnilead.data_tools.io.npz import ArrayError, npz_array, npz_names, open_npy


def npy(header, body=bytes(480_000)):
    length = len(header).to_bytes(2, "little")
    return b"\x93NUMPY\1\0" + length + header.encode() + body


def says(shape, kind="'<f8'"):
    return f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}\n"


BAD = {
    "empty": b"",
    "no npy": b"hello",
    "absurd": npy(says("(12, 4611686018427387904)")),
    "768 GB": npy(says("(12, 8589934592)")),
    "beyond a long": npy(says(f"(12, {10**30})")),
    "negative": npy(says("(-1, 5000)")),
    "twice negative": npy(says("(-1, -5000)")),
    "no shape": npy(says("True")),
    "70 axes": npy(says("(" + "1," * 70 + ")")),
    "nested": npy("(" * 9000 + ")" * 9000),
    "minus minus": npy("-" * 9000 + "1"),
    "a header of 4 GB": b"\x93NUMPY\2\0\xff\xff\xff\xff" + bytes(1000),
    "version 9": b"\x93NUMPY\x09\0\x10\0",
    "objects": npy(says("(12, 5000)", "'|O'")),
    "large items": npy(says("(12, 5000)", "'|V2147483647'")),
    "not closed": npy("{'descr': ("),
    "too short": npy(says("(12, 5000)"), body=bytes(1000)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_header_is_a_one_line_error(name, tmp_path):
    (tmp_path / "a.npy").write_bytes(BAD[name])
    one_line = r"\Acannot be read as numbers: [^\n]+\Z"
    with pytest.raises(ArrayError, match=one_line):
        open_npy(tmp_path / "a.npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", BAD[name])
    assert npz_names(tmp_path / "a.npz") == ["a"]
    with pytest.raises(ArrayError, match=one_line):
        npz_array(tmp_path / "a.npz", "a")


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros((12, 5000)))
    assert npz_array(tmp_path / "a.npz", "a").shape == (12, 5000)
    monkeypatch.setattr("omnilead.data_tools.io.npz.MAX_ARRAY_BYTES", 400_000)
    with pytest.raises(ArrayError, match="more than the 400000 bytes that are accepted"):
        npz_array(tmp_path / "a.npz", "a")


def test_good_arrays_are_read(tmp_path):
    values = np.random.default_rng(0).normal(size=(3, 12, 500)).astype("f4")
    np.save(tmp_path / "a.npy", np.asfortranarray(values))
    assert np.array_equal(open_npy(tmp_path / "a.npy"), values)
    np.savez(tmp_path / "b.npz", x=values, y=np.int64(3))
    assert npz_names(tmp_path / "b.npz") == ["x", "y"]
    assert npz_array(tmp_path / "b.npz", "y") == 3
    assert np.array_equal(npz_array(tmp_path / "b.npz", "x"), values)

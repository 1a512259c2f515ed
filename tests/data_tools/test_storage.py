"""Local files where the file system answers in parts."""

import numpy as np
import pytest
from handmade import build

from omnilead.data_tools.build.verify import verify
from omnilead.data_tools.io.errors import ReadError
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.sources.detect import open_sources

PART = 2**16


def test_files_are_read_and_patched_whole(in_parts, tmp_path):
    content = np.random.default_rng(0).bytes(3 * PART + 5)
    (tmp_path / "x").write_bytes(content)
    place = folder(tmp_path)
    assert place.read("x", len(content)) == content
    assert place.read("x", PART + 1, cut=True) == content[: PART + 1]
    assert place.read_range("x", 7, 2 * PART) == content[7 : 7 + 2 * PART]
    assert place.read_range("x", PART, 10 * PART) == content[PART:]
    assert place.read_range("x", len(content), 1) == b""
    with pytest.raises(ReadError, match="file too large"):
        place.read("x", len(content) - 1)
    new = np.random.default_rng(1).bytes(2 * PART)
    place.patch("x", memoryview(content), [(9, new)])
    assert (tmp_path / "x").read_bytes() == content[:9] + new + content[9 + len(new) :]


def test_no_record_is_refused_and_no_crop_damaged(in_parts, small, tmp_path):
    made = build(small, tmp_path / "out", format="both")
    assert sum(source["records"]["refused"] for source in made.meta["sources"]) == 0
    assert len(list(made)) == 15
    assert verify(made, open_sources(str(small))) == []

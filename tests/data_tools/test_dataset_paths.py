"""Several datasets in one command: paths, patterns and lists of them; verify and show."""

import re
import shutil

import pytest

import omnilead
from omnilead.__main__ import main
from omnilead.data_tools.dataset import DataError, dataset_paths, open_all


@pytest.fixture
def months(dataset, tmp_path):
    """Three copies of a dataset, and a file that a pattern also matches."""
    for name in ("2027-02", "2027-01", "2026-12"):
        shutil.copytree(dataset.root.url, tmp_path / "ds" / name)
    (tmp_path / "ds" / "2027-notes").write_text("")
    return tmp_path / "ds"


def test_patterns_are_sorted_and_lists_are_relative_to_their_file(months, dataset):
    first, second = str(months / "2027-01"), str(months / "2027-02")
    assert dataset_paths(f"{months}/2027-*") == [first, second]
    listed = months / "datasets.txt"
    listed.write_text("\ufeff# ours\r\n\r\n2026-12\n 2027-* \ns3://bucket/more\n", "utf-8")
    expected = [str(months / "2026-12"), first, second, "s3://bucket/more"]
    assert dataset_paths(listed) == expected
    assert dataset_paths([dataset, f"{months}/*-12"]) == [dataset.root.url, expected[0]]
    assert open_all(dataset) == [dataset]
    (months / "a[1]").mkdir()  # a folder, not a pattern
    assert dataset_paths(months / "a[1]") == [str(months / "a[1]")]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("2028-*", "--data 2028-*: no folder matches this pattern"),
        ("s3://bucket/2027-*", "--data s3://bucket/2027-*: patterns are expanded on local disks"),
        ("empty.txt", "--data empty.txt: lists no dataset"),
    ],
)
def test_an_error_names_the_pattern(path, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("# none\n")
    with pytest.raises(DataError, match=re.escape(why)) as error:
        dataset_paths(path)
    assert "\n" not in str(error.value)


def test_verify_has_a_line_for_each_and_any_finding_fails(months, capsys):
    assert main(["verify", f"{months}/2027-*", "--workers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"{months}/2027-01", f"{months}/2027-02"]
    shard = next((months / "2027-01" / "shards").glob("*.tar"))
    shard.write_bytes(shard.read_bytes()[:-512])
    words = ["verify", str(months / "2027-01"), str(months / "2026-12"), "--workers", "1"]
    assert main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "finding" in lines[-2] and "all checks passed" in lines[-1]
    findings = omnilead.verify([months / "2027-01", months / "2026-12"], workers=1)
    assert findings and all(finding.startswith(f"{months}/2027-01: ") for finding in findings)
    assert main([*words, "--archive", str(months)]) == 2
    assert "--archive compares one dataset" in capsys.readouterr().err


def test_show_prints_each_summary_and_draws_one(months, capsys):
    assert main(["show", str(months / "2026-12")]) == 0
    once = capsys.readouterr().out
    assert main(["show", f"{months}/2027-*"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(once.splitlines())
    for option, value in (("--crop", "0"), ("--png", str(months / "a.png"))):
        assert main(["show", f"{months}/2027-*", option, value]) == 2
        assert "is for one dataset, and 2 are given" in capsys.readouterr().err

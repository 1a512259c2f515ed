"""The command line as a user sees it: results, one-line errors, exit codes."""

import logging
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from handmade import ecg, write_challenge

from omnilead.data_tools import cli
from omnilead.data_tools.__main__ import main
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.errors import DataError, DatasetError
from omnilead.data_tools.summary import PAPER_SETS
from omnilead.data_tools.verify import verify


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_all_commands_run_from_synth_to_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, out = tmp_path / "archive", tmp_path / "dataset"
    assert run(capsys, "synth", archive, "--patients", 5, "--seed", 3)[0] == 0
    text = run(capsys, "shard", archive, "--out", out, "--workers", 1, "--format", "both")[1]
    assert "189,051" in text  # beside the paper's own count
    assert run(capsys, "verify", out, "--archive", archive, "--workers", 1)[0] == 0
    for arguments in ((), ("--crop", 0)):
        png = tmp_path / f"{len(arguments)}.png"
        assert run(capsys, "show", out, *arguments, "--png", png)[0] == 0
        assert png.read_bytes().startswith(b"\x89PNG")
    header = next(archive.glob("training/georgia/g*/*.hea"))
    assert "12 leads, 500 Hz" in run(capsys, "show", header, "--png", tmp_path / "record.png")[1]


SAME = (
    "--workers",
    "1",
    "--pretrain-sources",
    "all",
    "--id-share",
    "1",
)  # as the tests' dataset was made


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "required"),
        (("shard", "nowhere"), "--out"),
        (("shard", "nowhere", "--out", "x"), "nowhere"),
        (("shard", "SRC", "--out", "x", "--workers", "0"), "--workers: '0'"),
        (("shard", "SRC", "--out", "x", "--seed", "-1"), "--seed"),
        (("shard", "SRC", "--out", "x", "--plan", "mine"), "paper-split"),
        (("shard", "SRC", "--out", "x", "--source", "no_such_module:Thing"), "no_such_module"),
        (("shard", "SRC", "--out", "x", "--source", "json:loads"), "not a subclass"),
        (("shard", "SRC", "--out", "x", "--source", "json:Csv"), "has no attribute 'Csv'"),
        (
            ("shard", "SRC", "--out", "x", "--source", "nonsense"),
            "not auto, physionet2021, ptbxl, mimic-iv-ecg, code15, wfdb",
        ),
        (("shard", "SRC", "--out", "x", "--source", "clinic.py:Csv"), "no such file clinic.py"),
        (("shard", "SRC", "--out", "x", "--source", "code15"), "no .hdf5 in it"),
        (("shard", "LINKS", "--out", "x"), "mine is a link, and such folders are not entered"),
        (("shard", "SRC", "--out", "DATASET", *SAME), "format was both, not tar"),
        (
            ("shard", "SRC", "--out", "DATASET", *SAME, "--seed", "5"),
            "seed was 0, not 5, format was both, not tar",
        ),
        (("shard", "SRC", "--out", "x", "--id-share", "1.5"), "'1.5' is not a number from 0 to 1"),
        (
            ("shard", "SRC", "--out", "x", "--plan", "all", "--pretrain-sources", "ptb"),
            "so --pretrain-sources has no effect",
        ),
        (
            ("shard", "SRC", "--out", "x", "--plan", "all", "--id-share", "0.5"),
            "so --id-share has no effect",
        ),
        (
            ("shard", "SRC", "--out", "x", "--source", "omnilead.data_tools.sources:Source"),
            "abstract method",
        ),
        (("shard", "SRC", "--out", "x", "--pseudonymize", "nokey"), "nokey"),
        (("shard", "SRC", "--out", "x", "--pseudonymize", "SHORT"), "at least 16"),
        (
            ("shard", "SRC", "--out", "x", "--pseudonymize", "OPEN"),
            "other users can read it (-rw-r-----): chmod 600 OPEN",
        ),
        (("shard", "SRC", "--out", "SHORT"), "--out SHORT: is a file"),
        (("shard", "SRC", "--out", "x", "--crop", "3"), "unrecognized arguments: --crop 3 (--help"),
        (("shard", "SRC", "--out", "x", "--patients", "p.csv"), "--patients p.csv: no such file"),
        (("shard", "DATASET", "--out", "x"), "a dataset, not an archive"),
        (("verify", "SRC"), "shard SRC --out DATASET` makes or finishes it"),
        (("verify", "nothing"), "no dataset.json"),
        (("show", "nothing"), "no dataset.json"),
        (("show", "DATASET", "--crop", "999999"), "crops 0 to"),
        (("show", "nothing.hea"), "missing file"),
        (
            ("shard", "OWN", "--out", "x", "--patients", "p.csv"),
            "--patients p.csv: no SRC is the Challenge's archive",
        ),
        (
            ("verify", "DATASET", "--patients", "p.csv"),
            "--patients p.csv: no SRC is the Challenge's archive",
        ),
        (("shard", "SRC", "--out", "x", "--source", ":"), "ValueError: Empty module name"),
        (
            ("shard", "SRC", "--out", "x", "--source", "raising.py:Csv"),
            "--source raising.py:Csv: RuntimeError: a b",
        ),
        (("show", "DATASET", "--png", "PIPE"), "--png PIPE: exists and is not a regular file"),
        (("show", "OWN/one.hea", "--crop", "77"), "--crop 77: OWN/one.hea is a record"),
        (
            ("synth", "s3://bucket/archive"),
            "s3://bucket/archive: archives are made on a local disk",
        ),
        (("synth", "SRC"), "empty"),
        (("synth", "new", "--patients", "0"), "--patients"),
        (("show", "DATASET", "--png", "x.foo"), "x.foo: .foo is not a picture format"),
        (
            ("show", "DATASET", "--png", "no/such/folder/x.png"),
            "--png no/such/folder/x.png: folder ",
        ),
    ],
)
def test_wrong_arguments_give_a_one_line_error_and_exit_code_2(
    arguments: tuple[str, ...],
    words: str,
    archive: Path,
    dataset: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SHORT").write_bytes(b"short")
    (tmp_path / "SHORT").chmod(0o600)
    (tmp_path / "OPEN").write_bytes(bytes(32))
    (tmp_path / "OPEN").chmod(0o640)
    (tmp_path / "LINKS").mkdir()
    (tmp_path / "LINKS" / "mine").symlink_to(archive / "training" / "georgia" / "g1")
    (tmp_path / "raising.py").write_text('raise RuntimeError("a\\nb")\n')
    os.mkfifo("PIPE")
    write_challenge(tmp_path / "OWN", "one", ecg())
    places = {"SRC": str(archive), "DATASET": dataset.root.url}
    code, out, err = run(capsys, *(places.get(argument, argument) for argument in arguments))
    (line,) = [line for line in err.strip().splitlines() if not line.startswith("note: ")]
    assert code == 2 and not out and words in line
    assert not (tmp_path / "s3:").exists() and stat.S_ISFIFO(os.stat("PIPE").st_mode)


def test_custom_sources_get_roles_when_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(40):
        write_challenge(
            tmp_path / "src" / "training" / "ningbo" / "g1", f"JS{number}", ecg(seed=number)
        )
    command = ["shard", tmp_path / "src", "--workers", 1, "--out"]
    code, _, err = run(capsys, *command, tmp_path / "plain")
    assert code == 0
    assert "note: no crop for dx train, dx valid, dx test, id gallery, id probe: " in err
    assert all(
        word in err
        for word in (
            "cpsc_2018 or georgia: --dx-sources",
            "0.15",
            "ptb-xl",
            "--id-sources",
            "--id-share",
        )
    )
    assert "role_sources" not in Dataset.open(str(tmp_path / "plain")).meta
    code, _, err = run(capsys, *command, tmp_path / "named", "--dx-sources", "ningbo")
    assert code == 0 and "dx" not in err
    named = Dataset.open(str(tmp_path / "named"))
    assert set(named.meta["roles"]["dx"]) == {"train", "valid", "test"}
    assert run(capsys, "verify", tmp_path / "named", "--workers", 1)[0] == 0
    code, _, err = run(capsys, *command, tmp_path / "plain", "--dx-sources", "ningbo")
    assert code == 2 and "is already finished" in err
    assert run(capsys, *command, tmp_path / "x", "--plan", "all", "--id-sources", "ningbo")[0] == 2


def test_sources_of_the_paper_and_left_out_sources_are_printed(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All eight databases of the Challenge: the paper pre-trains on six."""
    command = ["shard", archive, "--workers", 1, "--out"]
    code, out, err = run(capsys, *command, tmp_path / "paper")
    assert code == 0
    assert (
        re.search("not for pre-training: ptb, st_petersburg_incart .*--pretrain-sources", err)
        and "no crop for" not in err
    )
    for name, records in (("georgia", "10,344"), ("ptb-xl", "21,837"), ("ptb", "0")):
        assert re.search(rf"^{name} +\d+ +{records} ", out, re.MULTILINE)
    paper = Dataset.open(str(tmp_path / "paper"))
    rows = paper.table(["source", "pretrain", "id_role"]).to_pylist()
    assert not any(
        row["id_role"] for row in rows if row["source"] in ("ptb", "st_petersburg_incart")
    )
    assert {row["source"] for row in rows if row["pretrain"]} == set(PAPER_SETS)
    assert 0 < paper.meta["roles"]["id"]["probe"] <= 0.15 * 60
    assert verify(paper) == []
    code, _, err = run(
        capsys,
        *command,
        tmp_path / "named",
        "--pretrain-sources",
        "ptb",
        "georgia",
        "--id-share",
        0,
    )
    assert code == 0 and "no crop for id gallery, id probe: " in err
    assert re.search(
        "not for pre-training: chapman_shaoxing, .*, st_petersburg_incart .*--pretrain-sources", err
    )
    named = Dataset.open(str(tmp_path / "named"))
    assert {
        row["source"] for row in named.table(["source", "pretrain"]).to_pylist() if row["pretrain"]
    } == {"ptb", "georgia"}
    assert verify(named) == []
    code, _, err = run(capsys, *command, tmp_path / "none", "--pretrain-sources", "nobody")
    assert code == 0 and "no crop for pretrain, id train, id valid: --pretrain-sources" in err


def test_file_names_that_are_not_utf_8_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records and stray files are listed with escaped names. A dataset's path is refused, since
    pyarrow cannot open it."""
    bad = os.fsdecode(b"\xff") + "é\n"
    src, out = tmp_path / f"src{bad}", tmp_path / "out"
    for name in ("E1", "E2"):
        write_challenge(src, name, ecg())
    write_challenge(src, "-cmd", ecg() * 0)
    (src / "E1.hea").rename(src / f"E{bad}.hea")
    (src / f"patients{bad}.csv").write_text("patient_id\n")
    code, _, err = run(capsys, "shard", src, "--out", out, "--workers", 1)
    assert code == 0 and "patients are unknown" in err
    rejects = (out / "rejects.csv").read_text()
    assert ",'-cmd,no valid lead" in rejects  # no formula of a spreadsheet
    rows = [line for line in rejects.splitlines() if "file name" in line]
    assert len(rows) == 1 and "E\\xffé\\n.hea" in rows[0]
    (out / "shards" / f"x{bad}").touch()
    code, text, _ = run(capsys, "verify", out, "--archive", src, "--workers", 1)
    assert code == 1 and "not a part of the dataset" in text
    (other := tmp_path / f"out{bad}").mkdir()
    for command in (("shard", src, "--out", other), ("verify", other), ("show", other)):
        code, _, err = run(capsys, *command)
        (line,) = [line for line in err.splitlines() if not line.startswith("note: ")]
        assert code == 2 and "out\\xff" in line and "UTF-8" in line


def test_a_wrong_unit_and_duplicate_waveforms_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Microvolts declared as millivolts; one waveform under two names."""
    for name, form in (
        ("A1", "16x1+24 1(0)/mV 16 0"),
        ("A2", "16x1+24 1000(0)/mV 16 0"),
        ("A3", "16x1+24 1000(0)/mV 16 0"),
    ):
        write_challenge(
            tmp_path / "src" / "cpsc_2018" / "g1", name, np.maximum(ecg(), -32767), form=form
        )
    code, out, err = run(
        capsys, "shard", tmp_path / "src", "--out", tmp_path / "out", "--workers", 1
    )
    assert code == 0
    assert "note: 1 of 3 crops of cpsc_2018 exceed 32 mV: is its unit right?" in err
    assert "2 crops have the same waveform as a crop of another record" in out
    assert "1 tar shard of" in out


def test_an_interrupted_synth_must_be_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("omnilead.data_tools.synthetic.archive.synthesise", stopped)
    error = f"interrupted: delete {tmp_path} and run it again\n"
    assert run(capsys, "synth", tmp_path) == (130, "", error)


def test_text_of_a_file_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text, shown = "a\x1b[31m\r\x9b\x00\nb", r"a\x1b[31m\r\x9b\x00"
    for says in (cli.show, cli.say, cli.echo):
        says(text)
        assert capsys.readouterr().out.rstrip("\n") == f"{shown}\nb"
    cli.tell(text)
    assert capsys.readouterr().err == rf"{shown}\nb" + "\n"
    with pytest.raises(SystemExit):
        cli.Parser("x").parse_args(["\x1b[31m"])
    logging.getLogger("omnilead.test").propagate = False
    logging.getLogger("omnilead.test").warning("skipped: %s", text)
    err = capsys.readouterr().err
    assert "\x1b" not in err and err.endswith(f"skipped: {shown}\nb\n")
    for kind in (DataError, DatasetError):
        assert str(kind(text)) == f"{shown}\nb"

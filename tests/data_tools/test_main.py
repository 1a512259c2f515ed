"""The command line as a user sees it: results, one-line errors, exit codes."""

import logging
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from handmade import ecg, write_challenge

from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io import terminal as cli
from omnilead.data_tools.io.errors import DataError, DatasetError
from omnilead.data_tools.plots import PAPER_DATABASES
from omnilead.data_tools.sharding.verify import verify
from tests.tables import tabulated


def test_all_commands_run_from_synth_to_a_figure(shell, tmp_path):
    archive, out, png = tmp_path / "archive", tmp_path / "dataset", tmp_path / "page.png"
    shell.run("synth", archive, "--patients", 5, "--seed", 3)
    shell.run("shard", archive, "--out", out, "--workers", 1, "--format", "both")
    shell.run("verify", out, "--archive", archive, "--workers", 1)
    header = next(archive.glob("training/synthetic-georgia/g*/*.hea"))
    for words in ((out,), (out, "--crop", 0), (header,)):
        text, _ = shell.run("show", *words, "--png", png)
        assert png.read_bytes().startswith(b"\x89PNG")
        png.unlink()
    assert "12 leads, 500 Hz" in text


@pytest.mark.parametrize(
    ("command", "words"),
    tabulated("""
 | required
shard nowhere | --out
shard nowhere --out x | nowhere
shard SRC --out x --workers 0 | --workers: 0:
shard SRC --out x --seed -1 | --seed
shard SRC --out x --plan mine | paper-split
shard SRC --out x --source no_such_module:Thing | no_such_module
shard SRC --out x --source json:loads | not a subclass
shard SRC --out x --source json:Csv | has no attribute 'Csv'
shard SRC --out x --source nonsense | choose auto, physionet2021, ptbxl, mimic-iv-ecg,
shard SRC --out x --source clinic.py:Csv | no such file clinic.py
shard SRC --out x --source code15 | contains no .hdf5 file
shard SRC --out x --source omnilead.data_tools.sources:Source | abstract method
shard SRC --out x --source : | ValueError: Empty module name
shard SRC --out x --source raising.py:Csv | raising.py:Csv: RuntimeError: a b
shard LINKS --out x | mine is a link, and such folders are not entered
shard SRC --out DATASET --workers 1 --pretrain-sources all --id-share 1 | format was both, not tar
shard SRC --out DATASET --workers 1 --pretrain-sources all --id-share 1 --seed 5 | seed was 0, not 5, format was both, not tar
shard SRC --out x --id-share 1.5 | --id-share: 1.5: must be a number from 0 to 1
shard SRC --out x --plan all --pretrain-sources ptb | --pretrain-sources has no effect
shard SRC --out x --pseudonymize nokey | nokey
shard SRC --out x --pseudonymize SHORT | at least 16
shard SRC --out x --pseudonymize OPEN | read this file (-rw-r-----): chmod 600 OPEN
shard SRC --out SHORT | --out SHORT: is a file
shard SRC --out x --crop 3 | unrecognized arguments: --crop 3: did you mean --shard-crops? (--help
shard SRC --out x --hypnosis 3 | unrecognized arguments: --hypnosis 3 (--help
shard SRC --out x --patients p.csv | p.csv: no such file: name a CSV or parquet file of patients
shard OWN --out x --patients raising.py | raising.py: its columns are
verify SRC | no dataset.json (not a dataset, or an unfinished one: `omnilead shard SRC --out DATASET` makes or finishes it)
verify nothing | nothing: does not exist
verify DATASET --patients p.csv | p.csv applies to an archive, and none is given
show nothing | nothing: does not exist
show DATASET --crop 999999 | crops 0 to
show nothing.hea | missing file
show OWN/one.hea --crop 77 | --crop 77: OWN/one.hea is a record
show DATASET --png PIPE | --png PIPE: this path exists and is not a regular file
show DATASET --png x.foo | x.foo: .foo is not a picture format
show DATASET --png no/such/folder/x.png | --png no/such/folder/x.png: folder
synth s3://bucket/archive | s3://bucket/archive: archives are made on a local disk
synth SRC | empty
synth new --patients 0 | --patients
"""),
)
def test_wrong_arguments_give_a_one_line_error(
    command,
    words,
    archive,
    dataset,
    shell,
    tmp_path,
    monkeypatch,
):
    monkeypatch.chdir(tmp_path)
    for name, size, mode in (("SHORT", 5, 0o600), ("OPEN", 32, 0o640)):
        Path(name).write_bytes(bytes(size))
        Path(name).chmod(mode)
    Path("LINKS").mkdir()
    Path("LINKS/mine").symlink_to(archive / "training" / "synthetic-georgia" / "g1")
    Path("raising.py").write_text('raise RuntimeError("a\\nb")\n')
    os.mkfifo("PIPE")
    write_challenge(Path("OWN"), "one", ecg())
    places = {"SRC": archive, "DATASET": dataset.root.url}
    assert words in shell.error(*(places.get(word, word) for word in command.split()))
    assert not Path("s3:").exists() and stat.S_ISFIFO(os.stat("PIPE").st_mode)


def test_custom_sources_get_roles_when_named(shell, tmp_path):
    place = tmp_path / "src" / "training" / "ningbo" / "g1"
    for number in range(40):
        write_challenge(place, f"JS{number}", ecg(seed=number))
    command = ("shard", tmp_path / "src", "--workers", 1, "--out")
    plain, named = tmp_path / "plain", tmp_path / "named"
    said, note = shell.run(*command, plain)
    assert "the paper" not in said and "cpsc_2018" not in note and "no crop for" not in note
    _, note = shell.run(*command, named, "--dx-sources", "ningbo", "--id-sources", "nobody")
    assert "note: no crop for id gallery, id probe: gallery and probe are for patients of " in note
    assert set(Dataset.open(str(named)).meta["roles"]["dx"]) == {"train", "valid", "test"}
    shell.run("verify", named, "--workers", 1)
    assert "only roles differ" in shell.run(*command, plain, "--dx-sources", "ningbo")[1]


def pretrained(dataset):
    """The sources that are used for pre-training."""
    assert verify(dataset) == []
    rows = dataset.table(["source", "pretrain"]).to_pylist()
    return {row["source"] for row in rows if row["pretrain"]}


def test_sources_of_the_paper_and_left_out_sources_are_printed(archive, shell, tmp_path):
    """All eight databases of the Challenge: the paper pre-trains on six."""
    command = ("shard", archive, "--workers", 1, "--out", tmp_path / "paper")
    out, note = shell.run(*command)
    assert re.search(
        "not for pre-training: synthetic-ptb, synthetic-st_petersburg_incart .*--pretrain-sources",
        note,
    )
    assert "no crop for" not in note
    assert "189,051" in out and " 34,905 " in out  # beside the paper's own counts
    for name in ("georgia", "ptb-xl", "ptb"):
        assert re.search(rf"^synthetic-{name} +\d+ .*  CC0-1.0$", out, re.MULTILINE)
    paper = Dataset.open(str(tmp_path / "paper"))
    assert pretrained(paper) == {f"synthetic-{name}" for name in PAPER_DATABASES}
    assert 0 < paper.meta["roles"]["id"]["probe"] <= 0.15 * 60
    command = (*command[:-1], tmp_path / "named")
    _, note = shell.run(*command, "--pretrain-sources", "ptb", "georgia", "--id-share", 0)
    assert re.search("no crop for (id valid, )?id gallery, id probe: ", note)
    assert "not for pre-training: synthetic-chapman_shaoxing, " in note
    assert pretrained(Dataset.open(str(tmp_path / "named"))) == {
        "synthetic-ptb",
        "synthetic-georgia",
    }
    _, note = shell.run(*command[:-1], tmp_path / "none", "--pretrain-sources", "nobody")
    assert "no crop for pretrain, id train, id valid: --pretrain-sources" in note


def test_file_names_that_are_not_utf_8_are_refused(shell, tmp_path):
    """Records and stray files are listed with escaped names. A dataset's path is refused, since
    pyarrow cannot open it."""
    bad = os.fsdecode(b"\xff") + "é\n"
    src, out, other = tmp_path / f"src{bad}", tmp_path / "out", tmp_path / f"out{bad}"
    for name in ("E1", "E2"):
        write_challenge(src, name, ecg())
    write_challenge(src, "-cmd", ecg() * 0)
    (src / "E1.hea").rename(src / f"E{bad}.hea")
    (src / f"patients{bad}.csv").write_text("patient_id\n")
    _, notes = shell.run("shard", src, "--out", out, "--workers", 1)
    assert "patients unknown for 1 of 1 records" in notes
    rejects = (out / "rejects.csv").read_text()
    assert ",'-cmd,no valid lead" in rejects  # no formula of a spreadsheet
    (row,) = [line for line in rejects.splitlines() if "file name" in line]
    assert "E\\xffé\\n.hea" in row
    (out / "shards" / f"x{bad}").touch()
    text, _ = shell.run("verify", out, "--archive", src, "--workers", 1, code=1)
    assert "not a part of the dataset" in text
    other.mkdir()
    for command in (("shard", src, "--out", other), ("verify", other), ("show", other)):
        assert re.search(r"out\\xff.*UTF-8", shell.error(*command))


def test_a_wrong_unit_and_duplicate_waveforms_are_printed(shell, tmp_path):
    """Microvolts declared as millivolts; one waveform under two names."""
    src, x = tmp_path / "src" / "cpsc_2018" / "g1", np.maximum(ecg(), -32767)
    for name, gain in (("A1", 1), ("A2", 1000), ("A3", 1000)):
        write_challenge(src, name, x, form=f"16x1+24 {gain}(0)/mV 16 0")
    command = ("shard", tmp_path / "src", "--out", tmp_path / "out", "--workers", 1)
    out, note = shell.run(*command)
    assert "note: 1 of 3 crops of cpsc_2018 exceed 32 mV: is its unit right?" in note
    pair = "cpsc_2018/A2 and cpsc_2018/A3; samples.parquet has the same `waveform` for them\n"
    assert f"2 crops have the same waveform as a crop of another record: {pair}" in out
    assert "1 tar shard of" in out


def test_an_interrupted_synth_must_be_started_again(shell, tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("omnilead.data_tools.synthetic.archive.synthesise", stopped)
    error = f"omnilead synth: interrupted: delete {tmp_path} and run it again\n"
    assert shell.run("synth", tmp_path, code=130) == ("", error)


def test_text_of_a_file_does_not_control_the_terminal(capsys):
    text, shown = "a\x1b[31m\r\x9b\x00\nb", r"a\x1b[31m\r\x9b\x00"
    for says in (cli.print_result, cli.say, cli.echo):
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

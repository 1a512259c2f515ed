"""omnilead.downstream.predict: columns of each kind of task, their numbers, what is refused. Reading
and resuming: test_embed."""

import json
import re
import shutil
import warnings
from csv import reader
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from binary_ecgs import edf
from handmade import ecg, write_files
from pyarrow import csv
from test_muse_xml import muse

import omnilead
from omnilead.data_tools import shard as shard_command
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.ecg.pseudonyms import read_key
from omnilead.data_tools.ecg.record_tables import read_table
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources
from omnilead.downstream import embed, predict
from omnilead.downstream.inference import outputs
from omnilead.downstream.inference.outputs import ParquetParts
from omnilead.engine.model import folder
from omnilead.engine.settings.errors import OutputError
from tests.conftest import save_model

torch.set_num_threads(1)
BASE = ["source", "record", "patient", "row", "start_s", "flags", "missing_leads", "path"]
TWO = {"kind": "multilabel", "classes": ["AF", "SB"]}
VALUE = {"kind": "regression", "center": [60.0], "scale": [15.0]}
HEADS = {
    "rhythm": {"task": "rhythm", **TWO, "thresholds": [0.4, 0.6]},
    "axis": {"task": "axis", "kind": "multiclass", "classes": ["left", "normal", "right"]},
    "age": {"task": "age", **VALUE, "classes": ["age"], "unit": "years"},
    "plain": {"task": "k", **VALUE, "classes": ["potassium"]},
    "identity": {"task": "identification", "kind": "identity", "classes": []},
    "twice": {"task": "twice", "kind": "binary", "classes": ["patient"], "thresholds": [0.5]},
}


def words(model, data, out, *options):
    return ["--model", str(model), "--data", str(data), "--out", str(out), *options]


def refused(arguments, capsys):
    assert predict.main(arguments) == 2
    err = str(capsys.readouterr().err)
    assert err.count("\n") == 1
    return err


@pytest.fixture(scope="module")
def predicted(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")

    def made(head, *options, name="out.parquet"):
        model, out = folder / head, folder / f"{head}-{name}"
        model = model if model.exists() else save_model(model, head=HEADS[head])
        assert predict.main(words(model, dataset.root.url, out, *options)) == 0
        return out, omnilead.load(model)

    return made


def expected(model, dataset, rows):
    """The predictions expected for records of one crop."""
    halves = dataset.column("halves")
    crops = [dataset.read(row)[:, : 2500 * int(halves[row])] for row in rows["row"].to_pylist()]
    return np.array([list(model.predict(uv_LT, 500, LEADS, "uV").values()) for uv_LT in crops])


@pytest.mark.parametrize("head", ["rhythm", "axis", "age", "plain"])
def test_columns_and_numbers_of_each_kind(head, dataset, predicted, capsys):
    out, model = predicted(head)
    table, classes = pq.read_table(out), model.classes
    records = (
        dataset.table(["source", "record"])
        .group_by(["source", "record"])
        .aggregate([([], "count_all")])
    )
    assert (
        len(table) == len(records)
        and f"{len(table):,} predictions of {model.head_info.task}" in capsys.readouterr().out
    )
    columns = {
        "axis": ["predicted", *classes],
        "age": ["age_years"],
        "plain": ["potassium"],
    }.get(head, ["AF", "AF_predicted", "SB", "SB_predicted"])
    assert table.column_names == [*BASE, *columns]
    single = records.filter(pa.compute.equal(records["count_all"], 1)).slice(0, 5)
    some = table.join(single, ["source", "record"], join_type="inner").sort_by("row")
    scores = expected(model, dataset, some)
    numbers = [name for name in columns if some[name].type == pa.float32()]
    np.testing.assert_allclose(
        np.stack([some[name].to_numpy() for name in numbers], 1), scores, rtol=1e-4, atol=1e-5
    )
    if head == "axis":
        assert some["predicted"].to_pylist() == [classes[k] for k in scores.argmax(1)]
    for name, threshold in zip(classes, model.thresholds, strict=False):
        assert (
            table[f"{name}_predicted"].to_pylist()
            == (table[name].to_numpy() > np.float32(threshold)).tolist()
        )


def test_csv_equals_parquet_also_from_two_ranks(
    dataset,
    predicted,
    monkeypatch,
    capsys,
):
    table = pq.read_table(predicted("rhythm", "--batch", "2", name="few.parquet")[0])
    out, _ = predicted("rhythm", "--batch", "2", name="few.csv")
    assert csv.read_csv(
        out, convert_options=csv.ConvertOptions(column_types=table.schema, strings_can_be_null=True)
    ).equals(table)
    capsys.readouterr()
    predicted("rhythm", "--batch", "2", name="few.csv")  # as of a parquet file
    assert capsys.readouterr().out == f"{out}: is complete already\n"
    whole = out.read_bytes()
    out.write_text("the user's own")
    again = words(out.parent / "rhythm", dataset.root.url, out)
    assert f"--out {out}: already exists" in refused(again, capsys)
    assert out.read_text() == "the user's own"
    out.write_bytes(whole)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        shared, _ = predicted("rhythm", "--batch", "2", name="shared.csv")
    assert shared.read_bytes() == out.read_bytes()
    capsys.readouterr()
    for rank, said in (("1", ""), ("0", f"{shared}: is complete already\n")):  # they come late
        monkeypatch.setenv("RANK", rank)
        predicted("rhythm", "--batch", "2", name="shared.csv")
        assert capsys.readouterr().out == said
    other = [*words(out.parent / "rhythm", dataset.root.url, shared), "--batch", "3"]
    assert f"{shared}: another job wrote it (batch was 2, now 3)" in refused(other, capsys)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert f"{shared}: another job wrote it (batch was 2, now 3)" in refused(other, capsys)


@pytest.mark.parametrize("order", [["0"], ["0", "1"]])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_jobs_of_different_numbers_of_ranks_write_the_same_file(
    suffix, order, dataset, predicted, monkeypatch
):
    """Two ranks begin to join the parts while one does: one of them is killed at the first part, the
    other completes the file."""
    name = f"both-{len(order)}.{suffix}"
    expected, _ = predicted("rhythm", "--batch", "2", name=f"one-{len(order)}.{suffix}")
    out, model = expected.with_name(f"rhythm-{name}"), expected.parent / "rhythm"
    arguments = words(model, dataset.root.url, out, "--batch", "2")
    read, codes = ParquetParts._read_part, []

    def interrupted(parts, number, schema=None):
        if schema and (parts.world, parts.rank, number) == (2, 0, 0):
            raise KeyboardInterrupt
        if schema and (parts.world, number) == (1, 2):
            monkeypatch.setenv("WORLD_SIZE", "2")
            for rank in order:
                monkeypatch.setenv("RANK", rank)
                codes.append(predict.main(arguments))
        return read(parts, number, schema)

    monkeypatch.setattr(ParquetParts, "_read_part", interrupted)
    assert predict.main(arguments) == 0
    assert codes == [{"0": 130, "1": 0}[rank] for rank in order]
    assert out.read_bytes() == expected.read_bytes()
    assert not out.with_name(f"{out.name}.parts").exists()


def test_a_file_that_is_complete_meanwhile_is_left_to_its_writer(
    dataset, predicted, tmp_path, monkeypatch
):
    """Ranks of another number joined the parts and removed them."""
    expected, _ = predicted("rhythm", "--batch", "2", name="first.csv")
    out = tmp_path / "F.csv"
    written = outputs.write_whole

    def late(path, content):
        shutil.copy(expected, out)
        shutil.rmtree(path.parent)
        written(path, content)

    monkeypatch.setattr(outputs, "write_whole", late)
    arguments = words(expected.parent / "rhythm", dataset.root.url, out, "--batch", "2")
    assert predict.main(arguments) == 0 and out.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize(
    "rlm, doubt", [(None, "is not known to have been trained"), (0.0, "was not trained"), (0.5, "")]
)
def test_missing_leads_are_named(rlm, doubt, tmp_path, capsys):
    model = save_model(tmp_path / "model", head=HEADS["rhythm"])
    folder.write_config(
        model,
        json.loads((model / "config.json").read_text())
        | {"trained": {} if rlm is None else {"rlm": rlm}},
    )
    mv_LT = np.random.default_rng(0).normal(0, 0.3, (12, 10_000)).astype(np.float32)
    lacks = mv_LT.copy()
    lacks[1, 5000:] = np.nan  # II, in the second crop of two
    lacks[6] = 0  # V1, never
    np.savez(tmp_path / "ecgs.npz", whole=mv_LT, lacks=lacks)
    command = ["--model", str(model), "--data", str(tmp_path / "ecgs.npz"), "--fs", "500"]
    doubt = (
        f"the model, or its head, {doubt} with missing leads: measure it with `omnilead evaluate --leads`"
        if doubt
        else ""
    )

    def missing(name, *options):
        out = tmp_path / name
        assert predict.main([*command, "--out", str(out), *options]) == 0
        read = csv.ConvertOptions(strings_can_be_null=True)
        table = csv.read_csv(out, convert_options=read)
        return [
            table["missing_leads"][i].as_py()
            for i in np.argsort(table["record"].to_pylist(), kind="stable")
        ]

    assert missing("records.csv") == ["II,V1", None]  # lacks, whole
    err = capsys.readouterr().err
    noted = err.count("1 of 2 rows lack leads (column missing_leads)")
    assert doubt in err and noted == err.count("\n") == bool(doubt)
    assert missing("crops.csv", "--per", "crop") == ["V1", "II,V1", None, None]
    with warnings.catch_warnings(record=True, action="always") as caught:
        omnilead.load(model).predict(mv_LT, 500, LEADS)
        assert not caught
        omnilead.load(model).predict(mv_LT[:2], 500, ["I", "V1"])
        omnilead.load(model).predict(lacks, 500, LEADS)
        omnilead.load(model).predict(np.stack([mv_LT, lacks, mv_LT]), 500, LEADS)
    assert all(one.filename == __file__ for one in caught)
    said = [str(one.message) for one in caught]
    which = ("II,III,aVR,aVL,aVF,V2,V3,V4,V5,V6", "II,V1", "II,V1 in 1 of 3 ECGs")
    assert len(said) == len(which) * bool(doubt)
    for leads, text in zip(which, said, strict=False):
        assert text.startswith(f"without leads {leads}: {doubt}")


def with_high_scale(place):
    """Two records of ten seconds in EDF, the second of which states ten times the scale."""
    for number, high in enumerate((32767, 327670)):
        x = dict(zip(LEADS, ecg(seed=number) // 2, strict=True))
        write_files(place, {f"{number}.edf": edf(x, scale=(-high - 1, high, -32768, 32767))})
    return place


@pytest.mark.parametrize(("fs_hz", "says"), [(250, True), (500, False), (1000, True)])
def test_a_sampling_rate_that_gives_no_heart_its_rate_is_said(
    fs_hz, says, dataset, tmp_path, capsys
):
    """By `shard`, and by `embed` and `predict` of the files and of the dataset."""
    (tmp_path / "raw").mkdir()
    np.save(tmp_path / "raw" / "a.npy", np.stack([dataset.read(row) for row in range(40)]))
    given = ["--fs", str(fs_hz), "--unit", "uV", "--leads", "12"]
    made = tmp_path / "made"
    sharding = [str(tmp_path / "raw"), "--source", "arrays", *given, "--plan", "all"]
    assert shard_command.main([*sharding, "--out", str(made), "--workers", "1"]) == 0
    line = r"note: (\S+: )?arrays?: median heart rate \d+ a minute in \d+ ECGs: is the sampling rate right\?\n"
    assert bool(re.search(line, capsys.readouterr().err)) == says
    model = save_model(tmp_path / "model", head=HEADS["rhythm"])
    for program, data, options in ((predict, tmp_path / "raw" / "a.npy", given), (embed, made, [])):
        out = tmp_path / f"{program.__name__}.parquet"
        assert program.main([*words(model, data, out), *options]) == 0
        assert bool(re.search(line, capsys.readouterr().err)) == says


def test_an_implausible_amplitude_is_flagged_as_in_a_dataset(tmp_path, capsys):
    """Of files, of the dataset made from them, and of arrays; with a note, in Python a warning."""
    model = save_model(tmp_path / "model", head=HEADS["rhythm"])
    export = with_high_scale(tmp_path / "export")
    sources = open_sources(str(export))
    made = shard(sources, ShardOptions(str(tmp_path / "made"), plan="all", quiet=True))
    flags = [
        ",".join(names) or None for names in made.table().sort_by("record")["flags"].to_pylist()
    ]
    assert flags[0] is None and flags[1].split(",")[-1] == "implausible"
    doubt = "implausible amplitude in 1 of 2 rows (column flags): is the scale of these ECGs right?"
    for data in (export, tmp_path / "made"):
        for program in (predict, embed):
            out = tmp_path / f"{data.name}-{program.__name__}.parquet"
            assert program.main(words(model, data, out)) == 0
            assert pq.read_table(out).sort_by("record")["flags"].to_pylist() == flags
            assert capsys.readouterr().err.count(f"note: {out}: {doubt}\n") == 1
        with pytest.warns(UserWarning, match=re.escape(doubt)) as caught:
            omnilead.embed(model, data=data)
        assert [(str(one.message), one.filename) for one in caught] == [(doubt, __file__)]


@pytest.mark.parametrize(
    ("head", "does"),
    [
        ("axis", "predicts axis (multiclass of 3: left, normal, right)"),
        ("age", "predicts age (regression of 1: age in years)"),
        ("identity", "makes an embedding of 32 numbers"),
    ],
)
def test_a_model_says_what_it_does_with_what(head, does, tmp_path):
    model = omnilead.load(save_model(tmp_path / "model", head=HEADS[head]))
    assert repr(model) == (
        f"TrainedModel: {does} from leads {','.join(LEADS)}, 5 s at a time at 500 Hz (millivolts, "
        "not normalised); it converts other rates and units"
    )


def test_the_amplitude_of_an_array_is_doubted_too(tmp_path, recwarn):
    model = omnilead.load(save_model(tmp_path / "model", head=HEADS["rhythm"]))
    mv_LT = np.random.default_rng(0).normal(0, 0.3, (12, 5000))
    model.predict(mv_LT, 500, LEADS)
    model.embed(np.where(np.arange(12)[:, None] < 8, 0.0, mv_LT), 500, LEADS)  # flat leads: nothing
    assert not recwarn
    model.embed(5 * mv_LT, 500, LEADS)
    model.predict(np.stack([mv_LT, mv_LT / 20, mv_LT]) * 1000, 500, LEADS, "uV")
    texts = [str(one.message) for one in recwarn]
    assert re.fullmatch(
        "implausible amplitude: 9.* mV within a second: is unit='mV' right.", texts[0]
    )
    assert re.match("implausible amplitude in 1 of 3 ECGs: 0.09.*is unit='uV'", texts[1])
    assert [one.filename for one in recwarn] == [__file__] * len(texts) and len(texts) == 2


def test_of_many_unreadable_files_the_first_few_are_shown(tmp_path, capsys):
    """A folder may hold 10^5 of another program. The list has all of them."""
    model, export = save_model(tmp_path / "model", head=HEADS["rhythm"]), tmp_path / "export"
    write_files(export, {"1.xml": muse(), **{f"{number}.dcm": "none" for number in range(300)}})
    for program in (predict, embed):
        out = tmp_path / f"{program.__name__}.parquet"
        assert program.main(words(model, export, out)) == 0
        said = capsys.readouterr().err
        assert said.count("skipped: ") == 6 and said.count("\n") < 12
        assert "skipped: more, which are only counted\n" in said
        assert f"note: {out}: without 300 of 301 records, which cannot be read\n" in said
        assert len(csv.read_csv(f"{out}.skipped.csv")) == 300


def test_a_folders_unreadable_files_are_listed_and_the_others_predicted(tmp_path, capsys):
    """Also after an interruption; a file that is named must be readable."""
    model, export = save_model(tmp_path / "model", head=HEADS["rhythm"]), tmp_path / "export"
    write_files(
        export, {"1.xml": muse(), "2.dcm": "none", "a/3.xml": muse()[:400], "b.txt": "none"}
    )
    out = tmp_path / "F.csv"
    assert predict.main(words(model, export, out)) == 0
    assert csv.read_csv(out)["record"].to_pylist() == [1]
    said = capsys.readouterr().err
    assert f"skipped: {export}/2.dcm: unknown format: " in said
    assert f"skipped: {export}/a/3.xml: " in said
    assert f"note: {export}: 1 file of no known format was left out (1 .txt)" in said
    assert f"note: {out}: without 2 of 3 records, which cannot be read\n" in said
    assert f"note: {tmp_path}/F.csv.skipped.csv: which ECGs were skipped, and why\n" in said
    assert csv.read_csv(out)["path"].to_pylist() == [f"{export}/1.xml"]
    again = words(model, export, tmp_path / "again.csv")
    with mock.patch.object(outputs.ParquetParts, "join_parts", side_effect=OutputError("killed")):
        assert predict.main(again) == 1
    assert capsys.readouterr().err.count("skipped: ") == 2
    assert predict.main(again) == 0
    said = capsys.readouterr().err
    assert "skipped: " not in said and "without 2 of 3 records" in said
    listed = csv.read_csv(tmp_path / "again.csv.skipped.csv").to_pylist()
    assert [ecg["path"] for ecg in listed] == [f"{export}/2.dcm", f"{export}/a/3.xml"]
    assert listed[0]["reason"].startswith("unknown format: ")
    assert listed == csv.read_csv(tmp_path / "F.csv.skipped.csv").to_pylist()
    (tmp_path / "F.parquet.skipped.csv").write_text("mine\n")
    assert predict.main(words(model, export, tmp_path / "F.parquet")) == 1
    assert "F.parquet.skipped.csv: another program wrote this file" in capsys.readouterr().err
    assert (tmp_path / "F.parquet.skipped.csv").read_text() == "mine\n"
    (tmp_path / "F.parquet.skipped.csv").unlink()
    assert predict.main(words(model, export, tmp_path / "F.parquet")) == 0
    assert listed == csv.read_csv(tmp_path / "F.parquet.skipped.csv").to_pylist()
    assert listed == csv.read_csv(tmp_path / "F.csv.skipped.csv").to_pylist()
    assert predict.main(words(model, export, tmp_path / "stop.csv", "--on-corrupt", "stop")) == 2
    assert f"{export}/2.dcm: " in capsys.readouterr().err
    assert predict.main(words(model, export / "2.dcm", tmp_path / "one.csv")) == 2
    (export / "1.xml").unlink()
    assert predict.main(words(model, export, tmp_path / "none.csv")) == 2
    assert "2 skipped" in capsys.readouterr().err
    assert not list(tmp_path.glob("none.csv*"))


def test_leads_that_are_hidden_are_missing(dataset, tmp_path):
    out, model = (
        tmp_path / "out.parquet",
        save_model(tmp_path / "model", head=HEADS["rhythm"], preprocessing={"seen": ["I", "II"]}),
    )
    assert predict.main(words(model, dataset.root.url, out)) == 0
    missing = pq.read_table(out)["missing_leads"]
    assert missing.null_count == len(missing)  # it uses two leads, both there
    out = tmp_path / "one.parquet"
    assert predict.main(words(model, dataset.root.url, out, "--leads", "II")) == 0
    assert set(pq.read_table(out)["missing_leads"].to_pylist()) == {"I"}


def test_names_in_csv_are_no_formulas_in_a_spreadsheet_and_are_read_back(tmp_path):
    classes = ["=SUM(A1)", "two\nlines", "'=plain"]
    head = {"task": "k", "kind": "multiclass", "classes": classes}
    model, names = save_model(tmp_path / "model", head=head), ["=1+2", "@SUM(A1)", "a,b", "-5"]
    np.savez(
        tmp_path / "some.npz",
        **{name: np.random.default_rng(0).normal(0, 0.3, (12, 5000)) for name in names},
    )
    arguments = ["--model", str(model), "--data", str(tmp_path / "some.npz"), "--fs", "500"]
    assert predict.main([*arguments, "--out", str(tmp_path / "some.csv")]) == 0
    with (tmp_path / "some.csv").open(newline="") as file:
        header, *rows = reader(file)
    assert header == [*BASE, "predicted", "'=SUM(A1)", "two\nlines", "''=plain"]
    assert [row[1] for row in rows] == ["'=1+2", "'@SUM(A1)", "a,b", "-5"]
    table = read_table(str(tmp_path / "some.csv"))
    assert (
        table.column_names == [*BASE, "predicted", *classes]
        and table["record"].to_pylist() == names
    )
    assert set(table["predicted"].to_pylist()) <= set(classes)


def test_hospital_files_get_the_pseudonyms_of_a_dataset_made_with_the_same_key(
    dataset, tmp_path, capsys
):
    model, export, key = (
        save_model(tmp_path / "model", head=HEADS["rhythm"]),
        tmp_path / "export",
        tmp_path / "KEYFILE",
    )
    (export / "ward").mkdir(parents=True)
    (export / "ward" / "jane_doe.xml").write_text(muse())
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    options = ShardOptions(
        str(tmp_path / "made"), plan="all", pseudonym_key=read_key(str(key)), quiet=True
    )
    made = shard(open_sources(str(export)), options)
    names = made.table(["source", "record", "patient"]).to_pylist()[0]
    hidden = ["--pseudonymize", str(key)]
    for program, end in ((predict, "csv"), (embed, "parquet")):
        out = tmp_path / f"{program.__name__}.{end}"
        assert program.main(words(model, export, out)) == 0
        said = (
            f"note: {out} will hold the file names and the hospital's patient ids: --pseudonymize "
            "KEYFILE replaces both\n"
        )
        assert capsys.readouterr().err == said and b"jane_doe" in out.read_bytes()
        out = tmp_path / f"hidden-{program.__name__}.{end}"
        assert program.main(words(model, export, out, *hidden)) == 0
        content = out.read_bytes()
        assert capsys.readouterr().err == "" and b"jane" not in content and b"4711" not in content
        table = csv.read_csv(out) if end == "csv" else pq.read_table(out)
        assert table.select(list(names)).to_pylist()[0] == names
        assert not list(tmp_path.glob("*.skipped.csv"))
    damaged = export / "ward" / "JOHN_DOE_1951.xml"
    damaged.write_text(muse()[:400])
    skipping = words(model, export, tmp_path / "skipping.csv", *hidden, "--on-corrupt", "skip")
    assert predict.main(skipping) == 0
    stopping = words(model, export, tmp_path / "stopped.csv", *hidden, "--on-corrupt", "stop")
    assert predict.main(stopping) == 2
    (linked := tmp_path / "linked").mkdir()
    (linked / "JOHN_DOE").symlink_to(export)  # no such folder is entered, nor named
    assert predict.main(words(model, linked, tmp_path / "linked.csv", *hidden)) == 2
    said = capsys.readouterr().err
    assert "skipped: a record: " in said and "is a link" in said and "DOE" not in said
    damaged.unlink()
    key.write_bytes(bytes(range(1, 33)))
    assert embed.main(words(model, export, out, *hidden)) == 2
    assert "another job wrote it" in capsys.readouterr().err
    on_dataset = words(model, dataset.root.url, tmp_path / "F.csv", *hidden)
    assert "the names in a dataset cannot be replaced" in refused(on_dataset, capsys)


@pytest.mark.parametrize(
    "head, out, named",
    [
        (None, "F.csv", "only pre-trained: fine-tune it with `omnilead finetune`"),
        ("identity", "F.csv", "fine-tuned for identification.*use `omnilead embed`"),
        ("twice", "F.csv", "two columns of the table would be called 'patient'"),
        ("rhythm", "F.txt", "F.txt: must end in .csv or .parquet"),
        ("rhythm", "no/F.csv", "no"),
    ],
)
def test_refusals_are_one_line(head, out, named, dataset, tmp_path, capsys):
    model = save_model(tmp_path / "model", head=HEADS.get(head or ""))
    err = refused(words(model, dataset.root.url, tmp_path / out), capsys)
    assert re.search(named, err) and not (tmp_path / out).exists()

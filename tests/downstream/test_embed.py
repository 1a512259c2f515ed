"""omnilead.downstream.embed: tables of embeddings from datasets, files and arrays, also after
interruptions."""

import errno
import os
import re
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import omnilead
from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.io.errors import DataError
from omnilead.downstream import embed
from omnilead.downstream.inference import commands, outputs
from omnilead.engine.settings.errors import ConfigError, OutputError
from tests.conftest import save_model
from tests.forks import started
from tests.tables import tabulated
from tests.waiting import until

torch.set_num_threads(1)
GOOD = np.random.default_rng(0).normal(0, 0.3, (12, 5000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder."""
    return save_model(tmp_path_factory.mktemp("embed") / "model")


@pytest.fixture(scope="module")
def model(folder):
    return omnilead.load(folder)


@pytest.fixture(scope="module")
def crops(folder, dataset, tmp_path_factory):
    """Embeddings of the dataset, one row for each crop."""
    out = tmp_path_factory.mktemp("crops") / "out.parquet"
    assert embed.main(command(folder, dataset.root.url, out, "--batch", "2")) == 0
    return out


@pytest.fixture(scope="module")
def embedded(folder):
    """The embeddings as a table in memory."""

    def made(*data, **options):
        return omnilead.embed(folder, data=data, **options)

    return made


def command(model, data, out, *options):
    return ["--model", str(model), "--data", str(data), "--out", str(out), *options]


def refused(arguments, capsys):
    """The line that embed ends with."""
    assert embed.main(arguments) == 2
    err = str(capsys.readouterr().err)
    assert err.count("\n") == 1
    return err


def vectors(table):
    return np.array(table["embedding"].to_pylist(), np.float32)


def test_rows_of_a_dataset(dataset, crops, embedded, model):
    names = ["source", "record", "patient", "start_s"]
    about, crop = dataset.table([*names, "halves"]), pq.read_table(crops)
    half, record = (embedded(dataset.root.url, per=per, batch=7) for per in ("half", "record"))
    every, halves = np.arange(len(dataset)), about["halves"].to_numpy().astype(int)
    assert crop["row"].to_pylist() == every.tolist()
    assert crop.select(names).to_pydict() == about.select(names).to_pydict()
    assert set(halves) == {1, 2}
    for row in (halves.argmin(), 0, 1, every[-1]):
        expected = model.embed(dataset.read(row)[:, : 2500 * halves[row]], 500, LEADS, "uV")
        np.testing.assert_allclose(vectors(crop)[row], expected, atol=2e-6)
    assert half["row"].to_pylist() == np.repeat(every, halves).tolist()
    starts = about["start_s"].to_numpy()[half["row"].to_numpy()]
    assert set(half["start_s"].to_numpy() - starts) == {0.0, 5.0}
    order, which = np.unique(half["record"].to_pylist(), return_inverse=True)
    means = np.stack([vectors(half)[which == i].mean(0) for i in range(len(order))])
    record = record.sort_by("record")
    assert record["record"].to_pylist() == order.tolist()
    np.testing.assert_allclose(vectors(record), means, atol=2e-6)
    assert record.schema.field("embedding").type == pa.list_(pa.float32(), 32)


def test_files_give_the_same_embeddings_as_their_dataset(archive, dataset, embedded):
    whole = embedded(dataset.root.url, per="record").sort_by("record")
    files = embedded(archive, per="record", batch=5, workers=3).sort_by("record")
    keys = ["source", "record", "patient"]
    assert files.select(keys).equals(whole.select(keys))
    np.testing.assert_allclose(vectors(files), vectors(whole), atol=2e-6)
    header = next(archive.rglob("*.hea"))
    for file in (header, header.with_suffix(".mat")):
        fsspec.filesystem("memory").put(str(file), f"/one/{file.name}")
    same = files.filter(pa.compute.equal(files["record"], header.stem))
    for place in (header, f"memory://one/{header.name}"):
        one = embedded(place, per="record")
        np.testing.assert_allclose(vectors(one), vectors(same), atol=2e-6)


def test_arrays(embedded, model, tmp_path):
    many = np.cumsum(np.random.default_rng(0).normal(0, 20, (3, 2, 4000)), 2) % 900
    np.save(tmp_path / "many.npy", many)
    np.savez(tmp_path / "few.npz", a=many[0], b=many[1])
    files = tmp_path / "many.npy", tmp_path / "few.npz"
    table = embedded(*files, batch=2, fs_hz=250, leads="V1,II", unit="uV", per="record")
    assert table["record"].to_pylist() == ["many[0]", "many[1]", "many[2]", "a", "b"]
    expected = model.embed(many, 250, "V1,II", "uV").numpy()[[0, 1, 2, 0, 1]]
    np.testing.assert_allclose(vectors(table), expected, atol=2e-6)


def test_a_folder_of_arrays_is_read_as_its_files_are(embedded, folder, tmp_path, capsys):
    place = tmp_path / "in"
    (place / "b").mkdir(parents=True)
    np.save(place / "many.npy", np.stack([GOOD, -GOOD]))
    np.save(place / "b" / "one.npy", GOOD)
    (place / "bad.npy").write_bytes(b"no array")
    np.save(place / "empty.npy", GOOD[:, :0])
    with pytest.warns(UserWarning, match="without 2 of 5 records"):
        table = embedded(place, fs_hz=500)
    assert sorted(table["record"].to_pylist()) == ["many[0]", "many[1]", "one"]
    files = embedded(place / "b" / "one.npy", place / "many.npy", fs_hz=500)
    both = vectors(table.sort_by("record")), vectors(files.sort_by("record"))
    np.testing.assert_allclose(*both, atol=2e-6)
    said = capsys.readouterr().err
    assert "skipped" in said and "bad.npy: cannot be read as numbers" in said
    assert "empty.npy: the file has no ECG" in said
    with pytest.raises(ConfigError, match="sampling rate"):
        embedded(place)
    with pytest.raises(DataError, match=r"bad.npy: cannot be read"):
        embedded(place, fs_hz=500, on_corrupt="stop")
    (place / "arrays.yaml").write_text(
        "file: many.npy\nfs_hz: 500\nunit: mV\nleads: 12\nname: own\n"
    )
    described = embedded(place)
    assert described["record"].to_pylist() == ["many_0", "many_1"]
    assert described["source"].to_pylist() == ["own"] * 2
    same = table.filter(pa.compute.match_substring(table["record"], "many"))
    np.testing.assert_allclose(vectors(described), vectors(same), atol=2e-6)


ROWS = """
import io

import numpy as np

from omnilead.data_tools.ecg.record import LEADS, EcgRecord
from omnilead.data_tools.sources import Source


class Rows(Source):
    name = "rows"

    def keys(self):
        for name in self.root.names():
            if name.endswith(".npy"):
                yield from (f"{name}#{row}" for row in range(len(self.array(name))))

    def array(self, name):
        return np.load(io.BytesIO(self.root.read(name, 10**8)), allow_pickle=False)

    def read(self, key):
        name, _, row = key.rpartition("#")
        return EcgRecord(f"ecg_{row}", self.array(name)[int(row)], 500.0, LEADS, source=self.name)
"""


def test_a_source_of_the_users_own_may_yield_many_ecgs_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "e.npy", np.stack([GOOD, -GOOD, GOOD * np.nan]))
    (tmp_path / "rows_of.py").write_text(ROWS)
    monkeypatch.chdir(tmp_path)
    how = {"source": "rows_of.py:Rows", "plan": "all"}
    made = omnilead.shard("in", out="out", workers=2, **how)
    assert sorted(made.table(["record"])["record"].to_pylist()) == ["ecg_0", "ecg_1"]
    assert "e.npy#2" in (tmp_path / "out" / "rejects.csv").read_text()
    assert omnilead.verify("out", archive="in", source=how["source"], workers=1) == []


def test_arrays_with_the_same_name_are_told_apart(embedded, tmp_path):
    files = [tmp_path / name for name in ("x/a.npy", "y/a.npy", "x/z.npz", "y/z.npz", "b.npy")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        np.save(file, GOOD) if file.suffix == ".npy" else np.savez(file, m=GOOD)
    np.savez(files[2], m=GOOD, own=GOOD)
    records = embedded(*files, fs_hz=500)["record"].to_pylist()
    assert records == [str(files[0]), str(files[1]), f"{files[2]}[m]", "own", f"{files[3]}[m]", "b"]


def test_files_with_the_same_name_are_told_apart(archive, embedded, tmp_path):
    """Also names that are equal once characters that a record's name may not have are removed."""
    header = next(archive.rglob("*.hea"))
    folders = [tmp_path / "src" / place for place in ("\u5fc3", "\u96fb", "a b")]
    for place in folders:
        place.mkdir(parents=True)
        for file in (header, header.with_suffix(".mat")):
            shutil.copy(file, place)
    paths = [str(place / header.name) for place in folders[:2]]
    records = embedded(tmp_path / "src", per="record")["record"].to_pylist()
    assert sorted(records) == sorted([*paths, f"a_b_{header.stem}"])
    assert embedded(*paths, per="record")["record"].to_pylist() == paths


def test_fewer_leads_and_half_precision(dataset, embedded, model):
    few = vectors(embedded(dataset.root.url, leads="II,V1"))
    expected = model.embed(dataset.read(3)[[1, 6]], 500, "II,V1", "uV")
    np.testing.assert_allclose(few[3], expected, atol=2e-6)
    rough = vectors(embedded(dataset.root.url, leads="II,V1", precision="bf16"))
    assert 0 < np.abs(rough - few).max() < 0.1


@pytest.mark.parametrize(
    "trained, asked, on_gpu",
    [("bf16", "auto", "bf16"), ("fp32", "auto", "fp32"), ("bf16", "fp32", "fp32")],
)
def test_a_gpu_embeds_in_the_precision_of_the_training(trained, asked, on_gpu, monkeypatch):
    loaded = mock.Mock(history={"precision": trained})
    monkeypatch.setattr(commands, "load", lambda path, code: loaded)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(0))  # no such device here
    for device, computed in (("cuda:1", on_gpu), ("cpu", "fp32")):
        assert commands.load_model_and_precision("RUN", device, asked)[1] == computed


@pytest.mark.gpu
@pytest.mark.parametrize("precision, within", [("fp32", 1e-4), ("bf16", 0.1)])
def test_gpu_and_cpu_embeddings_are_equal(precision, within, dataset, embedded):
    """Several parts, a batch that is not full, crops of one half."""
    there, here = (
        embedded(dataset.root.url, device=device, precision=precision, batch=5)
        for device in ("cuda", "cpu")
    )
    assert there["row"].to_pylist() == here["row"].to_pylist()
    np.testing.assert_allclose(vectors(there), vectors(here), atol=within)


def test_a_kill_at_any_part_does_not_change_the_result(
    folder, dataset, crops, tmp_path, monkeypatch
):
    write_whole, left = outputs.write_whole, [0]

    def dies(path, content):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        write_whole(path, content)

    cut = tmp_path / "cut"
    arguments = command(folder, dataset.root.url, cut, "--batch", "2")
    monkeypatch.setattr(outputs, "write_whole", dies)
    for lives in (1, 3, 2):
        left[0] = lives
        assert embed.main(arguments) == 130
    assert (tmp_path / "cut.parts" / "000001.parquet").exists()
    left[0] = 100
    assert embed.main(arguments) == 0
    left[0] = 0  # done already: nothing is written again
    assert embed.main(arguments) == 0
    assert embed.main([*arguments, "--leads", "I"]) == 2
    assert cut.read_bytes() == crops.read_bytes()
    assert not (tmp_path / "cut.parts").exists()


def test_ranks_share_the_parts(folder, dataset, crops, tmp_path, monkeypatch, capsys):
    """Of three ranks, the first finishes and the third is killed; then two ranks start, as
    deepspeed would start them."""
    out = tmp_path / "cut"
    arguments = [*command(folder, dataset.root.url, out, "--batch", "2"), "--local_rank=0"]
    parts = out.with_name("cut.parts")
    with monkeypatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        assert embed.main(arguments) == 0
        said = capsys.readouterr().out
        assert "rank 0 of 3: done" in said and "parts 1, 2, 4, 5" in said and not out.exists()
        patch.setenv("WORLD_SIZE", "two")
        assert embed.main(arguments) == 2 and "WORLD_SIZE" in capsys.readouterr().err
    third = ranks(arguments, tmp_path, [2], 3)
    until(lambda: (parts / "000002.parquet").exists() or not third[0].is_alive())
    third[0].kill()
    third[0].join()
    for process in (both := ranks(arguments, tmp_path, [0, 1], 2)):
        process.join()
    assert [process.exitcode for process in both] == [0, 0], (tmp_path / "output.txt").read_text()
    assert out.read_bytes() == crops.read_bytes() and not parts.exists()
    assert f"{len(dataset):,} embeddings of 32" in (tmp_path / "output.txt").read_text()


def ranks(arguments, folder, numbers, world):
    env = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    places = ({"RANK": str(number), "LOCAL_RANK": str(number)} for number in numbers)
    return [
        started(embed.main, arguments, out=folder / "output.txt", env=env | place)
        for place in places
    ]


def test_a_corrupt_crop_stops_or_is_skipped(dataset, crops, embedded, tmp_path):
    url = shutil.copytree(dataset.root.url, tmp_path / "copy")
    shard, offset, _ = (int(column[5]) for column in dataset.addresses)
    with (url / "shards" / dataset.shards[shard].name).open("r+b") as file:
        file.seek(offset + 100)
        file.write(b"\x55\xaa\x55\xaa")
    with pytest.raises(DataError, match="crop 5 at byte"):
        embedded(url)
    table = embedded(url, on_corrupt="skip", batch=2)
    others = np.delete(np.arange(len(dataset)), 5)
    assert table["row"].to_pylist() == others.tolist()
    np.testing.assert_allclose(vectors(table), vectors(pq.read_table(crops))[others], atol=2e-6)


def test_crops_without_any_of_the_models_leads(
    archive, dataset, folder, embedded, tmp_path, capsys,
    monkeypatch,
):  # fmt: skip
    """From a dataset, WFDB or an array: the record stops the run or is skipped; single crops of it
    are left out."""
    url, file = dataset.root.url, tmp_path / "a.npz"
    missing = dataset.table(["record", "missing_leads"]).to_pylist()
    row = next(i for i, one in enumerate(missing) if one["missing_leads"])
    record, lead = missing[row]["record"], missing[row]["missing_leads"][0]
    good = dataset.read(0)[[LEADS.index(lead)]]
    bad = np.full_like(good, -32768)
    np.savez(file, x=bad, y=np.concatenate([good, bad, good], 1))
    tables = []
    for data, named in ((url, record), (next(archive.rglob(f"{record}.hea")), record), (file, "x")):
        how = {"leads": lead} | ({"fs_hz": 500, "unit": "uV"} if data == file else {})
        with pytest.raises(DataError, match=rf"{named}\b.*no valid lead"):
            embedded(data, **how)
        skipping = partial(embedded, data, on_corrupt="skip", **how)
        if data == url:
            tables.append(skipping())
        elif data == file:
            with pytest.warns(UserWarning, match="without 1 of 2 records, which cannot be read"):
                tables.append(skipping())
        else:
            with pytest.raises(DataError, match="no record can be read: 1 skipped"):
                skipping()
        assert "skipped: " in capsys.readouterr().err
    assert tables[0]["row"].to_pylist() == [i for i in range(len(dataset)) if i != row]
    assert tables[1]["record"].to_pylist() == ["y", "y"]
    assert tables[1]["start_s"].to_pylist() == [0.0, 20.0]
    assert record in embedded(url, leads=f"I,{lead}")["record"].to_pylist()


def test_files_without_arrays(embedded, tmp_path):
    empty, zero, flat, none, objects, damaged = (
        tmp_path / name for name in ("e.npy", "z.npy", "f.npy", "n.npz", "o.npz", "d.npz")
    )
    empty.write_bytes(b"")
    np.save(zero, np.zeros((0, 12, 5000)))
    np.save(flat, np.zeros(5000))
    np.savez(none)
    np.savez(objects, a=np.array([None, 1], object))
    np.savez_compressed(damaged, a=GOOD)
    with damaged.open("r+b") as file:
        file.seek(5000)
        file.write(bytes(100))
    for path in (empty, zero, flat, none, objects, damaged):
        member = "[a]" if path in (objects, damaged) else ""
        with pytest.raises((ConfigError, DataError), match=re.escape(f"{path}{member}: ")):
            embedded(path, fs_hz=500)


@pytest.mark.parametrize(
    "change, named",
    tabulated(r"""
--out /tmp                | --out /tmp:
--data nothing/here       | nothing/here:
--data folder/x.txt       | folder/x.txt:
--data DATASET B          | --data
--leads I,V9              | 'V9'
--device cuda:7           | --device cuda:7
--data folder             | `omnilead shard --source`
--model no/model          | no/model:
--data three.npy          | three.npy: .*--fs
--fs 500                  | --fs and --unit
--out e.npy               | e\.parquet
--data three.npy --fs 500 | three.npy: has 3 rows, not 12: .*--leads
--data zeros.npy --fs 500 | zeros.npy: no valid lead
--out no/folder/F.parquet | no/folder
"""),
)
def test_errors_are_one_line(
    change, named, dataset, folder, tmp_path, monkeypatch,
    capsys,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    np.save("three.npy", GOOD[:3])
    np.save("zeros.npy", GOOD * 0)
    Path("folder").mkdir()
    Path("folder", "x.txt").write_text("")
    Path("DATASET").symlink_to(dataset.root.url)
    err = refused([*command(folder, "DATASET", Path("out")), *change.split()], capsys)
    assert re.search(named, err) and not Path("out").exists(), err


def test_unwritable_files_are_named_before_the_work(dataset, folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    arguments = command(folder, dataset.root.url, out)
    with monkeypatch.context() as patch:
        patch.setattr(
            commands, "load_model_and_precision", lambda *_: pytest.fail("work was begun")
        )
        patch.setattr(os, "access", lambda *_: False)
        assert f"--out {out}: " in refused(arguments, capsys)
    for number, code in ((errno.ENOSPC, 1), (errno.EROFS, 2)):
        failure = OSError(number, os.strerror(number), str(out))
        monkeypatch.setattr(outputs, "write_whole", mock.Mock(side_effect=failure))
        assert embed.main(arguments) == code
        err = capsys.readouterr().err
        assert err.startswith(f"omnilead embed: --out {out}: {os.strerror(number)}")
        assert err.count("\n") == 1 and ("same command" in err) == (code == 1)


def test_tables_in_memory_equal_the_files(dataset, crops, embedded, monkeypatch):
    """Of a dataset in a bucket, too."""
    url = dataset.root.url
    fsspec.filesystem("memory").put(url, "/bucket/dataset", recursive=True)
    for place in (url, "memory://bucket/dataset"):
        assert embedded(place, batch=2).equals(pq.read_table(crops))
    with monkeypatch.context() as patch:
        full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left"))
        patch.setattr(outputs, "predict", full)
        with pytest.raises(OutputError, match="No space left"):
            embedded(url)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match="WORLD_SIZE=2: a table in memory is computed by a single process"
    ):
        embedded(url)

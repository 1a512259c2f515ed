"""omnilead.engine.embed: tables of embeddings from datasets, files and arrays, also after
interruptions; the probes."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import omnilead
from omnilead.data_tools.dataset import Dataset
from omnilead.engine import embed
from omnilead.engine.common import LEADS, ConfigError, OutputError
from omnilead.engine.inference import commands as embedding
from omnilead.engine.inference import outputs
from tests.conftest import save_model
from tests.forks import started
from tests.waiting import until

torch.set_num_threads(1)
Embedded = Callable[..., pa.Table]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A model folder."""
    return save_model(tmp_path_factory.mktemp("embed") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return omnilead.load(folder)


@pytest.fixture(scope="module")
def crops(folder: Path, dataset: Dataset, tmp_path_factory: Any) -> Path:
    """Embeddings of the dataset, one row for each crop."""
    out = tmp_path_factory.mktemp("crops") / "out.parquet"
    assert embed.main(command(folder, [dataset.root.url], out, batch=2)) == 0
    return out


@pytest.fixture
def embedded(folder: Path, tmp_path: Path) -> Embedded:
    def made(*data: Any, to: str = "out.parquet", **options: Any) -> pa.Table:
        assert embed.main(command(folder, data, tmp_path / to, **options)) == 0
        assert not (tmp_path / f"{to}.parts").exists()
        return pq.read_table(tmp_path / to)

    return made


def command(model: Path, data: Any, out: Path, **options: Any) -> list[str]:
    given = [
        text
        for name, value in options.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    return ["--model", str(model), "--data", *map(str, data), "--out", str(out), *given]


def probing(model: Path, data: Any) -> list[str]:
    return ["--model", str(model), "--data", str(data), "--probe"]


def refused(arguments: list[str], capsys: Any) -> str:
    """The line that embed ends with."""
    assert embed.main(arguments) == 2
    err = str(capsys.readouterr().err)
    assert err.count("\n") == 1
    return err


def names(table: pa.Table) -> list[str]:
    return [
        f"{source}\t{record}"
        for source, record in zip(table["source"], table["record"], strict=True)
    ]


def vectors(table: pa.Table) -> np.ndarray:
    return np.array(table["embedding"].to_pylist(), np.float32)


def test_rows_of_a_dataset(dataset: Dataset, crops: Path, embedded: Embedded, model: Any) -> None:
    about, url = (
        dataset.table(["source", "record", "patient", "start_s", "halves"]),
        dataset.root.url,
    )
    crop = pq.read_table(crops)
    half, record = (embedded(url, to=per, per=per, batch=7) for per in ("half", "record"))
    assert crop["row"].to_pylist() == list(range(len(dataset)))
    for name in ("source", "record", "patient", "start_s"):
        assert crop[name].to_pylist() == about[name].to_pylist()
    halves = about["halves"].to_numpy().astype(int)
    assert {1, 2} == set(halves.tolist())
    for row in [int(np.flatnonzero(halves == 1)[0]), 0, 1, len(dataset) - 1]:
        expected = model.embed(dataset.read(row)[:, : 2500 * halves[row]], 500, LEADS, "uV")
        np.testing.assert_allclose(vectors(crop.slice(row, 1))[0], expected, atol=2e-6)
    assert half["row"].to_pylist() == np.repeat(np.arange(len(dataset)), halves).tolist()
    starts = about["start_s"].to_numpy()[half["row"].to_numpy()]
    assert set(half["start_s"].to_numpy() - starts) == {0.0, 5.0}
    order, which = np.unique(names(half), return_inverse=True)
    means = np.stack([vectors(half)[which == i].mean(0) for i in range(len(order))])
    assert names(record) == order.tolist()
    np.testing.assert_allclose(vectors(record), means, atol=2e-6)
    assert record.schema.field("embedding").type == pa.list_(pa.float32(), 32)


def test_files_give_the_same_embeddings_as_their_dataset(
    archive: Path, dataset: Dataset, embedded: Embedded
) -> None:
    whole = embedded(dataset.root.url, to="a", per="record")
    files = embedded(archive, to="b", per="record", batch=5, workers=3)
    keys = ["source", "record", "patient"]
    order = [(name, "ascending") for name in keys]
    whole, files = whole.sort_by(order), files.sort_by(order)
    assert files.select(keys).equals(whole.select(keys))
    np.testing.assert_allclose(vectors(files), vectors(whole), atol=2e-6)
    header = next(archive.rglob("*.hea"))
    one = embedded(header, to="c", per="record")
    same = files.filter(pa.compute.equal(files["record"], header.stem))
    np.testing.assert_allclose(vectors(one), vectors(same), atol=2e-6)


def test_arrays(embedded: Embedded, model: Any, tmp_path: Path) -> None:
    many = np.cumsum(np.random.default_rng(0).normal(0, 20, (3, 2, 4000)), 2) % 900
    np.save(tmp_path / "many.npy", many)
    np.savez(tmp_path / "few.npz", a=many[0], b=many[1])
    files = tmp_path / "many.npy", tmp_path / "few.npz"
    table = embedded(*files, batch=2, fs=250, leads="V1,II", unit="uV", per="record")
    assert table["record"].to_pylist() == ["many[0]", "many[1]", "many[2]", "a", "b"]
    expected = model.embed(many, 250, "V1,II", "uV").numpy()[[0, 1, 2, 0, 1]]
    np.testing.assert_allclose(vectors(table), expected, atol=2e-6)


def test_arrays_with_the_same_name_are_told_apart(embedded: Embedded, tmp_path: Path) -> None:
    good = np.random.default_rng(0).normal(0, 0.3, (12, 5000))
    files = [tmp_path / name for name in ("x/a.npy", "y/a.npy", "x/z.npz", "y/z.npz", "b.npy")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        np.save(file, good) if file.suffix == ".npy" else np.savez(file, m=good)
    np.savez(files[2], m=good, own=good)
    records = embedded(*files, fs=500)["record"].to_pylist()
    assert records == [str(files[0]), str(files[1]), f"{files[2]}[m]", "own", f"{files[3]}[m]", "b"]


def test_files_with_the_same_name_are_told_apart(
    archive: Path, embedded: Embedded, tmp_path: Path
) -> None:
    """Also names that are equal once characters that a record's name may not have are removed."""
    header = next(archive.rglob("*.hea"))
    for place in ("\u5fc3", "\u96fb", "a b"):
        (tmp_path / "src" / place).mkdir(parents=True)
        for file in (header, header.with_suffix(".mat")):
            shutil.copy(file, tmp_path / "src" / place)
    paths = [str(tmp_path / "src" / place / header.name) for place in ("\u5fc3", "\u96fb")]
    records = embedded(tmp_path / "src", per="record")["record"].to_pylist()
    assert sorted(records) == sorted([*paths, f"a_b_{header.stem}"])
    assert embedded(*paths, to="two", per="record")["record"].to_pylist() == paths


def test_fewer_leads_and_half_precision(dataset: Dataset, embedded: Embedded, model: Any) -> None:
    few = embedded(dataset.root.url, to="a", leads="II,V1")
    np.testing.assert_allclose(
        vectors(few)[3], model.embed(dataset.read(3)[[1, 6]], 500, "II,V1", "uV"), atol=2e-6
    )
    rough = vectors(embedded(dataset.root.url, to="b", leads="II,V1", precision="bf16"))
    assert 0 < np.abs(rough - vectors(few)).max() < 0.1


def test_a_gpu_embeds_in_the_precision_of_the_training(
    folder: Path, crops: Path, monkeypatch: Patch
) -> None:
    loaded = SimpleNamespace(history={}, input=None, to=lambda device, dtype: None)
    monkeypatch.setattr(embedding, "load", lambda path, code: loaded)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(0))  # no such device here
    for trained, asked, on_gpu in (
        ("bf16", "auto", "bf16"),
        ("fp32", "auto", "fp32"),
        ("bf16", "fp32", "fp32"),
    ):
        loaded.history = {"precision": trained}
        for device, computed in (("cuda:1", on_gpu), ("cpu", "fp32")):
            assert embedding.prepare_model(folder, device, asked)[1] == computed
    assert json.loads(pq.read_schema(crops).metadata[outputs.KEY])["precision"] == "fp32"


@pytest.mark.gpu
@pytest.mark.parametrize("precision, within", [("fp32", 1e-4), ("bf16", 0.1)])
def test_gpu_and_cpu_embeddings_are_equal(
    precision: str, within: float, dataset: Dataset, embedded: Embedded
) -> None:
    """Several parts, a batch that is not full, crops of one half."""
    there, here = (
        embedded(dataset.root.url, to=device, device=device, precision=precision, batch=5)
        for device in ("cuda", "cpu")
    )
    assert there["row"].to_pylist() == here["row"].to_pylist()
    np.testing.assert_allclose(vectors(there), vectors(here), atol=within)


def test_a_kill_at_any_part_does_not_change_the_result(
    folder: Path, dataset: Dataset, embedded: Embedded, tmp_path: Path, monkeypatch: Patch
) -> None:
    write_whole, left = outputs.write_whole, [0]

    def dies(path: Path, content: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        write_whole(path, content)

    embedded(dataset.root.url, to="whole", per="record", batch=2)
    arguments = command(folder, [dataset.root.url], tmp_path / "cut", per="record", batch=2)
    monkeypatch.setattr(outputs, "write_whole", dies)
    for lives in (1, 3, 2):
        left[0] = lives
        assert embed.main(arguments) == 130
    assert (tmp_path / "cut.parts" / "000001.parquet").exists()
    left[0] = 100
    assert embed.main(arguments) == 0
    before = (tmp_path / "whole").read_bytes()
    assert (tmp_path / "cut").read_bytes() == before
    left[0] = 0  # done already: nothing is written again
    assert embed.main(arguments) == 0
    assert embed.main([*arguments, "--leads", "I"]) == 2
    assert (tmp_path / "cut").read_bytes() == before


def test_ranks_share_the_parts(
    folder: Path, dataset: Dataset, crops: Path, tmp_path: Path, monkeypatch: Patch, capsys: Any
) -> None:
    """Of three ranks, the first finishes and the third is killed; then two ranks start, as
    deepspeed would start them."""
    out = tmp_path / "cut"
    arguments = [*command(folder, [dataset.root.url], out, batch=2), "--local_rank=0"]
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


def ranks(arguments: list[str], folder: Path, numbers: list[int], world: int) -> list[Any]:
    env = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    places = ({"RANK": str(number), "LOCAL_RANK": str(number)} for number in numbers)
    return [
        started(embed.main, arguments, out=folder / "output.txt", env=env | place)
        for place in places
    ]


def test_a_corrupt_crop_stops_or_is_skipped(
    folder: Path, dataset: Dataset, crops: Path, embedded: Embedded, tmp_path: Path, capsys: Any
) -> None:
    url = shutil.copytree(dataset.root.url, tmp_path / "copy")
    shard, offset, _ = (int(column[5]) for column in dataset.addresses)
    content = bytearray((url / "shards" / dataset.shards[shard]["name"]).read_bytes())
    content[offset + 100] ^= 1
    (url / "shards" / dataset.shards[shard]["name"]).write_bytes(content)
    assert "crop 5 at byte" in refused(command(folder, [url], tmp_path / "a"), capsys)
    table = embedded(url, to="b", on_corrupt="skip", batch=2)
    assert table["row"].to_pylist() == [row for row in range(len(dataset)) if row != 5]
    np.testing.assert_allclose(
        vectors(table), np.delete(vectors(pq.read_table(crops)), 5, 0), atol=2e-6
    )


def test_a_record_that_cannot_be_read_stops_or_is_skipped(
    folder: Path, embedded: Embedded, tmp_path: Path, capsys: Any
) -> None:
    good = np.random.default_rng(0).normal(0, 0.3, (12, 5000))
    np.savez(tmp_path / "a.npz", a=good, b=good[:, :2000], c=good)
    stopped = command(folder, [tmp_path / "a.npz"], tmp_path / "a", fs=500)
    assert "a.npz[b]: 4 s of signal" in refused(stopped, capsys)
    table = embedded(tmp_path / "a.npz", to="b", fs=500, on_corrupt="skip")
    assert table["record"].to_pylist() == ["a", "c"]


def test_crops_without_any_of_the_models_leads(
    archive: Path,
    dataset: Dataset,
    folder: Path,
    embedded: Embedded,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: Patch,
) -> None:
    """From a dataset, WFDB or an array: the record stops the run or is skipped; single crops of it
    are left out."""
    missing = dataset.table(["record", "missing_leads"]).to_pylist()
    row, one = next((i, one) for i, one in enumerate(missing) if one["missing_leads"])
    lead, record = one["missing_leads"][0], one["record"]
    good = dataset.read(0)[[LEADS.index(lead)]]
    bad = np.full_like(good, -32768)
    np.savez(tmp_path / "a.npz", x=bad, y=np.concatenate([good, bad, good], 1))
    array = {"fs": 500, "unit": "uV"}
    inputs = (
        (dataset.root.url, {}),
        (next(archive.rglob(f"{record}.hea")), {}),
        (tmp_path / "a.npz", array),
    )
    for number, (data, how) in enumerate(inputs):
        arguments = command(folder, [data], tmp_path / f"{number}", leads=lead, **how)
        err = refused(arguments, capsys)
        assert "no valid lead" in err and (record if number < 2 else "a.npz[x]") in err
        assert embed.main([*arguments, "--on-corrupt", "skip"]) == 0
        assert "skipped: " in capsys.readouterr().err
    rows = [i for i in range(len(dataset)) if i != row]
    assert pq.read_table(tmp_path / "0")["row"].to_pylist() == rows
    assert len(pq.read_table(tmp_path / "1")) == 0
    starts = pq.read_table(tmp_path / "2").select(["record", "start_s"]).to_pylist()
    assert starts == [{"record": "y", "start_s": start} for start in (0.0, 20.0)]
    assert record in embedded(dataset.root.url, leads=f"I,{lead}")["record"].to_pylist()
    monkeypatch.setattr(
        "omnilead.engine.inference.inputs.none_measured",
        lambda dataset, leads: np.ones(len(dataset), bool),
    )
    probed = [*probing(folder, dataset.root.url), "--on-corrupt", "skip"]
    assert "no valid lead" in refused(probed, capsys)


def test_files_without_arrays(folder: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty.npy").write_bytes(b"")
    np.save(tmp_path / "zero.npy", np.zeros((0, 12, 5000)))
    np.save(tmp_path / "flat.npy", np.zeros(5000))
    np.savez(tmp_path / "none.npz")
    np.savez(tmp_path / "object.npz", a=np.array([None, 1], object))
    np.savez_compressed(
        tmp_path / "damaged.npz", a=np.random.default_rng(0).normal(0, 0.3, (12, 5000))
    )
    content = bytearray((tmp_path / "damaged.npz").read_bytes())
    content[5000:5100] = bytes(100)
    (tmp_path / "damaged.npz").write_bytes(content)
    for file in ("empty.npy", "zero.npy", "flat.npy", "none.npz", "object.npz", "damaged.npz"):
        member = "[a]" if file in ("object.npz", "damaged.npz") else ""
        err = refused(command(folder, [tmp_path / file], tmp_path / "out", fs=500), capsys)
        assert f"{file}{member}: " in err and not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "out.parts", ignore_errors=True)


def test_a_dataset_in_a_bucket(dataset: Dataset, crops: Path, embedded: Embedded) -> None:
    fsspec.filesystem("memory").put(dataset.root.url, "/bucket/dataset", recursive=True)
    assert embedded("memory://bucket/dataset", batch=2).equals(pq.read_table(crops))


def test_one_file_in_a_bucket(archive: Path, embedded: Embedded) -> None:
    header = next(archive.rglob("*.hea"))
    for file in (header, header.with_suffix(".mat")):
        fsspec.filesystem("memory").put(str(file), f"/one/{file.name}")
    found = embedded(f"memory://one/{header.name}", to="a", per="record")
    np.testing.assert_array_equal(vectors(found), vectors(embedded(header, to="b", per="record")))


@pytest.mark.parametrize(
    "change, named",
    [
        (["--out", "/tmp"], "--out /tmp: "),
        (["--data", "nothing/here"], "nothing/here: "),
        (["--data", __file__], f"{__file__}: "),
        (["--data", "DATASET", "B"], "--data "),
        (["--leads", "I,V9"], "'V9'"),
        (["--device", "cuda:7"], "--device cuda:7"),
        (["--data", "EMPTY"], "`omnilead shard --source`"),
        (["--model", "no/model"], "no/model: "),
        (["--data", "THREE"], "three.npy: .*--fs"),
        (["--fs", "500"], "--fs and --unit"),
        (["--out", "e.npy"], r"e\.parquet"),
        (["--data", "THREE", "--fs", "500"], "three.npy: has 3 rows, not 12: .*--leads"),
        (["--data", "ZEROS", "--fs", "500"], "zeros.npy: no valid lead"),
        (["--out", "no/folder/F.parquet"], "no/folder"),
    ],
)
def test_errors_are_one_line(
    change: list[str], named: str, dataset: Dataset, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    np.save(tmp_path / "three.npy", np.random.default_rng(0).normal(0, 0.3, (3, 5000)))
    np.save(tmp_path / "zeros.npy", np.zeros((12, 5000)))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.txt").write_text("")
    places = {"EMPTY": "folder", "THREE": "three.npy", "ZEROS": "zeros.npy"}
    places = {name: str(tmp_path / file) for name, file in places.items()} | {
        "DATASET": dataset.root.url
    }
    arguments = command(folder, [dataset.root.url], tmp_path / "out")
    err = refused([*arguments, *(places.get(text, text) for text in change)], capsys)
    assert re.search(named, err) and not (tmp_path / "out").exists(), err


def test_unwritable_files_are_named_before_the_work(
    dataset: Dataset, folder: Path, tmp_path: Path, monkeypatch: Patch, capsys: Any
) -> None:
    arguments = command(folder, [dataset.root.url], tmp_path / "out")
    probed = [*probing(folder, dataset.root.url), "--json", "no/F"]
    with monkeypatch.context() as patch:
        patch.setattr(embedding, "prepare_model", lambda *_: pytest.fail("work was begun"))
        assert "--json no/F: " in refused(probed, capsys)
        patch.setattr(os, "access", lambda *_: False)
        assert f"--out {tmp_path / 'out'}: " in refused(arguments, capsys)

    for number, code in ((errno.ENOSPC, 1), (errno.EROFS, 2)):

        def fails(path: Path, content: Any, number: int = number) -> None:
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(outputs, "write_whole", fails)
        assert embed.main(arguments) == code
        err = capsys.readouterr().err
        said = f"omnilead embed: --out {tmp_path / 'out'}: {os.strerror(number)}"
        assert err.startswith(said) and err.count("\n") == 1
        assert ("same command" in err) == (code == 1)


def test_all_probes_in_one_command(
    archive: Path, dataset: Dataset, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    arguments = [*probing(folder, dataset.root.url), "--json", str(tmp_path / "scores.json")]
    assert embed.main(arguments) == 0
    scores, shown = json.loads((tmp_path / "scores.json").read_text()), capsys.readouterr().out
    assert {"linear", "nearest", "identification", "records", "precision"} == set(scores)
    for probe in ("linear", "nearest"):
        assert f"{scores[probe]['challenge']:.4f}" in shown
        assert f"{scores[probe]['auroc']:.4f}" in shown
    assert scores["identification"]["n_probes"] == len(dataset.select(identity="probe"))
    assert f"{scores['identification']['accuracy']:.4f}" in shown
    assert "a probe needs a dataset" in refused(probing(folder, archive), capsys)


def test_probes_of_a_task(dataset: Dataset, folder: Path, tmp_path: Path, capsys: Any) -> None:
    table, scores = tmp_path / "my.csv", tmp_path / "scores.json"
    records = dict(
        zip(*dataset.table(["record", "source"]).to_pydict().values(), strict=True)
    ).items()
    rows = [f"{record},{source},{'abc'[i % 3]}" for i, (record, source) in enumerate(records)]
    table.write_text("\n".join(["record,source,kind", *rows]))
    never = tmp_path / "never.csv"
    never.write_text("\n".join(["record,source,y", *(f"{row[:-2]},0" for row in rows)]))
    arguments = [*probing(folder, dataset.root.url), "--json", str(scores)]
    for given, name, metric in (
        (["--task", "age"], "age", "mae"),
        (["--labels", str(table)], "my", "balanced_accuracy"),
    ):
        assert embed.main([*arguments, *given]) == 0
        found, shown = json.loads(scores.read_text()), capsys.readouterr().out
        assert found["task"] == name and sum(found["records"].values()) <= len(records)
        assert f"{found['nearest'][metric]:.4f}" in shown
        assert f"{name}, {found['records']['test']} records of test" in shown
    err = refused([*arguments, "--labels", str(never)], capsys)
    assert f"{never}: all labels of the split train are the same: nothing to learn" in err
    table.write_text("\n".join(["record,source,kind,split", *(f"{row},train" for row in rows)]))
    lacking = f"{table}: no record is in the split valid: a probe needs train, valid, test"
    for option, value, named in (
        ("--labels", str(table), lacking),
        ("--task", "identification", "--task identification: leave it out"),
        ("--task", "six", "did you mean sex"),
    ):
        assert named in refused([*arguments, option, value], capsys)


def test_tables_in_memory_equal_the_files(
    folder: Path, dataset: Dataset, crops: Path, monkeypatch: Patch
) -> None:
    table = embedding.embed(folder, data=dataset.root.url, batch=2)
    assert table.equals(pq.read_table(crops))
    with pytest.raises(ConfigError, match="no/data: does not exist"):
        embedding.embed(folder, data=["no/data"])
    with monkeypatch.context() as patch:
        full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left"))
        patch.setattr(outputs, "predict", full)
        with pytest.raises(OutputError, match="No space left"):
            embedding.embed(folder, data=dataset.root.url)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2: a table in memory is computed by one"):
        embedding.embed(folder, data=dataset.root.url)

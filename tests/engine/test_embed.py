"""engine.embed: tables of embeddings, whichever way the ECGs come, however often it is stopped; the probes."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import engine
from data_tools.dataset import Dataset
from data_tools.sources import open_sources, prepared
from engine import embed
from engine.common import LEADS
from engine.data.preprocess import Input
from engine.evaluation import table_parts as parts_of
from engine.evaluation.embedding import COLUMNS, Crops, encoder, tables
from tests.forks import started
from tests.waiting import until

ROOT = Path(__file__).parents[2]
Saved = Callable[..., Path]
torch.set_num_threads(1)


@pytest.fixture
def embedded(saved_model: Saved, tmp_path: Path) -> Callable[..., pa.Table]:
    model = saved_model()

    def made(*data: Any, to: str = "out.parquet", model: Path = model, **options: Any) -> pa.Table:
        assert embed.main(command(model, data, tmp_path / to, **options)) == 0
        assert not (tmp_path / f"{to}.parts").exists()
        return pq.read_table(tmp_path / to)

    return made


def command(model: Path, data: Any, out: Path, **options: Any) -> list[str]:
    given = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return ["--model", str(model), "--data", *map(str, data), "--out", str(out), *given]


def names(table: pa.Table) -> list[str]:
    return [f"{one['source']}\t{one['record']}" for one in table.select(["source", "record"]).to_pylist()]


def vectors(table: pa.Table) -> np.ndarray:
    return np.array(table["embedding"].to_pylist(), np.float32)


@pytest.fixture
def model(saved_model: Saved, tmp_path: Path) -> Any:
    folder = tmp_path / "run" / "model"
    return engine.load(folder if folder.exists() else saved_model())


def test_rows_of_a_dataset(dataset: Dataset, embedded: Callable[..., pa.Table], model: Any) -> None:
    about, url = dataset.table(["source", "record", "patient", "start_s", "halves"]), dataset.root.url
    crop, half, record = (embedded(url, to=per, per=per, batch=7) for per in ("crop", "half", "record"))
    assert crop["row"].to_pylist() == list(range(len(dataset)))
    for name in ("source", "record", "patient", "start_s"):
        assert crop[name].to_pylist() == about[name].to_pylist()
    halves = about["halves"].to_numpy().astype(int)
    assert {1, 2} == set(halves.tolist())
    some = [int(np.flatnonzero(halves == 1)[0]), 0, 1, len(dataset) - 1]
    for row in some:
        wanted = model.embed(dataset.read(row)[:, : 2500 * halves[row]], 500, LEADS, "uV")
        np.testing.assert_allclose(vectors(crop.slice(row, 1))[0], wanted, atol=2e-6)
    assert half["row"].to_pylist() == np.repeat(np.arange(len(dataset)), halves).tolist()
    assert set(half["start_s"].to_numpy() - about["start_s"].to_numpy()[half["row"].to_numpy()]) == {0.0, 5.0}
    order, which = np.unique(names(half), return_inverse=True)
    means = np.stack([vectors(half)[which == i].mean(0) for i in range(len(order))])
    assert names(record) == order.tolist()
    np.testing.assert_allclose(vectors(record), means, atol=2e-6)
    assert record.schema.field("embedding").type == pa.list_(pa.float32(), 32)


def test_files_give_what_their_dataset_gives(archive: Path, dataset: Dataset, embedded: Callable[..., pa.Table]) -> None:
    whole = embedded(dataset.root.url, to="a", per="record")
    files = embedded(archive, to="b", per="record", batch=5, workers=3)
    keys = ["source", "record", "patient"]
    assert sorted(map(str, files.select(keys).to_pylist())) == sorted(map(str, whole.select(keys).to_pylist()))
    order = [(name, "ascending") for name in ("source", "record")]
    np.testing.assert_allclose(vectors(files.sort_by(order)), vectors(whole.sort_by(order)), atol=2e-6)
    header = next(archive.rglob("*.hea"))
    one = embedded(header, to="c", per="record")
    named = files.filter(pa.compute.equal(files["record"], header.stem))
    np.testing.assert_allclose(vectors(one), vectors(named), atol=2e-6)


def test_arrays(embedded: Callable[..., pa.Table], model: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    many = np.cumsum(rng.normal(0, 20, (3, 2, 4000)), 2) % 900
    np.save(tmp_path / "many.npy", many)
    np.savez(tmp_path / "few.npz", a=many[0], b=many[1])
    names = {"fs": 250, "leads": "V1,II", "unit": "uV", "per": "record"}
    table = embedded(tmp_path / "many.npy", tmp_path / "few.npz", batch=2, **names)
    assert table["record"].to_pylist() == ["many[0]", "many[1]", "many[2]", "a", "b"]
    wanted = model.embed(many, 250, "V1,II", "uV").numpy()
    np.testing.assert_allclose(vectors(table), wanted[[0, 1, 2, 0, 1]], atol=2e-6)


def test_fewer_leads_and_half_precision(dataset: Dataset, embedded: Callable[..., pa.Table], model: Any) -> None:
    few = embedded(dataset.root.url, to="a", leads="II,V1")
    crop = dataset.read(3)
    np.testing.assert_allclose(vectors(few)[3], model.embed(crop[[1, 6]], 500, "II,V1", "uV"), atol=2e-6)
    rough = vectors(embedded(dataset.root.url, to="b", leads="II,V1", precision="bf16"))
    difference = np.abs(rough - vectors(few)).max()
    assert 0 < difference < 0.1


def test_a_gpu_embeds_in_the_precision_of_the_training(
    dataset: Dataset, embedded: Callable[..., pa.Table], model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for precision in ("bf16", "fp32", None):
        model.config["trained"] = {"precision": precision} if precision else {}
        for asked in ("auto", "fp32", "bf16"):
            found[precision, asked] = [embed.precision_of(asked, torch.device(device), model) for device in ("cuda:1", "cpu")]
    assert found.pop(("bf16", "auto")) == ["bf16", "fp32"]
    assert all(told == ["fp32" if asked == "auto" else asked] * 2 for (_, asked), told in found.items())
    table = embedded(dataset.root.url)
    assert capsys.readouterr().out.endswith("computed in fp32\n")
    assert json.loads(table.schema.metadata[parts_of.KEY])["precision"] == "fp32"


@pytest.mark.gpu
@pytest.mark.parametrize("precision, within", [("fp32", 1e-4), ("bf16", 0.1)])
def test_a_gpu_s_embeddings_are_a_cpu_s(
    precision: str, within: float, dataset: Dataset, embedded: Callable[..., pa.Table]
) -> None:
    """Several parts, a batch that is not full, crops of one half."""
    there, here = (
        embedded(dataset.root.url, to=device, device=device, precision=precision, batch=5) for device in ("cuda", "cpu")
    )
    assert there["row"].to_pylist() == here["row"].to_pylist()
    np.testing.assert_allclose(vectors(there), vectors(here), atol=within)


def test_a_batch_is_on_its_way_before_the_last_one_s_result_is_waited_for() -> None:
    events: list[str] = []
    batches = [Crops(0, n == 2, 1, np.zeros((1, 12, 5000), np.int16), np.ones(1), np.array([n]), ABOUT) for n in range(3)]

    def encode(crops: Crops) -> Callable[[], np.ndarray]:
        number = crops.record_B[0]
        events.append(f"launch {number}")

        def wait() -> np.ndarray:
            events.append(f"wait {number}")
            return np.full((1, 4), number, np.float32)

        return wait

    stream: Any = lambda parts: (crops for crops in batches)  # noqa: E731
    [(part, table)] = tables(stream, encode, [0], "crop")
    assert events == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2"]
    assert part == 0 and vectors(table)[:, 0].tolist() == [0, 1, 2]


ABOUT = pa.Table.from_pylist([dict.fromkeys(name for name, _ in COLUMNS)], pa.schema(COLUMNS))


def test_a_gpu_s_copies_do_not_wait_for_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The crops go up beside the last batch's work; their memory is given back when they are there, not when they are used."""
    events: list[str] = []

    class Upload:
        def __init__(self, device: torch.device) -> None:
            events.append(device.type)

        def __call__(self, host: torch.Tensor) -> torch.Tensor:
            events.append("up")
            return host

        def wait(self) -> None:
            events.append("wait")

    def pooled(x_RLT: torch.Tensor) -> torch.Tensor:
        events.append("compute")
        return x_RLT[:, 0, :4]

    monkeypatch.setattr("engine.evaluation.embedding.Upload", Upload)
    monkeypatch.setattr("engine.evaluation.embedding.download", lambda x: events.append("down") or x.numpy)
    model: Any = SimpleNamespace(device=torch.device("cuda", 0), pooled=pooled)
    encode = encoder(model, Input(tuple(range(12)), tuple(range(12))))
    crops = Crops(0, True, 1, np.ones((2, 12, 5000), np.int16), np.array([2, 1]), np.arange(2), ABOUT)
    assert encode(crops)().shape == (3, 4)
    assert events == ["cuda", "up", "compute", "down", "wait"]


@pytest.mark.parametrize("per", ["crop", "record"])
def test_killed_at_any_part_it_ends_as_the_same_bytes(
    per: str, dataset: Dataset, embedded: Callable[..., pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, left = parts_of._publish, [0]

    def dies(path: Path, write: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        publish(path, write)

    embedded(dataset.root.url, to="whole", per=per, batch=2)
    asked = command(tmp_path / "run", [dataset.root.url], tmp_path / "cut", per=per, batch=2)
    monkeypatch.setattr(parts_of, "_publish", dies)
    for lives in (1, 3, 2):
        left[0] = lives
        assert embed.main(asked) == 130
    assert (tmp_path / "cut.parts" / "000001.parquet").exists()
    left[0] = 100
    assert embed.main(asked) == 0
    before = (tmp_path / "whole").read_bytes()
    assert (tmp_path / "cut").read_bytes() == before
    left[0] = 0  # done already: nothing is written again
    assert embed.main(asked) == 0
    assert embed.main([*asked, "--leads", "I"]) == 2 and (tmp_path / "cut").read_bytes() == before


def test_killed_for_real(dataset: Dataset, embedded: Callable[..., pa.Table], tmp_path: Path) -> None:
    url, out = dataset.root.url, tmp_path / "cut"
    embedded(url, to="whole", batch=1)
    asked = command(tmp_path / "run", [url], out, batch=1)
    running = started(embed.main, asked, out=tmp_path / "said.txt")
    until(lambda: out.with_name("cut.parts").joinpath("000001.parquet").exists() or not running.is_alive())
    running.kill()
    running.join()
    assert embed.main(asked) == 0
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()


def test_parts_of_another_job_are_refused(dataset: Dataset, saved_model: Saved, tmp_path: Path, capsys: Any) -> None:
    asked = command(saved_model(), [dataset.root.url], tmp_path / "out", batch=2)
    assert embed.main(asked) == 0
    (tmp_path / "out").rename(tmp_path / "other")
    (tmp_path / "out.parts").mkdir()
    (tmp_path / "out.parts" / "job.json").write_text(json.dumps({"model": "another"}))
    (tmp_path / "out.parts" / "000001.parquet").write_text("")
    assert embed.main(asked) == 2
    assert "out.parts: is of another job" in capsys.readouterr().err
    (tmp_path / "out.parts" / "000001.parquet").unlink()  # nothing is lost then
    assert embed.main(asked) == 0 and (tmp_path / "out").read_bytes() == (tmp_path / "other").read_bytes()
    (tmp_path / "out").write_text("precious")
    assert embed.main(asked) == 2 and (tmp_path / "out").read_text() == "precious"


def broken(dataset: Dataset, to: Path, row: int) -> str:
    """A copy in which one crop has a flipped bit."""
    subprocess.run(["cp", "-r", dataset.root.url, str(to)], check=True)
    shard, offset, _ = (int(column[row]) for column in dataset.addresses)
    with open(to / "shards" / dataset.shards[shard]["name"], "r+b") as file:
        file.seek(offset + 100)
        byte = file.read(1)[0]
        file.seek(offset + 100)
        file.write(bytes([byte ^ 1]))
    return str(to)


def test_a_corrupt_crop_stops_or_is_left_out(
    dataset: Dataset, embedded: Callable[..., pa.Table], tmp_path: Path, capsys: Any
) -> None:
    url = broken(dataset, tmp_path / "copy", 5)
    assert embed.main(command(tmp_path / "run", [url], tmp_path / "a")) == 2
    assert "crop 5 at byte" in capsys.readouterr().err
    table = embedded(url, to="b", on_corrupt="skip")
    whole = embedded(dataset.root.url, to="c")
    assert table["row"].to_pylist() == [row for row in range(len(dataset)) if row != 5]
    np.testing.assert_allclose(vectors(table), np.delete(vectors(whole), 5, 0), atol=2e-6)


def test_a_record_that_cannot_be_read_stops_or_is_left_out(
    embedded: Callable[..., pa.Table], tmp_path: Path, capsys: Any
) -> None:
    good = np.random.default_rng(0).normal(0, 0.3, (12, 5000))
    short = good[:, :2000]
    np.savez(tmp_path / "a.npz", a=good, b=short, c=good)
    asked = command(tmp_path / "run", [tmp_path / "a.npz"], tmp_path / "a", fs=500)
    assert embed.main(asked) == 2
    assert "a.npz[b]: 4 s of signal" in capsys.readouterr().err
    table = embedded(tmp_path / "a.npz", to="b", fs=500, on_corrupt="skip")
    assert table["record"].to_pylist() == ["a", "c"]


def test_what_the_model_looks_at_was_not_measured(
    archive: Path,
    dataset: Dataset,
    embedded: Callable[..., pa.Table],
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a dataset, WFDB or an array: the record stops the run, or is left out; a crop of it is left out."""
    missing = dataset.table(["record", "missing_leads"]).to_pylist()
    row, lead, record = next(
        (i, one["missing_leads"][0], one["record"]) for i, one in enumerate(missing) if one["missing_leads"]
    )
    header = next(archive.rglob(f"{record}.hea"))
    good = dataset.read(0)[[LEADS.index(lead)]]
    bad = np.full_like(good, -32768)
    np.savez(tmp_path / "a.npz", x=bad, y=np.concatenate([good, bad, good], 1))
    array = {"fs": 500, "unit": "uV", "leads": lead}
    for at, (data, how) in enumerate(((dataset.root.url, {}), (header, {}), (tmp_path / "a.npz", array))):
        asked = command(tmp_path / "run", [data], tmp_path / f"{at}", **({"leads": lead} | how))
        assert embed.main(asked) == 2
        err = capsys.readouterr().err
        assert "no valid lead" in err and (record if at < 2 else "a.npz[x]") in err and err.count("\n") == 1
        assert embed.main([*asked, "--on-corrupt", "skip"]) == 0 and "skipped: " in capsys.readouterr().err
    assert pq.read_table(tmp_path / "0")["row"].to_pylist() == [i for i in range(len(dataset)) if i != row]
    assert len(pq.read_table(tmp_path / "1")) == 0
    assert pq.read_table(tmp_path / "2").select(["record", "start_s"]).to_pylist() == [
        {"record": "y", "start_s": start} for start in (0.0, 20.0)
    ]
    assert record in embedded(dataset.root.url, leads=f"I,{lead}")["record"].to_pylist()
    monkeypatch.setattr(embed, "unseen", lambda dataset, leads: np.ones(len(dataset), bool))
    probed = ["--model", str(tmp_path / "run"), "--data", dataset.root.url, "--probe", "--on-corrupt", "skip"]
    assert embed.main(probed) == 2 and "at which the model looks: show it other leads" in capsys.readouterr().err


def test_arrays_that_are_none(saved_model: Saved, tmp_path: Path, capsys: Any) -> None:
    model, good = saved_model(), np.random.default_rng(0).normal(0, 0.3, (12, 5000))
    (tmp_path / "empty.npy").write_bytes(b"")
    np.save(tmp_path / "zero.npy", np.zeros((0, 12, 5000)))
    np.savez(tmp_path / "none.npz")
    np.savez(tmp_path / "object.npz", a=np.array([None, 1], object))
    np.savez_compressed(tmp_path / "damaged.npz", a=good)
    content = bytearray((tmp_path / "damaged.npz").read_bytes())
    content[5000:5100] = bytes(100)
    (tmp_path / "damaged.npz").write_bytes(content)
    for name, told in (
        ("empty.npy", "cannot be read as numbers"),
        ("zero.npy", "holds no ECG"),
        ("none.npz", "holds no ECG"),
        ("object.npz", "object.npz[a]: cannot be read as numbers"),
        ("damaged.npz", "damaged.npz[a]: cannot be read as numbers"),
    ):
        assert embed.main(command(model, [tmp_path / name], tmp_path / "out", fs=500)) == 2
        err = capsys.readouterr().err
        assert f"{name}" in err and told in err and err.count("\n") == 1 and not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "out.parts", ignore_errors=True)


def test_arrays_of_one_name_are_told_apart(embedded: Callable[..., pa.Table], tmp_path: Path) -> None:
    good = np.random.default_rng(0).normal(0, 0.3, (12, 5000))
    files = [tmp_path / name for name in ("x/a.npy", "y/a.npy", "x/z.npz", "y/z.npz", "b.npy")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        np.savez(file, m=good, own=good) if file == files[2] else np.savez(file, m=good) if "z" in file.name else np.save(
            file, good
        )
    found = embedded(*files, fs=500)["record"].to_pylist()
    assert found == [str(files[0]), str(files[1]), f"{files[2]}[m]", "own", f"{files[3]}[m]", "b"]


def test_a_dataset_in_a_bucket(dataset: Dataset, embedded: Callable[..., pa.Table]) -> None:
    fsspec.filesystem("memory").put(dataset.root.url, "/bucket/dataset", recursive=True)
    here, there = (embedded(url, to=name) for url, name in ((dataset.root.url, "a"), ("memory://bucket/dataset", "b")))
    assert here.equals(there)


@pytest.mark.parametrize(
    "change, told",
    [
        (["--out", "/tmp"], "/tmp: is a folder"),
        (["--data", "nothing/here"], "nothing/here: is not there"),
        (["--data", "nothing.npy"], "nothing.npy: is not there"),
        (["--data", __file__], "nor a .hea"),
        (["--data", "DATASET", "B"], "one dataset at a time"),
        (["--leads", "I,V9"], "'V9'"),
        (["--batch", "0"], "--batch 0"),
        (["--device", "cuda:7"], "--device cuda:7"),
        (["--device", "meta"], "--device meta"),
        (["--data", "EMPTY"], "name it with `data_tools shard --source`, and give the dataset"),
        (["--model", "no/model"], "no/model: no such folder"),
        (["--data", "THREE"], "three.npy: say with --fs"),
        (["--probe"], "give --out"),
        (["--json", "F"], "--json F: holds the scores of --probe"),
        (["--fs", "500"], "--fs and --unit are of .npy and .npz files"),
        (["--unit", "uV"], "--fs and --unit are of .npy and .npz files"),
        (["--out", "e.npy"], "--out e.npy: parquet is written: call it e.parquet"),
        (["--data", "THREE", "--fs", "500"], "three.npy: has 3 rows, not 12: name its rows with --leads"),
        (["--data", "ZEROS", "--fs", "500"], "zeros.npy: no valid lead"),
        (["--out", "no/folder/F.parquet"], "no folder no/folder"),
    ],
)
def test_what_is_wrong_is_one_line(
    change: list[str], told: str, dataset: Dataset, saved_model: Saved, tmp_path: Path, capsys: Any
) -> None:
    asked = command(saved_model(), [dataset.root.url], tmp_path / "out")
    np.save(tmp_path / "three.npy", np.random.default_rng(0).normal(0, 0.3, (3, 5000)))
    np.save(tmp_path / "zeros.npy", np.zeros((12, 5000)))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.txt").write_text("")
    places = {
        "EMPTY": str(tmp_path / "folder"),
        "DATASET": dataset.root.url,
        "THREE": str(tmp_path / "three.npy"),
        "ZEROS": str(tmp_path / "zeros.npy"),
    }
    assert embed.main([*asked, *(places.get(text, text) for text in change)]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_where_nothing_can_be_written_is_said_before_the_work_and_by_its_name(
    dataset: Dataset, saved_model: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model = saved_model()
    asked = command(model, [dataset.root.url], tmp_path / "out")
    probed = ["--model", str(model), "--data", dataset.root.url, "--probe"]
    assert embed.main([*probed, "--per", "half"]) == 2 and "--per half" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(embed, "prepare_model", lambda _: pytest.fail("work was begun"))
        assert embed.main([*probed, "--json", "no/F"]) == 2
        assert "--json no/F: no folder no" in capsys.readouterr().err
        patch.setattr(os, "access", lambda *_: False)
        assert embed.main(asked) == 2
        assert f"--out {tmp_path / 'out'}: {tmp_path} may not be written to" in capsys.readouterr().err

    def fails(number: int) -> Callable[..., None]:
        def publish(path: Path, write: Any) -> None:
            raise OSError(number, os.strerror(number), str(path))

        return publish

    for number, code, more in ((errno.ENOSPC, 1, ": the same command goes on"), (errno.EROFS, 2, "")):
        monkeypatch.setattr(parts_of, "_publish", fails(number))
        assert embed.main(asked) == code
        assert capsys.readouterr().err == f"engine.embed: --out {tmp_path / 'out'}: {os.strerror(number)}{more}\n"


def test_the_probes_in_one_command(dataset: Dataset, saved_model: Saved, tmp_path: Path, capsys: Any) -> None:
    asked = ["--model", str(saved_model()), "--data", dataset.root.url, "--probe", "--json", str(tmp_path / "scores.json")]
    assert embed.main(asked) == 0
    scores, shown = json.loads((tmp_path / "scores.json").read_text()), capsys.readouterr().out
    assert {"linear", "nearest", "identification", "records", "precision"} == set(scores)
    for probe in ("linear", "nearest"):
        assert f"{scores[probe]['challenge']:.4f}" in shown and f"{scores[probe]['auroc']:.4f}" in shown
    patients = dataset.table(["patient"]).take(dataset.select(identity="probe"))["patient"]
    assert scores["identification"]["n_probes"] == len(patients) and f"{scores['identification']['accuracy']:.4f}" in shown


def test_a_dataset_without_roles_cannot_be_probed(archive: Path, saved_model: Saved, capsys: Any) -> None:
    assert embed.main(["--model", str(saved_model()), "--data", str(archive), "--probe"]) == 2
    assert "needs a dataset" in capsys.readouterr().err


def test_a_record_straight_from_its_archive(archive: Path, dataset: Dataset) -> None:
    source = open_sources(str(archive))[0]
    key = next(iter(source.keys()))
    found = prepared(source, key)
    rows = np.flatnonzero(dataset.column("record") == found.record)  # type: ignore[union-attr]
    order = rows[np.argsort(dataset.column("start_s")[rows])]
    assert all((dataset.read(int(row)) == crop).all() for row, crop in zip(order, found.crops_uv, strict=True))  # type: ignore[union-attr]

"""The data card: README.md as people see it, croissant.json as mlcroissant reads it."""

import hashlib
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from handmade import build, ecg, files, found_in, write_challenge
from twins import write_mimic

from omnilead.data_tools.dataset import COLUMNS
from omnilead.data_tools.ecg.record import LEADS, EcgRecord
from omnilead.data_tools.io.errors import ReadError
from omnilead.data_tools.io.storage import folder
from omnilead.data_tools.sharding.data_card import CARD, CROISSANT, write_card
from omnilead.data_tools.sharding.finishing import FLAG_REASONS, read_rejects
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.base import Source
from omnilead.data_tools.sources.detect import open_sources

mlcroissant = pytest.importorskip("mlcroissant")
# Names of patients, records and their folder
SECRETS = ("10000032", "40000017", "MEIER", "ward seven")
LOUD = "mine | <script>alert(1)</script> [click](http://x)\n## Roles"


class Loud(Source):
    """A user's source whose licence and reason for a refusal are no friends of tables."""

    name, licence = "loud", LOUD

    def keys(self):
        return iter(["good", "bad"])

    def read(self, key):
        if key == "bad":
            raise ReadError("no | good\n# <b>")
        return EcgRecord(key, ecg(seed=9), 500.0, LEADS, gain=1000.0, source=self.name)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """MIMIC-IV-ECG, records of nowhere, one of which is refused, and the loud ones."""
    root = tmp_path_factory.mktemp("archives")
    write_mimic(root / "mimic", {"40000017": "10000032", "40000018": "10000032"})
    for seed in (1, 2, 3):
        write_challenge(root / "ward seven", f"MEIER{seed}", ecg(seed=seed))
    (root / "ward seven" / "MEIER2.mat").write_bytes(b"")
    ours = open_sources(str(root / "ward seven"), kind="wfdb")
    return [*open_sources(str(root / "mimic")), *ours, Loud(folder(root))]


@pytest.fixture(scope="module")
def made(sources, tmp_path_factory):
    return shard(sources, ShardOptions(str(tmp_path_factory.mktemp("made") / "out"), quiet=True))


def card_of(dataset):
    return Path(dataset.root.url, CARD).read_text()


def section(card, name):
    return re.search(rf"\n## {name}\n(.*?)(?=\n## |\Z)", card, re.DOTALL)[1]


def cells(text):
    """The rows of the tables in a text; a pipe after a backslash belongs to a cell."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def test_the_card_says_what_each_licence_demands_and_what_to_cite(made):
    card = card_of(made)
    rows = {
        row[0].split("]")[0].lstrip("["): row[1:]
        for row in cells(section(card, "Sources and licences"))
    }
    assert rows["mimic-iv-ecg"] == ["ODbL-1.0", "2", "2", "0", "2", "0"]
    assert rows["wfdb"] == ["unknown", "3", "2", "1", "2", "0"]
    demands = section(card, "Sources and licences").split("demand")[1]
    loud, odbl, unknown = (line for line in demands.splitlines() if line.startswith("- "))
    assert "(mimic-iv-ecg)" in odbl and "Share-alike" in odbl and "re-encodings" in odbl
    assert "https://opendatacommons.org/licenses/odbl/1-0/" in odbl
    assert "(wfdb)" in unknown and "no permission" in unknown
    assert "(loud)" in loud and "does not know this licence" in loud
    cited = section(card, "Citation")
    assert "doi:10.13026/4nqg-sb35" in cited and "Goldberger" in cited and "Reyna" not in cited
    assert "- wfdb: no reference is known" in cited
    assert made.fingerprint in cited


def test_every_role_refusal_and_flag_is_in_a_table_that_stands(made):
    card = card_of(made)
    for table in re.findall(r"(?:^\|.*\n)+", card, re.MULTILINE):
        assert len({len(row) for row in cells(table)}) == 1
    roles = dict(cells(section(card, "Roles"))[2:])
    assert roles["pre-training"] == str(made.meta["roles"]["pretrain"])
    counts = made.meta["roles"]["id"]
    assert {
        f"identification: {name}": str(n) for name, n in counts.items()
    }.items() <= roles.items()
    rows = cells(section(card, "Refused, repaired, flagged"))[2:]
    reasons = Counter(reason for _, _, reason, _ in read_rejects(made))
    assert sum(int(row[2]) for row in rows) == reasons.total() > 1
    assert {row[1] for row in rows} == {"no"}
    assert "<script>" not in re.sub(r"\\.", "", card)
    assert card.count("\n## Roles\n") == 1


def test_flags_are_told_from_refusals(small, tmp_path):
    made = build(small, tmp_path, plan="all")
    reasons = Counter({"flat lead": 2, "gain": 1000} | {f"reason {i}": 1 for i in range(50)})
    write_card(made.root, made.facts, reasons, FLAG_REASONS)
    rows = cells(section(card_of(made), "Refused, repaired, flagged"))[2:]
    assert rows[:3] == [["gain", "no", "1,000"], ["flat lead", "yes", "2"], ["reason 0", "no", "1"]]
    assert rows[50:] == [["2 other reasons", "", ""]]
    write_card(made.root, made.facts, Counter(), FLAG_REASONS)
    assert "Nothing was refused" in section(card_of(made), "Refused, repaired, flagged")


def test_an_empty_licence_is_an_unknown_one(made, tmp_path):
    sources = [source.model_copy(update={"licence": ""}) for source in made.facts.sources]
    write_card(
        folder(tmp_path),
        made.facts.model_copy(update={"sources": sources}),
        Counter(),
        FLAG_REASONS,
    )
    card = (tmp_path / CARD).read_text()
    assert {row[1] for row in cells(section(card, "Sources and licences"))[2:]} == {"unknown"}
    assert card.count("no permission") == 1
    assert yaml.safe_load(card.split("---\n")[1])["license"] == ["unknown"]


def test_synthetic_crops_are_called_synthetic(small, tmp_path):
    made = build(small, tmp_path, plan="paper-split")
    card = card_of(made)
    assert f"{len(made)} crops are synthetic" in card
    assert "CC0-1.0" in card and "CC-BY" not in card
    assert "nothing to cite" in section(card, "Citation")
    assert "in train **and** in test" in section(card, "Roles")


def test_hugging_face_can_read_the_front_matter(made, tmp_path):
    front = yaml.safe_load(card_of(made).split("---\n")[1])
    assert front["license"] == ["odbl", "other", "unknown"]
    assert front["configs"] == [{"config_name": "crops", "data_files": "samples.parquet"}]
    for crops, size in (
        (1, "n<1K"),
        (999, "n<1K"),
        (1000, "1K<n<10K"),
        (43_101, "10K<n<100K"),
        (10**7, "10M<n<100M"),
    ):
        write_card(
            folder(tmp_path),
            made.facts.model_copy(update={"crops": crops}),
            Counter(),
            FLAG_REASONS,
        )
        front = yaml.safe_load((tmp_path / CARD).read_text().split("---\n")[1])
        assert front["size_categories"] == [size]


def plainly(value):
    """Of mlcroissant, which gives texts as bytes."""
    if isinstance(value, list):
        return [plainly(one) for one in value]
    value = value.item() if hasattr(value, "item") else value
    return value.decode() if isinstance(value, bytes) else value


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("form", ["tar", "zarr", "both"])
def test_mlcroissant_reads_the_twin(form, sources, tmp_path):
    made = shard(sources, ShardOptions(str(tmp_path), format=form, quiet=True))
    twin = mlcroissant.Dataset(str(tmp_path / CROISSANT))
    issues = twin.metadata.ctx.issues
    assert not issues.errors
    (warning,) = issues.warnings
    assert "datePublished" in warning  # equal input gives equal bytes, so there is no date
    rows = [
        {name.removeprefix("crops/"): plainly(value) for name, value in row.items()}
        for row in twin.records("crops")
    ]
    assert rows == made.table().to_pylist()
    assert list(rows[0]) == COLUMNS.names
    content = files(tmp_path)
    objects = [one for one in twin.metadata.distribution if hasattr(one, "sha256")]
    for one in objects:
        assert hashlib.sha256(content[one.content_url]).hexdigest() == one.sha256
        assert one.content_size == f"{len(content[one.content_url])} B"
    tables = {"samples.parquet", "rejects.csv"}
    assert {one.content_url for one in objects} == tables | {
        f"shards/{one.name}" for one in made.shards
    }
    sets = {one.id for one in twin.metadata.distribution} - {one.id for one in objects}
    assert sets == {"tar": {"ecg", "json"}, "zarr": {"zarr"}, "both": {"ecg", "json", "zarr"}}[form]
    odbl = "https://opendatacommons.org/licenses/odbl/1-0/"
    assert twin.metadata.license == [LOUD, odbl, "unknown"]
    assert made.fingerprint in twin.metadata.version


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["names", "pseudonyms"])
def test_the_card_names_nobody(key, sources, tmp_path):
    made = shard(sources, ShardOptions(str(tmp_path), pseudonym_key=key, quiet=True))
    written = (tmp_path / CARD).read_bytes() + (tmp_path / CROISSANT).read_bytes()
    assert found_in(written, (*SECRETS, str(tmp_path))) == []
    assert ("hashes with a secret key" in section(card_of(made), "Privacy")) == bool(key)


def test_an_edited_or_missing_card_changes_nothing(small, tmp_path):
    """Whoever publishes a dataset has more to say; older datasets have no card."""
    made = build(small, tmp_path)
    (tmp_path / CARD).write_text("mine")
    assert verify(made) == []
    build(small, tmp_path)
    assert (tmp_path / CARD).read_text() == "mine"
    (tmp_path / CARD).unlink()
    (tmp_path / CROISSANT).unlink()
    assert verify(made) == []

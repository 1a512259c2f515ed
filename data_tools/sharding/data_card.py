"""The data card of a dataset: README.md for people, croissant.json (Croissant 1.1) for programs.

data_card.md is the template, data_card.yaml has what is known of licences, sources and columns. A
card follows from dataset.json and rejects.csv alone, so a run after a kill writes the same bytes.
Nothing reads a card: it may be edited, for example before a dataset is published.
"""

import json
import re
from collections import Counter
from collections.abc import Collection
from importlib.resources import files
from typing import Any

from ..dataset import COLUMNS, FORMAT_VERSION, REJECTS, SAMPLES, DatasetFacts, FileFacts, ShardFacts
from ..ecg.constants import SYNTHETIC
from ..io.storage import Folder

CARD, CROISSANT = "README.md", "croissant.json"
SIZE_CATEGORIES = (
    "n<1K",
    "1K<n<10K",
    "10K<n<100K",
    "100K<n<1M",
    "1M<n<10M",
    "10M<n<100M",
    "100M<n<1B",
)


def write_card(
    out: Folder, facts: DatasetFacts, reasons: Counter[str], flags: Collection[str]
) -> None:
    """Writes README.md and croissant.json. `reasons`: the number of lines of rejects.csv for each reason;
    `flags`: the reasons for which no record or crop is refused."""
    import jinja2
    import yaml  # type: ignore[import-untyped]

    texts = yaml.safe_load(_read_resource("data_card.yaml"))
    texts["licences"] = _licences(facts, texts)
    texts["citations"] = _citations(facts, texts)
    texts["title"] = f"12-lead ECGs of {', '.join(source.name for source in facts.sources)}"
    texts["description"] = _description(facts)
    texts["privacy"] += " " + texts["pseudonyms" if facts.pseudonyms else "names"]
    texts["size"] = SIZE_CATEGORIES[max(0, len(str(facts.crops)) - 3)]
    templates = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    templates.filters["plain"] = _escape_cell
    listed = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    template = templates.from_string(_read_resource("data_card.md"))
    out.write(CARD, template.render(texts, facts=facts, reasons=listed, flags=flags).encode())
    out.write(CROISSANT, (json.dumps(_croissant(facts, texts), indent=1) + "\n").encode())


def _read_resource(name: str) -> str:
    return (files("omnilead.data_tools.sharding") / name).read_text("utf-8")


def _escape_cell(text: str) -> str:
    """Escapes untrusted text for a cell of a Markdown table."""
    return re.sub(r"([\\`\[\]|<>&*_])", r"\\\1", " ".join(text.split()))


def _licences(facts: DatasetFacts, texts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns, for each licence of the dataset, what it demands and the names of the sources under it."""
    licences: dict[str, dict[str, Any]] = {}
    for source in facts.sources:
        licence = source.licence or "unknown"
        known = texts["licences"].get(licence, texts["other_licence"])
        licences.setdefault(licence, {**known, "sources": []})["sources"].append(source.name)
    return licences


def _citations(facts: DatasetFacts, texts: dict[str, Any]) -> list[str]:
    citations = []
    homes = []
    for source in facts.sources:
        name = source.name
        known = texts["references"].get(name)
        if known:
            homes.append(known["home"])
            citations.append(f"{name}: {known['cite']}")
        elif not name.startswith(SYNTHETIC):
            citations.append(f"{name}: no reference is known; ask those who provided the files")
    for host, reference in texts["hosts"].items():
        if any(home.startswith(host) for home in homes):
            citations.append(reference)
    return citations


def _description(facts: DatasetFacts) -> str:
    records = made_up = 0
    for source in facts.sources:
        records += source.records["used"]
        if source.name.startswith(SYNTHETIC):
            made_up += source.crops
    text = (
        f"{facts.crops:,} crops of 10 s from {records:,} ECGs: int16 [12, 5000], "
        f"{facts.uv_per_lsb:g} µV a step, {facts.fs_hz} Hz."
    )
    if made_up:
        text += f" {made_up:,} crops are synthetic: computed, of no patient."
    return text


def _croissant(facts: DatasetFacts, texts: dict[str, Any]) -> dict[str, Any]:
    distribution = [
        _croissant_file(SAMPLES, "application/x-parquet", facts.samples),
        _croissant_file(REJECTS, "text/csv", facts.rejects),
    ]
    tars = []
    for shard in facts.shards:
        tar = _croissant_file(f"shards/{shard.name}", "application/x-tar", shard)
        distribution.append(tar)
        tars.append({"@id": tar["@id"]})
    if tars:
        distribution += [{**member, "containedIn": tars} for member in texts["members"]]
    if "zarr" in facts.formats:
        distribution.append(texts["zarr"])
    fields = []
    for column in COLUMNS:
        kind, shape = column.type, {}
        if hasattr(kind, "value_type"):
            shape = {"isArray": True, "arrayShape": str(getattr(kind, "list_size", -1))}
            kind = kind.value_type
        field = {
            "@type": "cr:Field",
            "@id": f"crops/{column.name}",
            "name": column.name,
            "description": texts["columns"][column.name],
            "dataType": texts["types"][str(kind)],
            "source": {"fileObject": {"@id": SAMPLES}, "extract": {"column": column.name}},
        }
        fields.append(field | shape)
    return {
        "@context": texts["context"],
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": texts["title"],
        "description": texts["description"],
        "version": f"{FORMAT_VERSION}.0.0+{facts.fingerprint}",
        "license": [known["url"] or licence for licence, known in texts["licences"].items()],
        "citeAs": "\n".join(texts["citations"]),
        "rai:personalSensitiveInformation": texts["privacy"],
        "distribution": distribution,
        "recordSet": {"@type": "cr:RecordSet", "@id": "crops", "name": "crops", "field": fields},
    }


def _croissant_file(name: str, encoding: str, file: FileFacts | ShardFacts) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": name,
        "contentUrl": name,
        "contentSize": f"{file.bytes} B",
        "encodingFormat": encoding,
        "sha256": file.sha256,
    }

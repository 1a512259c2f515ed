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

from ..dataset import COLUMNS, REJECTS, SAMPLES
from ..ecg.constants import SYNTHETIC
from ..io.storage import Folder

CARD, CROISSANT = "README.md", "croissant.json"
SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B")


def write_card(
    out: Folder, meta: dict[str, Any], reasons: Counter[str], flags: Collection[str]
) -> None:
    """`reasons`: how many lines of rejects.csv have each; `flags`: those of records that were used
    nevertheless."""
    import jinja2
    import yaml  # type: ignore[import-untyped]

    facts = yaml.safe_load(_beside("data_card.yaml"))
    facts["licences"] = _licences(meta, facts)
    facts["citations"] = _citations(meta, facts)
    facts["title"] = f"12-lead ECGs of {', '.join(source['name'] for source in meta['sources'])}"
    facts["description"] = _description(meta)
    facts["privacy"] += " " + facts["pseudonyms" if meta["pseudonyms"] else "names"]
    facts["size"] = SIZES[max(0, len(str(meta["crops"])) - 3)]
    templates = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    templates.filters["plain"] = _plain
    listed = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    template = templates.from_string(_beside("data_card.md"))
    out.write(CARD, template.render(facts, meta=meta, reasons=listed, flags=flags).encode())
    out.write(CROISSANT, (json.dumps(_croissant(meta, facts), indent=1) + "\n").encode())


def _beside(name: str) -> str:
    return (files("omnilead.data_tools.sharding") / name).read_text("utf-8")


def _plain(text: str) -> str:
    """Anybody's text for a cell of a table."""
    return re.sub(r"([\\`\[\]|<>&*_])", r"\\\1", " ".join(text.split()))


def _licences(meta: dict[str, Any], facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each licence of the dataset demands, and its sources."""
    licences: dict[str, dict[str, Any]] = {}
    for source in meta["sources"]:
        licence = source["licence"] or "unknown"
        known = facts["licences"].get(licence, facts["other_licence"])
        licences.setdefault(licence, {**known, "sources": []})["sources"].append(source["name"])
    return licences


def _citations(meta: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    citations = []
    homes = []
    for source in meta["sources"]:
        name = source["name"]
        known = facts["references"].get(name)
        if known:
            homes.append(known["home"])
            citations.append(f"{name}: {known['cite']}")
        elif not name.startswith(SYNTHETIC):
            citations.append(f"{name}: no reference is known; ask those who provided the files")
    for host, reference in facts["hosts"].items():
        if any(home.startswith(host) for home in homes):
            citations.append(reference)
    return citations


def _description(meta: dict[str, Any]) -> str:
    records = made_up = 0
    for source in meta["sources"]:
        records += source["records"]["used"]
        if source["name"].startswith(SYNTHETIC):
            made_up += source["crops"]
    text = (
        f"{meta['crops']:,} crops of 10 s from {records:,} ECGs: int16 [12, 5000], "
        f"{meta['uv_per_lsb']:g} µV a step, {meta['fs_hz']} Hz."
    )
    if made_up:
        text += f" {made_up:,} crops are synthetic: computed, of no patient."
    return text


def _croissant(meta: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    distribution = [
        _file_object(SAMPLES, "application/x-parquet", meta["samples"]),
        _file_object(REJECTS, "text/csv", meta["rejects"]),
    ]
    tars = []
    for shard in meta["shards"]:
        tar = _file_object(f"shards/{shard['name']}", "application/x-tar", shard)
        distribution.append(tar)
        tars.append({"@id": tar["@id"]})
    if tars:
        distribution += [{**member, "containedIn": tars} for member in facts["members"]]
    if "zarr" in meta["formats"]:
        distribution.append(facts["zarr"])
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
            "description": facts["columns"][column.name],
            "dataType": facts["types"][str(kind)],
            "source": {"fileObject": {"@id": SAMPLES}, "extract": {"column": column.name}},
        }
        fields.append(field | shape)
    return {
        "@context": facts["context"],
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": facts["title"],
        "description": facts["description"],
        "version": f"{meta['format_version']}.0.0+{meta['fingerprint']}",
        "license": [known["url"] or licence for licence, known in facts["licences"].items()],
        "citeAs": "\n".join(facts["citations"]),
        "rai:personalSensitiveInformation": facts["privacy"],
        "distribution": distribution,
        "recordSet": {"@type": "cr:RecordSet", "@id": "crops", "name": "crops", "field": fields},
    }


def _file_object(name: str, encoding: str, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": name,
        "contentUrl": name,
        "contentSize": f"{facts['bytes']} B",
        "encodingFormat": encoding,
        "sha256": facts["sha256"],
    }

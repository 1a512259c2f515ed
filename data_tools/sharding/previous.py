"""The version of a dataset that another one follows.

    previous = PreviousVersion.open("DATASET")
    rejects = previous.rejects_with(new_rejects, new_parts)

An append keeps its rows, rejects, shards and roles, in front of the new ones; a removal of patients, those
of others.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..dataset import FORMAT_MINOR, META, REJECTS, SAMPLES, VERSIONS, Dataset
from ..ecg.pseudonyms import REMOVED
from ..io.errors import DataError
from .rejects import FLAGS, Reject, rejects_of

NAMES = ["source", "record"]


class PreviousVersion(Dataset):
    """A dataset that is about to have another version."""

    def check_appendable(self, url: str) -> None:
        """`url`: as it was given."""
        if (
            "zarr" in self.meta["formats"]
            or self.meta["plan"] == "paper-split"
            or self.minor < FORMAT_MINOR
        ):
            raise DataError(
                f"{url} has a zarr copy, roles by crop (--plan paper-split) or shards without "
                "roles, of an earlier omnilead, so nothing can be appended: build it again"
            )

    @property
    def next_shard_number(self) -> int:
        return 1 + max(int(shard["name"].removesuffix(".tar")) for shard in self.shards)

    def new_refusals(self, rejects: list[Reject]) -> int:
        """How many lines say what no line of its rejects.csv says, but that in other words. That those
        who were removed do not come back is no news."""
        lines = {reject[:3] for reject in rejects if reject[2] != REMOVED}
        return len(lines - {reject[:3] for reject in rejects_of(self)})

    def rejects_with(self, rejects: list[Reject], parts: Iterable[pa.Table]) -> list[Reject]:
        """The new lines and its own, but for records that have been read again."""
        earlier = rejects_of(self)
        again = {reject[:2] for reject in rejects}
        again |= _with_crops({reject[:2] for reject in earlier}, parts)
        return [*rejects, *(reject for reject in earlier if reject[:2] not in again)]

    def refused_with(self, rejects: list[Reject], parts: Iterable[pa.Table]) -> Counter[str]:
        """How many records of each source are refused. `rejects`: all lines, its own too."""
        refused = {reject[:2] for reject in rejects if reject[2] not in FLAGS}
        refused -= _with_crops(refused, chain(self.parts(NAMES), parts))
        return Counter(source for source, _ in refused)

    def source_without_patients(self, rows: pa.Table, fewest: int) -> str | None:
        """A source whose records had patients, while none that is appended has: by chance, fewer than
        one in a hundred such appends would have none. `rows`: source, patient and start_s of the new
        crops; `fewest`: a source with less is not named. A record counts by its first crop."""
        crops = pa.concat_tables([self.table(rows.column_names), rows])
        is_first = pc.equal(crops["start_s"], 0).to_numpy()
        has_patient = crops["patient"].is_valid().to_numpy()
        is_new = np.arange(len(crops)) >= len(self)
        for name in crops["source"].unique().to_pylist():
            is_record = is_first & pc.equal(crops["source"], name).to_numpy()
            old, new = has_patient[is_record & ~is_new], has_patient[is_record & is_new]
            if not len(old) or len(new) < fewest or new.any():
                continue
            if (~old).mean() ** len(new) < 0.01:
                return str(name)
        return None

    def keep_tables(self) -> None:
        """Copy them to where those of earlier versions lie."""
        for name in (SAMPLES, REJECTS, META):
            if self.place(name) == name:
                kept = f"{VERSIONS}/{self.version}/{name}"
                self.root.write(kept, self.root.read(name, 2**40))

    def versions_with(self, what: str, crops: int) -> list[dict[str, Any]]:
        """What dataset.json says of the versions, when another one follows."""
        versions = self.meta.get("versions") or [{"what": "shard", "crops": len(self)}]
        last = versions[-1] | {"fingerprint": self.fingerprint}
        return [*versions[:-1], last, {"what": what, "crops": crops}]


def _with_crops(
    records: set[tuple[str, str]], parts: Iterable[pa.Table | pa.RecordBatch]
) -> set[tuple[str, str]]:
    """Those of the records that have crops in these parts of samples.parquet."""
    if not records:
        return set()
    wanted = pa.array([f"{source}/{name}" for source, name in records])
    with_crops = set()
    for part in parts:
        labels = pc.binary_join_element_wise(part["source"], part["record"], "/")
        for label in labels.filter(pc.is_in(labels, wanted)).to_pylist():
            source, _, name = label.partition("/")
            with_crops.add((source, name))
    return with_crops

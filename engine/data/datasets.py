"""Several datasets, read as if they were one: their crops are numbered consecutively.

data = open_together(["ds/2026", "ds/2027-*"])       # Datasets
data.column("age")                                   # of all crops
data.rows_by_dataset(np.array([3, 70_000]))                  # the rows of each dataset
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np
import pyarrow as pa

from omnilead.data_tools.dataset import Data, Dataset, Ecg, open_all

from ..settings.errors import ConfigError, Flag, join_first_names

MAX_LISTED_DATASETS = 3  # largest number of datasets that a message lists


@dataclass(frozen=True)
class Datasets:
    all: tuple[Dataset, ...]

    @cached_property
    def first_rows(self) -> np.ndarray:
        """Returns, for each dataset, the number of its first crop in the consecutive numbering."""
        return np.cumsum([0, *map(len, self.all)])[:-1]

    def __len__(self) -> int:
        return sum(map(len, self.all))

    def __getitem__(self, row: int) -> Ecg:
        number = int(self.dataset_numbers(np.array([row]))[0])
        return self.all[number][row - int(self.first_rows[number])]

    @property
    def name(self) -> str:
        return join_first_names([dataset.root.url for dataset in self.all], MAX_LISTED_DATASETS)

    @property
    def fingerprint(self) -> str:
        """Returns the fingerprint of a single dataset, or a hash of the fingerprints of several
        datasets, in their order in `all`."""
        prints = [dataset.fingerprint for dataset in self.all]
        return prints[0] if len(prints) == 1 else sha256(" ".join(prints).encode()).hexdigest()

    @property
    def plan(self) -> str | None:
        """Returns the plan by which `omnilead shard` assigned the roles of crops; different
        plans are joined by "and"."""
        plans = dict.fromkeys(dataset.facts.plan for dataset in self.all)
        return " and ".join(map(str, plans)) if len(plans) > 1 else next(iter(plans))

    @property
    def synthetic_crops(self) -> int:
        return sum(dataset.synthetic_crops for dataset in self.all)

    def table(self, columns: Sequence[str]) -> pa.Table:
        return pa.concat_tables([dataset.table(columns) for dataset in self.all])

    def column(self, name: str) -> np.ndarray:
        return self.concatenate(lambda dataset: dataset.column(name))

    def concatenate(self, values_of: Callable[[Dataset], np.ndarray]) -> np.ndarray:
        """Returns values_of(dataset) of all datasets, concatenated."""
        return np.concatenate([values_of(dataset) for dataset in self.all])

    def rows_with_id_role(self, identity: str) -> np.ndarray:
        """Returns the numbers of the crops that have this role in identification."""
        return np.flatnonzero(
            self.concatenate(lambda dataset: dataset.column("id_role")) == identity
        )

    def dataset_numbers(self, rows: np.ndarray) -> np.ndarray:
        """Returns, for each crop, the index of its dataset."""
        return np.asarray(np.searchsorted(self.first_rows, rows, side="right") - 1)

    def rows_by_dataset(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns, for each dataset, those of these crops that are in it, as rows of that
        dataset."""
        number_N = self.dataset_numbers(rows)
        return [
            rows[number_N == number] - begin
            for number, begin in enumerate(self.first_rows.tolist())
        ]

    def split_by_dataset(self, values_N: np.ndarray) -> list[np.ndarray]:
        """Splits an array with a value for each crop into one array per dataset."""
        return np.split(values_N, self.first_rows[1:])


def open_together(
    data: Data | Sequence[Data], anonymous: bool = False, option: str = Flag("--data")
) -> Datasets:
    """Opens datasets that are used together (data_tools.dataset.dataset_paths). `option`: the
    option that named them, for messages."""
    datasets = open_all(data, anonymous, option)
    names = " and ".join(dataset.root.url for dataset in datasets)
    if not datasets:
        raise ConfigError(option, ": names no dataset")
    if len({dataset.fingerprint for dataset in datasets}) < len(datasets):
        weights = ""
        if option == "data.datasets":
            weights = "; to see a dataset more often, set pipeline.weights"
        raise ConfigError(option, f": {names} are the same data: remove one{weights}")
    if len({dataset.preprocessing_sha256 for dataset in datasets}) > 1:
        raise ConfigError(
            option, f": {names} were preprocessed differently: build them with the same settings"
        )
    return Datasets(tuple(datasets))

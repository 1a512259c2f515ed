"""Tables of labels for the records of a dataset."""

import csv

from omnilead.downstream.tasks.config import TaskConfig
from omnilead.downstream.tasks.labels import read_task


class Tables:
    """Writes tables of labels for the records of a dataset, and reads them as tasks."""

    def __init__(self, dataset, folder):
        self.dataset, self.path = dataset, folder / "my.csv"
        rows = dataset.table(["record", "patient"]).to_pylist()
        people = {row["record"]: row["patient"] or row["record"] for row in rows}
        order = sorted(set(people.values()))
        self.fold_of = {record: order.index(person) % 10 for record, person in people.items()}
        self.records = list(self.fold_of)

    def write(self, header, rows, mark=",", encoding="utf-8"):
        with self.path.open("w", newline="", encoding=encoding) as file:
            csv.writer(file, delimiter=mark).writerows([header.split("|"), *rows])
        return str(self.path)

    def read_file(self, **task):
        config = TaskConfig(**{"kind": "binary", "labels": str(self.path)} | task)
        return read_task(config, [self.dataset])

    def read(self, header, rows, **task):
        self.write(header, rows)
        return self.read_file(**task)

    def by_fold(self, column, cell, **task):
        """Labels for all records but the first, and a column made from numbers of ten folds."""
        rows = [
            (name, i % 2 if i else "", cell(f)) for i, (name, f) in enumerate(self.fold_of.items())
        ]
        return self.read(f"record|v|{column}", rows, **task)

    def folds_in(self, labels, split):
        return {
            self.fold_of[name]
            for name in self.dataset.column("record")[labels.rows_of_dataset(0, split)]
        }

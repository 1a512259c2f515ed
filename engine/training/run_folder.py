"""Manages RUN, the folder of a training run: its path, lock, checkpoints and other files, and its copy
in a bucket. Also opens the datasets that the run trains on.

    folder = RunFolder("s3://bucket/run")     # or a local path
    folder.make()
    with folder.locked(ranks):
        folder.fetch()                        # from a bucket, if it is in one
        path = folder.newest_checkpoint(warn) # the checkpoint to resume from
        folder.claim()
        folder.write_run_files(code, files)
        writer = folder.writer(ranks, config.train)   # uploads each checkpoint
        folder.upload(config.train.keep, last=True)     # when RUN/model is written
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omnilead.data_tools.dataset import META, Dataset
from omnilead.data_tools.io.storage import locked_by_another, write_whole

from ..data.datasets import open_together
from ..model.folder import WEIGHTS
from ..settings.errors import ConfigError, Flag
from ..settings.files import CODE_FOLDER
from ..settings.run_files import LOCK
from .bucket import Bucket
from .checkpoint_files import (
    BEST,
    CHECKPOINTS,
    HOW_TO_RESTORE,
    LATEST,
    CheckpointError,
    WriteError,
    checkpoint_named,
    complete_checkpoints,
    find_fault,
    remove_leftovers,
)
from .config import RunConfig, TrainConfig

if TYPE_CHECKING:
    from .checkpoint import Writer
    from .distributed import Ranks

MAKE_DEMO = (
    "omnilead synth demo/archive --patients 100 && omnilead shard demo/archive --out demo/dataset"
)


class RunFolder:
    def __init__(self, name: str | Path) -> None:
        """`name`: the folder as the user gave it. A string may be s3://bucket/run: then training
        writes to a local working folder, `path`. A Path is always a local folder."""
        self.name = str(name)
        self.bucket = Bucket(name) if isinstance(name, str) and "://" in name else None
        self.path = self.bucket.working_folder if self.bucket else Path(name)
        self.checkpoints = self.path / CHECKPOINTS
        self.model = self.path / "model"
        self.lock_file: os.stat_result | None = None  # None unless this process holds the lock

    def make(self) -> None:
        mend = "choose another folder with ", Flag("--out"), " RUN"
        if (self.path / META).exists() or (self.path.parent / META).exists():
            raise ConfigError(f"{self.name}: is a dataset, or lies in a dataset: ", *mend)
        if (self.path / WEIGHTS).exists():
            raise ConfigError(
                f"{self.name}: is a model, which a run in this folder would hide: ", *mend
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.name}: {error.strerror}: ", *mend) from None

    @contextmanager
    def locked(self, ranks: "Ranks") -> Iterator[None]:
        """A context that holds the lock of this folder. It refuses a second process, because the
        two would delete each other's checkpoints."""
        # imported here because PyTorch takes seconds to import
        from .distributed import on_first_rank

        with ExitStack() as open_files:
            on_first_rank(ranks, lambda: self._lock(open_files))
            yield

    def _lock(self, open_files: ExitStack) -> None:
        try:
            lock = open_files.enter_context(open(self.path / LOCK, "w"))  # noqa: SIM115
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: {error.strerror}: choose another folder with ", Flag("--out"), " RUN"
            ) from None
        if locked_by_another(lock, str(self.path)):
            raise CheckpointError(
                f"{self.path}: another process trains here: wait for it, or use ",
                Flag("--out"),
                " NEW",
            )
        self.lock_file = os.stat(self.path / LOCK)

    def _prepare_for_checkpoint(self, path: Path) -> None:
        """Removes what a killed run left, before a checkpoint is written. Raises WriteError if the
        folder was moved, since another training may have begun in its place."""
        lock = self.path / LOCK
        if self.lock_file and not (lock.exists() and os.path.samestat(lock.stat(), self.lock_file)):
            raise WriteError(
                f"{self.path}: was moved or deleted during training: run the same command to start "
                "anew"
            )
        remove_leftovers(self.checkpoints, path)

    def fetch(self) -> None:
        """Downloads the newest checkpoint from the bucket, unless the local one is as new."""
        if self.bucket:
            self.bucket.fetch()

    def claim(self) -> None:
        """Claims a run in a bucket for this machine, which ends a training of it on another
        machine."""
        if self.bucket:
            self.bucket.claim()

    def upload(self, keep: int, last: bool = False) -> None:
        """Uploads what is new to the bucket. `last`: at the end of training, a failed upload is an
        error."""
        if self.bucket:
            self.bucket.upload(keep, last)

    def writer(self, ranks: "Ranks", settings: TrainConfig) -> "Writer":
        from .checkpoint import Writer

        upload = partial(self.upload, settings.keep)
        return Writer(self.checkpoints, ranks, settings, self._prepare_for_checkpoint, upload)

    def newest_checkpoint(self, warn: Callable[[str], object] | None = None) -> Path | None:
        """Returns the checkpoint that `latest` names if it is intact, otherwise the newest intact
        one; None if the run has no checkpoint. `warn` is called with what was skipped and why."""
        root = self.checkpoints
        latest, finished = checkpoint_named(root, LATEST), complete_checkpoints(root)
        if latest is None and not finished and not (root / LATEST).exists():
            return None
        skipped = [] if latest else [f"{root / LATEST}: does not name a checkpoint"]
        for path in dict.fromkeys([*([latest] if latest else []), *finished]):
            why = find_fault(path)
            if why is None:
                if warn and skipped:
                    warn(
                        f"{'; '.join(skipped)}: resuming from {path.name}, the newest complete "
                        "checkpoint"
                    )
                return path
            skipped.append(why)
        raise CheckpointError(f"{'; '.join(skipped)}: no checkpoint is complete: ", *HOW_TO_RESTORE)

    def best_checkpoint(self) -> Path | None:
        """Returns the best checkpoint by validation; without validation, the newest."""
        path = checkpoint_named(self.checkpoints, BEST)
        return path if path and find_fault(path) is None else self.newest_checkpoint()

    def write_run_files(self, code: Mapping[str, bytes], files: Mapping[str, bytes]) -> None:
        """Writes plug-in code and other files, such as labels, without which the run's model could
        not be exported."""
        for name, content in code.items():
            (self.path / CODE_FOLDER).mkdir(exist_ok=True)
            write_whole(self.path / CODE_FOLDER / name, content)
        for name, content in files.items():
            write_whole(self.path / name, content)

    def read_code(self, names: Iterable[str]) -> dict[str, bytes]:
        code = {}
        for name in names:
            file = self.path / CODE_FOLDER / name
            if file.is_symlink() or not file.is_file():
                raise CheckpointError(
                    f"{file}: no such file, or a link, but the checkpoint was trained with it: ",
                    *HOW_TO_RESTORE,
                )
            code[name] = file.read_bytes()
        return code


def open_datasets(config: RunConfig) -> list[Dataset]:
    if "demo/dataset" in config.data.datasets and not Path("demo/dataset").exists():
        raise ConfigError(
            f"there is no demo/dataset: make it with `{MAKE_DEMO}`, or name another dataset with ",
            Flag("--set data.datasets=[DATASET]"),
        )
    return list(open_together(config.data.datasets, config.data.anonymous, "data.datasets").all)

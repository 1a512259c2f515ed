"""A run in object storage (--out s3://bucket/run): training writes to a working folder on a local
disk, which is uploaded after every checkpoint.

    bucket = Bucket("s3://bucket/run")
    bucket.fetch()                 # downloads the newest checkpoint, unless the one here is as new
    bucket.claim()                 # before training: a training of this run on another machine ends
    bucket.upload(keep)            # after each checkpoint, by the thread that wrote it
    bucket.upload(keep, last=True) # at the end: a failed upload is an error

A kill at any moment leaves a checkpoint in the bucket that can be resumed from: manifest.json is
uploaded after the other files of a checkpoint, `latest` after both. If another machine starts the
same run, the training on the first machine ends at its next upload: the user may have given that
machine up.
"""

import json
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from omnilead.data_tools.dataset import META, DataError
from omnilead.data_tools.io.errors import Flag, ReadError
from omnilead.data_tools.io.storage import RemoteFolder, write_whole
from omnilead.data_tools.io.terminal import say

from ..settings.errors import ConfigError
from ..settings.launcher import launched_rank
from ..settings.run_files import LOCK, METRICS, VALIDATION
from . import checkpoint_files
from .checkpoint_files import BEST, CHECKPOINTS, LATEST, MANIFEST, STATE, step_of

# Written to LOCK in a bucket, to tell which process started the run last
OWNER_TOKEN = secrets.token_bytes(16)
Files = dict[str, list[str]]  # name of a checkpoint -> names of its files


class Bucket:
    """A run's folder in object storage, and the local working folder that training writes to."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.place = RemoteFolder(url.rstrip("/"))
        # Every start of this run on this machine gets the same folder
        self.working_folder = self.place.workdir() / "run" / Path(url).name
        self.reachable = True  # False after an upload that failed

    def fetch(self) -> None:
        place, run = self.place, self.working_folder
        root = run / CHECKPOINTS
        say(f"{self.url}: the working folder is {run}, uploaded after every checkpoint")
        if place.exists(META):
            raise ConfigError(
                f"{self.url}: is a dataset: choose another folder with ", Flag("--out"), " RUN"
            )
        complete = {
            name: files for name, files in self._checkpoint_files().items() if MANIFEST in files
        }
        local_checkpoint = checkpoint_files.checkpoint_named(root, LATEST)
        if local_checkpoint and checkpoint_files.find_fault(local_checkpoint):
            local_checkpoint = None
        name = self._fetch_newest(complete, local_checkpoint)
        if not name:
            return
        for best in self._checkpoints_named_by(BEST, complete):
            if best == name or not self._download(complete[best], root / best):
                write_whole(root / BEST, best)
        for file in (METRICS, VALIDATION):
            if place.exists(file):
                self._download_file(file, run / file)
        write_whole(root / LATEST, name)

    def claim(self) -> None:
        """Claims the run for this machine, so that a training of it elsewhere ends. Called when it
        is certain that training continues here. As this writes to the bucket, it also shows before
        training whether that is possible."""
        try:
            self.place.write(LOCK, OWNER_TOKEN)
        except FileNotFoundError as error:
            raise ConfigError(f"{self.url}: {error}: make the bucket, or choose another") from None

    def upload(self, keep: int, last: bool = False) -> None:
        """Uploads, on rank 0, the files of the newest and the best checkpoint that the bucket lacks,
        and all other files of the run. If that fails, a warning says so once and training
        continues. Each later call tries again if the bucket answers a first request, which is sent
        without retries. With `last`, at the end of training, it always tries, and an error is raised
        instead of the warning. A CheckpointError is raised in any case if the bucket shows that the
        run was started elsewhere."""
        if launched_rank().rank:
            return
        try:
            if not self.reachable and not last:
                replace(self.place, tries=1).exists(LOCK)
            self._upload_changes(keep)
        except (DataError, OSError) as error:
            text = f"cannot upload: {error}: all is in {self.working_folder}: "
            if last:
                raise checkpoint_files.WriteError(
                    f"{text}run the same command again on this machine"
                ) from None
            if self.reachable:
                checkpoint_files.warn(f"{text}training goes on, and each checkpoint tries again")
            self.reachable = False
        else:
            if not self.reachable:
                self.reachable = True
                say(f"{self.url}: has been uploaded again, up to the newest checkpoint")

    def _fetch_newest(self, complete: Files, local_checkpoint: Path | None) -> str:
        """Downloads the newest intact checkpoint of the bucket and returns its name. Returns "" if
        the local checkpoint is as new, or if the bucket has none."""
        if local_checkpoint and not complete:
            checkpoint_files.warn(f"{self.place.url}: has no checkpoint: using {local_checkpoint}")
        for name in dict.fromkeys([*self._checkpoints_named_by(LATEST, complete), *complete]):
            if local_checkpoint and step_of(local_checkpoint) >= step_of(Path(name)):
                return ""
            why = self._download(complete[name], self.working_folder / CHECKPOINTS / name)
            if not why:
                return name
            checkpoint_files.warn(f"{self.place.url}: {why}")
        if complete and not local_checkpoint:
            raise checkpoint_files.CheckpointError(
                f"{self.place.url}: no checkpoint is intact: begin a new run with ",
                Flag("--out"),
                " NEW",
            )
        return ""

    def _upload_changes(self, keep: int) -> None:
        place, run = self.place, self.working_folder
        if place.exists(LOCK) and place.read(LOCK, len(OWNER_TOKEN)) != OWNER_TOKEN:
            raise checkpoint_files.CheckpointError(
                f"{place.url}: this run was started elsewhere as well and goes on there, so it ends here"
            )
        pointers = {}
        for pointer in (BEST, LATEST):
            if path := checkpoint_files.checkpoint_named(run / CHECKPOINTS, pointer):
                pointers[pointer] = path
                self._upload_checkpoint(path)
        for file in run.rglob("*"):
            name = file.relative_to(run)
            if file.is_file() and name.parts[0] not in (CHECKPOINTS, LOCK):
                with suppress(FileNotFoundError):  # the file was temporary and is gone
                    # not `place.upload`, which fails if training writes to the file meanwhile
                    place.write(name.as_posix(), file.read_bytes())
        for pointer, path in pointers.items():
            place.write(f"{CHECKPOINTS}/{pointer}", path.name.encode())
        if LATEST in pointers:
            self._prune(pointers, keep)

    def _checkpoint_files(self) -> Files:
        """Returns the checkpoints in the bucket with the names of their files, the newest first."""
        files_of_steps: Files = {}
        for file in map(Path, self.place.names(CHECKPOINTS)):
            if step_of(file.parent) >= 0 and len(file.parts) == 3 and not file.name.startswith("."):
                files_of_steps.setdefault(file.parent.name, []).append(file.name)
        return dict(sorted(files_of_steps.items(), key=lambda item: -step_of(Path(item[0]))))

    def _checkpoints_named_by(self, pointer: str, complete: Files) -> list[str]:
        with suppress(ReadError):  # the bucket has no such pointer
            name = (
                self.place.read(f"{CHECKPOINTS}/{pointer}", 1000).decode(errors="replace").strip()
            )
            return [name] if name in complete else []
        return []

    def _download(self, files: list[str], path: Path) -> str | None:
        """Downloads a checkpoint to `path`. Returns what is wrong with it; None if it is intact."""
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        for file in sorted(files, key=lambda file: file == MANIFEST):
            self._download_file(f"{CHECKPOINTS}/{path.name}/{file}", path / file)
        if why := checkpoint_files.find_fault(path):
            shutil.rmtree(path)
        return why

    def _download_file(self, name: str, path: Path) -> None:
        size, part = self.place.size(name), checkpoint_files.CHUNK_BYTES
        with open(path, "wb") as file:
            for start in range(0, size, part):
                file.write(self.place.read_range(name, start, min(part, size - start)))
            file.flush()
            os.fsync(file.fileno())

    def _upload_checkpoint(self, path: Path) -> None:
        """Uploads the files of a checkpoint that the bucket does not have yet."""
        remote_folder = f"{CHECKPOINTS}/{path.name}"
        manifest, before = json.loads((path / MANIFEST).read_text()), {}
        # if the bucket has no manifest of this checkpoint, or a damaged one, all files are uploaded
        with suppress(ReadError, ValueError, TypeError):
            before = dict(
                json.loads(
                    self.place.read(f"{remote_folder}/{MANIFEST}", checkpoint_files.CHUNK_BYTES)
                )
            )
        changed = [name for name in manifest if manifest[name] != before.get(name)]
        # Writer.amend_progress changed only state.json. The new manifest fits the old state.json
        # too, so it is uploaded first
        if changed == [STATE]:
            changed = [MANIFEST, STATE]
        elif changed:
            self.place.remove(f"{remote_folder}/{MANIFEST}")
            changed.append(MANIFEST)
        for name in changed:
            self.place.upload(path / name, f"{remote_folder}/{name}")

    def _prune(self, pointers: dict[str, Path], keep: int) -> None:
        """Removes old checkpoints and unfinished uploads from the bucket. Keeps what the working
        folder keeps: the newest `keep`, the best one, and those of later steps."""
        last = step_of(pointers[LATEST])
        steps = {
            name: files
            for name, files in self._checkpoint_files().items()
            if step_of(Path(name)) <= last
        }
        complete = [name for name, files in steps.items() if MANIFEST in files]
        for name in steps:
            if name not in [*complete[:keep], *(path.name for path in pointers.values())]:
                self.place.remove(f"{CHECKPOINTS}/{name}/{MANIFEST}")
                self.place.remove(f"{CHECKPOINTS}/{name}")

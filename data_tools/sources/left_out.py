"""What lies in a folder that looks like ECGs and that no source reads: counted, so that no record
vanishes without a word."""

import os
from collections import Counter
from collections.abc import Sequence

from omnilead.data_tools.errors import StorageError
from omnilead.data_tools.sources.base import FileSource, Source
from omnilead.data_tools.storage import Folder, folder


def places_read(root: Folder, sources: Sequence[Source]) -> set[str]:
    """Paths below `root` of the folders that these sources read; "" is all of it."""
    read = set()
    for source in sources:
        for place in source.places():
            path = f"{source.root.url}/{place}".removeprefix(root.url)
            read.add(path.strip("/"))
    return read


class LeftOut:
    """The files below a folder that look like ECGs and that none of its sources reads.

    The folders that a source reads are not searched: MIMIC-IV-ECG's has 800,000 subfolders."""

    def __init__(
        self,
        root: Folder,
        sources: Sequence[Source],
        besides: Sequence[str],
        anonymous: bool,
        endings: tuple[str, ...],
    ) -> None:
        """`endings`: of the names of hospital files."""
        self.root = root
        self.anonymous = anonymous
        self.endings = endings
        # The first file by uppermost folder; "" holds the files beside the folders
        self.first: dict[str, str] = {}
        self.count: Counter[str] = Counter()
        self.links: list[str] = []
        self.unlisted: list[str] = []
        self.opened = {source.root.url for source in sources}
        self.read = places_read(root, sources)
        for url in besides:
            self.read.add(folder(url).url.removeprefix(f"{root.url}/"))
        if any(isinstance(source, FileSource) for source in sources):
            return  # it looks at every file, and counts those that it leaves out
        if "" in self.read:  # all WFDB records are read
            hospital = [name for name in root.names() if name.lower().endswith(self.endings)]
            self._add("", hospital)
        else:
            self._search("")

    def _search(self, place: str) -> None:
        below = self.root
        if place:
            below = folder(self.root.path(place), self.anonymous, self.root.private)
        for name in below.children():
            path = f"{place}/{name}" if place else name
            if path in self.read:
                continue
            if any(one.startswith(f"{path}/") for one in self.read):
                self._search(path)
            elif self._looks_like_ecg(name):
                self._add(place, [path])
            elif not (self.root.remote and looks_like_file(name)):
                self._add_folder(path)

    def _add_folder(self, path: str) -> None:
        place = self.root.path(path)
        if not self.root.remote and os.path.islink(place):
            if os.path.isdir(place) and os.path.realpath(place) not in self.opened:
                self.links.append(path)
            return
        try:
            self._add(path, [name for name in self.root.names(path) if self._looks_like_ecg(name)])
        except (StorageError, OSError):
            self.unlisted.append(path)

    def _looks_like_ecg(self, name: str) -> bool:
        return name.endswith(".hea") or name.lower().endswith(self.endings)

    def _add(self, place: str, names: Sequence[str]) -> None:
        if names:
            self.first.setdefault(place, names[0])
            self.count[place] += len(names)

    def sentence(self) -> str:
        said = []
        if self.unlisted:
            said.append(f"could not list {self._named(self.unlisted)}")
        if self.links:
            said.append(f"does not follow linked folders: {self._named(self.links)}")
        if total := self.count.total():
            files = "1 file that looks like an ECG"
            if total > 1:
                files = f"{total:,} files that look like ECGs"
            said.append(f"leaves out {files}{self._where()}")
        return f"{self.root.url}: {'; '.join(said)}" if said else ""

    def _named(self, paths: Sequence[str]) -> str:
        if self.root.private:
            return f"{len(paths)} of its folders"
        return ", ".join(paths[:3]) + ", ..." * (len(paths) > 3)

    def _where(self) -> str:
        if self.root.private:
            return ": give the folders that hold them as well"
        parts = []
        for place, first in list(self.first.items())[:3]:
            more = f" and {self.count[place] - 1:,} more" if self.count[place] > 1 else ""
            mend = f"give {self.root.url}/{place} as well"
            if place == "" or any(one.startswith(f"{place}/") for one in self.read):
                mend = "move them to a folder of their own and give it as well"
            parts.append(f"{first}{more}: {mend}")
        return f": {'; '.join(parts)}" + "; ..." * (len(self.first) > 3)


def looks_like_file(name: str) -> bool:
    """Whether an object storage need not be asked what is in it: table.csv, but not v1.0."""
    ending = name.rpartition(".")[2]
    return ending != name and not ending.isdigit()

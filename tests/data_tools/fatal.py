"""A source that kills its process; in its own module, so that workers import it quickly."""

import contextlib
import os
import signal
import time
from pathlib import Path

from omnilead.data_tools.sources.wfdb_archives import PhysioNet2021


class Fatal(PhysioNet2021):
    """Reading the record that ARCHIVE.fatal names kills, once, the process with the id given there,
    or the reading one."""

    def read(self, key):
        trap, name = Path(f"{self.root.url}.fatal"), ""
        # Another process may take it at any moment: its absence must not refuse this record
        with contextlib.suppress(FileNotFoundError):
            name, _, victim = trap.read_text().partition(" ")
        if name == key:
            trap.unlink()
            os.kill(int(victim or os.getpid()), signal.SIGKILL)
        time.sleep(0.005)  # both workers get some of the tasks
        return super().read(key)

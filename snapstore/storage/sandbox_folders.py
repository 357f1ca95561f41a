"""Sandbox folders: hidden folders in a place, where `doctor` and a first save test what the place can do.

In: the root of a local store. Out: a new folder; its name begins with a dot, so no listing shows it. A process that is
killed leaves its folder: the next sandbox in the same place removes it.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = ".snapstore-trial-"
NAME = re.compile(re.escape(_PREFIX) + r"\w+")
#: A test takes seconds. An older folder is one that a killed process has left [s].
OLD_S = 3600.0


def make(root: Path) -> Path:
    """Make a folder for a sandbox, and remove old ones.

    Raises:
        OSError: it cannot be made.
    """
    new = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    with suppress(OSError):  # another process may remove them too
        old_s = new.stat().st_mtime - OLD_S  # by the clock of the file system
        for path in root.iterdir():
            if NAME.fullmatch(path.name) and path.lstat().st_mtime < old_s:
                remove(path)
    return new


def remove(folder: Path) -> None:
    """Remove the folder of a sandbox, as far as that works; links are not followed."""
    shutil.rmtree(folder, ignore_errors=True)

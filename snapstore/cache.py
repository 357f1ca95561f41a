"""Cache: the folder of this machine where indexes of remote repositories and signs of life of held objects lie.

Nothing in it is the truth, and any of it may be deleted at any time. It must lie on a local disk: LMDB and flock both
fail in silence on network file systems.
"""

from __future__ import annotations

import os
from pathlib import Path

from .errors import InvalidInputError

_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "glusterfs", "fuse.")


def cache_folder() -> Path:
    """SNAPSTORE_CACHE_DIR, else the user's cache.

    Raises:
        InvalidInputError: the variable is no absolute path.
    """
    import platformdirs

    return chosen_cache() or Path(platformdirs.user_cache_dir("snapstore"))


def chosen_cache() -> Path | None:
    """SNAPSTORE_CACHE_DIR, if it is set.

    Raises:
        InvalidInputError: it is no absolute path.
    """
    chosen = os.environ.get("SNAPSTORE_CACHE_DIR")
    if chosen is not None and not Path(chosen).is_absolute():
        raise InvalidInputError(f"SNAPSTORE_CACHE_DIR={chosen!r}: expected an absolute path")
    return Path(chosen) if chosen else None


def mount_of(folder: Path) -> tuple[str, str]:
    """(mount point, file system type) of a folder, by /proc/mounts; ("", "") where there is none."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "", ""
    resolved = str(folder.resolve())
    inside = [m for m in mounts if resolved == m[0] or resolved.startswith(m[0].rstrip("/") + "/")]
    point, kind = max(inside, key=lambda mount: len(mount[0]), default=["", ""])
    return point, kind


def on_network(folder: Path) -> bool:
    """Whether a folder lies on a network file system (Linux tells)."""
    return mount_of(folder)[1].startswith(_NETWORK_FILE_SYSTEMS)

"""This process as other processes see it in a session: host, boot and pid."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from ..format.records import Session


def this_session(save_id: str, key: str) -> Session:
    """Return a session of this process."""
    return Session(
        id=save_id, key=key, host=socket.gethostname(), boot_id=boot_id(), pid=os.getpid(), started=time.time()
    )


def boot_id() -> str:
    """Return the id of this boot, "" where unknown. Within one boot, a free lock proves that a process is dead."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

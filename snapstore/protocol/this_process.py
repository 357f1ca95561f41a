"""This process as other processes see it in a session: host, boot and pid."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from ..format.records import Session


def this_session(save_id: str, key: str) -> Session:
    """Return a session of this process."""
    return Session(id=save_id, key=key, host=host_name(), boot_id=boot_id(), pid=os.getpid(), started=time.time())


def host_name() -> str:
    """Return the name of this host, the same in every locale; a byte that is not UTF-8 is shown as that byte."""
    return os.fsencode(socket.gethostname()).decode("utf-8", "backslashreplace")


def boot_id() -> str:
    """Return the id of this boot, "" where unknown. Within one boot, a free lock proves that a process is dead."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

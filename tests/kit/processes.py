"""The checkout's folders, the environment in which other processes find it and this kit, and ranks as processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


def environment(**more: str) -> dict[str, str]:
    """Return the environment of this process, with the checkout and its tests first on PYTHONPATH."""
    paths = [str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more


def run_ranks(script: str, job: dict[str, Any], ranks: int, log: Path, **more: str) -> list[int]:
    """Run a script of the kit as the ranks of a job on one host, each with JSON as its argument; return the exit codes.

    Args:
        log: their outputs go to `<log>.<rank>`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-W", "ignore", str(TESTS / "kit" / script), json.dumps(job)]
    running = []
    for rank in range(ranks):
        place = environment(RANK=str(rank), LOCAL_RANK=str(rank), **more)
        with Path(f"{log}.{rank}").open("w") as output:
            running.append(subprocess.Popen(command, env=place, stdout=output, stderr=output))
    return [one.wait(300) for one in running]

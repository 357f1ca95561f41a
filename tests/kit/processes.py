"""The checkout's folders, the environment in which other processes find it and this kit, and ranks as processes."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


def environment(**more: str) -> dict[str, str]:
    """Return the environment of this process, with the checkout and its tests first on PYTHONPATH."""
    paths = [str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more


def run_python(*args: object, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments (`"-c", code`, ...) and this checkout; return its exit code and output."""
    command = [sys.executable, *map(str, args)]
    env = environment(**more)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)


def free_port() -> int:
    """Return a free port below the range from which Linux gives ports to sockets without one: none takes it."""
    ports = random.SystemRandom().sample(range(20_000, 32_000), 100)
    for port in ports:
        with socket.socket() as server, suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of {len(ports)} ports is free")


def run_ranks(script: str, job: dict[str, Any], ranks: int, log: Path, **more: str) -> list[int]:
    """Run a script of the kit as the ranks of a job on one host, each with JSON as its argument; return the exit codes.

    Args:
        log: their outputs go to `<log>.<rank>`.
    """
    more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-W", "ignore", str(TESTS / "kit" / script), json.dumps(job)]
    running = []
    for rank in range(ranks):
        place = environment(RANK=str(rank), LOCAL_RANK=str(rank), **more)
        with Path(f"{log}.{rank}").open("w") as output:
            running.append(subprocess.Popen(command, env=place, stdout=output, stderr=output))
    return [one.wait(300) for one in running]

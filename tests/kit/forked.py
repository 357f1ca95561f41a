"""Processes that run a program as a Python command would, forked from one that has imported torch already.

`Forked("-m", "kit.rank_worker", options, log=file, env=environment())` in place of a `Popen`: a process of its own,
with a pid to kill, that need not import torch for seconds. Its output goes to a file. Take a `Popen` where a test is
about the start of Python, its options, or what an import does.

The server of `multiprocessing` forks them: it is a fresh process without threads, and not a fork of the tests.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from kit.processes import environment

#: Trainings import these sooner or later; the first step of an optimizer imports `torch._dynamo`, for seconds.
PRELOADED = [
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint", "torch._dynamo",
    "kit.ranks", "snapstore.dcp",
]  # fmt: skip


class Forked:
    """One process, with the methods of a `Popen`.

    Args:
        program: `-m` and a module, or `-c` and code; then its arguments.
        log: gets stdout and stderr.
        env: its environment; variables that torch reads at its import have no effect.
    """

    def __init__(self, *program: str, log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        log.touch()
        arguments = program, str(log), dict(env), str(Path.cwd())
        self._process = _server().Process(target=_run, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs; -N of signal N."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired(str(self.pid), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._process.kill()

    def text(self) -> str:
        """Return what it has written until now."""
        return self.log.read_text()


def wait_all(processes: Sequence[Forked], timeout: float, *, stopped: Collection[int] = ()) -> None:
    """Wait for the ends of some processes, up to `timeout` s each, but not of the stopped ones; then kill all."""
    try:
        for number, process in enumerate(processes):
            if number not in stopped:
                process.wait(timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@cache
def _server() -> Any:
    """Start the server that forks; it ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = dict(os.environ)
    os.environ |= environment(OMP_NUM_THREADS="1")  # it imports by PYTHONPATH, and torch's threads would not be forked
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before
    atexit.register(_kill_all)  # before multiprocessing waits for them, also for a stopped one
    return context


def _kill_all() -> None:
    """Kill the processes that a failed test has left."""
    for process in multiprocessing.active_children():
        process.kill()


def _run(program: tuple[str, ...], log: str, env: dict[str, str], folder: str) -> None:
    """Be `python *program` in a forked process."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ |= env
    os.chdir(folder)
    kind, name, *arguments = program
    sys.argv[:] = [kind, *arguments]
    try:
        if kind == "-m":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(name, "<string>", "exec"), sys.modules["__main__"].__dict__)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out

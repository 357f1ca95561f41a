"""Processes that run the cases, one after the other each; one that dies is named in the outcome of its case."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch

from .optimizers import named
from .paths import Outcome, outcomes
from .training import Case

#: Modules whose imports take seconds: each process inherits them, and the package of each optimizer.
_PRELOADED = ["resume_matrix.workers", "resume_matrix.preloaded"]
_Work = tuple[Case, list[str]]


def run(cases: list[_Work], count: int, device: str) -> Iterator[tuple[Case, dict[str, Outcome], float]]:
    """Run cases in `count` processes; yield each case with the outcomes of its paths, and its seconds, when it ends."""
    context: Any = get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        context.set_forkserver_preload([*_PRELOADED, *{case.optimizer.partition(".")[0] for case, _ in cases}])
    left, running = list(reversed(cases)), dict[connection.Connection, tuple[Any, _Work | None, float]]()
    folder = tempfile.mkdtemp(prefix="resume-matrix-")

    def begin() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, folder, device), daemon=True)
        process.start()
        theirs.close()
        running[ours] = (process, None, 0.0)
        give(ours)

    def give(pipe: connection.Connection) -> None:
        work = left.pop() if left else None
        running[pipe] = (running[pipe][0], work, time.monotonic())
        pipe.send(work)
        if work is None:
            running.pop(pipe)[0].join()

    try:
        for _ in range(min(count, len(left))):
            begin()
        while running:
            for pipe in connection.wait(list(running)):
                assert isinstance(pipe, connection.Connection)
                process, work, began = running[pipe]
                assert work is not None
                try:
                    found = pipe.recv()
                except EOFError:
                    del running[pipe]
                    process.join()
                    text = f"error: the process ended with exit code {process.exitcode}"
                    found = dict.fromkeys(work[1], Outcome(text, text))
                    if left:
                        begin()
                else:
                    give(pipe)
                yield work[0], found, time.monotonic() - began
    finally:
        for process, *_ in running.values():
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _serve(pipe: connection.Connection, folder: str, device: str) -> None:
    """Run the cases that come through a pipe, until None comes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()  # the Trainer collects at each training
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    while (work := pipe.recv()) is not None:
        case, paths = work
        place = Path(tempfile.mkdtemp(dir=folder))
        os.environ["SNAPSTORE_CACHE_DIR"] = str(place / "cache")
        pipe.send(outcomes(case, named(case.optimizer), paths, place, device))
        shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):
        pipe.close()


def spread(pairs: Iterable[tuple[Case, str]]) -> list[_Work]:
    """Return the pairs by case, with the paths of each case together."""
    cases: dict[Case, list[str]] = {}
    for case, path in pairs:
        cases.setdefault(case, []).append(path)
    return list(cases.items())

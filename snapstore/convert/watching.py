"""Import the checkpoints of a trainer while it writes them.

In: a folder of a series. Out: each checkpoint, as a snapshot, soon after it is complete. It is complete when nothing in
it has changed between two looks, and it can be opened. A checkpoint of transformers' Trainer also has its
`trainer_state.json`, which the Trainer writes last; DCP, Orbax and Lightning give a name only to what is complete.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..checks import check_name
from ..errors import InvalidInputError, SnapstoreError
from ..repository import Repository
from .checkpoint import read_json, versions
from .hf_folder import IN_SERIES, TRAINER_STATE
from .importing import Imported, import_found
from .sources import Failed, is_numbered, open_source, series_of

#: Between two looks at the folder [s].
LOOK_S = 2.0
#: After so long without a change, a checkpoint that cannot be opened is damaged, and a folder is complete [s].
PATIENCE_S = 30.0

Versions = dict[str, tuple[int, int, int] | None]


def watch(
    repository: Repository, folder: Path, *, run: str, bases: Sequence[str] = (), failed: Failed
) -> Iterator[Imported]:
    """Import the checkpoints in a folder, and all later ones, without end; yield each once it is committed.

    Only those with a step or an epoch in their names are imported: others, such as `last.ckpt`, are written repeatedly.

    Args:
        folder: it may be empty, or missing until the trainer makes it.
        run, bases: see `import_checkpoints`.
        failed: called with the path of a checkpoint that cannot be imported and the error. It is tried again after it
            has changed.

    Raises:
        InvalidInputError: `run` cannot name a run.
        NotFoundError: a base names nothing.
        StorageError: the store failed. Start it again: it goes on with what is missing.
    """
    done: dict[Path, Versions] = {}
    last: dict[Path, tuple[Versions, float]] = {}

    def tell(path: Path, error: Exception) -> None:
        now = _look(path)
        if done.pop(path) == now:  # else the trainer has deleted it, or writes it again
            done[path] = now
            failed(path, error)

    run = check_name("run", run)
    while True:
        ready: dict[Path, str] = {}
        for path, kind in series_of(folder, lambda *_: None).formats.items():
            now, since = _look(path), time.monotonic()
            if not is_numbered(path, kind) or done.get(path) == now:
                continue
            if path not in last or last[path][0] != now:
                last[path] = now, since
            elif is_complete(path, kind, since - last[path][1]):
                done[path] = now
                ready[path] = kind
        try:
            if ready:  # else each look would list the records
                yield from import_found(repository, ready, run=run, bases=bases, failed=tell)
        except (InvalidInputError, OSError) as error:  # of the only one
            tell(next(iter(ready)), error)
        time.sleep(LOOK_S)


def _look(path: Path) -> Versions:
    """Return the versions of the files of a checkpoint; {} if it is deleted meanwhile."""
    try:
        return versions(path)
    except OSError:
        return {}


def is_complete(path: Path, kind: str, quiet_s: float) -> bool:
    """Return whether a checkpoint can be imported, or never will be.

    Args:
        quiet_s: for how long it has not changed [s].
    """
    try:
        if kind == "hf" and IN_SERIES.fullmatch(path.name):
            if not (path / TRAINER_STATE).exists():
                return False
            read_json(path / TRAINER_STATE)
        elif kind == "hf" and quiet_s < PATIENCE_S:  # no file of it tells that it is the last one
            return False
        open_source(path, kind)
    except (SnapstoreError, OSError):
        return quiet_s >= PATIENCE_S and path.exists()
    return True

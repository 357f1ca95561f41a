"""Import checkpoints of other programs: a series becomes a run with steps, deltas and dedup.

In: files and folders, in any order. Out: one snapshot each, saved in the order of their steps, with their dates and
metrics. Each is read tensor by tensor, and file by file beside the weights, so a checkpoint may be larger than memory.
Steps that the run has already are skipped, so an import that was interrupted can be repeated. A fingerprint in the
snapshot tells whether the source of a skipped step is still the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..checks import check_name
from ..errors import CapabilityError, InvalidInputError
from ..format.records import Snapshot
from ..repository import Repository
from ..save.inputs import SaveRequest, is_stream
from ..save.pipeline import save
from ..save.streaming import inputs_of_state
from ..storage import progress
from . import files
from .checkpoint import fingerprint, modified, noted, require_unchanged, size_of, versions
from .lazy_state import inputs_of_lazy, require_bounded_inputs
from .sources import Failed, NumberedSource, find, in_order, open_source


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint that was imported.

    Attributes:
        source: its path.
        snapshot: the snapshot of its step in the repository.
        skipped: whether the run had a snapshot of this step already.
        bytes_read: size of its files, 0 if it was skipped [bytes].
        left_out: names of its files or items that were not imported.
        differs: whether it was skipped although other files were imported as this step. A file whose name has no step,
            such as `last.ckpt`, is skipped beside a source whose name has its step, and does not differ.
        origin: its path, format and step, by which it can be opened again.
    """

    source: str
    snapshot: Snapshot
    skipped: bool
    bytes_read: int
    left_out: list[str]
    differs: bool = False
    origin: NumberedSource | None = None


def import_checkpoints(
    repository: Repository,
    sources: Sequence[str | Path],
    *,
    run: str,
    step: int | None = None,
    bases: Sequence[str] = (),
    format: str | None = None,
    failed: Failed | None = None,
) -> Iterator[Imported]:
    """Import checkpoints as snapshots of one run, in the order of their steps; yield each once it is committed.

    A snapshot has the date of the newest file of its checkpoint, and the metrics that are found: the entries of this
    step in `trainer_state.json`, the score of Lightning's ModelCheckpoint, and numbers in a name such as loss=0.12.

    Args:
        sources: files and folders of checkpoints, and folders that hold a series of them.
        step: the step of the only source. None: a whole number after "step" or at the end of its name, else the step
            that the checkpoint states, else 0 if there is one source.
        bases: references of snapshots of any run to dedup against, such as the model that these checkpoints fine-tune.
        format: one of FORMATS; None: it is found.
        failed: called with the path of a checkpoint that cannot be imported and the error; the others are imported.
            None: the error is raised, as it is if the only source is none.

    Raises:
        InvalidInputError: a source is no checkpoint, is damaged or holds Python objects; two have one step, or one has
            none. Snapshots before that are committed.
        NotFoundError: a base names nothing.
        IntegrityError, StorageError: the run may have a step already, in a snapshot whose record is damaged, gone or
            cannot be read. Snapshots before that are committed.
        StorageError: the store failed.
    """
    run = check_name("run", run)
    formats = find([Path(source) for source in sources], format, failed).formats
    return import_found(repository, formats, run=run, step=step, bases=bases, failed=failed)


def import_found(
    repository: Repository,
    formats: dict[Path, str],
    *,
    run: str,
    step: int | None = None,
    bases: Sequence[str] = (),
    failed: Failed | None = None,
) -> Iterator[Imported]:
    """Import the checkpoints that `find` has found, and nothing in their place; see `import_checkpoints`."""
    run = check_name("run", run)
    if step is not None and len(formats) != 1:
        raise InvalidInputError(f"step {step}: is given for {len(formats)} sources; import them one by one")
    return _import(repository, in_order(formats, step, failed), run, bases, failed)


def _import(
    repository: Repository, ordered: list[NumberedSource], run: str, bases: Sequence[str], failed: Failed | None
) -> Iterator[Imported]:
    view = repository.context.index.refresh(run)
    there = {snapshot.step: snapshot for snapshot in view.snapshots(run)}
    for one in progress.through(ordered, lambda one: size_of(one.path)):
        path, step = one.path, one.step
        if step not in there:
            view.require_known(f"{path}: step {step} of run {run!r}", run, step=step)
        try:
            source = fingerprint(path)
            if (known := there.get(step)) is None:
                found = _save(repository, one, source, run, bases)
            else:
                differs = not one.is_alias and noted(known, "imported").get("source") not in (None, source)
                found = Imported(str(path), known, True, 0, [], differs, one)
        except (InvalidInputError, CapabilityError, OSError) as error:
            if failed is None:
                raise
            failed(path, error)
            continue
        there[step] = found.snapshot
        yield found


def _save(repository: Repository, one: NumberedSource, source: str, run: str, bases: Sequence[str]) -> Imported:
    """Save a checkpoint as a snapshot.

    Args:
        source: its fingerprint.
    """
    path, before = one.path, versions(one.path)
    opened = open_source(path, one.format)
    imported = {"from": path.name, "format": one.format, "source": source, **opened.imported}
    request = SaveRequest(
        run=run,
        step=one.step,
        bases=bases,
        metrics=opened.metrics,
        metadata={"imported": imported, **opened.about},
        created=modified(before),
        before_commit=partial(require_unchanged, path, before),
    )
    request.resolve(repository.context, repository.lineage)
    inputs = inputs_of_lazy(opened.state, repository.context.engines, opened.let_go, opened.bytes_read, str(path))
    size, left_out, opened.state = opened.bytes_read, opened.left_out, None
    snapshot = save(repository.context, repository.lineage, request, [inputs], None)
    return Imported(str(path), snapshot, False, size, left_out, origin=one)


def save_file(repository: Repository, path: Path, **arguments: Any) -> Snapshot:
    """Save the state in a file, which must not change meanwhile.

    Args:
        arguments: as for `Repository.save`.

    Raises:
        InvalidInputError: as `files.read` raises it, the tensors are much larger than the file, or it has changed; the
            others as of `Repository.save`.
        CapabilityError: a tensor that was expanded does not fit into memory.
    """
    context, before = repository.context, versions(path)
    state, about = files.read(path)
    metadata = {"safetensors": about} if about else None
    check = partial(require_unchanged, path, before)
    request = SaveRequest(metadata=metadata, before_commit=check, **arguments)
    request.resolve(context, repository.lineage)
    inputs = inputs_of_state(state, context.engines)
    if not is_stream(state):
        require_bounded_inputs(inputs, path.stat().st_size, str(path))
    return save(context, repository.lineage, request, inputs, None)

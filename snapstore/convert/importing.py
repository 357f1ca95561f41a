"""Import checkpoints of other programs: a series becomes a run with steps, deltas and dedup.

In: files and folders, in any order. Out: one snapshot each, saved in the order of their steps. Each is read tensor by
tensor, and file by file beside the weights, so a checkpoint may be larger than memory. Steps that the run has already
are skipped, so an import that was interrupted can be repeated. A fingerprint in the snapshot tells whether the source
of a skipped step is still the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..checks import check_choice, check_name, check_step
from ..errors import InvalidInputError, out_of_memory
from ..format.records import Snapshot
from ..repository import Repository
from ..save.inputs import SaveRequest, is_stream
from ..save.pipeline import save
from ..save.streaming import inputs_of_state
from ..storage import progress
from ..text import some
from . import files
from .checkpoint import Checkpoint, fingerprint, noted, require_unchanged, size_of, step_in, versions
from .dcp_folder import is_dcp, open_dcp
from .hf_folder import is_hf, open_hf
from .lazy_state import inputs_of_lazy, require_bounded_inputs
from .orbax_folder import is_orbax, open_orbax
from .safetensors_file import laters

#: A number that stands at the end of a name, such as in checkpoint-500, step_500, epoch=3-step=500.ckpt or 500. The
#: end of a decimal number is none: loss=0.35, lr=1e-05.
_NUMBER = re.compile(r"(?:^|[_=]|(?<!\d[eE])-|(?<!\d)\.|(?<=[-_.=])(?:step|iter|epoch))(\d{1,18})$")
#: A number after "step". One with a unit or decimals is none: step10k, step2M, step1e5, step=0.35.
_STEP = re.compile(r"step[-_=]?(\d{1,18})(?!\d|\.\d|[eE][-+]?\d|[kKmMbB](?![A-Za-z0-9]))")


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint that was imported.

    Attributes:
        source: its path.
        snapshot: the snapshot of its step in the repository.
        skipped: whether the run had a snapshot of this step already.
        bytes_read: size of its files, 0 if it was skipped [bytes].
        left_out: names of its files or items that were not imported.
        differs: whether it was skipped although other files were imported as this step.
    """

    source: str
    snapshot: Snapshot
    skipped: bool
    bytes_read: int
    left_out: list[str]
    differs: bool = False


def _open_file(path: Path) -> Checkpoint:
    state, metadata = files.read(path)
    if path.suffix.lower() == files.SAFETENSORS:
        state = dict(laters(path))
    about = {"safetensors": metadata} if metadata else {}
    return Checkpoint(state, path.stat().st_size, step_in(state), about, let_go=files.let_go)


#: By name: whether a path is of the format, and how it is opened.
FORMATS: dict[str, tuple[Callable[[Path], bool], Callable[[Path], Checkpoint]]] = {
    "dcp": (is_dcp, open_dcp),
    "orbax": (is_orbax, open_orbax),
    "hf": (is_hf, open_hf),
    "file": (lambda path: path.is_file() and files.is_known(path), _open_file),
}


def format_of(path: Path) -> str:
    """Return the name of the format of a checkpoint.

    Raises:
        InvalidInputError: it is none that can be imported.
    """
    for name, (fits, _) in FORMATS.items():
        if fits(path):
            return name
    if not path.exists():
        raise InvalidInputError(f"{path}: is missing; name a checkpoint's file or folder")
    if not path.is_dir():
        raise InvalidInputError(f"{path}: expected a folder, or a file named *{', *'.join(files.SUFFIXES)}")
    inside = sorted(child.name for child in path.iterdir() if any(fits(child) for fits, _ in FORMATS.values()))
    if inside:
        raise InvalidInputError(f"{path}: holds checkpoints ({some(inside, 3)}); name them: {path}/*")
    raise InvalidInputError(
        f"{path}: expected a folder of DCP (.metadata), Hugging Face (*.safetensors) or Orbax, found "
        "none of their files"
    )


def import_checkpoints(
    repository: Repository,
    sources: Sequence[str | Path],
    *,
    run: str,
    step: int | None = None,
    bases: Sequence[str] = (),
    format: str | None = None,
) -> Iterator[Imported]:
    """Import checkpoints as snapshots of one run, in the order of their steps; yield each once it is committed.

    Args:
        sources: files and folders of checkpoints.
        step: the step of the only source. None: a whole number after "step" or at the end of its name, else the step
            that the checkpoint states, else 0 if there is one source.
        bases: references of snapshots of any run to dedup against, such as the model that these checkpoints fine-tune.
        format: one of FORMATS; None: `format_of` finds it.

    Raises:
        InvalidInputError: a source is no checkpoint, is damaged or holds Python objects; two have one step, or one has
            none. Snapshots before that are committed.
        NotFoundError: a base names nothing.
        IntegrityError, StorageError: the run may have a step already, in a snapshot whose record is damaged, gone or
            cannot be read. Snapshots before that are committed.
        StorageError: the store failed.
    """
    run = check_name("run", run)
    paths = [Path(source) for source in sources]
    if format is not None:
        check_choice("format", format, tuple(FORMATS))
    if step is not None and len(paths) != 1:
        raise InvalidInputError(f"step {step}: is given for {len(paths)} sources; import them one by one")
    formats = {path: format or format_of(path) for path in paths}
    return _import(repository, _in_order(formats, step), run, bases)


def _import(
    repository: Repository, ordered: list[tuple[int, Path, str]], run: str, bases: Sequence[str]
) -> Iterator[Imported]:
    view = repository.view()
    there = {snapshot.step: snapshot for snapshot in view.snapshots(run)}
    for step, path, kind in progress.through(ordered, lambda source: size_of(source[1])):
        source = fingerprint(path)
        if step in there:
            differs = noted(there[step], "imported").get("source") not in (None, source)
            yield Imported(str(path), there[step], True, 0, [], differs)
            continue
        view.require_known(f"{path}: step {step} of run {run!r}", run, step=step)
        before = versions(path)
        opened = _open(path, kind)
        imported = {"from": path.name, "format": kind, "source": source, **opened.imported}
        about = {"imported": imported, **opened.about}
        check = partial(require_unchanged, path, before)
        request = SaveRequest(run, step, None, bases, None, about, before_commit=check)
        request.resolve(repository.context, repository.lineage)
        inputs = inputs_of_lazy(opened.state, repository.context.engines, opened.let_go, opened.bytes_read, str(path))
        size, left_out, opened.state = opened.bytes_read, opened.left_out, None
        snapshot = save(repository.context, repository.lineage, request, [inputs], None)
        yield Imported(str(path), snapshot, False, size, left_out)


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


def _open(path: Path, kind: str) -> Checkpoint:
    with out_of_memory(f"{path}: open", "free memory; or the file is damaged, and claims too much"):
        return FORMATS[kind][1](path)


def _in_order(formats: dict[Path, str], step: int | None) -> list[tuple[int, Path, str]]:
    """Return (step, path, format) by step.

    Raises:
        InvalidInputError: a checkpoint has no step, or two have the same.
    """
    found: dict[int, tuple[Path, str]] = {}
    for path, kind in formats.items():
        number = check_step(step) if step is not None else _step_of(path, kind)
        if number is None and len(formats) > 1:
            raise InvalidInputError(
                f"{path}: no step found: its name has no whole number after 'step' or at its end; import it "
                "alone, with --step"
            )
        number = number or 0
        if number in found:
            raise InvalidInputError(
                f"{path}: has step {number}, as {found[number][0]} has; import one of them, or each with --step"
            )
        found[number] = path, kind
    return [(number, *found[number]) for number in sorted(found)]


def _step_of(path: Path, kind: str) -> int | None:
    """Return the step of a checkpoint: from its name, unless that may be an epoch, else from its contents."""
    name = path.resolve().name if path.name in ("", ".", "..") else path.name
    name = name[: -len(path.suffix)] if kind == "file" else name.removesuffix(".ckpt")
    match, number = _STEP.search(name), _NUMBER.search(name)
    if match is None and "epoch" not in name:
        match = number
    if match is None:
        step = _open(path, kind).step
        if step is not None:
            return step
    match = match or number
    return int(match[1]) if match else None


def default_run(sources: Sequence[str | Path]) -> str:
    """Return a name for the run: that of the one source, or of the folder that holds a series of checkpoints."""
    path = Path(os.path.realpath(sources[0]))  # Path.resolve raises if a link leads to itself
    name = path.stem if path.is_file() else path.name
    return path.parent.name if len(sources) > 1 or _NUMBER.search(name) else name

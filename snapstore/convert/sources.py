"""The checkpoints that an import takes: what a path is, which of them a folder holds, and the step of each.

In: paths of files and folders. Out: the sources in the order of their steps. A folder that is no checkpoint itself may
hold a series of them, as trainers write it: `step_100.pt`, `checkpoint-100/`, `epoch=1-step=100.ckpt`, `100/`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..checks import check_choice, check_step
from ..errors import CapabilityError, InvalidInputError, out_of_memory
from ..text import some
from . import files
from .checkpoint import Checkpoint, step_in
from .dcp_folder import is_dcp, open_dcp
from .hf_folder import IN_SERIES, is_hf, open_hf
from .logged_metrics import metrics_in_name, metrics_of_lightning
from .orbax_folder import is_orbax, open_orbax
from .safetensors_file import laters

#: A number that stands at the end of a name, such as in checkpoint-500, step_500, epoch=3-step=500.ckpt or 500. The
#: end of a decimal number is none: loss=0.35, lr=1e-05.
_NUMBER = re.compile(r"(?:^|[_=]|(?<!\d[eE])-|(?<!\d)\.|(?<=[-_.=])(?:step|iter|epoch))(\d{1,18})$")
#: A number after "step". One with a unit or decimals is none: step10k, step2M, step1e5, step=0.35.
_STEP = re.compile(r"step[-_=]?(\d{1,18})(?!\d|\.\d|[eE][-+]?\d|[kKmMbB](?![A-Za-z0-9]))")


#: Names that a program gives to what it has not finished: transformers, Orbax, editors, downloads.
_UNFINISHED = re.compile(r"\..*|tmp-.*|.*\.tmp|.*\.part|.*\.orbax-checkpoint-tmp.*")
#: The end of the name of a shard.
_SHARD = re.compile(r"-of-\d+$")
#: Told of a path that cannot be imported, and of the error.
Failed = Callable[[Path, Exception], None]


@dataclass(frozen=True, slots=True)
class NumberedSource:
    """A checkpoint to import.

    Attributes:
        format: a key of FORMATS.
        step: in the run.
        is_alias: whether its name has no step, and that of another source has this step, such as `last.ckpt`.
    """

    path: Path
    format: str
    step: int
    is_alias: bool = False


@dataclass(slots=True)
class Found:
    """The checkpoints among some paths.

    Attributes:
        formats: the format of each path of a checkpoint.
        left_out: names in folders of series that are no checkpoints, or links to others.
    """

    formats: dict[Path, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def _open_file(path: Path) -> Checkpoint:
    state, metadata = files.read(path)
    if path.suffix.lower() == files.SAFETENSORS:
        state = dict(laters(path))
    about = {"safetensors": metadata} if metadata else {}
    metrics = metrics_of_lightning(state)
    return Checkpoint(state, path.stat().st_size, step_in(state), about, let_go=files.let_go, metrics=metrics)


#: By name: whether a path is of the format, and how it is opened.
FORMATS: dict[str, tuple[Callable[[Path], bool], Callable[[Path], Checkpoint]]] = {
    "dcp": (is_dcp, open_dcp),
    "orbax": (is_orbax, open_orbax),
    "hf": (is_hf, open_hf),
    "file": (lambda path: path.is_file() and files.is_known(path), _open_file),
}


def fitting(path: Path) -> str | None:
    """Return the name of the format of a checkpoint; None: it is none."""
    return next((name for name, (fits, _) in FORMATS.items() if fits(path)), None)


def format_of(path: Path) -> str:
    """Return the name of the format of a checkpoint.

    Raises:
        InvalidInputError: it is none that can be imported.
    """
    if (name := fitting(path)) is not None:
        return name
    if not path.exists():
        raise InvalidInputError(f"{path}: is missing; name a checkpoint's file or folder")
    if not path.is_dir():
        raise InvalidInputError(f"{path}: expected a folder, or a file named *{', *'.join(files.SUFFIXES)}")
    inside = sorted(child.name for child in path.iterdir() if fitting(child) is not None)
    if inside:
        raise InvalidInputError(f"{path}: holds checkpoints ({some(inside, 3)}); name them: {path}/*")
    raise InvalidInputError(
        f"{path}: expected a folder of DCP (.metadata), Hugging Face (*.safetensors) or Orbax, or of their "
        f"checkpoints, found none of their files{_deeper(path)}"
    )


def _deeper(path: Path) -> str:
    """Return a hint to a folder of checkpoints further down, such as `lightning_logs/version_0/checkpoints`."""
    folders = [path]
    with suppress(OSError, InvalidInputError):
        for _ in range(3):
            folders = [child for folder in folders for child in sorted(folder.iterdir()) if child.is_dir()][:100]
            for folder in folders:
                if series_in(folder).formats:
                    return f"; import {folder}, which holds checkpoints"
    return ""


def series_in(folder: Path, failed: Failed | None = None) -> Found:
    """Return the checkpoints in a folder.

    Raises:
        InvalidInputError: a checkpoint of the Trainer has no weights that can be imported.
        OSError: a folder in it cannot be read. With `failed` these errors are told.
    """
    found = Found()
    children = sorted(folder.iterdir()) if folder.is_dir() else []
    names = {child.name for child in children}
    for child in children:
        try:
            if _UNFINISHED.fullmatch(child.name):
                found.left_out += [str(child)] if fitting(child) is not None else []
                continue
            is_checkpoint = IN_SERIES.fullmatch(child.name) is not None and child.is_dir()
            kind = format_of(child) if is_checkpoint else fitting(child)
        except (InvalidInputError, OSError) as error:
            _fail(failed, child, error)
            continue
        home = Path(os.path.realpath(child))
        is_link = child.is_symlink() and home.parent == Path(os.path.realpath(folder)) and home.name in names
        if kind is None or is_link:
            found.left_out.append(str(child))
        else:
            found.formats[child] = kind
    return found


def find(paths: Sequence[Path], format: str | None = None, failed: Failed | None = None) -> Found:
    """Return the checkpoints that some paths are or hold.

    Args:
        format: of all of them; None: it is found. With it a path is a checkpoint, and no folder of a series.
        failed: told of what cannot be imported; None: it is an error. That of the only path is always one.

    Raises:
        InvalidInputError: a path is no checkpoint, and holds none.
        OSError: it cannot be read.
    """
    if format is not None:
        check_choice("format", format, tuple(FORMATS))
    found = Found()
    for path in paths:
        try:
            series = Found() if format is not None else series_of(path, failed)
            found.formats |= series.formats or {path: format or format_of(path)}
            found.left_out += series.left_out
        except (InvalidInputError, OSError) as error:
            _fail(failed if len(paths) > 1 else None, path, error)
    return found


def series_of(path: Path, failed: Failed | None) -> Found:
    """Return the checkpoints in a folder; none if it is one itself.

    The output folder of transformers' Trainer may hold a model beside its checkpoints: the model is left out. Several
    files of safetensors are one model, unless each has a step, and there is no config. Without a config, several files
    with "step" in their names are a series too, whatever model lies beside them.

    Raises:
        InvalidInputError, OSError: see `series_in`.
    """
    kind = fitting(path)
    if kind not in (None, "hf"):
        return Found()
    series = series_in(path, failed)
    numbered = {child: one for child, one in series.formats.items() if is_numbered(child, one)}
    of_trainer = {child: one for child, one in numbered.items() if one == "hf" and IN_SERIES.fullmatch(child.name)}
    taken = of_trainer
    if kind is None:
        taken = numbered if of_trainer else series.formats
    elif not of_trainer and not (path / "config.json").exists():
        weights = {child for child in series.formats if child.suffix == files.SAFETENSORS}
        is_series = len(weights) > 1 and weights <= numbered.keys()
        steps = {child: one for child, one in numbered.items() if one == "file" and _STEP.search(child.stem)}
        taken = numbered if is_series and not any(_SHARD.search(child.stem) for child in weights) else {}
        taken = taken or (steps if len(steps) > 1 else {})
    left_out = [str(child) for child in series.formats if child not in taken]
    return Found(taken, sorted(series.left_out + left_out)) if taken else Found()


def open_source(path: Path, kind: str) -> Checkpoint:
    """Open a checkpoint; it has the metrics in its name too.

    Raises:
        InvalidInputError: it is damaged, or holds Python objects.
        CapabilityError: it does not fit into memory, or a package is missing.
    """
    with out_of_memory(f"{path}: open", "free memory; or the file is damaged, and claims too much"):
        opened = FORMATS[kind][1](path)
    opened.metrics = metrics_in_name(_name(path, kind)) | opened.metrics
    return opened


def in_order(formats: dict[Path, str], step: int | None, failed: Failed | None) -> list[NumberedSource]:
    """Return the sources by step; one with the step of another is last.

    Args:
        step: of the only one; None: as its name or its contents say.

    Raises:
        InvalidInputError: a checkpoint has no step, or two have the same; with `failed` it is told, and left out.
    """
    found: dict[int, Path] = {}
    sources: list[NumberedSource] = []
    named = {path: _step_in_name(path, kind) for path, kind in formats.items()}
    for path in sorted(formats, key=lambda path: named[path] is None):  # those with a name first; else in their order
        try:
            number = named[path] if step is None else check_step(step)
            if number is None:
                number = _step_inside(path, formats[path])
            if number is None and len(formats) > 1:
                raise InvalidInputError(
                    f"{path}: no step found: its name has no whole number after 'step' or at its end; import it "
                    "alone, with --step"
                )
            number = number or 0
            is_alias = number in found and named[path] is None and named[found[number]] is not None
            if number in found and not is_alias:
                raise InvalidInputError(
                    f"{path}: has step {number}, as {found[number]} has; import one of them, or each with --step"
                )
        except (InvalidInputError, CapabilityError, OSError) as error:
            _fail(failed, path, error)
            continue
        found.setdefault(number, path)
        sources.append(NumberedSource(path, formats[path], number, is_alias))
    return sorted(sources, key=lambda source: (source.step, source.is_alias))


def _fail(failed: Failed | None, path: Path, error: Exception) -> None:
    if failed is None:
        raise error
    failed(path, error)


def _name(path: Path, kind: str) -> str:
    """Return the name of a checkpoint without the ending of a file."""
    name = path.resolve().name if path.name in ("", ".", "..") else path.name
    return name[: -len(path.suffix)] if kind == "file" else name.removesuffix(".ckpt")


def _step_in_name(path: Path, kind: str) -> int | None:
    """Return the step in the name of a checkpoint; None: there is none, or it may be an epoch."""
    name = _name(path, kind)
    match = _STEP.search(name)
    if match is None and "epoch" not in name:
        match = _NUMBER.search(name)
    return int(match[1]) if match else None


def _step_inside(path: Path, kind: str) -> int | None:
    """Return the step in the contents of a checkpoint, or else the number in its name."""
    step = open_source(path, kind).step
    if step is not None:
        return step
    match = _NUMBER.search(_name(path, kind))
    return int(match[1]) if match else None


def is_numbered(path: Path, kind: str) -> bool:
    """Return whether the name of a checkpoint has its step or epoch, so that another one gets another name."""
    name = _name(path, kind)
    return bool(_STEP.search(name) or _NUMBER.search(name))


def default_run(sources: list[Path]) -> str:
    """Return a name for the run: that of the one source, or of the folder that holds a series of checkpoints."""
    path = Path(os.path.realpath(sources[0]))  # Path.resolve raises if a link leads to itself
    name = path.stem if path.is_file() else path.name
    return path.parent.name if len(sources) > 1 or (_NUMBER.search(name) and fitting(path)) else name

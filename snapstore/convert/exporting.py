"""Export a snapshot for other programs: a folder of Hugging Face, a file of safetensors or torch, or a folder of DCP.

In: a reference, and how the tensors are named. Out: a file or folder that appears under its name when it is whole and
on disk. Tensors are read one by one, so a snapshot may be larger than memory.
"""

from __future__ import annotations

import glob
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from ..checks import check_choice
from ..errors import AlreadyExistsError, InvalidInputError, OutputError
from ..repository import Repository
from ..restore.sources import SHARED_ONLY, AsRank, PerRankOption
from ..restore.streaming import TensorReader
from ..snapshots import newest_whole_named
from ..state.fill.fit import Fit
from ..text import quoted, some
from . import files, hf_adapter, hf_export
from .dcp_folder import METADATA
from .files import Exported

To = Literal["hf", "safetensors", "torch", "dcp"]
#: `torch.compile` puts this before the names of a module's parameters, at any depth.
COMPILED = "_orig_mod."
#: Prefixes that "hf" takes off: those of torch.compile and of DistributedDataParallel.
WRAPPERS = (COMPILED, "module.")
DEFAULT_SHARD_BYTES = 5 * 10**9
#: Files of the weights in an older export, which may have had other shards or another format.
_WEIGHTS = re.compile(
    r"(diffusion_pytorch_)?model(-\d{5,}-of-\d{5,})?\.safetensors|"
    r"(diffusion_pytorch_)?model\.safetensors\.index\.json|adapter_model\.safetensors|\.metadata|__0_0\.distcp"
)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How a snapshot is exported.

    Attributes:
        part: the top-level key whose value is exported. None: for "hf" `model`, or else `state_dict`, if its value is a
            dict; otherwise the whole state.
        strip: prefixes of names to take off, such as "module.", in this order, each once; "_orig_mod." at any depth.
            "hf" always takes off these two.
        max_shard_bytes: the most bytes of one file of "hf", unless one tensor is larger.
        config: a folder whose config and tokenizer files "hf" copies; None: the imported ones are written.
        tensors_only: leave out values that "hf" and "safetensors" cannot hold.
        force: replace an output that exists.
        per_rank: which rank's own values (`PerRank`, `RngState`) are exported; see `Repository.restore`. With None,
            "torch" and "dcp" hold the values of all ranks as a dict by rank; "hf" and "safetensors" leave them out, as
            values that they cannot hold.
    """

    part: str | None = None
    strip: Sequence[str] = ()
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    config: str | Path | None = None
    tensors_only: bool = False
    force: bool = False
    per_rank: PerRankOption = None


def export_snapshot(
    repository: Repository, ref: str, output: str | Path, *, to: To, options: ExportOptions | None = None
) -> Exported:
    """Write a snapshot in the format of another program.

    Args:
        output: path of the file; for "hf" and "dcp" of the folder.
        to: "hf": a folder that `from_pretrained` loads; "safetensors": one file; "torch": a file that
            `torch.load(weights_only=True)` loads; "dcp": a folder that `torch.distributed.checkpoint.load` reads.

    Raises:
        InvalidInputError: an argument is invalid, the format cannot hold the state, two tensors get one name, no name
            has a prefix to strip, or `per_rank` names no rank that saved. Nothing was written.
        AlreadyExistsError: the output exists, and `force` is not set or it is not an export.
        NotFoundError: the reference or the part names nothing.
        IntegrityError: the snapshot is damaged; nothing was written.
        CapabilityError: a library is not installed.
        OutputError: the output cannot be written.
    """
    check_choice("to", to, get_args(To))
    options, path = options or ExportOptions(), Path(output)
    if isinstance(options.strip, str):
        raise InvalidInputError(
            f"strip {quoted(options.strip)}: expected a sequence of prefixes, such as [{quoted(options.strip)}]"
        )
    as_rank = rank_for(to, options.per_rank)
    if to in ("torch", "safetensors") and files.is_known(path) and files.format_of(path) != to:
        raise InvalidInputError(
            f"{path}: is the name of a file of {files.format_of(path)}, but the export is to {to}; choose another name"
        )
    files.check_new(path, force=options.force, is_folder=to in ("hf", "dcp"))
    snapshot = repository.snapshot(ref)
    ref = f"id:{snapshot.id}"
    with newest_whole_named(repository.context, ref):
        part = options.part
        if to == "hf" and part is None:
            part = _model_part(TensorReader(repository.context, ref))
        strip = (*options.strip, *(WRAPPERS if to == "hf" else ()))
        found_prefixes: set[str] = set()
        fit = Fit(None, part, partial(stripped, prefixes=strip, found=found_prefixes) if strip else None)
        reader = TensorReader(repository.context, ref, keys=fit, as_rank=as_rank)
        if lacking := [prefix for prefix in options.strip if prefix not in found_prefixes]:
            names = some([name for name, _ in reader.specs], 3) or "none"
            raise InvalidInputError(f"strip: no name begins with {lacking[0]!r}; the names are {names}")
        if to == "hf":
            exported = _write_hf(repository, reader, path, options, fit, as_rank)
        else:
            exported = _write(reader, path, to, options)
    exported.part = part
    return exported


def rank_for(to: To, per_rank: PerRankOption) -> AsRank:
    """Return whose own values an export in a format has.

    Raises:
        InvalidInputError: `per_rank` is invalid.
    """
    return SHARED_ONLY if per_rank in (None, "same") and to in ("hf", "safetensors") else AsRank(per_rank)


def _model_part(reader: TensorReader) -> str | None:
    """Return the top-level key of the model in a state: `model`, else `state_dict`, if its value is a dict; or None."""
    tops = {spec.path[0] for _, spec in reader.specs if len(spec.path) > 1}
    return next((name for name in ("model", "state_dict") if name in tops), None)


def stripped(name: str, prefixes: Sequence[str], found: set[str]) -> str:
    """Return a name without prefixes, each taken off once; "_orig_mod." at any depth.

    Args:
        found: receives the prefixes that the name had.
    """
    for prefix in prefixes:
        before = name
        if prefix == COMPILED:
            *parts, last = name.split(".")
            name = ".".join([*(part for part in parts if part != COMPILED[:-1]), last])
        else:
            name = name.removeprefix(prefix)
        if name != before:
            found.add(prefix)
    return name


def _write(reader: TensorReader, path: Path, to: To, options: ExportOptions) -> Exported:
    snapshot, force = reader.snapshot, options.force
    if to == "torch":
        return files.write_torch(path, reader, force=force)
    if to == "safetensors":
        return files.write_safetensors(path, reader, force=force, tensors_only=options.tensors_only)
    from .dcp_export import write

    publish_folder(path, lambda temp: write(temp, reader), force=force)
    names = sorted(child.name for child in path.iterdir())
    return Exported(snapshot, names, len(reader.specs), _size_of(path, names), reader.of_ranks, reader.by_rank)


def _write_hf(
    repository: Repository, reader: TensorReader, path: Path, options: ExportOptions, fit: Fit, as_rank: AsRank
) -> Exported:
    """Write a folder of Hugging Face; of a state with an adapter of PEFT, only the adapter."""
    snapshot, specs = reader.snapshot, reader.specs
    beside = hf_export.other_files(repository, snapshot, options.config)
    if hf_adapter.is_adapted([name for name, _ in specs]) or (options.config and hf_export.is_adapter(beside)):
        beside, config = hf_export.of_adapter(beside, hf_adapter.config_of_trainer(repository, snapshot))
        new = hf_adapter.names_in_file(snapshot.ref, specs, config)
        keys = [glob.escape(name) for name in new.values()]
        old = fit.rename if callable(fit.rename) else str
        reader = TensorReader(
            repository.context,
            f"id:{snapshot.id}",
            keys=Fit(keys, fit.part, lambda name: new.get(old(name), old(name))),
            as_rank=as_rank,
        )
    plan = hf_export.plan(path, reader, beside, options.max_shard_bytes, tensors_only=options.tensors_only)
    about = {"format": "pt", **files.safetensors_metadata(snapshot)}
    publish_folder(path, lambda temp: hf_export.write(temp, reader, plan, beside, about), force=options.force)
    names, tensors = plan.files(beside), sum(map(len, plan.shards.values()))
    return Exported(snapshot, names, tensors, _size_of(path, names), plan.dropped, tied=plan.tied)


def _size_of(folder: Path, names: Sequence[str]) -> int:
    return sum((folder / name).stat().st_size for name in names)


def publish_folder(path: Path, fill: Callable[[Path], None], *, force: bool) -> None:
    """Fill a temporary folder beside `path`, make it durable, and rename it.

    Raises:
        AlreadyExistsError: the folder exists, and `force` is not set or it is no export.
        OutputError: it cannot be written.
    """
    temp = path.with_name(f".snapstore-{secrets.token_hex(8)}.tmp")
    old = temp.with_suffix(".old")
    try:
        temp.mkdir()
        fill(temp)
        for child in [*temp.rglob("*"), temp]:
            files.fsync(child)
        if os.path.lexists(path):
            if not force:
                raise files.exists(path)
            _require_export(path, temp)
            path.rename(old)
        temp.rename(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}; nothing was left behind") from error
    finally:
        if old.exists() and not os.path.lexists(path):  # an error, or a signal, between the two renames
            old.rename(path)
        for rest in (temp, old):
            shutil.rmtree(rest, ignore_errors=True)


def _require_export(path: Path, new: Path) -> None:
    """Check that a folder to be replaced is an export, so that only files of an export are deleted.

    Raises:
        AlreadyExistsError: it is not an export, or has another file.
    """
    whole = path.is_dir() and not path.is_symlink()
    if not whole or (any(path.iterdir()) and not (path / METADATA).exists() and not any(path.glob("*.safetensors"))):
        raise AlreadyExistsError(
            f"{path}: is not an export (*.safetensors or {METADATA}), so --force does not delete it; remove "
            "it, or choose another name"
        )
    for old in sorted(path.rglob("*")):
        name = old.relative_to(path)
        if not (new / name).exists() and not _WEIGHTS.fullmatch(name.as_posix()):
            raise AlreadyExistsError(
                f"{path}: has {name}, which this export does not write, so --force does not delete it; move it away, "
                "or choose another name"
            )

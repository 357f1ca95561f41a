"""The verbs init, save and restore: create a repository, and move states in and out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import Place, Ref, Shell, UsageError, verb
from .output import line, note, print_json, snapshot_json, spinner

if TYPE_CHECKING:
    from ..format.records import Snapshot
    from ..repository import Repository
    from .files import Written


@verb()
def init(
    shell: Shell,
    place: Place = None,
    chunk_bytes: Annotated[
        int | None, typer.Option("--chunk-bytes", metavar="N", help="The unit of dedup; 1 MiB by default.")
    ] = None,
) -> None:
    """Create a repository."""
    from ..format.chunking import DEFAULT_CHUNK_BYTES
    from ..repository import Repository

    size = DEFAULT_CHUNK_BYTES if chunk_bytes is None else chunk_bytes
    with Repository.create(shell.need_url(place), chunk_bytes=size) as repository:
        config = repository.config
        if shell.as_json:
            columns = {name: getattr(config, name) for name in ("uuid", "version", "chunk_bytes")}
            print_json({"url": repository.url, **columns})
        else:
            line(f"created a repository at {repository.url}")


@verb()
def save(
    shell: Shell,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .pt, .pth, .bin or .safetensors file.")],
    run: Annotated[str, typer.Option("--run", metavar="R", help="The run of the snapshot.")],
    step: Annotated[int, typer.Option("--step", metavar="N", help="The step of the snapshot.")],
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="T", help="A tag; may be repeated.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME=VALUE", help="A metric; may be repeated.")
    ] = None,
    parent: Annotated[
        str | None, typer.Option("--parent", metavar="REF", help="Default: the newest of the run.")
    ] = None,
    base: Annotated[
        list[str] | None,
        typer.Option("--base", metavar="REF", help="Also dedup against this; may be repeated."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Store no deltas.")] = False,
) -> None:
    """Save the state in a file as a snapshot.

    A file that holds Python objects is refused, because it could run any code.
    """
    from ..storage.urls import expand_home

    metrics, file = _metrics(metric or []), Path(expand_home(file))
    with shell.repository() as repository:
        from . import files

        with spinner(f"saving {file}"):
            state, about = files.read(file)
            snapshot = repository.save(
                state,
                run=run,
                step=step,
                parent=parent,
                bases=base or [],
                metrics=metrics,
                metadata={"safetensors": about} if about else None,
                tags=tag or [],
                full=full,
                ranks=False,
            )
    if shell.as_json:
        print_json({"snapshot": snapshot_json(snapshot)})
        return
    from ..text import human_bytes

    line(
        f"saved {snapshot.ref} as id:{snapshot.id[:12]}: {human_bytes(snapshot.logical_bytes)} of state, "
        f"{human_bytes(snapshot.stored_bytes)} stored, {snapshot.new_chunks} of {snapshot.chunks} chunks new"
    )


def _metrics(given: list[str]) -> dict[str, float]:
    """Parse a `NAME=VALUE` each."""
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            name = ""
        if not name or name in found:
            raise UsageError(f"--metric {text!r}: expected NAME=NUMBER, each name once, such as val_loss=2.31")
        found[name] = number
    return found


@verb()
def restore(
    shell: Shell,
    ref: Ref,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="A .pt or .safetensors file.")],
    keys: Annotated[
        list[str] | None, typer.Option("--keys", metavar="GLOB", help="Only these paths ('model.*'); may be repeated.")
    ] = None,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out values that .safetensors cannot hold.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Verify the state of a snapshot and write it to a file."""
    from ..storage.urls import expand_home

    output = Path(expand_home(output))
    with shell.repository() as repository:
        from . import files

        files.check_output(output, force=force)
        snapshot = repository.snapshot(ref)
        with spinner(f"restoring {snapshot.ref}"):
            # By id: the reference may name another snapshot now.
            written = _write(repository, snapshot, output, keys or None, force=force, only=tensors_only)
    size = output.stat().st_size
    if shell.as_json:
        counts = {"tensors": written.tensors, "bytes": size, "dropped": written.dropped}
        changed = [value._asdict() for value in written.changed]
        print_json({"snapshot": snapshot_json(snapshot), "file": str(output), **counts, "changed": changed})
        return
    from ..text import counted, human_bytes, some
    from .safetensors_file import LEAVES_NAMED

    what = f"{counted(written.tensors, 'tensor')}, {human_bytes(size)}"
    line(f"restored {snapshot.ref} (id:{snapshot.id[:12]}) to {output}: {what}")
    if written.dropped:
        note(f"left out {counted(len(written.dropped), 'value')}: the file holds tensors only")
    if written.changed:
        changes = [f"{value.path} ({value.was} as {value.written_as})" for value in written.changed]
        note(f"written as another type for torch.load(weights_only=True): {some(changes, LEAVES_NAMED)}")


def _write(
    repository: Repository, snapshot: Snapshot, output: Path, keys: list[str] | None, *, force: bool, only: bool
) -> Written:
    """Write a snapshot to a file; return the contents of the file."""
    from ..restore.streaming import TensorReader
    from . import files

    ref = f"id:{snapshot.id}"
    if output.suffix.lower() != files.SAFETENSORS:
        return files.write(output, repository.restore(ref, keys=keys), force=force)
    reader = TensorReader(repository.context, ref, keys=keys)
    about = _safetensors_metadata(snapshot)
    return files.write_safetensors(output, reader, metadata=about, force=force, tensors_only=only)


def _safetensors_metadata(snapshot: Snapshot) -> dict[str, str]:
    """Return the metadata of the .safetensors file that a snapshot was saved from."""
    metadata: Any = snapshot.metadata
    about = metadata.get("safetensors") if isinstance(metadata, dict) else None
    if not isinstance(about, dict):
        return {}
    return {name: value for name, value in about.items() if isinstance(name, str) and isinstance(value, str)}

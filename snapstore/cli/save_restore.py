"""init, save, restore: states in and out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import Ref, Shell, UsageError, verb
from .output import line, note, print_json, snapshot_json, spinner

if TYPE_CHECKING:
    from ..format.records import Snapshot

Place = Annotated[str | None, typer.Argument(metavar="[URL]", help="Where; else --repo or SNAPSTORE_REPO.")]


@verb()
def init(
    shell: Shell,
    place: Place = None,
    chunk_bytes: Annotated[
        int | None, typer.Option("--chunk-bytes", metavar="N", help="The unit of dedup; 1 MiB by default.")
    ] = None,
) -> None:
    """Make a repository."""
    from ..format.chunking import DEFAULT_CHUNK_BYTES
    from ..repository import Repository

    size = DEFAULT_CHUNK_BYTES if chunk_bytes is None else chunk_bytes
    with Repository.create(shell.need_url(place), chunk_bytes=size) as repository:
        config = repository.config
        if shell.as_json:
            print_json({
                "url": repository.url, "uuid": config.uuid, "version": config.version,
                "chunk_bytes": config.chunk_bytes,
            })  # fmt: skip
        else:
            line(f"made a repository at {repository.url}")


@verb()
def save(
    shell: Shell,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .pt, .pth, .bin or .safetensors file.")],
    run: Annotated[str, typer.Option("--run", metavar="R", help="The run that it belongs to.")],
    step: Annotated[int, typer.Option("--step", metavar="N", help="Its step in the run.")],
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="T", help="A tag; may be repeated.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME=VALUE", help="A metric; may be repeated.")
    ] = None,
    parent: Annotated[str | None, typer.Option("--parent", metavar="REF", help="What it goes on from.")] = None,
    base: Annotated[
        list[str] | None, typer.Option("--base", metavar="REF", help="Dedup against this too; may be repeated.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Store no deltas.")] = False,
) -> None:
    """Save the state in a file as a snapshot.

    Files that hold Python objects are refused, for these could run any code.
    """
    metrics = _metrics(metric or [])
    with shell.repository() as repository:
        from . import files

        with spinner(f"saving {file}"):
            state, about = files.read(file)
            snapshot = repository.save(
                state, run=run, step=step, parent=parent, bases=base or [], metrics=metrics,
                metadata={"safetensors": about} if about else None, tags=tag or [], full=full, ranks=False,
            )  # fmt: skip
    if shell.as_json:
        print_json({"snapshot": snapshot_json(snapshot)})
        return
    from ..text import human_bytes

    line(
        f"saved {snapshot.ref} as id:{snapshot.id[:12]}: {human_bytes(snapshot.logical_bytes)} of state, "
        f"{human_bytes(snapshot.stored_bytes)} stored, {snapshot.new_chunks} of {snapshot.chunks} chunks new"
    )


def _metrics(given: list[str]) -> dict[str, float]:
    """`NAME=VALUE` each."""
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
        bool, typer.Option("--tensors-only", help="Leave out what .safetensors cannot hold.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a snapshot's state to a file, verified."""
    with shell.repository() as repository:
        from . import files

        files.check_output(output, force=force)
        snapshot = repository.snapshot(ref)
        with spinner(f"restoring {snapshot.ref}"):
            # By id: the reference may name another snapshot by now.
            state = repository.restore(f"id:{snapshot.id}", keys=keys or None)
            tensors, dropped = files.write(
                output, state, metadata=_about(snapshot), force=force, tensors_only=tensors_only
            )
    size = output.stat().st_size
    if shell.as_json:
        print_json({
            "snapshot": snapshot_json(snapshot), "file": str(output), "tensors": tensors, "bytes": size,
            "dropped": dropped,
        })  # fmt: skip
        return
    from ..text import human_bytes

    line(f"restored {snapshot.ref} (id:{snapshot.id[:12]}) to {output}: {tensors} tensors, {human_bytes(size)}")
    if dropped:
        note(f"left out {len(dropped)} values that are no tensors")


def _about(snapshot: Snapshot) -> dict[str, str]:
    """The metadata of the .safetensors file that a snapshot was saved from."""
    metadata: Any = snapshot.metadata
    about = metadata.get("safetensors") if isinstance(metadata, dict) else None
    if not isinstance(about, dict):
        return {}
    return {name: value for name, value in about.items() if isinstance(name, str) and isinstance(value, str)}

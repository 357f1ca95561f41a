"""The verbs import and export: move states between a repository and the checkpoints of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..text import counted, human_bytes, some
from .app import PARTIAL, PerRank, Ref, Shell, UsageError, per_rank_of, size_of, verb
from .output import NAMED, fields_json, line, note, note_changes, print_json, snapshot_json, spinner

if TYPE_CHECKING:
    from ..convert import Exported, Imported

#: The options of `export` that have no effect in some formats.
WITHOUT_EFFECT = {
    "--config": ("safetensors", "torch", "dcp"),
    "--max-shard-size": ("safetensors", "torch", "dcp"),
    "--tensors-only": ("torch", "dcp"),
}


@verb("snapstore import checkpoints/step_*.pt --run exp")
def import_(
    shell: Shell,
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SRC...", help="Checkpoints: files, or folders."),
    ],
    run: Annotated[
        str | None, typer.Option("--run", metavar="R", help="The run; default: the name of the folder.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="The step, if there is one SRC.")] = None,
    base: Annotated[
        list[str] | None, typer.Option("--base", metavar="REF", help="Also dedup against REF; may be repeated.")
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", metavar="FORMAT", help="dcp, hf, orbax or file; default: detected.")
    ] = None,
) -> int | None:
    """Import checkpoints of other programs; a series becomes the steps of a run.

    Files that hold Python objects are refused, because they could run any code. Steps that the run has are skipped.
    """
    from ..storage.urls import expand_home

    if not all(sources):  # an unset variable of a script; as a path it would be the current folder
        raise UsageError("SRC: expected the path of a checkpoint, got an empty one")
    paths = [Path(expand_home(source)) for source in sources]
    with shell.repository() as repository:
        from ..convert import import_checkpoints
        from ..convert.importing import default_run

        found: list[Imported] = []
        run = default_run(paths) if run is None else run
        with spinner(f"importing {len(paths)} into {run}"):
            for one in import_checkpoints(repository, paths, run=run, step=step, bases=base or [], format=format):
                found.append(one)
                if not shell.as_json:
                    _print_imported(one)
                _warn_if_other(one)
    taken = [one for one in found if not one.skipped]
    read, stored = (sum(values) for values in ([o.bytes_read for o in taken], [o.snapshot.stored_bytes for o in taken]))
    if shell.as_json:
        columns = [
            {
                "source": one.source,
                "snapshot": snapshot_json(one.snapshot),
                "skipped": one.skipped,
                "bytes": one.bytes_read,
                "left_out": one.left_out,
                "differs": one.differs,
            }
            for one in found
        ]
        print_json({"imported": columns, "bytes": read, "stored_bytes": stored})
    elif taken:
        line(
            f"imported {counted(len(taken), 'checkpoint')} into {run}: {human_bytes(read)} in, {human_bytes(stored)} "
            f"stored, {read / max(stored, 1):.2f} times smaller"
        )
    return PARTIAL if any(one.differs for one in found) else None


def _warn_if_other(one: Imported) -> None:
    if one.differs:
        there = f"{one.snapshot.ref} (id:{one.snapshot.id[:12]})"
        note(
            f"snapstore: warning: {one.source}: its files are not those of {there}, and were not imported; import them "
            "with another --run or --step"
        )


def _print_imported(one: Imported) -> None:
    if one.skipped:
        line(f"{one.source}: skipped, {one.snapshot.ref} is there (id:{one.snapshot.id[:12]})")
        return
    stored = human_bytes(one.snapshot.stored_bytes)
    line(
        f"{one.source}: {one.snapshot.ref} (id:{one.snapshot.id[:12]}), {human_bytes(one.bytes_read)}, {stored} stored"
    )
    if one.left_out:
        note(f"{one.source}: left out {counted(len(one.left_out), 'file')}: {some(one.left_out, NAMED)}")


@verb("snapstore export exp@latest --to safetensors -o model.safetensors")
def export(
    shell: Shell,
    ref: Ref,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="hf, safetensors, torch or dcp.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="The file; of hf and dcp, the folder.")],
    part: Annotated[
        str | None, typer.Option("--part", "--root", metavar="NAME", help="Only the value of this top-level key.")
    ] = None,
    strip: Annotated[
        list[str] | None, typer.Option("--strip", metavar="PREFIX", help="Remove it from names; may be repeated.")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", metavar="SIZE", help="Limit for one file of hf; default: 5G.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="DIR", help="Copy config or adapter_config, and tokenizer, from here."),
    ] = None,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out values that the format cannot hold.")
    ] = False,
    per_rank: PerRank = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")] = False,
) -> None:
    """Verify the state of a snapshot and write it in the format of another program."""
    from ..storage.urls import expand_home

    if config == "":  # an unset variable of a script; as a path it would be the current folder
        raise UsageError("--config: expected a folder, got an empty name")
    output = Path(expand_home(output))
    given = {"--config": config, "--max-shard-size": max_shard_size, "--tensors-only": tensors_only or None}
    for option, value in given.items():
        if value is not None and to in WITHOUT_EFFECT[option]:
            raise UsageError(f"{option}: has no effect with --to {to}")
    shard_bytes = size_of("5G" if max_shard_size is None else max_shard_size, "--max-shard-size")
    with shell.repository() as repository:
        from ..convert import ExportOptions, export_snapshot

        options = ExportOptions(
            part=part,
            strip=strip or (),
            max_shard_bytes=shard_bytes,
            config=None if config is None else Path(expand_home(config)),
            tensors_only=tensors_only,
            force=force,
            per_rank=per_rank_of(per_rank),
        )
        with spinner(f"exporting {ref}"):
            exported = export_snapshot(repository, ref, output, to=to, options=options)  # type: ignore[arg-type]
    document: dict[str, Any] = {"snapshot": snapshot_json(exported.snapshot), "output": str(output), "to": to}
    document |= fields_json(exported, "files", "tensors", "bytes", "dropped", "by_rank", "tied", "part")
    document["changed"] = [value._asdict() for value in exported.changed]
    shell.show(document, _print_exported, exported, output, to)


def _print_exported(exported: Exported, output: Path, to: str) -> None:
    snapshot = exported.snapshot
    what = f"{counted(exported.tensors, 'tensor')} in {counted(len(exported.files), 'file')}"
    line(f"exported {snapshot.ref} (id:{snapshot.id[:12]}) to {output}: {what}, {human_bytes(exported.bytes)}")
    if exported.tied:
        note(f"not written, because they are tied to others: {some(exported.tied, NAMED)}")
    note_changes(exported, to)
    if "adapter_config.json" in exported.files and "config.json" not in exported.files:
        note(f"an adapter of PEFT, without its base model: PeftModel.from_pretrained(base, {str(output)!r})")
    elif to == "hf" and "config.json" not in exported.files:
        note("no config.json: from_pretrained needs one; export with --config DIR, such as the base model's folder")

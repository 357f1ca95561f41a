"""The verbs import and export: move states between a repository and the checkpoints of other programs."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CapabilityError, InvalidInputError
from ..text import counted, human_bytes, some
from .app import ERROR, PARTIAL, PerRank, Ref, Shell, UsageError, per_rank_of, size_of, verb
from .output import NAMED, fields_json, line, note, note_changes, print_json, snapshot_json, spinner, writing

if TYPE_CHECKING:
    from ..convert import Exported, Imported
    from ..repository import Repository

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
        typer.Argument(metavar="SRC...", help="Checkpoints: files, or folders; or folders that hold them."),
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
    verify: Annotated[
        bool, typer.Option("--verify", help="Then read each SRC again, and compare it with its snapshot.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on with the checkpoints that a trainer writes; Ctrl-C ends.")
    ] = False,
) -> int | None:
    """Import checkpoints of other programs; a series becomes the steps of a run.

    The repository is made if there is none. Steps that the run has are skipped, so repeat the command to go on. A file
    that cannot be imported is named, and the others are imported. No code of a file runs.
    """
    from ..storage.urls import expand_home

    if not all(sources):  # an unset variable of a script; as a path it would be the current folder
        raise UsageError("SRC: expected the path of a checkpoint, got an empty one")
    paths = [Path(expand_home(source)) for source in sources]
    if watch and (len(paths) > 1 or verify or step is not None or format is not None):
        raise UsageError("--watch: expected one folder, without --verify, --step and --format")
    shell.need_url()
    from ..convert.sources import Found, default_run, find

    done = _Imports(shell)
    found = Found() if watch else find(paths, format, done.failed)
    if not found.formats and not watch:
        return done.end()
    run = default_run(paths) if run is None else run
    with shell.repository(create=True) as repository:
        if watch:
            done.follow(repository, paths[0], run, base or [])
        else:
            done.take(repository, found.formats, {"run": run, "step": step, "bases": base or []})
        if verify:
            done.verify(repository)
            for path in find(paths, format, lambda *_: None).formats.keys() - found.formats.keys():
                done.failed(path, InvalidInputError(f"{path}: is new, and was not imported; run it again"))
    done.left_out = found.left_out
    if found.left_out:
        note(f"not imported: {counted(len(found.left_out), 'file')}: {some(found.left_out, NAMED)}")
    return done.end()


class _Imports:
    """The checkpoints of one command: imported, skipped, failed and verified; each is printed when it is known."""

    def __init__(self, shell: Shell) -> None:
        self.imported: list[Imported] = []
        self.errors: dict[str, str] = {}
        self.verified: dict[str, list[str]] = {}
        self.left_out: list[str] = []
        self._as_json = shell.as_json

    def add(self, one: Imported) -> None:
        """Note a checkpoint that is in the repository."""
        self.imported.append(one)
        if not self._as_json:
            _print_imported(one)
        _warn_if_other(one)

    def failed(self, path: Path, error: Exception) -> None:
        """Note a checkpoint that could not be imported."""
        self.errors[str(path)] = message = f"{path}: {error}" if isinstance(error, OSError) else str(error)
        note(*f"snapstore: error: {message}".split("\n"))

    def take(self, repository: Repository, formats: dict[Path, str], options: dict[str, Any]) -> None:
        """Import checkpoints; an error of the only one is raised."""
        from ..convert.importing import import_found

        failed = self.failed if len(formats) > 1 else None
        with spinner(f"importing {len(formats)} into {options['run']}"):
            for one in import_found(repository, formats, failed=failed, **options):
                self.add(one)

    def follow(self, repository: Repository, folder: Path, run: str, bases: list[str]) -> None:
        """Import the checkpoints in a folder, and all later ones, until Ctrl-C."""
        from ..convert.watching import watch

        note(f"watching {folder} for checkpoints; Ctrl-C ends")
        with suppress(KeyboardInterrupt):
            for one in watch(repository, folder, run=run, bases=bases, failed=self.failed):
                self.add(one)
                with writing():
                    sys.stdout.flush()

    def verify(self, repository: Repository) -> None:
        """Compare each checkpoint with its snapshot."""
        from ..convert.checkpoint import changed, versions
        from ..convert.verifying import compare

        before = {one.source: versions(Path(one.source)) for one in self.imported}
        with spinner(f"verifying {len(self.imported)}"):
            for one in self.imported:
                try:
                    found, left_out = compare(repository, one)
                    self.verified[one.source] = found
                except (InvalidInputError, CapabilityError, OSError) as error:
                    self.verified[one.source] = [str(error)]
                    note(*f"snapstore: error: {error}".split("\n"))
                    continue
                if left_out and one.skipped:  # else the import has named them
                    _note_left_out(one.source, left_out)
                if found:
                    there = f"{one.snapshot.ref} (id:{one.snapshot.id[:12]})"
                    told = f"is not equal to {there}: {some(found, NAMED)}; keep the file"
                    note(f"snapstore: error: {one.source}: {told}")
        for source, found in self.verified.items():
            if not found and (names := changed(Path(source), before[source])):
                found.append(f"{names}: changed while the others were verified")
                note(f"snapstore: error: {source}: {found[0]}; keep the file")

    def end(self) -> int | None:
        """Print the sums, and return the exit code."""
        taken = [one for one in self.imported if not one.skipped]
        read, stored = sum(one.bytes_read for one in taken), sum(one.snapshot.stored_bytes for one in taken)
        unequal = [source for source, found in self.verified.items() if found]
        if self._as_json:
            document: dict[str, Any] = {"imported": [self._json(one) for one in self.imported]}
            failed = [{"source": source, "message": message} for source, message in self.errors.items()]
            document |= {"failed": failed, "left_out": self.left_out}
            print_json(document | {"bytes": read, "stored_bytes": stored})
        elif taken:
            line(
                f"imported {counted(len(taken), 'checkpoint')} into {taken[0].snapshot.run}: {human_bytes(read)} in, "
                f"{human_bytes(stored)} stored, {read / max(stored, 1):.2f} times smaller"
            )
        highest = max((one.snapshot.step for one in self.imported), default=0)
        if taken and taken[-1].snapshot.step < highest:
            last = taken[-1].snapshot
            note(f"{last.run}@latest is step {last.step}, which was saved last; {last.run}@highest is step {highest}")
        if self.verified and not self._as_json:
            equal = counted(len(self.verified) - len(unequal), "checkpoint")
            line(f"verified {equal}: the snapshots restore to the same bits")
        if self.errors:
            others = f"{counted(len(self.imported), 'checkpoint')} imported or there already"
            advice = "repair or remove what is named above, then run it again"
            note(f"snapstore: error: {counted(len(self.errors), 'checkpoint')} not imported; {others}; {advice}")
        if self.errors and not self.imported:
            return ERROR
        return PARTIAL if self.errors or unequal or any(one.differs for one in self.imported) else None

    def _json(self, one: Imported) -> dict[str, Any]:
        fields = {"source": one.source, "snapshot": snapshot_json(one.snapshot), "skipped": one.skipped}
        fields |= {"bytes": one.bytes_read, "left_out": one.left_out, "differs": one.differs}
        if one.source in self.verified:
            fields["unequal"] = self.verified[one.source]
        return fields


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
        _note_left_out(one.source, one.left_out)


def _note_left_out(source: str, names: list[str]) -> None:
    note(f"{source}: left out {counted(len(names), 'file')}: {some(names, NAMED)}")


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

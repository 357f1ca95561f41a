"""The verbs init, save and restore: create a repository, and move states in and out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..storage import progress
from ..text import counted, human_bytes
from .app import PerRank, Place, Ref, Shell, UsageError, per_rank_of, size_of, verb
from .output import fields_json, line, note_changes, print_json, snapshot_json, spinner

if TYPE_CHECKING:
    from ..check.fallback import SkippedSnapshot
    from ..convert import Exported, ExportOptions
    from ..format.records import Snapshot
    from ..repository import Repository
    from ..state.fill.fit import Fit


@verb("snapstore init /data/snapshots")
def init(
    shell: Shell,
    place: Place = None,
    chunk_bytes: Annotated[
        str | None, typer.Option("--chunk-bytes", metavar="SIZE", help="The unit of dedup, such as 4M; default: 1M.")
    ] = None,
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="URL", help="Take over the chunk size and digest seed of URL, to copy from it."),
    ] = None,
) -> None:
    """Create a repository."""
    from ..format.chunking import DEFAULT_CHUNK_BYTES
    from ..repository import Repository

    if like is not None and chunk_bytes is not None:
        raise UsageError("pass --chunk-bytes or --like, not both")
    size = DEFAULT_CHUNK_BYTES if chunk_bytes is None else size_of(chunk_bytes, "--chunk-bytes")
    with (
        spinner("creating a repository"),
        nullcontext() if like is None else Repository.open(like) as other,
        Repository.create(shell.need_url(place), chunk_bytes=size, like=other) as repository,
    ):
        config = repository.config
        document = {"url": repository.url, **fields_json(config, "uuid", "version", "chunk_bytes")}
        shell.show(document, line, f"created a repository at {repository.url}")


@verb("snapstore save model.pt --run exp --step 100 --metric loss=0.31")
def save(
    shell: Shell,
    file: Annotated[
        str, typer.Argument(metavar="FILE|DIR", help="A .pt, .pth, .bin, .ckpt or .safetensors file, or a folder.")
    ],
    run: Annotated[str, typer.Option("--run", metavar="R", help="The run of the snapshot.")],
    step: Annotated[int, typer.Option("--step", metavar="N", help="The step of the snapshot.")],
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="T", help="A tag; may be repeated.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME=VALUE", help="A metric; may be repeated.")
    ] = None,
    parent: Annotated[
        str | None, typer.Option("--parent", metavar="REF", help="The parent; default: the newest of the run.")
    ] = None,
    base: Annotated[
        list[str] | None, typer.Option("--base", metavar="REF", help="Also dedup against REF; may be repeated.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Store no deltas.")] = False,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="Store the files that links out of a folder lead to.")
    ] = False,
) -> None:
    """Save the state in a file, or a folder of files, as a snapshot.

    A file of torch that holds Python objects is refused, because it could run any code. The files of a folder are
    stored as bytes.
    """
    from ..storage.urls import expand_home

    if not file:  # an unset variable of a script; as a path it would be the current folder
        raise UsageError("no file named; pass FILE or DIR")
    metrics, path = _metrics(metric or []), Path(expand_home(file))
    with shell.repository() as repository:
        from ..convert.checkpoint import size_of as size_of_source
        from ..convert.importing import save_file
        from ..state.folder import pack_folder

        with spinner(f"saving {path}"), progress.whole(size_of_source(path)):
            is_folder = path.is_dir()
            if follow_links and not is_folder:
                raise UsageError(f"--follow-links: {path} is not a folder")
            arguments: dict[str, Any] = {"run": run, "step": step, "parent": parent, "bases": base or []}
            arguments |= {"metrics": metrics, "tags": tag or [], "full": full}
            if is_folder:
                state = pack_folder(path, follow_links=follow_links)
                snapshot = repository.save(state, ranks=False, **arguments)
            else:
                snapshot = save_file(repository, path, **arguments)
    text = (
        f"saved {snapshot.ref} as id:{snapshot.id[:12]}: {human_bytes(snapshot.logical_bytes)} of state, "
        f"{human_bytes(snapshot.stored_bytes)} stored, {snapshot.new_chunks} of {snapshot.chunks} chunks new"
    )
    shell.show({"snapshot": snapshot_json(snapshot)}, line, text)


def _metrics(given: list[str]) -> dict[str, float]:
    """Parse texts of the form NAME=VALUE; return the values by name.

    Raises:
        UsageError: a text has another form, or a name comes twice.
    """
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


@verb("snapstore restore exp@best:loss -o best.pt")
def restore(
    shell: Shell,
    ref: Ref,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE|DIR", help="A .pt or .safetensors file, or a folder.")
    ],
    keys: Annotated[
        list[str] | None, typer.Option("--keys", metavar="GLOB", help="Only these paths ('model.*'); may be repeated.")
    ] = None,
    part: Annotated[
        str | None, typer.Option("--part", metavar="NAME", help="Only the value of this top-level key.")
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="OLD=NEW", help="Rename keys; 'module.=' cuts a prefix; may be repeated."),
    ] = None,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out values that .safetensors cannot hold.")
    ] = False,
    per_rank: PerRank = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="If it is damaged, take the newest older snapshot that is whole.")
    ] = False,
) -> None:
    """Verify the state of a snapshot and write it to a file; or a saved folder, to a new folder."""
    from ..storage.urls import expand_home

    output, names, rank = Path(expand_home(output)), _names(rename or []), per_rank_of(per_rank)
    with shell.repository() as repository:
        from ..convert import ExportOptions
        from ..state.fill.fit import Fit

        options = ExportOptions(tensors_only=tensors_only, force=force, per_rank=rank)
        write = _Output(repository, output, Fit(keys or None, part, names or None), options)
        skipped: list[SkippedSnapshot] = []
        if fallback:
            document, skipped = write.newest_whole(ref)
        else:
            document = write(ref)
    if fallback:
        document["skipped"] = [one._asdict() for one in skipped]
    if shell.as_json:
        print_json(document)
        return
    for one in skipped:
        line(f"skipped step {one.step} (id:{one.id[:12]}): {one.why}")
    line(write.text)
    if write.exported is not None:
        from ..convert import files

        note_changes(write.exported, files.format_of(output))


class _Output:
    """The file or folder that a restore writes: it appears only when it is whole.

    Attributes:
        text: what was written, for people.
        exported: what was written to a file; None: it was a folder.
    """

    def __init__(self, repository: Repository, output: Path, fit: Fit, options: ExportOptions) -> None:
        self._repository, self._output, self._fit, self._options = repository, output, fit, options
        self.text = ""
        self.exported: Exported | None = None

    def __call__(self, ref: str) -> dict[str, Any]:
        """Write a snapshot; return what the shell prints in JSON."""
        from ..snapshots import newest_whole_named

        with newest_whole_named(self._repository.context, ref):
            return self._write(ref)

    def newest_whole(self, ref: str) -> tuple[dict[str, Any], list[SkippedSnapshot]]:
        """Write a snapshot, or the newest older one that is whole; return (what the shell prints, those skipped)."""
        from ..check.fallback import Alone, candidates, restore_newest_whole

        context, (run, at, name) = self._repository.context, ref.rpartition("@")
        if not at:
            run = self._repository.snapshot(ref).run
        named = None if at and name == "latest" else ref
        found = candidates(context, run, named, int(name) if at and name.isdecimal() else None)
        documents: list[dict[str, Any]] = []

        def write(context: object, snapshot: Snapshot, check: object) -> Snapshot:
            documents.append(self._write(f"id:{snapshot.id}"))
            return snapshot

        _, skipped = restore_newest_whole(context, Alone(found), write, verifies=False)
        return documents[-1], skipped

    def _write(self, ref: str) -> dict[str, Any]:
        from ..convert import files

        to_folder = not files.is_known(self._output) and self._fit == type(self._fit)()
        if to_folder and self._options.per_rank is None and (document := self._unpack(ref)) is not None:
            return document
        files.check_output(self._output, force=self._options.force)
        if self._options.tensors_only and files.format_of(self._output) == "torch":
            raise UsageError(f"--tensors-only: {self._output} holds values of all types; name a .safetensors file")
        with spinner(f"restoring {ref}"):
            snapshot = self._repository.snapshot(ref)
            self.exported = written = self._write_file(f"id:{snapshot.id}")  # the reference may name another one now
        counts = fields_json(written, "tensors", "bytes", "dropped", "by_rank")
        changed = [value._asdict() for value in written.changed]
        what = f"{counted(written.tensors, 'tensor')}, {human_bytes(written.bytes)}"
        self.text = f"restored {snapshot.ref} (id:{snapshot.id[:12]}) to {self._output}: {what}"
        return {"snapshot": snapshot_json(snapshot), "file": str(self._output), **counts, "changed": changed}

    def _unpack(self, ref: str) -> dict[str, Any] | None:
        """Write the folder that a snapshot holds; return None if it holds none."""
        from ..inspect.lazy import open_tensors
        from ..state.folder import is_folder, unpack_folder

        with spinner(f"reading {ref}"):
            tensors = open_tensors(self._repository.context, ref)
            if not is_folder(tensors):
                return None
        snapshot = tensors.snapshot
        with spinner(f"restoring {snapshot.ref}"), progress.whole(snapshot.logical_bytes):
            done = unpack_folder(tensors, self._output)
        what = f"{counted(done.files, 'file')}, {human_bytes(done.nbytes)}"
        self.text = f"restored {snapshot.ref} (id:{snapshot.id[:12]}) to {self._output}: {what}"
        return {
            "snapshot": snapshot_json(snapshot),
            "folder": str(self._output),
            "files": done.files,
            "bytes": done.nbytes,
        }

    def _write_file(self, ref: str) -> Exported:
        from ..convert import files
        from ..convert.exporting import rank_for
        from ..restore.streaming import TensorReader

        to, options = files.format_of(self._output), self._options
        as_rank = rank_for(to, options.per_rank)
        reader = TensorReader(self._repository.context, ref, keys=self._fit, as_rank=as_rank)
        if to == "torch":
            return files.write_torch(self._output, reader, force=options.force)
        return files.write_safetensors(self._output, reader, force=options.force, tensors_only=options.tensors_only)


def _names(given: list[str]) -> dict[str, str]:
    """Parse texts of the form OLD=NEW; return the new names by the old ones.

    Raises:
        UsageError: a text has another form, or a name comes twice.
    """
    found: dict[str, str] = {}
    for text in given:
        old, equals, new = text.partition("=")
        if not old or not equals or old in found:
            raise UsageError(f"--rename {text!r}: expected OLD=NEW, each name once, such as module.=")
        found[old] = new
    return found

"""Repository: all data under one URL, and everything one can do with it. A facade: each verb is a module of its own.

A Repository may be used from several threads, also for several saves at once. It must not be used across a fork.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from . import retention
from .catalog import index, policy_store
from .catalog.history import PUT_BACK, View
from .catalog.index import Index
from .context import Context
from .engine.registry import CODECS, Engines
from .errors import (
    AlreadyExistsError,
    ConflictError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    UnknownFormatError,
)
from .format import chunking, records
from .format.hashing import new_seed
from .format.records import COMMITTED, FORGOTTEN, Config, Snapshot, check_name
from .options import SaveOptions
from .protocol import forget, gc, quarantine, revisions
from .protocol import tags as tagging
from .protocol.forget import ForgetResult
from .protocol.gc import GcResult
from .protocol.same_repository import confirmed
from .ranks import check as check_ranks
from .save.lineage import Lineage
from .storage.base import ObjectStore
from .storage.cache_dir import shrink
from .storage.urls import open_store
from .text import counted, some, without_advice

if TYPE_CHECKING:
    from .check.report import CheckResult
    from .inspect.inspection import Diff, Stats
    from .repair.repair import RepairReport
    from .rewrite.compact import CompactReport
    from .rewrite.recode import RecodeResult

log = logging.getLogger("snapstore")
KNOWN_FEATURES: frozenset[str] = frozenset()


P = ParamSpec("P")
T = TypeVar("T")


def _in_one_place(
    verb: Callable[Concatenate[Repository, P], T],
) -> Callable[Concatenate[Repository, P], T]:
    """A verb that decides by what it lists, and writes or deletes: all of it in the place of this repository."""

    @functools.wraps(verb)
    def call(self: Repository, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.store.pinned() if self.context.config_problem else confirmed(self.context):
            return verb(self, *args, **kwargs)

    return call


class Repository:
    """All data under one URL. Make one with `create` or `open`, close it with `close` or a `with` block."""

    def __init__(self, store: ObjectStore, config: Config, options: SaveOptions, *, config_problem: str = "") -> None:
        self.url, self.store, self.config, self.options = store.url, store, config, options
        engines = Engines(config.digest_seed, options.threads, options.codec, required=options.codec != "portable")
        folder, temporary = index.folder_for(store, config.uuid)
        if config_problem:  # its uuid is made up: the index that is there stays as it is
            temporary = folder = Path(tempfile.mkdtemp(prefix="snapstore-index-"))
        own = Index(store, config.uuid, folder, limit_bytes=index.MAP_BYTES, digest_seed=config.digest_seed)
        self.context = Context(store, own, engines, config, options, config_problem)
        if temporary is None:
            shrink()
        self._finalizer = weakref.finalize(self, _clean_up, own, engines, temporary, os.getpid())
        self.lineage = Lineage()

    # -- open and close

    @classmethod
    def create(
        cls,
        url: str | Path | ObjectStore,
        *,
        chunk_bytes: int = chunking.DEFAULT_CHUNK_BYTES,
        options: SaveOptions | None = None,
    ) -> Repository:
        """Make a repository under a URL.

        Raises:
            AlreadyExistsError: there is one.
            InvalidInputError: the place holds other things, or the chunk size cannot be used.
            StorageError, CapabilityError: the place cannot be written, or is not safe to use.
        """
        chunking.check_chunk_bytes(chunk_bytes)
        store = open_store(str(url), create=True) if isinstance(url, str | Path) else _store(url)
        config = Config(
            uuid=records.new_id(),
            version=records.FORMAT_VERSION,
            chunk_bytes=chunk_bytes,
            digest_seed=new_seed(),
            features=[],
            created=time.time(),
            writer=f"snapstore {records.VERSION}",
        )
        try:
            store.stat("config")
        except NotFoundError:
            store.prepare()
        try:
            store.put("config", records.encode(config))
        except AlreadyExistsError as error:
            raise AlreadyExistsError(f"{store.url}: is a snapstore repository already; open it instead") from error
        return cls(store, config, options or SaveOptions())

    @classmethod
    def open(
        cls, url: str | Path | ObjectStore, *, options: SaveOptions | None = None, damaged: bool = False
    ) -> Repository:
        """Open the repository under a URL.

        Args:
            damaged: even if its config is damaged, gone or another repository's, to `check` and `repair` it.

        Raises:
            NotFoundError: there is none.
            FormatError: it is of a format or has a feature that this release does not know.
            IntegrityError: its config is damaged.
        """
        store = open_store(str(url)) if isinstance(url, str | Path) else _store(url)
        if not damaged:
            return cls(store, cls._config(store), options or SaveOptions())
        from .check.recoverable import is_foreign, salvaged_config

        problem = ""
        try:
            config = cls._config(store)
        except (NotFoundError, IntegrityError, StorageError) as error:
            made_up = salvaged_config(store)
            if made_up is None:
                raise
            config, problem = made_up, "config is missing" if isinstance(error, NotFoundError) else str(error)
        else:
            if is_foreign(store, config):
                config = salvaged_config(store) or config
                problem = "config has another digest seed than the manifests: it is another repository's"
        return cls(store, config, options or SaveOptions(), config_problem=problem)

    @staticmethod
    def _config(store: ObjectStore) -> Config:
        """What makes it a repository, if this release can read it."""
        data = b""
        try:
            data = store.get("config", limit_bytes=records.MAX_OBJECT_BYTES)
            config = records.decode(data, Config, "config")
        except NotFoundError as error:
            raise NotFoundError(
                f"{store.url}: no snapstore repository here (no 'config'); make one with 'snapstore init' "
                "or Repository.create; if there was one, run 'snapstore repair'"
            ) from error
        except (FormatError, IntegrityError) as error:
            if not records.is_damaged(data):
                raise
            why = without_advice(error)
            raise IntegrityError(f"{store.url}: config is damaged; run 'snapstore repair': {why}") from error
        unknown = sorted(set(config.features) - KNOWN_FEATURES)
        if config.version != records.FORMAT_VERSION or unknown:
            what = f"features {unknown} are" if unknown else f"format version {config.version} is"
            raise UnknownFormatError(
                f"{store.url}: {what} unknown to this snapstore ({records.VERSION}), which reads version "
                f"{records.FORMAT_VERSION}; use {config.writer} or newer"
            )
        if not re.fullmatch(r"[0-9a-f]{32}", config.uuid):  # it names a folder of the cache
            raise FormatError(f"{store.url}: config: uuid {config.uuid[:80]!r}, expected 32 hexadecimal digits")
        if config.chunk_bytes % 16 or not chunking.MIN_CHUNK_BYTES <= config.chunk_bytes <= chunking.MAX_CHUNK_BYTES:
            raise FormatError(f"{store.url}: config: chunk size {config.chunk_bytes}")
        return config

    def close(self) -> None:
        """Let go of threads, index and temporary files. Closing twice is fine."""
        self._finalizer()

    def __enter__(self) -> Repository:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Repository({self.url!r})"

    # -- look

    def view(self) -> View:
        """Everything that is there now, in one listing."""
        return self.context.index.refresh()

    def snapshots(self, run: str | None = None) -> list[Snapshot]:
        """Committed snapshots of a run (of all runs), in the order in which they were saved."""
        return self.view().snapshots(run)

    def snapshot(self, ref: str) -> Snapshot:
        """The snapshot that a reference names: `run@step`, `run@latest`, `run@tag` or `id:<prefix>`.

        Raises:
            NotFoundError, InvalidInputError: see `View.resolve`.
        """
        return self.view().resolve(ref)

    def children(self, ref: str) -> list[Snapshot]:
        """Committed snapshots that go on from this one, in any run."""
        view = self.view()
        return view.children(view.resolve(ref).id)

    # -- save and restore

    def save(
        self,
        state: Any,
        *,
        run: str,
        step: int,
        parent: str | None = None,
        bases: Sequence[str] = (),
        metrics: Mapping[str, float] | None = None,
        metadata: Any = None,
        tags: Sequence[str] = (),
        full: bool = False,
        ranks: bool | None = None,
    ) -> Snapshot:
        """Save a state and wait until it is committed. Nothing may change it until then.

        Args:
            state: any nesting of dict, list and tuple over tensors, arrays, plain values and objects with state_dict.
            run, step: where it goes. A step may be saved again; the newest save of a step is what `run@step` means.
            parent: reference of the snapshot that this one goes on from; by default what this Repository restored or
                committed last, else the newest of the run.
            bases: references of further snapshots to dedup against.
            metrics: numbers that policies and people choose by.
            metadata: plain values to keep beside it.
            tags: names; a tagged snapshot is never forgotten.
            full: store no deltas, for a snapshot that is kept for long.
            ranks: False: no other rank of torch.distributed saves this run. Without it a save from one of several ranks
                is refused.

        Raises:
            InvalidInputError: a name, step, metric or leaf cannot be saved, or an array of the state was changed
                meanwhile; nothing was committed.
            StorageError: the store failed; nothing was committed.
            ConflictError: a gc gave this save up as dead; save again.
        """
        check_ranks(run, ranks)
        from .save.inputs import SaveRequest, inputs_of
        from .save.pipeline import save as store
        from .save.staging import Staging
        from .state.flatten import flatten

        request = SaveRequest(run, step, parent, bases, metrics, metadata, tags, full)
        request.resolve(self.context, self.lineage)
        staging = Staging(self.context.engines, keep_base=False)
        return store(self.context, self.lineage, request, inputs_of(flatten(state)), staging)

    def restore(self, ref: str, *, keys: str | Sequence[str] | None = None, device: Any = None) -> Any:
        """Return the state of a snapshot, as nested containers.

        Args:
            ref: of any run; a save into another run afterwards forks from it.
            keys: glob or globs over dotted paths, such as "model.*"; only the bytes that they need are read.
            device: where new tensors go.

        Raises:
            NotFoundError: the reference or a key names nothing.
            CapabilityError: `device` is a CUDA device that is not there, or the state does not fit into memory.
            IntegrityError: the snapshot is damaged.
        """
        from .restore.pipeline import read

        snapshot, state = read(self.context, ref, keys=keys, device=device)
        self.lineage.note_restored(snapshot)
        return state

    def restore_into(self, ref: str, target: Any, *, keys: str | Sequence[str] | None = None) -> Snapshot:
        """Fill `target` with the state of a snapshot, and return the snapshot.

        Args:
            ref, keys: see `restore`.
            target: nested containers, tensors and objects with load_state_dict, shaped like the saved state.

        Raises:
            NotFoundError: the reference or a key names nothing.
            InvalidInputError: `target` does not fit; every difference is listed, and nothing was written.
            IntegrityError: the snapshot is damaged; `target` may be half written.
        """
        from .restore.pipeline import read_into

        snapshot = read_into(self.context, ref, target, keys=keys)
        self.lineage.note_restored(snapshot)
        return snapshot

    # -- tags

    @_in_one_place
    def tag(self, ref: str, name: str) -> Snapshot:
        """Put a tag on a committed snapshot; it is never forgotten from then on.

        A tag names one snapshot of a run: it moves here if another one of the run has it. Of several that are given it
        at once the newest keeps it; the snapshot that is returned shows whether this one has.

        Raises:
            ConflictError: other processes keep revising the snapshots of the run; tag again.
        """
        records.check_tag(name)

        def add(snapshot: Snapshot) -> dict[str, Any]:
            return {"tags": records.check_tags([*snapshot.tags, name])}

        before, tagged = self._revise(ref, add)
        return tagging.take(self.context, [name], tagged, before)

    @_in_one_place
    def untag(self, ref: str, name: str) -> Snapshot:
        """Take a tag off.

        Raises:
            NotFoundError: the snapshot does not have it.
        """

        def remove(snapshot: Snapshot) -> dict[str, Any]:
            if name not in snapshot.tags:
                there = ", ".join(snapshot.tags) or "none"
                raise NotFoundError(f"{snapshot.ref}: has no tag {name!r}; tags: {there}")
            return {"tags": [tag for tag in snapshot.tags if tag != name]}

        return self._revise(ref, remove)[1]

    def _revise(self, ref: str, change: Callable[[Snapshot], dict[str, Any]]) -> tuple[View, Snapshot]:
        """Create the next revision of a committed snapshot, again if another process was first; and what was there."""
        for _ in range(20):
            view = self.view()
            snapshot = view.resolve(ref)
            if snapshot.state != COMMITTED:
                raise InvalidInputError(f"{ref}: is {snapshot.state}; 'snapstore unforget' brings a forgotten one back")
            try:
                return view, revisions.revise(self.context, snapshot, **change(snapshot))
            except ConflictError:
                continue
        raise ConflictError(f"{ref}: other processes keep revising it; try again")

    # -- forget and gc

    @_in_one_place
    def forget(
        self, keep: Sequence[retention.Policy], *, run: str, dry_run: bool = False, force: bool = False
    ) -> ForgetResult:
        """Forget the snapshots of a run that no policy keeps. Their bytes stay until `gc`; `unforget` works until then.

        Tagged snapshots and the newest one always stay. So does a snapshot that a repair found damaged; it counts for
        no policy, so it costs no intact snapshot its place.

        Raises:
            InvalidInputError: no policy, or policies that keep nothing, without `force`.
            NotFoundError: no such run.
        """
        return forget.forget(self.context, keep, run=run, dry_run=dry_run, force=force)

    @_in_one_place
    def forget_snapshots(self, refs: Sequence[str], *, dry_run: bool = False, force: bool = False) -> ForgetResult:
        """Forget the named snapshots.

        Raises:
            InvalidInputError: one is tagged; or is the newest of its run, without `force`.
            NotFoundError: a reference names nothing.
        """
        return forget.forget_snapshots(self.context, refs, dry_run=dry_run, force=force)

    @_in_one_place
    def unforget(self, ref: str) -> Snapshot:
        """Bring a forgotten snapshot back.

        Raises:
            InvalidInputError: it is not forgotten.
            NotFoundError: no such snapshot, or a gc has deleted its bytes.
        """
        return forget.unforget(self.context, ref)

    @_in_one_place
    def gc(
        self, *, dry_run: bool = False, fence_after_s: float = gc.DEFAULT_FENCE_AFTER_S, unexplained: bool = False
    ) -> GcResult:
        """Delete what no committed snapshot needs. Safe beside running saves and other gcs.

        Args:
            fence_after_s: a session of another host whose heartbeat is older is given up as dead [s].
            unexplained: delete also packs and manifests of which no record says that they may go: their records were
                removed by hand, say. Without it they stop a gc, since the store may have listed too few records.

        Raises:
            IntegrityError, StorageError: it cannot be told what is live; nothing was deleted.
        """
        if isinstance(fence_after_s, bool) or not isinstance(fence_after_s, int | float) or not fence_after_s >= 0:
            raise InvalidInputError(f"fence_after_s {fence_after_s!r}: expected a number of seconds of 0 or more")
        return gc.collect(self.context, dry_run=dry_run, fence_after_s=fence_after_s, unexplained=unexplained)

    @_in_one_place
    def recode(
        self,
        refs: Sequence[str] | None = None,
        *,
        codec: Literal["portable", "ans"] = "portable",
        dry_run: bool = False,
    ) -> RecodeResult:
        """Rewrite snapshots into another codec; `gc` then frees the old bytes. Safe beside saves, forgets and gcs.

        Args:
            refs: which; None: all committed ones.
            codec: "portable", which every machine reads, or "ans" (see `SaveOptions`).

        Returns:
            What was done, and the snapshots that could not be recoded: those are as they were.

        Raises:
            NotFoundError, InvalidInputError: a reference names nothing; there is no such codec.
            CapabilityError: the GPU that a codec needs is not here.
            StorageError: the store failed; snapshots before that are recoded.
        """
        from .rewrite.recode import recode

        if codec not in CODECS:
            raise InvalidInputError(f"codec {codec!r}: expected one of {', '.join(CODECS)}")
        states = (COMMITTED,) if refs is None else (COMMITTED, FORGOTTEN)
        chosen = self.snapshots() if refs is None else self._resolve_all(refs, states)
        return recode(self.context, chosen, codec=codec, states=states, dry_run=dry_run)

    @_in_one_place
    def compact(
        self, refs: Sequence[str] | None = None, *, max_repack_bytes: int | None = None, dry_run: bool = False
    ) -> CompactReport:
        """Rewrite packs that are mostly dead, and chunks that hang on bases nobody else needs; `gc` then frees them.

        States, digests, ids, lineage and tags stay. Safe beside saves, forgets and gcs; a run that dies is finished by
        the next one.

        Args:
            refs: rewrite no others; None: all committed ones.
            max_repack_bytes: of blobs written, 0 or more; the most profitable come first. None: no limit.

        Returns:
            What was done, and the snapshots that could not be rewritten: those are as they were.

        Raises:
            NotFoundError, InvalidInputError: a reference names nothing; no such number of bytes.
            IntegrityError: a record is damaged or missing, so what lives cannot be told; nothing was rewritten.
            StorageError: the store failed; snapshots before that are rewritten.
        """
        from .rewrite.compact import compact

        if max_repack_bytes is not None and (type(max_repack_bytes) is not int or max_repack_bytes < 0):
            raise InvalidInputError(f"max_repack_bytes {max_repack_bytes!r}: expected an int of 0 or more, or None")
        return compact(
            self.context,
            only=None if refs is None else self._resolve_all(refs, (COMMITTED,)),
            max_repack_bytes=max_repack_bytes,
            dry_run=dry_run,
        )

    def _resolve_all(self, refs: Sequence[str], states: tuple[str, ...]) -> list[Snapshot]:
        """The snapshots that are named, each once."""
        if isinstance(refs, str):
            raise InvalidInputError(f"refs {refs!r}: expected a list of str, got one str")
        view = self.view()
        return list({snapshot.id: snapshot for snapshot in (view.resolve(ref, states) for ref in refs)}.values())

    # -- policies

    def policies(self, run: str) -> list[retention.Policy]:
        """The retention policies stored for a run, newest revision."""
        return policy_store.read(self.store, run)

    @_in_one_place
    def set_policies(self, run: str, keep: Sequence[retention.Policy]) -> None:
        """Store the retention policies of a run, so that `forget` needs none named."""
        policy_store.store(self.store, check_name("run", run), keep)

    # -- look closer

    def check(
        self,
        level: str = "metadata",
        *,
        share: float = 1.0,
        subset: tuple[int, int] = (1, 1),
        max_decoded_bytes: int | None = None,
    ) -> CheckResult:
        """Verify: "metadata" (all there?), "data" (all stored bytes intact?) or "restore" (every state bit-exact?).

        Args:
            share: the part of the packs that "data" reads, 0 to 1.
            subset: (n, t): "data" reads the n-th of t fixed shares of the packs, so that t checks read them all.
            max_decoded_bytes: how much "restore" decodes at most; None: 8192 times what is stored, and 1 GiB, which no
                repository exceeds that snapstore has made.
        """
        from .check.check import check

        return check(self.context, level=level, share=share, subset=subset, max_decoded_bytes=max_decoded_bytes)

    def in_need_of_quarantined(self, snapshots: Sequence[Snapshot]) -> set[str]:
        """Ids of the snapshots that need a pack which a repair has found damaged, or a manifest that it has not found:
        they may be lost.

        Reads nothing of them while no pack is in quarantine.
        """
        return quarantine.in_need_of_quarantined(self.context, snapshots)

    @_in_one_place
    def repair(
        self, *, apply: bool = False, level: str = "data", drop: bool = False, purge: bool = False
    ) -> RepairReport:
        """Say what can be mended, and with `apply` do it. Safe beside saves, forgets and gcs; can be repeated any time.

        Heals snapshots by what the repository still holds, keeps saves from building on damaged packs, and builds the
        index anew. Deletes no pack and no manifest.

        Args:
            level: how closely to look first, as `check`.
            drop: forget the snapshots that stay damaged, unless they are tagged; `gc` then deletes what only they need.
            purge: let `gc` delete damaged packs that nobody needs any more.

        Raises:
            StorageError: the store failed; what was done is whole, repair again.
        """
        from .repair.repair import repair

        return repair(self.context, level=level, apply=apply, drop=drop, purge=purge)

    def rebuild_index(self, *, forget_missing: bool = True) -> int:
        """Build the index anew from the objects; the number of records read.

        Args:
            forget_missing: also what nothing but the index knows, and `repair` would put back: records that are gone
                from the store (else refused), and what those said that cannot be read (else kept).

        Raises:
            InvalidInputError: records are gone, and `forget_missing` is not set; nothing was changed.
        """
        if not forget_missing and (missing := self.view().missing):
            names = some([f"{s.ref} (id:{s.id[:12]}, {s.state})" for s in missing])
            raise InvalidInputError(
                f"index rebuild: would give up {counted(len(missing), 'snapshot')} of which only the index "
                f"still has the record: {names}; {PUT_BACK}"
            )
        view = self.context.index.rebuild(keep_unreadable=not forget_missing)
        return len(view.snapshots(states=None)) + len(view.damaged) + len(view.unread)

    def stats(self) -> Stats:
        """Bytes by tensor group and codec, dedup, ratio, chain depths."""
        from .inspect.inspection import stats

        return stats(self.context)

    def diff(self, a: str, b: str) -> Diff:
        """What changed between two snapshots, tensor by tensor."""
        from .inspect.inspection import diff

        view = self.view()
        return diff(self.context, view.resolve(a), view.resolve(b))


def _store(given: ObjectStore) -> ObjectStore:
    if not callable(getattr(given, "get_ranges", None)):
        raise InvalidInputError(f"{given!r}: expected a URL, a path or an object store, got {type(given).__name__}")
    return given


def _clean_up(opened: Index, engines: Engines, temporary: Path | None, pid: int) -> None:
    engines.close()
    opened.close()
    if temporary is not None and os.getpid() == pid:  # a forked child that ends must not take the parent's
        index.remove(temporary)

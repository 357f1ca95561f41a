"""Repository: all data under one URL, and everything one can do with it. A facade: each verb is a module of its own.

A Repository may be used from several threads, also for several saves at once. It must not be used across a fork.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    SnapstoreError,
    StorageError,
    UnknownFormatError,
)
from .format import chunking, records
from .format.hashing import new_seed
from .format.records import COMMITTED, FORGOTTEN, SWEPT, Config, SaveRequest, Snapshot, check_name, check_step
from .options import SaveOptions
from .protocol import gc, quarantine, revisions
from .protocol import tags as tagging
from .protocol.gc import GcResult
from .protocol.same_repository import confirmed
from .ranks import check as check_ranks
from .storage.base import ObjectStore
from .storage.cache_dir import shrink
from .storage.urls import open_store
from .text import counted, some, without_advice

if TYPE_CHECKING:
    from .check.report import CheckResult
    from .format.manifest import Manifest
    from .inspect.inspection import Diff, Stats
    from .repair.repair import RepairReport
    from .rewrite.compact import CompactResult
    from .rewrite.recode import RecodeResult
    from .save.staging import Staging
    from .state.arrays import Memory
    from .state.flatten import Part

log = logging.getLogger("snapstore")
KNOWN_FEATURES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ForgetResult:
    """What a forget did, or would do.

    Attributes:
        kept: (snapshot, reasons) of every snapshot that stays.
        forgotten: the others.
    """

    kept: list[tuple[Snapshot, tuple[str, ...]]]
    forgotten: list[Snapshot]
    dry_run: bool = False


@dataclass(slots=True)
class _Lineage:
    """What this process restored or committed last: the parents of its next saves."""

    committed: dict[str, str] = field(default_factory=dict)  # run -> id
    restored: str | None = None
    restored_for: set[str] = field(default_factory=set)  # runs that have saved since


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

    def __init__(
        self, store: ObjectStore, config: Config, options: SaveOptions, *, config_problem: str = ""
    ) -> None:  # fmt: skip
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
        self._lock = threading.RLock()
        self._lineage = _Lineage()
        self._at_hand: dict[str, dict[str, Manifest]] = {}  # manifests of each run's last save: the next one's base
        self._manifests: dict[str, Manifest] = {}  # all of these, by SHA-256

    # -- open and close

    @classmethod
    def create(
        cls, url: str | Path | ObjectStore, *, chunk_bytes: int = chunking.DEFAULT_CHUNK_BYTES,
        options: SaveOptions | None = None,
    ) -> Repository:  # fmt: skip
        """Make a repository under a URL.

        Raises:
            AlreadyExistsError: there is one.
            InvalidInputError: the place holds other things, or the chunk size cannot be used.
            StorageError, CapabilityError: the place cannot be written, or is not safe to use.
        """
        chunking.check_chunk_bytes(chunk_bytes)
        store = open_store(str(url), create=True) if isinstance(url, str | Path) else _store(url)
        config = Config(
            uuid=records.new_id(), version=records.FORMAT_VERSION, chunk_bytes=chunk_bytes, digest_seed=new_seed(),
            features=[], created=time.time(), writer=f"snapstore {records.VERSION}",
        )  # fmt: skip
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
    ) -> Repository:  # fmt: skip
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
        self, state: Any, *, run: str, step: int, parent: str | None = None, bases: Sequence[str] = (),
        metrics: Mapping[str, float] | None = None, metadata: Any = None, tags: Sequence[str] = (), full: bool = False,
        ranks: bool | None = None,
    ) -> Snapshot:  # fmt: skip
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
        request = self.request(run, step, parent, bases, metrics, metadata, tags, full)
        from .save.staging import Staging
        from .state.flatten import flatten

        started = time.monotonic()
        staging = Staging(self.context.engines, keep_base=False)
        return self.write(request, flatten(state), staging=staging, copies=None, started=started)

    def request(
        self, run: str, step: int, parent: str | None, bases: Sequence[str], metrics: Mapping[str, float] | None,
        metadata: Any, tags: Sequence[str], full: bool,
    ) -> SaveRequest:  # fmt: skip
        """Check the arguments of a save before anything is done."""
        self.context.index.check_process()
        check_name("run", run)
        for what, given in (("tags", tags), ("bases", bases)):
            if isinstance(given, str):
                raise InvalidInputError(f"{what} {given!r}: expected a list of str, got one str")
        view = self.view() if parent or bases else None
        return SaveRequest(
            run=run, step=check_step(step), tags=records.check_tags(tags),
            parent=view.resolve(parent).id if parent and view else self._parent(run),
            bases=[view.resolve(ref).id for ref in bases] if view else [],
            metrics=records.check_metrics(metrics or {}), metadata_node=records.encode_metadata(metadata),
            full=full or bool(tags),
        )  # fmt: skip

    def write(
        self, request: SaveRequest, parts: list[Part], *, staging: Staging, copies: list[list[Memory]] | None,
        started: float, stall_s: float | None = None,
    ) -> Snapshot:  # fmt: skip
        """Run the write path (save.py); SnapshotManager calls it from its own thread."""
        from .save.pipeline import save
        from .save.writer import Plan

        options, before = self.options, self.view() if request.tags else None
        plan = Plan(
            self.config.chunk_bytes, options.pack_bytes, options.max_depth, request.full, verify=options.verify_writes
        )
        snapshot, manifests = save(
            self.context, request, parts, plan, staging=staging, copies=copies,
            at_hand=self._manifests, started=started, stall_s=stall_s,
        )  # fmt: skip
        with self._lock:
            self._at_hand[request.run] = manifests
            self._lineage.committed[request.run] = snapshot.id
            self._lineage.restored_for.add(request.run)
            self._manifests = {name: m for of_run in self._at_hand.values() for name, m in of_run.items()}
        try:
            if before is not None:
                snapshot = tagging.take(self.context, request.tags, snapshot, before)
        except SnapstoreError as error:  # the save is committed; the newest of two that hold a tag is the one it means
            log.warning("run=%s tags %s stay on an older snapshot as well: %s", request.run, request.tags, error)
        return snapshot

    def restore(
        self, ref: str, *, into: Any = None, keys: str | Sequence[str] | None = None, device: Any = None
    ) -> Any:
        """The state of a snapshot as a nested dict, or `into` filled in place (then the Snapshot is returned).

        Args:
            ref: of any run; saving into another run afterwards forks from it.
            into: nested containers, tensors and objects with load_state_dict, shaped like the saved state.
            keys: glob or globs over dotted paths, such as "model.*"; only the bytes they need are read.
            device: where new tensors go.

        Raises:
            NotFoundError: the reference or a key names nothing.
            InvalidInputError: `into` does not fit; every difference is listed, nothing was written.
            CapabilityError: `device` is a CUDA device that is not there.
            IntegrityError: damage was found; `into` may be half written.
        """
        snapshot, state = self.read(ref, into, keys, device)
        with self._lock:
            self._lineage.restored, self._lineage.restored_for = snapshot.id, set()
        return snapshot if into is not None else state

    def read(self, ref: str, into: Any, keys: str | Sequence[str] | None, device: Any) -> tuple[Snapshot, Any]:
        """`restore` without a say in the lineage of later saves: (the snapshot, its state)."""
        from .restore.pipeline import restore

        snapshot = self.snapshot(ref)
        while True:
            try:
                return snapshot, restore(self.context, snapshot, into=into, keys=keys, device=device)
            except (IntegrityError, FormatError) as error:
                ruling = self.view().get(snapshot.id)
                if ruling is None or (ruling.state != SWEPT and ruling.manifests == snapshot.manifests):
                    raise type(error)(f"{snapshot.ref} (id:{snapshot.id[:12]}): {error}") from error
                # Rewritten, and the old packs collected, while we read; or collected itself, so another one is meant.
                snapshot = ruling if ruling.state != SWEPT else self.snapshot(ref)

    def go_on_from(self, run: str, snapshot: Snapshot) -> None:
        """The next save of `run` has this parent; other runs keep theirs (two managers may share a repository)."""
        with self._lock:
            self._lineage.committed[run] = snapshot.id
            self._lineage.restored_for.add(run)

    def _parent(self, run: str) -> str | None:
        """What the next save of a run goes on from: a restore since its last save, else that save."""
        with self._lock:
            if self._lineage.restored is not None and run not in self._lineage.restored_for:
                return self._lineage.restored
            return self._lineage.committed.get(run)

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

        def attempt() -> tuple[View, Snapshot]:
            view = self.view()
            snapshot = view.resolve(ref)
            if snapshot.state != COMMITTED:
                raise InvalidInputError(f"{ref}: is {snapshot.state}; 'snapstore unforget' brings a forgotten one back")
            return view, revisions.revise(self.context, snapshot, **change(snapshot))

        return revisions.retry_conflicts(
            attempt, lambda _: ConflictError(f"{ref}: other processes keep revising it; try again")
        )

    # -- forget and gc

    @_in_one_place
    def forget(
        self, keep: Sequence[retention.Policy], *, run: str, dry_run: bool = False, force: bool = False
    ) -> ForgetResult:
        """Forget the snapshots of a run that no policy keeps. Their bytes stay until `gc`; `unforget` works until then.

        Tagged snapshots and the newest one always stay. One that a repair has found damaged stays as well, and counts
        for no policy: it must not cost a whole one its place.

        Raises:
            InvalidInputError: no policy, or one that keeps nothing, without `force`.
            NotFoundError: no such run.
        """
        check_name("run", run)
        view = self.view()
        self.store.settle(f"snapshots/{run}/")  # a newer snapshot that a power cut takes must not cost an older one
        snapshots = view.snapshots(run)
        if not snapshots:
            there = ", ".join(view.runs()) or "none"
            raise NotFoundError(f"run {run!r}: has no snapshots in this repository; runs: {there}")
        damaged = quarantine.in_need_of_quarantined(self.context, snapshots)
        decisions = retention.apply(keep, [s for s in snapshots if s.id not in damaged], force=force)
        chosen = [d.snapshot for d in decisions if not d.reasons]
        by_id = {s.id: s for s in snapshots}
        kept = [(by_id[d.snapshot.id], d.reasons) for d in decisions if d.reasons]
        kept += [(s, ("damaged: 'snapstore repair' heals it, or drops it",)) for s in snapshots if s.id in damaged]
        if dry_run:
            return ForgetResult(kept, [by_id[s.id] for s in chosen], True)
        superseded = view.superseded()
        policy = retention.describe(keep)
        forgotten: list[Snapshot] = []
        for reason, group in (
            ("superseded by a later save of its step", [by_id[s.id] for s in chosen if s.id in superseded]),
            ("kept by no policy", [by_id[s.id] for s in chosen if s.id not in superseded]),
        ):
            if group:
                forgotten += revisions.forget(self.context, group, policy=policy, reason=reason)
        return ForgetResult(kept, sorted(forgotten, key=lambda s: s.seq))

    @_in_one_place
    def forget_snapshots(self, refs: Sequence[str], *, dry_run: bool = False, force: bool = False) -> ForgetResult:
        """Forget the snapshots named.

        Raises:
            InvalidInputError: one is tagged; or is the newest of its run, without `force`.
            NotFoundError: a reference names nothing.
        """
        view = self.view()
        chosen = [view.resolve(ref, (COMMITTED,)) for ref in refs]
        for snapshot in chosen:
            if snapshot.tags:
                raise InvalidInputError(f"{snapshot.ref}: is tagged {', '.join(snapshot.tags)}; untag it first")
            if snapshot == view.newest(snapshot.run) and not force:
                raise InvalidInputError(f"{snapshot.ref}: is the newest of its run, which a resume needs; force it")
        if not dry_run:
            chosen = revisions.forget(self.context, chosen, policy="", reason="named by the user")
        return ForgetResult([], chosen, dry_run)

    @_in_one_place
    def unforget(self, ref: str) -> Snapshot:
        """Bring a forgotten snapshot back.

        Raises:
            InvalidInputError: it is not forgotten.
            NotFoundError: no such snapshot, or a gc has collected it.
        """
        view = self.view()
        snapshot = view.resolve(ref, (FORGOTTEN, COMMITTED, SWEPT))
        forgotten = [s for s in view.snapshots(snapshot.run, (FORGOTTEN,)) if s.step == snapshot.step]
        if snapshot.state != FORGOTTEN and forgotten and not ref.startswith("id:"):
            snapshot = forgotten[-1]
        if snapshot.state == COMMITTED:
            raise InvalidInputError(f"{ref}: is not forgotten")
        if snapshot.state == SWEPT:
            raise NotFoundError(f"{ref}: was forgotten and a gc has collected its bytes; it cannot come back")
        return revisions.revise(self.context, snapshot, state=COMMITTED, policy="", reason="")

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
        return gc.collect(
            self.context, dry_run=dry_run, fence_after_s=fence_after_s, unexplained=unexplained
        )  # fmt: skip

    @_in_one_place
    def recode(
        self, refs: Sequence[str] | None = None, *, codec: Literal["portable", "ans"] = "portable",
        dry_run: bool = False,
    ) -> RecodeResult:  # fmt: skip
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
        return recode(
            self.context, chosen, codec=codec, states=states, dry_run=dry_run
        )  # fmt: skip

    @_in_one_place
    def compact(
        self, refs: Sequence[str] | None = None, *, max_repack_bytes: int | None = None, dry_run: bool = False
    ) -> CompactResult:
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
            self.context, only=None if refs is None else self._resolve_all(refs, (COMMITTED,)),
            max_repack_bytes=max_repack_bytes, dry_run=dry_run,
        )  # fmt: skip

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
        self, level: str = "metadata", *, share: float = 1.0, subset: tuple[int, int] = (1, 1),
        max_decoded_bytes: int | None = None,
    ) -> CheckResult:  # fmt: skip
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
    ) -> RepairReport:  # fmt: skip
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

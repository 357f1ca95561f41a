"""Repository: the data under one URL, and one method per verb. Each method calls a module of its own.

The methods that only read snapshots are in snapshots.py.

Several threads may use one Repository, also for several saves at once. It must not be used across a fork.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from .catalog import policy_store
from .catalog.config import new_config, read_config, read_or_reconstruct_config
from .catalog.history import PUT_BACK
from .catalog.index import open_index
from .catalog.read_twice import exists
from .checks import check_choice, check_list, check_name
from .context import Context
from .distributed.choose import check as check_ranks
from .engine.registry import Engines
from .errors import AlreadyExistsError, InvalidInputError, NotFoundError
from .format import chunking, records
from .format.blobs.codecs import CODECS
from .format.hashing import new_seed
from .format.records import COMMITTED, FORGOTTEN, Config, Snapshot
from .options import SaveOptions
from .protocol import forget, gc, notes, tags
from .protocol.forget import ForgetResult
from .protocol.gc import GcResult
from .protocol.same_repository import pinned
from .retention import Policy
from .retention import check as check_policies
from .save.inputs import Lineage
from .snapshots import Snapshots
from .storage.base import ObjectStore
from .storage.urls import open_store
from .text import counted, quoted, some
from .threads import when_dropped

if TYPE_CHECKING:
    from .check.report import CheckResult
    from .copy.copy import CopyResult
    from .repair.report import RepairResult
    from .rewrite.compact import CompactResult
    from .rewrite.recode import RecodeResult


class Repository(Snapshots):
    """The data under one URL. Make one with `create` or `open`; close it with `close` or a `with` block.

    Attributes:
        url, store, config, options: as opened.
        context: the argument of the verbs.
        lineage: the parents of this process's next saves.
    """

    def __init__(self, store: ObjectStore, config: Config, options: SaveOptions, *, config_problem: str = "") -> None:
        self.url, self.store, self.config, self.options = store.url, store, config, options
        engines = Engines(config.digest_seed, options.threads, options.codec, required=options.codec == "ans")
        index = open_index(store, config, reconstructed=bool(config_problem))
        super().__init__(Context(store, index, engines, config, options, config_problem))
        self._finalizer = when_dropped(self, self.context.close)
        self.lineage = Lineage()

    @classmethod
    def create(
        cls,
        url: str | Path | ObjectStore,
        *,
        chunk_bytes: int = chunking.DEFAULT_CHUNK_BYTES,
        like: Repository | None = None,
        options: SaveOptions | None = None,
    ) -> Repository:
        """Make a repository under a URL.

        Args:
            chunk_bytes: the size of a chunk, a multiple of 16 [bytes].
            like: an open repository. The new one takes its chunk size and digest seed, so that snapshots can be copied
                between the two.

        Raises:
            AlreadyExistsError: there is a repository already.
            InvalidInputError: the directory or prefix is not empty, or an argument cannot be used.
            StorageError, CapabilityError: the store cannot be written, or lacks a property that snapstore needs.
        """
        if like is not None and not isinstance(like, Repository):
            raise InvalidInputError(f"like {quoted(like)}: expected an open Repository, got {type(like).__name__}")
        chunking.check_chunk_bytes(chunk_bytes)
        options = SaveOptions.of(options)
        store = open_store(url, create=True)
        seed = like.config.digest_seed if like else new_seed()
        config = new_config(like.config.chunk_bytes if like else chunk_bytes, seed)
        try:
            if not exists(store, "config"):
                _prepare(store)
            store.put("config", records.encode(config))
        except AlreadyExistsError as error:
            raise AlreadyExistsError(f"{store.url}: is a snapstore repository already; open it instead") from error
        return cls(store, config, options)

    @classmethod
    def open(
        cls, url: str | Path | ObjectStore, *, options: SaveOptions | None = None, damaged: bool = False
    ) -> Repository:
        """Open the repository under a URL.

        Args:
            damaged: open it even if its config is damaged, missing or of another one, to `check` and `repair` it.

        Raises:
            NotFoundError: there is no repository.
            FormatError: this release does not know its format, or one of its features.
            IntegrityError: its config is damaged.
        """
        store = open_store(url)
        config, problem = read_or_reconstruct_config(store) if damaged else (read_config(store), "")
        return cls(store, config, SaveOptions.of(options), config_problem=problem)

    @classmethod
    def open_or_create(
        cls, url: str | Path | ObjectStore, *, like: Repository | None = None, options: SaveOptions | None = None
    ) -> Repository:
        """Open the repository under a URL, or make one where there is none; see `open` and `create`."""
        try:
            return cls.open(url, options=options)
        except NotFoundError:
            try:
                return cls.create(url, like=like, options=options)
            except AlreadyExistsError:  # another process was first
                return cls.open(url, options=options)

    def close(self) -> None:
        """Release threads, index and temporary files. It is idempotent."""
        if self._finalizer.detach():
            self.context.close()

    def __enter__(self) -> Repository:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Repository({self.url!r})"

    # -- save

    def save(
        self,
        state: Any,
        *,
        run: str,
        step: int,
        parent: str | None = None,
        bases: Sequence[str] = (),
        metrics: Mapping[str, SupportsFloat] | None = None,
        metadata: Any = None,
        tags: Sequence[str] = (),
        full: bool = False,
        ranks: Literal[False] | None = None,
    ) -> Snapshot:
        """Save a state, and wait until it is committed. Nothing may change the state until then.

        Args:
            state: any nesting of dict, list and tuple over tensors, arrays, plain values and objects with state_dict.
                Or an iterator of (dotted path, tensor), for a state larger than memory: each tensor is written before
                the next is asked for. It is saved as a dict of the paths.
            run, step: the name of the snapshot. A step may be saved again: `run@step` then means the newest save.
            parent: reference of the parent, of any run; by default the snapshot of this run that this Repository
                committed last, else the newest of the run.
            bases: references of more snapshots to dedup against.
            metrics: numbers for policies such as KeepBest, NaN and infinities included: tensors and arrays of one
                element, or anything with `__float__`. Those on a GPU are copied in the order of its current stream.
            metadata: plain values, stored with the snapshot.
            tags: names; a tagged snapshot is never forgotten.
            full: store no deltas, for a snapshot that is kept for a long time.
            ranks: False: no other rank of torch.distributed saves this run. None: a save from one of several ranks is
                an error.

        Raises:
            InvalidInputError: a name, step, metric or leaf cannot be saved, or an array of the state was changed
                meanwhile. Nothing was committed; the same holds for the other errors.
            StorageError: the store failed.
            ConflictError: a gc expired this save because it looked dead; save again.
        """
        check_ranks(run, ranks)
        from .save.inputs import SaveRequest
        from .save.pipeline import save as store
        from .save.streaming import inputs_of_state

        request = SaveRequest(run, step, parent, bases, metrics, metadata, tags, full)
        request.resolve(self.context, self.lineage)
        return store(self.context, self.lineage, request, inputs_of_state(state, self.context.engines), None)

    # -- tags

    @pinned
    def tag(self, ref: str, name: str) -> Snapshot:
        """Put a tag on a committed snapshot; from then on the snapshot is never forgotten.

        A tag names one snapshot of a run: if another snapshot of the run has the tag, it moves to this one. If several
        processes give it to different snapshots at once, the newest of these keeps it. The returned snapshot shows
        whether it has the tag.

        Raises:
            ConflictError: other processes keep revising the snapshots of the run; tag again.
        """
        return tags.tag(self.context, ref, name)

    @pinned
    def untag(self, ref: str, name: str) -> Snapshot:
        """Remove a tag from a snapshot.

        Raises:
            NotFoundError: the snapshot does not have the tag.
        """
        return tags.untag(self.context, ref, name)

    # -- forget and gc

    @pinned
    def forget(
        self, keep: Policy | Sequence[Policy], *, run: str, dry_run: bool = False, force: bool = False
    ) -> ForgetResult:
        """Forget the snapshots of a run that no policy keeps. Their bytes stay until `gc`; `unforget` works until then.

        Tagged snapshots and the newest one always stay. A snapshot that a repair found damaged stays too; no policy
        counts it, so it does not take the place of an intact snapshot.

        Args:
            dry_run: only return the result; write nothing.
            force: accept no policy, and policies that keep nothing.

        Raises:
            InvalidInputError: no policy, or policies that keep nothing, without `force`.
            NotFoundError: no such run.
            IntegrityError, StorageError: a run has only records that are damaged, gone or cannot be read.
        """
        return forget.forget(self.context, check_policies(keep), run=run, dry_run=dry_run, force=force)

    @pinned
    def forget_snapshots(self, refs: Sequence[str], *, dry_run: bool = False, force: bool = False) -> ForgetResult:
        """Forget the named snapshots.

        Raises:
            InvalidInputError: one is tagged; or is the newest of its run, without `force`.
            NotFoundError: a reference names nothing.
        """
        return forget.forget_snapshots(self.context, refs, dry_run=dry_run, force=force)

    @pinned
    def forget_to_free(self, free_bytes: int, *, run: str | None = None, dry_run: bool = False) -> ForgetResult:
        """Forget as few snapshots as it takes until a gc would free some bytes, those that are worth least first.

        First go snapshots that no stored policy of their run keeps, then those that only the last of its policies
        keeps, then the last but one, and so on; each time the oldest first. Tagged snapshots, the newest one of each
        run and damaged ones stay.

        Args:
            free_bytes: what a gc frees afterwards, with what it would free now.
            run: only snapshots of this run; None: of all runs.
            dry_run: only return the result; write nothing.

        Raises:
            InvalidInputError: so much cannot be freed; nothing was forgotten.
            NotFoundError: no such run, or a manifest is missing.
            IntegrityError: a record is not known, so a gc would free nothing.
        """
        if isinstance(free_bytes, bool) or not isinstance(free_bytes, int) or free_bytes < 1:
            raise InvalidInputError(f"free_bytes {quoted(free_bytes)}: expected an int of 1 or more")
        return forget.forget_to_free(self.context, free_bytes, run=run, dry_run=dry_run)

    @pinned
    def unforget(self, ref: str) -> Snapshot:
        """Bring a forgotten snapshot back.

        Raises:
            InvalidInputError: it is not forgotten.
            NotFoundError: no such snapshot, or a gc has deleted its bytes.
        """
        return forget.unforget(self.context, ref)

    @pinned
    def gc(
        self, *, dry_run: bool = False, fence_after_s: float = gc.DEFAULT_FENCE_AFTER_S, unexplained: bool = False
    ) -> GcResult:
        """Delete packs and manifests that no committed snapshot needs. It may run beside saves and other gcs.

        Args:
            fence_after_s: a session of another host whose heartbeat is older counts as dead, and is expired [s].
            unexplained: also delete packs and manifests that no record explains, for example because records were
                removed by hand. Without it, such an object stops the gc: the store may have listed too few records.

        Raises:
            IntegrityError: gc cannot know which objects are needed. Nothing was deleted, except objects that an earlier
                gc had marked.
            StorageError: the store failed; the next gc continues.
        """
        if isinstance(fence_after_s, bool) or not isinstance(fence_after_s, int | float) or not fence_after_s >= 0:
            raise InvalidInputError(f"fence_after_s {quoted(fence_after_s)}: expected a number of seconds of 0 or more")
        return gc.collect(self.context, dry_run=dry_run, fence_after_s=fence_after_s, unexplained=unexplained)

    @pinned
    def recode(
        self,
        refs: Sequence[str] | None = None,
        *,
        codec: Literal["portable", "ans"] = "portable",
        dry_run: bool = False,
    ) -> RecodeResult:
        """Rewrite snapshots into another codec; `gc` then frees the old bytes. It may run beside saves and gcs.

        Args:
            refs: the snapshots to recode; None: all committed ones.
            codec: "portable", which every machine reads, or "ans" (see `SaveOptions`).

        Returns:
            The work done, and the snapshots and records that could not be recoded or read; those are unchanged.

        Raises:
            NotFoundError, InvalidInputError: a reference names nothing; the codec is unknown.
            CapabilityError: the codec needs a GPU that is not here.
            StorageError: the store failed; snapshots before that are recoded.
        """
        from .rewrite.recode import recode

        check_choice("codec", codec, CODECS)
        states = (COMMITTED,) if refs is None else (COMMITTED, FORGOTTEN)
        chosen, unknown = self._chosen(refs, None)
        return recode(self.context, chosen, unknown, codec=codec, states=states, dry_run=dry_run)

    @pinned
    def compact(
        self, refs: Sequence[str] | None = None, *, max_repack_bytes: int | None = None, dry_run: bool = False
    ) -> CompactResult:
        """Rewrite packs that are mostly unneeded, and chunks whose bases no snapshot needs; `gc` then frees the bytes.

        States, digests, ids, lineage and tags stay. It may run beside saves, forgets and gcs. If it dies, the next
        compact finishes its work.

        Args:
            refs: the snapshots to rewrite; None: all committed ones.
            max_repack_bytes: write at most this many bytes of blobs, the most profitable first. None: no limit.

        Returns:
            The work done, and the snapshots that could not be rewritten; those are unchanged.

        Raises:
            NotFoundError, InvalidInputError: a reference names nothing; `max_repack_bytes` is no int of 0 or more.
            IntegrityError: a record is damaged or missing, so nothing says which bytes are needed; nothing was changed.
            StorageError: the store failed; snapshots before that are rewritten.
        """
        from .rewrite.compact import compact

        if max_repack_bytes is not None and (type(max_repack_bytes) is not int or max_repack_bytes < 0):
            raise InvalidInputError(f"max_repack_bytes {quoted(max_repack_bytes)}: expected an int of 0 or more")
        return compact(
            self.context,
            only=None if refs is None else self._resolve_all(refs, (COMMITTED,)),
            max_repack_bytes=max_repack_bytes,
            dry_run=dry_run,
        )

    def copy(
        self,
        refs: Sequence[str] | None = None,
        *,
        to: str | Path | ObjectStore | Repository,
        run: str | None = None,
        verify: bool = True,
        dry_run: bool = False,
    ) -> CopyResult:
        """Copy snapshots into another repository as they are stored: verify them, and send only blobs that it lacks.

        Ids, steps, tags, metrics, metadata and lineage stay; policies are not copied. It may run beside saves, copies
        and gcs of both. The next copy continues an interrupted one, after the last snapshot that was committed.

        Args:
            refs: the snapshots to copy. None: all committed ones, except snapshots that the destination has forgotten.
            to: the destination. If there is none, one is made, with the chunk size and digest seed of this repository.
            run: without `refs`: copy only the snapshots of this run.
            verify: rebuild each chunk that is sent; compare its digest. False: no save there builds on it until proven.

        Returns:
            The work done, and the snapshots that could not be copied; nothing of them was committed.

        Raises:
            NotFoundError, InvalidInputError: a reference or the run names nothing; the digests of the destination have
                another seed; or the destination is this repository.
            IntegrityError, StorageError: a run has only records that are damaged, gone or cannot be read.
            StorageError: one of the stores failed; snapshots before that are copied.
        """
        from .copy.copy import CopyResult, copy

        if refs is not None and run is not None:
            raise InvalidInputError(f"run {quoted(run)}: pass either refs or run")
        (chosen, unknown), named = self._chosen(refs, run), refs is not None
        if isinstance(to, Repository):
            return copy(self.context, to.context, chosen, unknown, named=named, dry_run=dry_run, verify=verify)
        try:
            target = Repository.open(to) if dry_run else Repository.open_or_create(to, like=self, options=self.options)
        except NotFoundError:
            return CopyResult(str(to), copied=chosen, unknown=unknown, dry_run=True)
        with target:
            return copy(self.context, target.context, chosen, unknown, named=named, dry_run=dry_run, verify=verify)

    def _chosen(self, refs: Sequence[str] | None, run: str | None) -> tuple[list[Snapshot], dict[str, str]]:
        """Return the snapshots that are named, or those of a run, or all; and the records that are not known."""
        if refs is not None:
            return self._resolve_all(refs, (COMMITTED, FORGOTTEN)), {}
        view = self.view()
        if run is not None:
            view.require_run(run)
        return view.snapshots(run), view.unknown(run)

    def _resolve_all(self, refs: Sequence[str], states: tuple[str, ...]) -> list[Snapshot]:
        """Return the named snapshots, each once."""
        check_list("refs", refs)
        view = self.view()
        return list({snapshot.id: snapshot for snapshot in (view.resolve(ref, states) for ref in refs)}.values())

    # -- policies

    def policies(self, run: str) -> list[Policy]:
        """Return the retention policies that are stored for a run."""
        return policy_store.read(self.store, run)

    @pinned
    def set_policies(self, run: str, keep: Policy | Sequence[Policy]) -> None:
        """Store the retention policies of a run, so that `snapstore forget --run` can use them."""
        policy_store.store(self.store, check_name("run", run), check_policies(keep))

    # -- look closer

    def check(
        self,
        level: str = "metadata",
        *,
        share: float = 1.0,
        subset: tuple[int, int] = (1, 1),
        max_decoded_bytes: int | None = None,
    ) -> CheckResult:
        """Verify the repository, and return the problems that were found.

        Args:
            level: "metadata" (are all objects there?), "data" (are all stored bytes as written?) or "restore" (does the
                state come back bit for bit? Only this level compares digests).
            share: the part of the packs that "data" reads, 0 to 1.
            subset: (n, t): "data" reads the n-th of t fixed shares of the packs, so t checks read them all.
            max_decoded_bytes: "restore" decodes at most so many bytes; None: 1 GiB plus 8192 times the stored bytes. No
                repository that snapstore made needs more.
        """
        from .check.check import check

        return check(self.context, level=level, share=share, subset=subset, max_decoded_bytes=max_decoded_bytes)

    def in_need_of_quarantined(self, snapshots: Sequence[Snapshot]) -> set[str]:
        """Return the ids of the snapshots that need a pack or manifest that a repair found damaged or missing.

        These snapshots may be lost. While no pack is in quarantine, nothing is read.
        """
        return notes.in_need_of_quarantined(self.context, snapshots)

    @pinned
    def repair(
        self, *, apply: bool = False, level: str = "data", drop: bool = False, purge: bool = False
    ) -> RepairResult:
        """Report what can be repaired; with `apply`, repair it.

        It heals snapshots from intact copies of their chunks, keeps saves from building on damaged packs, and rebuilds
        the index. It deletes no pack and no manifest. It may run beside saves, forgets and gcs, and may be repeated.

        Args:
            level: how thorough the check before the repair is, as in `check`.
            drop: forget snapshots that stay damaged, unless they are tagged; `gc` then deletes what only they need.
            purge: let `gc` delete damaged packs that no snapshot needs any more.

        Raises:
            StorageError: the store failed; every step so far is complete. Repair again.
        """
        from .repair.repair import repair

        return repair(self.context, level=level, apply=apply, drop=drop, purge=purge)

    def rebuild_index(self, *, forget_missing: bool = True) -> int:
        """Rebuild the index from the objects; return the number of records read.

        Args:
            forget_missing: drop the records that only the index has, because they are gone from the store or cannot be
                read there. `repair` would put them back. False: refuse if records are gone, and keep unreadable ones.

        Raises:
            InvalidInputError: records are gone, and `forget_missing` is False; nothing was changed.
        """
        if not forget_missing and (missing := self.view().missing):
            names = some([f"{s.ref} (id:{s.id[:12]}, {s.state})" for s in missing])
            raise InvalidInputError(
                f"index rebuild: would drop {counted(len(missing), 'snapshot')} whose records only the index still "
                f"has: {names}; {PUT_BACK}"
            )
        view = self.context.index.rebuild(keep_unreadable=not forget_missing)
        return len(view.snapshots(states=None)) + len(view.damaged) + len(view.unread)


def _prepare(store: ObjectStore) -> None:
    """Prepare an empty place; raise AlreadyExistsError if another process makes a repository there meanwhile."""
    try:
        store.prepare()
    except InvalidInputError as error:
        if exists(store, "config"):
            raise AlreadyExistsError("config") from error
        raise

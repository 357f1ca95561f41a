"""Snapshots: the snapshots of a repository: look them up, restore them, read their tensors, compare them.

In: an open repository. Out: records, states and tensors. Nothing here writes to the store. `Repository` is a subclass,
which also saves and forgets snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Unpack, overload

from .catalog.history import View
from .errors import CapabilityError, FormatError, IntegrityError, OutputError, SnapstoreError, StorageError
from .format.records import Snapshot
from .inspect.tables import SnapshotList
from .retention import utc
from .text import counted, html_table, human_bytes, log, some

if TYPE_CHECKING:
    from .context import Context
    from .inspect.blame import BlameResult
    from .inspect.diff import DiffResult
    from .inspect.divergence import DivergenceResult
    from .inspect.lazy import LazyTensors
    from .inspect.report_page import RunReport
    from .inspect.stats import StatsResult
    from .inspect.usage import UsageResult
    from .state.fill.fit import Mismatches, NameOptions, Rename


@contextmanager
def newest_whole_named(
    context: Context,
    ref: str,
    elsewhere: Callable[[str], str] = lambda ref: "",
) -> Iterator[None]:
    """Run the block; if it fails to restore the newest snapshot of a run, add the newest whole one to the error.

    Every restore runs in such a block, so that the code below raises plain errors.

    Args:
        ref: the reference of the snapshot that the block restores.
        elsewhere: returns how to get the snapshot of a reference from another store, or nothing.

    Raises:
        IntegrityError, FormatError, StorageError: the error of the restore, with the name.
    """
    try:
        yield
    except (IntegrityError, FormatError, StorageError) as error:
        if isinstance(error, CapabilityError | OutputError):  # it can be read, here or elsewhere
            raise
        if isinstance(error, StorageError) and context.store.url.startswith("s3:"):  # the network, and no bad sector
            raise
        try:
            from .check import newest_whole

            advice = newest_whole.advice(context, ref, maybe_whole=isinstance(error, StorageError))
        except (SnapstoreError, ImportError, OSError) as failure:  # the error of the restore is the one to see
            log.info("found no whole snapshot to name: %s", failure)
            advice = ""
        advice += elsewhere(ref)
        if not advice:
            raise
        first, *more = error.args
        raise type(error)(f"{first}{advice}", *more) from error


class Snapshots:
    """The snapshots of one repository.

    Attributes:
        context: the argument of the verbs.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._left_out = frozenset[str]()  # the records that a warning has named

    def __reduce__(self) -> NoReturn:
        """Refuse pickle and copy."""
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied; open another one by its URL")

    def _repr_html_(self) -> str:
        """Return a table of the runs, as of now; a notebook calls this."""
        name = f"{type(self).__name__} {self.context.store.url}"
        try:
            view = self.view()
        except SnapstoreError as error:  # the store cannot be read, or is closed
            return html_table(f"{name}: {error}", [], [])
        runs: dict[str, list[Snapshot]] = {}
        for snapshot in view.snapshots():
            runs.setdefault(snapshot.run, []).append(snapshot)
        rows = []
        for run, found in runs.items():
            newest, stored = found[-1], sum(one.stored_bytes for one in found)
            sizes = human_bytes(newest.logical_bytes), human_bytes(stored)
            rows.append([run, len(found), newest.step, f"{utc(newest.created):%Y-%m-%d %H:%M}", *sizes])
        unknown = f", {counted(len(view.unknown()), 'unreadable record')}" if view.unknown() else ""
        columns = ["run", ">snapshots", ">newest step", "created (UTC)", ">size", ">stored in all"]
        return html_table(f"{name}: {counted(len(rows), 'run')}{unknown}", columns, rows)

    # -- look

    def view(self, run: str | None = None) -> View:
        """List the store and return all records.

        Args:
            run: list only the records of this run, if it has a snapshot. The View answers questions about it alone.
        """
        return self.context.index.refresh_for(run)

    def snapshots(self, run: str | None = None) -> SnapshotList:
        """Return the committed snapshots of a run, or of all runs, in the order in which they were saved.

        The list has `to_pandas()`, and is a table in a notebook.

        Leaves out snapshots whose record cannot be read or is gone. A warning names each such record once, and
        `view().unknown(run)` returns them all.

        Raises:
            IntegrityError, StorageError: the run has only records that are damaged, gone or cannot be read.
        """
        view = self.view(run)
        found = view.snapshots(run)
        if run is not None and not found:
            view.require_known(f"run {run!r}", run)
        self._warn_of_left_out(view, run)
        return SnapshotList(found)

    def snapshot(self, ref: str) -> Snapshot:
        """Return the snapshot that a reference names: `run@step`, `run@latest` (`highest`, `best`), `run@tag` or an id.

        Raises:
            NotFoundError, InvalidInputError, IntegrityError, StorageError: see `View.resolve`.
        """
        return self.context.index.find(ref)

    def children(self, ref: str) -> SnapshotList:
        """Return the committed snapshots, of any run, whose parent is this one; it leaves out what `snapshots` does."""
        view = self.view()
        found = view.children(view.resolve(ref).id)
        self._warn_of_left_out(view)
        return SnapshotList(found)

    def _warn_of_left_out(self, view: View, run: str | None = None) -> None:
        if new := view.unknown(run).keys() - self._left_out:
            self._left_out |= new
            text = "%s: left out snapshots whose records cannot be read or are gone; run 'snapstore check': %s"
            log.warning(text, self.context.store.url, some(sorted(new)))

    # -- restore

    @overload
    def restore(
        self,
        ref: str,
        *,
        keys: str | Sequence[str] | None = ...,
        device: Any = ...,
        types: Sequence[type] = ...,
        part: None = ...,
        rename: Rename | None = ...,
        per_rank: Literal["same", "drop"] | int | None = ...,
    ) -> dict[Any, Any]: ...

    @overload
    def restore(
        self,
        ref: str,
        *,
        keys: str | Sequence[str] | None = ...,
        device: Any = ...,
        types: Sequence[type] = ...,
        part: str,
        rename: Rename | None = ...,
        per_rank: Literal["same", "drop"] | int | None = ...,
    ) -> Any: ...

    def restore(
        self,
        ref: str,
        *,
        keys: str | Sequence[str] | None = None,
        device: Any = None,
        types: Sequence[type] = (),
        part: str | None = None,
        rename: Rename | None = None,
        per_rank: Literal["same", "drop"] | int | None = None,
    ) -> Any:
        """Return the state of a snapshot, as nested containers.

        For a type checker it is a dict, as nearly every state is; cast it if yours is a list or one value.

        Args:
            ref: a reference of any run. A restore does not change the parent of the next save: to fork, call
                `save(parent=ref)`.
            keys: dotted paths, or globs over them such as "model.*"; only the bytes that they need are read.
            device: where new tensors go.
            types: your classes of which values are made. Values of other classes of yours come back in a plain form;
                nothing is imported.
            part: return only the value of this top-level key, and read no more; `keys` then begin inside it.
            rename: new names for the keys of dicts, such as {"_orig_mod.": ""}: a mapping of old names to new ones,
                where an old name that ends with a dot is a prefix; or a function that returns the new name of each.
                `keys` then select by new names.
            per_rank: which rank's own values (`PerRank`, `RngState`) to return, if ranks saved the snapshot together.
                None: those of the only rank; if there were more, `RankValues`, which have those of all ranks. A number:
                those of that rank. "drop": none. "same": those of the only rank; an error if there were more.

        Raises:
            NotFoundError: a reference, key, part or old name names nothing.
            InvalidInputError: a class does not accept the stored value; two names would become one; `per_rank` names no
                rank that saved.
            CapabilityError: `device` is a CUDA device that is not there, or the state does not fit into memory.
            IntegrityError: the snapshot is damaged. If it is the newest of its run, the error names the newest whole
                one.
        """
        from .restore.pipeline import read
        from .restore.sources import AsRank
        from .state.fill.fit import Fit

        fit, as_rank = Fit(keys, part, rename), AsRank(per_rank)
        with newest_whole_named(self.context, ref):
            return read(self.context, ref, keys=fit, device=device, types=types, as_rank=as_rank)[1]

    def restore_into(
        self,
        ref: str,
        target: Any,
        *,
        keys: str | Sequence[str] | None = None,
        types: Sequence[type] = (),
        per_rank: Literal["same", "drop"] | int | None = None,
        strict: bool | Mismatches = True,
        **names: Unpack[NameOptions],
    ) -> Snapshot:
        """Fill `target` with the state of a snapshot, and return the snapshot.

        Args:
            ref, keys, types: see `restore`; the classes in `target` need not be named.
            target: nested containers, tensors and objects with load_state_dict, shaped like the saved state.
            per_rank: see `restore`. None: if more ranks saved, an `RngState` of `target` keeps its generators, with a
                warning; other values of each rank's own are an error. "drop": `target` keeps its own values, and may
                lack them.
            strict: False: fill only names that both sides have, and log the others. `Mismatches()`: do so, and note the
                other names in it. Another shape, dtype or type is an error in any case, and so are names that differ
                only by the prefix of a wrapper.
            names: `part` and `rename`; see `restore`.

        Raises:
            NotFoundError: the reference, a key, the part or an old name names nothing.
            InvalidInputError: `target` does not fit. The error names the differences part by part; nothing was written.
                Or `per_rank` names no rank that saved, or must choose one; nothing was written.
                Or a `load_state_dict` failed, or tensors of `target` share memory and those of the snapshot differ:
                `target` may be partly filled, and the error says so.
            IntegrityError: the snapshot is damaged. This and every other error says so if `target` may be partly
                filled by now.
        """
        from .restore.pipeline import read_into
        from .restore.sources import AsRank
        from .state.fill.fit import Fit

        fit, as_rank = Fit(keys, strict=strict, **names), AsRank(per_rank)
        with newest_whole_named(self.context, ref):
            return read_into(self.context, ref, target, keys=fit, types=types, as_rank=as_rank)

    def named_tensors(
        self, ref: str, *, keys: str | Sequence[str] | None = None, device: Any = None
    ) -> Iterator[tuple[str, Any]]:
        """Yield (dotted path, tensor or array) of a snapshot one by one, for a state larger than memory.

        They come in the order in which they were saved; the paths of tied tensors follow each other. Each is verified
        before it is yielded. Plain values, and values that each rank keeps for itself (`PerRank`), are left out:
        `restore` them with keys.

        Args:
            ref, keys, device: see `restore`, also for the errors.
        """
        from .restore.streaming import TensorReader

        return iter(TensorReader(self.context, ref, keys=keys, device=device))

    def tensors(self, ref: str, *, keys: str | Sequence[str] | None = None) -> LazyTensors:
        """Return the tensors and arrays of a snapshot by dotted path, as handles that read slices.

        `tensors["model.wte.weight"][100:200]` reads the chunks that hold these rows, and checks each against its
        digest. Plain values, bytes, and values that each rank keeps for itself (`PerRank`) are left out.

        Args:
            ref, keys: see `restore`.

        Raises:
            NotFoundError, InvalidInputError: a reference or key names nothing; two tensors have the same path.
            IntegrityError: the snapshot is damaged. If it is the newest of its run, the error names the newest whole
                one.
        """
        from .inspect.lazy import open_tensors

        with newest_whole_named(self.context, ref):
            return open_tensors(self.context, ref, keys=keys)

    # -- count and compare

    def stats(self) -> StatsResult:
        """Return the bytes by tensor group and by codec, the effect of dedup, the ratio and the depths of chains.

        Leaves out snapshots whose record cannot be read or is gone; `unknown` of the result names them.
        """
        from .inspect.stats import stats

        return stats(self.context)

    def du(self, by: Literal["run", "snapshot", "part", "tensor"] = "run", *, run: str | None = None) -> UsageResult:
        """Return what takes the space, and what would be freed without each run or snapshot.

        Args:
            by: what each row of the result is. Parts and tensors are counted over the committed snapshots of all runs.
            run: show this run alone; parts and tensors are counted over its snapshots only.

        Raises:
            InvalidInputError: `by` is none of these.
            NotFoundError: there is no such run, or a manifest of a snapshot is missing.
            IntegrityError, FormatError: a manifest is damaged.
        """
        from .inspect.usage import usage

        return usage(self.context, by, run)

    def report(
        self,
        runs: Sequence[str] = (),
        *,
        values: bool = False,
        storage_price: float = 0.023,
        put_price: float = 0.005,
    ) -> RunReport:
        """Return a page of HTML about some runs, and what was read for it.

        The page shows lineage and reasons, bytes, ratio, stall, duration and metrics of every snapshot, from records.
        Bytes by part and codec, the compressibility of planes and the share of changed elements by layer are those of
        some steps, evenly spread over each run. It holds all that it needs: a browser loads nothing for it.

        Args:
            runs: names of runs; none: all runs.
            values: also read the values of at most 50 steps: how far each layer moved, as relative L2 and cosine.
            storage_price: of a GB per month [USD]; put_price: of a thousand requests [USD]. The defaults are AWS list
                prices of S3 Standard in us-east-1, as published in 2025.

        Raises:
            NotFoundError: there is no such run, or no snapshot.
            CapabilityError: plotly is not installed.
            IntegrityError, StorageError: a run has only records that are damaged, gone or cannot be read.
        """
        from .inspect.report_page import report

        return report(self.context, runs, values=values, storage_price=storage_price, put_price=put_price)

    def diff(self, a: str, b: str) -> DiffResult:
        """Return the differences between two snapshots, tensor by tensor.

        Raises:
            NotFoundError: a reference names nothing, or a snapshot was deleted meanwhile.
            IntegrityError, FormatError: an object that must be read is damaged.
        """
        from .inspect.diff import diff

        view = self.view()
        return diff(self.context, view.resolve(a), view.resolve(b))

    def blame(self, run: str, *, since: int | None = None, until: int | None = None) -> BlameResult:
        """Return at which step which tensor of a run began to move away.

        A tensor gets NaNs or infinities, jumps, changes although it was frozen, or stops changing.

        Follows the parents of the run's newest snapshot within the run. Compares digests, and reads the values of few
        tensors and snapshots; `read_bytes` of the result says how much.

        Args:
            run: the name of the run.
            since, until: look at snapshots of these steps alone, both included.

        Raises:
            NotFoundError: there is no such run.
            InvalidInputError: there are fewer than two snapshots to compare.
            IntegrityError, FormatError: a chunk that must be read is damaged. Snapshots with damaged manifests are left
                out; `skipped` of the result names them.
        """
        from .inspect.blame import blame

        return blame(self.context, run, since, until)

    def first_difference(self, a: str, b: str) -> DivergenceResult:
        """Return the first common step, tensor and element at which two runs, or two snapshots, differ.

        Looks at all common steps in ascending order, up to the first that differs. Compares digests, and reads chunks
        of one tensor. Plain values are not compared: see `diff`. Leaves out snapshots whose record cannot be read or is
        gone; `unknown` of the result names them.

        Args:
            a, b: names of runs, or references.

        Raises:
            NotFoundError: a name is of no run, the runs have no step in common, or a snapshot was deleted meanwhile.
            IntegrityError: an object that must be read is damaged.
            IntegrityError, StorageError: a run has only records that are damaged, gone or cannot be read.
        """
        from .inspect.divergence import first_difference

        return first_difference(self.context, a, b)

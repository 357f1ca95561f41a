"""save, async_save and load: DCP's functions, called with the right arguments for snapstore."""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from ..errors import InvalidInputError, NotFoundError
from ..state.values.containers import MAX_DEPTH, Path, is_mapping, shown
from ..state.walk.per_rank import PerRank, has_objects
from ..state.walk.stateful import is_stateful, state_of
from .exchange import DetailsWantedError
from .planner import SnapstoreLoadPlanner, SnapstorePlanner, closed
from .reader import SnapstoreReader
from .stored import StoredState
from .writer import SnapstoreWriter

_ObjectPlace = tuple[Path, Any]  # an object, and where it is


def save(
    state: dict[str, Any], writer: SnapstoreWriter, step: int, *, process_group: dist.ProcessGroup | None = None
) -> Metadata:
    """Save the state of all ranks as one snapshot, and wait until it is committed; every rank calls it.

    It first waits for an `async_save` of this writer that runs.

    Args:
        state: a dict of tensors, DTensors, plain values, objects with state_dict/load_state_dict, and containers of
            these.
        process_group: the ranks that save; None: all ranks of the job, or this process without torch.distributed.

    Raises:
        CheckpointException: a rank failed; it is raised on all ranks, and is a BaseException. Nothing was committed.
    """

    def call() -> Metadata:
        try:
            metadata: Metadata = state_dict_saver.save(
                closed(state),
                checkpoint_id=_id_of(step),
                storage_writer=writer,
                planner=SnapstorePlanner(),
                process_group=process_group,
            )
        except BaseException:
            writer.end_failed()  # DCP does not tell the writer that another rank has failed
            raise
        return metadata

    writer.idle.wait()
    with alone_is_meant():
        try:
            return call()
        except CheckpointException as error:  # the same on all ranks
            if not any(isinstance(one, DetailsWantedError) for one, _ in error.failures.values()):
                raise
        return call()  # it succeeds if only the order of keys or empty containers differ, or names what differs


def async_save(
    state: dict[str, Any], writer: SnapstoreWriter, step: int, *, process_group: dist.ProcessGroup | None = None
) -> Future[Metadata]:
    """Save the state of all ranks as one snapshot in the background; return once the state may change.

    It first waits for an `async_save` of this writer that runs.

    Args:
        state: see `save`.
        process_group: a gloo group that is used only here: a background thread calls its collectives during the
            training.

    Returns:
        A future. Its result raises the errors of `save`, also those of the copy; no other call does.
    """
    writer.idle.wait()
    writer.idle.clear()
    try:
        future: Any = state_dict_saver.async_save(  # DCP returns another type only if a stager returns a future
            closed(state),
            checkpoint_id=_id_of(step),
            storage_writer=writer,
            planner=SnapstorePlanner(),
            process_group=process_group,
        )
    except BaseException:
        writer.idle.set()
        raise
    done: Future[Metadata] = Future()
    done.set_running_or_notify_cancel()  # it cannot be cancelled
    future.add_done_callback(partial(_finish, done, writer, threading.get_ident()))
    return done


def _id_of(step: Any) -> Any:
    """Return a step or a tag as a checkpoint id. Any other value stays no step: the error is raised on all ranks."""
    if step is None or type(step) is bool:  # None would be the checkpoint id of the call before
        return str(step)
    try:
        return operator.index(step)
    except TypeError:
        return step


def _finish(done: Future[Metadata], writer: SnapstoreWriter, caller: int, future: Future[Metadata]) -> None:
    """Give a future the result of DCP's, once no session is left of a save that failed.

    Args:
        caller: the thread of `async_save`; this is called in the thread that saved, unless the save had ended before.
    """
    error = future.exception()  # to raise it here would add the caller's frames, which hold the state
    try:
        if error is not None:
            writer.reset() if threading.get_ident() == caller else writer.end_failed()
    finally:
        writer.idle.set()  # first: the caller's callbacks of the future run in this thread, and may save again
        done.set_result(future.result()) if error is None else done.set_exception(error)


def load(state: dict[str, Any], reader: SnapstoreReader, step: int | str | None = None) -> None:
    """Fill a state from a snapshot of any number of ranks. Each rank reads what it needs; nothing is communicated.

    Args:
        state: its tensors are filled in place; its other values are replaced. Objects with load_state_dict load their
            state, also in dicts, lists and `PerRank`: first the values of `state` itself, then those below them, in the
            order of their keys; an object in the state of another one before that one. Those with `load_last`
            (`RngState`) come last, as in `SnapshotManager.restore_into`.
        step: a step, a tag, or None for the newest. Each rank looks a tag or the newest up by itself: if a save may be
            committed meanwhile, pass the number of a step, the same on all ranks.

    An object gets all values that the snapshot has for it, also the ones that it lacks, such as the moments of a new
    optimizer. Groups, names and shapes of an optimizer's parameters must fit.

    Raises:
        InvalidInputError: an object is in a tuple, dataclass or other value that DCP replaces as a whole, or in a list
            that is at two places; two keys of `state` have the same text; or the state contains itself. Nothing was
            loaded.
        CheckpointException: the snapshot lacks a key of the state, or a shape differs, or an optimizer does not fit;
            nothing was loaded. Or reading failed: the state may be partly filled.
        Exception: the error of a load_state_dict; the tensors, and the objects before, are loaded.
    """
    checkpoint_id = "latest" if step is None else _id_of(step)
    keys = {str(key): key for key in state}  # DCP sorts them, and has text for each
    if len(keys) < len(state):
        raise InvalidInputError("state: two of its keys have the same text, which is their key in DCP; rename one")
    ordered = {name: state[keys[name]] for name in sorted(keys)}  # objects load in the same order on all ranks
    with alone_is_meant(), _opened(ordered) as objects:
        _fill(ordered, reader, checkpoint_id, objects)
    for text, value in ordered.items():
        if state[keys[text]] is not value:
            state[keys[text]] = value


def _fill(state: dict[str, Any], reader: SnapstoreReader, checkpoint_id: Any, objects: _Objects) -> None:
    """Fill a state without objects; if its snapshot is deleted meanwhile, with the one that the id then means."""
    tried = set()
    while True:
        try:
            planner = SnapstoreLoadPlanner(complete=lambda opened: objects.complete(opened, reader.present()))
            state_dict_loader.load(
                state, checkpoint_id=checkpoint_id, storage_reader=reader, planner=planner, no_dist=True
            )
            return
        except CheckpointException as error:
            is_gone = any(isinstance(one, NotFoundError) for one, _ in error.failures.values())
            if not is_gone or reader.snapshot.id in tried:
                raise
            tried.add(reader.snapshot.id)


class _Objects:
    """The objects of a state, each with the result of its `state_dict`; an object comes after the ones in its state."""

    def __init__(self, state: dict[str, Any], places: list[_ObjectPlace]) -> None:
        objects = {path: value for path, value in places if type(value) is not PerRank}
        deepest_first = sorted(objects.items(), key=lambda one: -len(one[0]))
        self._places = [(path, value, _container(state, path)[path[-1]]) for path, value in deepest_first]
        self._stored: StoredState | None = None

    def complete(self, state: dict[str, Any], stored: StoredState) -> None:
        """Give each state a place for each value that the snapshot has for its object.

        Raises:
            InvalidInputError: the state of an object has objects in it, and lacks a value; or a stored state does not
                fit its optimizer. Nothing was loaded.
        """
        self._stored = stored
        for path, value, opened in self._places:
            if (tree := _below(stored.tree, path)) is None:
                continue
            completed = stored.completed(tree, opened, value, path)
            has_objects_in_it = any(len(other) > len(path) and other[: len(path)] == path for other, *_ in self._places)
            if completed is not opened and has_objects_in_it:
                raise InvalidInputError(
                    f"{shown(path)}: the snapshot has values for this {type(value).__name__} that its state_dict() "
                    "lacks, beside objects: call restore_into of a Repository or SnapshotManager; nothing was loaded"
                )
            _container(state, path)[path[-1]] = completed

    def put_back(self, path: Path, value: Any, loaded: Any) -> None:
        """Put back what the loader of an optimizer has cast."""
        assert self._stored is not None
        self._stored.put_back(_below(self._stored.tree, path), value, loaded)


def _below(tree: Any, path: Path) -> Any:
    """Return the stored value at a path of a state, whose first element is text; None: there is none."""
    for number, key in enumerate(path):
        if is_mapping(tree):
            tree = {str(one): child for one, child in tree.items()}.get(str(key)) if not number else tree.get(key)
        else:
            tree = tree[key] if isinstance(tree, list) and type(key) is int and key < len(tree) else None
    return tree


@contextmanager
def _opened(state: dict[str, Any]) -> Iterator[_Objects]:
    """Replace objects by their states, and afterwards let each object load the state that is then in its place."""
    places: list[_ObjectPlace] = []  # an object comes before the objects in its state
    seen: dict[int, Path] = {}
    loads: list[_ObjectPlace] = []  # and here after them
    try:
        for key in sorted(state, key=lambda key: not is_stateful(state[key])):
            loads += _open_place(state, key, (key,), places, seen)
        objects = _Objects(state, places)
        yield objects
        last = [path for path, value in loads if getattr(type(value), "load_last", False) is True]
        for place in sorted(loads, key=lambda load: any(path[: len(load[0])] == load[0] for path in last)):
            path, value = place
            container = _container(state, path)
            loaded, container[path[-1]] = container[path[-1]], value
            places = [one for one in places if one is not place]
            value.load_state_dict(loaded)
            objects.put_back(path, value, loaded)
    finally:
        for path, value in reversed(places):
            _container(state, path)[path[-1]] = value


def _open_place(
    container: Any, key: Any, path: Path, places: list[_ObjectPlace], seen: dict[int, Path], *, is_inside: bool = False
) -> list[_ObjectPlace]:
    """Replace the objects at a place, and below it, by their states; return them in the order to load them.

    Args:
        seen: the paths of the dicts, and of the lists with objects below them, that are opened already; by id.
        is_inside: whether the place is in the state of an object, which can load any value there.

    Raises:
        InvalidInputError: an object is in a value that DCP replaces as a whole, or in a list that is at two places; or
            the state contains itself.
    """
    opened: list[_ObjectPlace] = []
    while is_stateful(container[key]) and len(path) + len(opened) <= MAX_DEPTH:
        opened.append((path, container[key]))
        places.append(opened[-1])
        container[key] = state_of(container[key], path)
    if len(path) + len(opened) > MAX_DEPTH:
        raise InvalidInputError(f"{shown(path[:8])}: more than {MAX_DEPTH} levels deep, or contains itself")
    below, loads = container[key], list[_ObjectPlace]()
    is_inside = is_inside or not all(type(value) is PerRank for _, value in opened)
    if id(below) in seen and isinstance(below, list):
        raise InvalidInputError(
            f"{shown(path)}: is the same list as {shown(seen[id(below)])}, and has objects with load_state_dict: DCP "
            "would make two lists of it; put a copy of the list there, or call restore_into of a Repository or "
            "SnapshotManager; nothing was loaded"
        )
    if id(below) in seen:
        return opened[::-1]
    if isinstance(below, dict | list):
        for child in sorted(below, key=str) if isinstance(below, dict) else range(len(below)):
            loads += _open_place(below, child, (*path, child), places, seen, is_inside=is_inside)
        if loads or isinstance(below, dict):
            seen[id(below)] = path
    elif not is_inside and has_objects(below):
        raise InvalidInputError(
            f"{shown(path)}: a {type(below).__name__} with an object that has load_state_dict: DCP loads a "
            f"{type(below).__name__} as one value, which would replace the object; keep objects in dicts and lists, or "
            "call restore_into of a Repository or SnapshotManager; nothing was loaded"
        )
    return loads + opened[::-1]


def _container(state: dict[str, Any], path: Path) -> Any:
    """Return the container of a path. It is looked up again, because DCP replaces lists."""
    found: Any = state
    for key in path[:-1]:
        found = found[key]
    return found


@contextmanager
def alone_is_meant() -> Iterator[None]:
    """Silence DCP's warning that a call without torch.distributed is for one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield

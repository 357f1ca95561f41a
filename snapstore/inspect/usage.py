"""Usage: the bytes that each run, snapshot, part or tensor needs, and what would be freed without it.

In: an open repository. Out: UsageResult. Reads every manifest once; writes nothing.

A blob is named by its pack and its offset there. What two rows need counts in both, and is freed by neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..catalog.history import View
from ..catalog.needed_keys import all_manifests
from ..checks import check_choice
from ..context import Context
from ..format.keys import pack_key
from ..format.manifests import manifest
from ..format.manifests.manifest import Manifest
from ..format.manifests.tensor_layout import held_bytes
from ..format.records import Snapshot
from ..protocol.gc import running_sessions
from ..protocol.notes import in_quarantine
from ..state.values.containers import Path, display
from ..text import brief, html_table, human_bytes
from .stats import while_unchanged
from .tables import data_frame

By = Literal["run", "snapshot", "part", "tensor"]
_COLUMNS = ("name", "logical_bytes", "stored_bytes", "unshared_bytes", "freed_bytes")
#: Rows of these can be forgotten.
_FORGOTTEN = ("run", "snapshot")
#: An offset in a pack has at most so many bits.
_OFFSET_BITS = 40

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Usage:
    """The bytes of one run, snapshot, part or tensor.

    Attributes:
        id: of the snapshot; "" for the others.
        logical_bytes: of its state, over the snapshots that have it.
        stored_bytes: of the blobs and manifests that it needs, each counted once. Of a part or tensor: of the blobs.
        unshared_bytes: of those that nothing else needs: forget, gc and compact would free about as much, and more if
            compact finds other bases for deltas.
        freed_bytes: of the packs and manifests that nothing else needs: gc frees them if it alone is forgotten. A pack
            that others need too stays, whole, until `compact`. None for a part or tensor, which cannot be forgotten.
    """

    name: str
    id: str
    logical_bytes: int
    stored_bytes: int
    unshared_bytes: int
    freed_bytes: int | None


@dataclass(frozen=True, slots=True)
class UsageResult:
    """What takes the space of a repository, over its committed snapshots.

    Attributes:
        by: what each row is.
        rows: runs by name, snapshots from the oldest to the newest of each run, parts and tensors in the state's order.
        stored_bytes: size of all packs and manifests of the repository.
        unneeded_bytes: of those that no committed snapshot needs: gc frees them now. 0 if there are `unknown` records,
            or if a save runs, whose own objects they may be: gc waits for it.
        unknown: key -> why, of records that cannot be read or are gone; their snapshots are not counted.
    """

    by: str
    rows: list[Usage]
    stored_bytes: int
    unneeded_bytes: int
    unknown: dict[str, str]

    __repr__ = brief

    def to_pandas(self) -> Any:
        """Return `rows` as a `pandas.DataFrame`, with the attributes of `Usage` as its columns, but `id`.

        Raises:
            CapabilityError: pandas is not installed.
        """
        return data_frame({name: [getattr(row, name) for row in self.rows] for name in _COLUMNS})

    @property
    def columns(self) -> list[str]:
        """The titles of a table of `cells`; `>` means aligned right."""
        return [
            self.by,
            *(f">{name.removesuffix('_bytes')}" for name in _COLUMNS[1 : 5 if self._is_forgettable else 4]),
        ]

    @property
    def cells(self) -> list[list[str]]:
        """The rows of a table."""
        sizes = ([row.logical_bytes, row.stored_bytes, row.unshared_bytes, row.freed_bytes] for row in self.rows)
        return [
            [row.name, *(human_bytes(n) for n in of if n is not None)] for row, of in zip(self.rows, sizes, strict=True)
        ]

    @property
    def _is_forgettable(self) -> bool:
        return self.by in _FORGOTTEN

    def _repr_html_(self) -> str:
        return html_table(f"{human_bytes(self.stored_bytes)} stored", self.columns, self.cells)


def usage(context: Context, by: By = "run", run: str | None = None) -> UsageResult:
    """Return what takes the space; see `Repository.du`.

    Raises:
        InvalidInputError: `by` is none of the choices.
        NotFoundError: there is no such run.
        IntegrityError, FormatError: a manifest is damaged.
    """
    check_choice("by", by, get_args(By))
    return while_unchanged(context, partial(_count, context, by, run))


def _count(context: Context, by: By, run: str | None, sizes: dict[str, int], view: View) -> UsageResult:
    if run is not None:
        view.require_run(run)
    quarantine, unknown = in_quarantine(context.store), view.unknown()
    tally = _UsageRows(by)
    needed: set[str] = set()
    contents: dict[str, _Content] = {}
    for snapshot in sorted(view.snapshots(), key=lambda snapshot: (snapshot.run, snapshot.seq, snapshot.id)):
        keys = set(snapshot.named_keys)
        found = []
        for ref, read in all_manifests(snapshot, lambda ref: manifest.read(context.store, ref, None)):
            if ref.key not in contents:
                contents[ref.key] = _Content.of(read, tally.pack_number)
            found.append(contents[ref.key])
            keys |= contents[ref.key].keys | {ref.key}
        needed |= keys
        if by in _FORGOTTEN or run in (None, snapshot.run):
            tally.add(snapshot, found, keys)
    rows = tally.rows({key: size for key, size in sizes.items() if key not in quarantine})
    left = sum(size for key, size in sizes.items() if key not in needed | quarantine)
    left = 0 if unknown or (left and running_sessions(context.store)) else left
    shown = [row for row, of_run in rows if run in (None, of_run) or by not in _FORGOTTEN]
    return UsageResult(by, shown, sum(sizes.values()), left, unknown)


@dataclass(frozen=True, slots=True)
class _Content:
    """What a manifest holds.

    Attributes:
        keys: of its packs.
        blobs, lengths, owners: (n,) of each reference to a blob: its name, its size, and the number of its tensor.
        paths, logical: of each tensor: its path, and its bytes here.
    """

    keys: frozenset[str]
    blobs: Numbers
    lengths: Numbers
    owners: Numbers
    paths: list[Path]
    logical: list[int]

    @classmethod
    def of(cls, m: Manifest, pack_number: Callable[[str], int]) -> _Content:
        """Return the content of a manifest. `pack_number` gives a number that no other pack has."""
        names, table = m.header.pack_names, m.table
        numbers = np.array([pack_number(name) for name in names], np.int64)
        own = frozenset(map(pack_key, m.own_packs))
        blobs = numbers[table.ref_packs] << _OFFSET_BITS | table.ref_offsets.astype(np.int64)
        owners = np.repeat(m.owners, table.ref_counts)
        logical = [held_bytes(m, entry) for entry in m.tensors]
        return cls(own, blobs, table.ref_lengths.astype(np.int64), owners, [e.path for e in m.tensors], logical)


class _UsageRows:
    """The rows of a result, and the blobs that they need."""

    def __init__(self, by: By) -> None:
        self._by = by
        self._packs: dict[str, int] = {}
        self._numbers: dict[str, int] = {}  # of the rows, by name and id
        self._named: list[tuple[str, str, str]] = []  # of each row: name, id, run
        self._logical: list[int] = []
        self._keys: list[set[str]] = []
        self._seen: set[tuple[int, int]] = set()  # rows and the contents that were added to them
        self._blobs: list[tuple[Numbers, Numbers, Numbers]] = []  # row, name, size

    def pack_number(self, name: str) -> int:
        """Return the number of a pack."""
        return self._packs.setdefault(name, len(self._packs))

    def add(self, snapshot: Snapshot, contents: Sequence[_Content], keys: set[str]) -> None:
        """Add a snapshot, which needs these objects."""
        if self._by in _FORGOTTEN:
            name, of_id = (snapshot.run, "") if self._by == "run" else (snapshot.ref, snapshot.id)
            row = self._row(name, of_id, snapshot.run)
            self._logical[row] += snapshot.logical_bytes
            self._keys[row] |= keys
            for content in contents:
                self._add_blobs(np.full(len(content.blobs), row), content, row)
            return
        for content in contents:
            rows = [self._row(self._name_of(path), "", "") for path in content.paths]
            for row, logical in zip(rows, content.logical, strict=True):
                self._logical[row] += logical
            self._add_blobs(np.array([*rows, -1], np.int64)[content.owners], content, -1)

    def _name_of(self, path: Path) -> str:
        return display(path[:1] if self._by == "part" else path) or "(root)"

    def _row(self, name: str, of_id: str, run: str) -> int:
        number = self._numbers.setdefault(of_id or name, len(self._named))
        if number == len(self._named):
            self._named.append((name, of_id, run))
            self._logical.append(0)
            self._keys.append(set())
        return number

    def _add_blobs(self, rows: Numbers, content: _Content, row: int) -> None:
        if (row, id(content)) not in self._seen:
            self._seen.add((row, id(content)))
            self._blobs.append((rows, content.blobs, content.lengths))

    def rows(self, sizes: Mapping[str, int]) -> list[tuple[Usage, str]]:
        """Return the rows, each with its run.

        Args:
            sizes: of the objects that a gc may delete [bytes].
        """
        users = Counter(key for keys in self._keys for key in keys)
        own = [{key for key in keys if users[key] == 1 and key in sizes} for keys in self._keys]
        shared, alone = self._sums(set().union(*own))
        found = []
        for number, (name, of_id, run) in enumerate(self._named):
            freed = sum(sizes[key] for key in own[number])
            manifests = {key for key in self._keys[number] if not key.startswith("packs/")} - own[number]
            unshared = freed + alone[number]
            stored = unshared + shared[number] + sum(sizes.get(key, 0) for key in manifests)
            can_go = self._by in _FORGOTTEN
            found.append((Usage(name, of_id, self._logical[number], stored, unshared, freed if can_go else None), run))
        return found

    def _sums(self, own: set[str]) -> tuple[list[int], list[int]]:
        """Return the bytes of blobs that each row shares with others, and of those that it alone needs.

        Args:
            own: keys of packs that only one row needs: their blobs are in neither.
        """
        count = len(self._named)
        if not self._blobs:
            return [0] * count, [0] * count
        rows, blobs, lengths = (np.concatenate(columns) for columns in zip(*self._blobs, strict=True))
        is_own = np.array([pack_key(name) in own for name in self._packs], bool)
        stays = (rows >= 0) & ~is_own[blobs >> _OFFSET_BITS]
        rows, blobs, lengths = rows[stays], blobs[stays], lengths[stays]
        order = np.lexsort((rows, blobs))
        rows, blobs, lengths = rows[order], blobs[order], lengths[order]
        is_new = np.append(True, (np.diff(blobs) != 0) | (np.diff(rows) != 0))[: len(rows)]
        rows, blobs, lengths = rows[is_new], blobs[is_new], lengths[is_new]
        _, which, users = np.unique(blobs, return_inverse=True, return_counts=True)
        sums = np.zeros((2, count), np.int64)  # shared, alone
        np.add.at(sums, ((users[which] == 1).astype(np.int64), rows), lengths)
        return sums[0].tolist(), sums[1].tolist()

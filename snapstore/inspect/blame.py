"""Blame: at which step of a run which tensor began to move away.

In: a run. Out: a BlameResult: tensors that got NaNs, jumped, changed although they were frozen, or stopped changing.

The manifests of the run's line say which chunks changed in which step; that alone finds frozen and dead tensors. Values
are read where that is not enough: all that ever changed, of the newest snapshot, for NaNs, and then of few more by
bisection, since a NaN stays; and the changes of the model's tensors, between all snapshots if few chunks change, else
between snapshots so far apart that the bytes stay within a budget, and between all near a jump.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ..catalog.history import View
from ..context import Context
from ..errors import IntegrityError, InvalidInputError
from ..format.records import COMMITTED, Snapshot
from ..restore.pipeline import read_as_ruled
from ..text import counted, html_table, human_bytes, quoted
from .frozen import StillTensors
from .jumps import jumps
from .tables import data_frame
from .tensor_history import TensorHistory, Track


@dataclass(frozen=True, slots=True)
class Blame:
    """One tensor that moved away.

    Attributes:
        step: of the first snapshot that shows it.
        after: step of the snapshot before it, which does not show it; None if there is none. If steps lie between the
            two, the change happened in one of these or in `step`.
        path: dotted path of the tensor.
        what: "nan" (a value is not finite), "jumped", "thawed" (it changed, although it was frozen) or "died" (it
            stopped changing).
        evidence: the numbers that say so, as text.
    """

    step: int
    after: int | None
    path: str
    what: str
    evidence: str


@dataclass(frozen=True, slots=True)
class BlameResult:
    """The tensors of a run that moved away, and how much was read to find them.

    Attributes:
        run: its name.
        steps: of the snapshots that were compared, in ascending order of their saves.
        found: by step; of one step, tensors of the model before those of an optimizer. Later ones may follow from the
            first.
        read_bytes: of manifests and blobs that were read.
        plain_bytes: of the states of all compared snapshots.
        skipped: reference -> why, of snapshots with damaged manifests.
        unknown: key -> why, of records of the run that cannot be read or are gone. Their snapshots were not compared.
    """

    run: str
    steps: list[int]
    found: list[Blame]
    read_bytes: int
    plain_bytes: int
    skipped: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.found)

    @property
    def summary(self) -> str:
        """How much was compared and read, as a line of text."""
        read = f"read {human_bytes(self.read_bytes)} of {human_bytes(self.plain_bytes)}"
        steps = f", steps {self.steps[0]} to {self.steps[-1]}" if self.steps else ""
        return f"{counted(len(self.steps), 'snapshot')} of {self.run}{steps}; {read}"

    def to_pandas(self) -> Any:
        """Return `found` as a `pandas.DataFrame`, with the attributes of `Blame` as its columns.

        Raises:
            CapabilityError: pandas is not installed.
        """
        return data_frame({one.name: [getattr(row, one.name) for row in self.found] for one in fields(Blame)})

    @property
    def cells(self) -> list[list[str]]:
        """The rows of a table of `found`: the step, or the two between which it happened; tensor, what, evidence."""
        rows = []
        for one in self.found:
            between = f"<= {one.step}" if one.after is None else f"{one.after} - {one.step}"
            step = f"{one.step}" if one.after == one.step - 1 else between
            rows.append([step, one.path or "(root)", one.what, one.evidence])
        return rows

    def _repr_html_(self) -> str:
        return html_table(self.summary, [">step", "tensor", "what", "evidence"], self.cells)


def blame(context: Context, run: str, since: int | None = None, until: int | None = None) -> BlameResult:
    """Return the tensors of a run that moved away; see `Repository.blame`.

    Raises:
        NotFoundError: there is no such run.
        InvalidInputError: it has fewer than two snapshots in the range.
        IntegrityError, FormatError: a chunk that must be read is damaged, or all manifests but one.
    """
    if not isinstance(run, str):
        raise InvalidInputError(f"run {quoted(run)}: expected a str, got {type(run).__name__}")
    view = context.index.refresh()
    view.require_run(run)
    line = [s for s in _line(view, run) if (since is None or s.step >= since) and (until is None or s.step <= until)]
    if len(line) < 2:
        raise InvalidInputError(
            f"run {run!r}: {counted(len(line), 'snapshot')} to compare, expected at least 2; save it more often, or "
            "choose a wider range of steps"
        )
    return read_as_ruled(context, line, lambda *line: _blame(context, run, line, view.unknown(run)))


def _line(view: View, run: str) -> list[Snapshot]:
    """Return the committed snapshots of a run from which its newest one descends, and that one, oldest first."""
    of_run, replaced = {s.id: s for s in view.snapshots(run, None)}, view.superseded(run)
    older = view.snapshots(run)
    found: list[Snapshot] = []
    at: Snapshot | None = older[-1]
    while at is not None:
        if at.state == COMMITTED and at.id not in replaced:
            found.append(at)
        parent = of_run.get(at.parent or "")
        if parent is None and at.parent and view.get(at.parent) is None:  # its record is gone: a copy has no parents
            below = [s for s in older if s.seq < at.seq and s.step < at.step]
            parent = below[-1] if below else None
        at = parent if parent is not None and parent.seq < at.seq else None
    return found[::-1]


def _blame(context: Context, run: str, line: Sequence[Snapshot], unknown: dict[str, str]) -> BlameResult:
    history = TensorHistory(context, line)
    if len(history.snapshots) < 2:
        ref, why = next(iter(history.skipped.items()))
        raise IntegrityError(
            f"run {run!r}: fewer than 2 of {len(line)} snapshots can be read; the first other, {ref}: {why}"
        )
    found = _Search(history).found()
    steps = [snapshot.step for snapshot in history.snapshots]
    return BlameResult(run, steps, found, history.read_bytes, history.plain_bytes, history.skipped, unknown)


class _Search:
    """Finds the tensors of a history that moved away."""

    def __init__(self, history: TensorHistory) -> None:
        self._history = history
        self._last = len(history.snapshots) - 1
        self._tracks = list(history.tracks.values())
        self._model = [track for track in self._tracks if not track.is_optimizer]
        self._found: dict[tuple[Track, int], Blame] = {}

    def found(self) -> list[Blame]:
        """Return all findings."""
        until = self._not_finite()
        for track, number, what, evidence in StillTensors(self._history, until).found():
            self._add(track, number, what, evidence)
        bad = {track for (track, _), one in self._found.items() if one.what == "nan"}
        tracks = [track for track in self._model if track.spec.shape and track not in bad]
        for track, number, evidence in jumps(self._history, tracks, until):
            self._add(track, number, "jumped", evidence)
        order = {track: (track.is_optimizer, place) for place, track in enumerate(self._tracks)}
        return [self._found[key] for key in sorted(self._found, key=lambda key: (key[1], order[key[0]]))]

    def _add(self, track: Track, number: int, what: str, evidence: str) -> None:
        steps = [snapshot.step for snapshot in self._history.snapshots]
        if (track, number) not in self._found:
            after = steps[number - 1] if number else None
            self._found[track, number] = Blame(steps[number], after, track.path, what, evidence)

    # -- NaN

    def _not_finite(self) -> int:
        """Find the first snapshot with values that are not finite; return the last one without, or the last of all."""
        last = [track for track in self._tracks if track.end == self._last + 1 and self._bad(track, self._last)]
        if not last:
            return self._last
        bad, number = last, self._last
        while bad:  # the first snapshot of one of them; then look whether another one has them before
            number = self._first_bad(bad[0], number)
            bad = [track for track in last if number and track.begin < number and self._bad(track, number - 1)]
            number -= bool(bad)
        first = {track: count for track in last if track.begin <= number and (count := self._bad(track, number))}
        now = f"; in step {self._history.snapshots[-1].step}, {counted(len(last), 'tensor')} have such values"
        for track, count in first.items():
            values = int(np.prod(track.spec.shape, dtype=np.int64))
            self._add(track, number, "nan", f"{count} of {values} values are not finite{now if len(last) > 1 else ''}")
        return number - 1 if len(first) < len(last) else self._last

    def _bad(self, track: Track, number: int) -> int:
        """Return how many values, in pieces that ever changed, are not finite in a snapshot."""
        pieces = track.pieces_changed(track.begin, self._last)
        values = self._history.values([(number, track, pieces)]) if pieces.size else ()
        return sum(int(np.count_nonzero(~np.isfinite(piece))) for piece in values)

    def _first_bad(self, track: Track, number: int) -> int:
        """Return the first snapshot in which a tensor has values that are not finite, if they stay up to `number`."""
        good, bad = track.begin - 1, number
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (good, middle) if self._bad(track, middle) else (middle, bad)
        return bad

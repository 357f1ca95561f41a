"""Tables: lists of snapshots and results, as data frames of pandas and as HTML, which notebooks show.

In: snapshots, or the columns of a result. Out: a `pandas.DataFrame`, or a table of HTML. pandas is imported only when a
data frame is asked for. Nothing here reads the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, overload

from ..errors import needs
from ..format.records import Snapshot
from ..retention import utc
from ..text import counted, html_table, human_bytes

_COLUMNS = ("run", "step", "id", "state", "created", "parent", "tags")
_NUMBERS = ("logical_bytes", "stored_bytes", "stall_s", "total_s")


def data_frame(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return columns of equal length as a `pandas.DataFrame`.

    Raises:
        CapabilityError: pandas is not installed.
    """
    with needs("pandas", "pip install pandas"):
        import pandas
    return pandas.DataFrame(dict(columns))


class SnapshotList(list[Snapshot]):
    """A list of snapshots, which a notebook shows as a table; a slice of it is such a list too."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> Snapshot: ...

    @overload
    def __getitem__(self, index: slice) -> SnapshotList: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Snapshot | SnapshotList:
        found = super().__getitem__(index)
        return SnapshotList(found) if isinstance(found, list) else found

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each snapshot.

        The columns are run, step, id, state, created (UTC), parent (an id, or None), tags (a list), logical_bytes and
        stored_bytes [bytes], stall_s and total_s [s], and one for each metric: its name, or `metrics.<name>` if another
        column has this name. A snapshot without the metric has NaN there.

        Raises:
            CapabilityError: pandas is not installed.
        """
        columns: dict[str, list[Any]] = {name: [getattr(s, name) for s in self] for name in (*_COLUMNS, *_NUMBERS)}
        columns["created"] = [utc(s.created) for s in self]
        for metric in dict.fromkeys(name for s in self for name in s.metrics):
            column = f"metrics.{metric}" if metric in columns else metric
            columns[column] = [s.metrics.get(metric, float("nan")) for s in self]
        return data_frame(columns)

    def _repr_html_(self) -> str:
        metrics = list(dict.fromkeys(name for s in self for name in s.metrics))
        columns = ["snapshot", "id", "created (UTC)", ">size", ">stored", "tags", *(f">{name}" for name in metrics)]
        rows = [
            [s.ref, s.id[:8], f"{utc(s.created):%Y-%m-%d %H:%M}", human_bytes(s.logical_bytes)]
            + [human_bytes(s.stored_bytes), ", ".join(s.tags)]
            + [f"{s.metrics[name]:.4g}" if name in s.metrics else "" for name in metrics]
            for s in self
        ]
        return html_table(counted(len(self), "snapshot"), columns, rows)

"""What the shell prints: JSON documents, tables and lines on stdout; a spinner on stderr.

Strings from a repository are somebody else's: control characters are escaped before they reach a terminal. Without a
terminal, tables are as wide as they need to be, so that no pipe sees a wrapped or a cut column.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..state.containers import step

if TYPE_CHECKING:
    from ..catalog.history import View
    from ..format.records import Snapshot

#: A spinner appears only for what takes longer [s].
SPINNER_AFTER_S = 1.0

#: Longer tables are printed without rich, which takes more than a second for a thousand rows.
RICH_ROWS = 200

#: Shorter cells are padded up to this; longer ones are printed whole, and push the rest of their row.
MAX_PADDED = 200

#: Longer integers are shown in hexadecimal.
MAX_BITS = 4096

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def plain(value: Any) -> Any:
    """`value` as JSON can say it: NaN and infinities as strings that float() reads, things without a form as text."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return hex(value)  # Python refuses to write, and to read, longer ones in decimal
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(step(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    try:
        return str(value)
    except ValueError:  # it holds such an integer
        return f"<{type(value).__name__}>"


def print_json(document: dict[str, Any]) -> None:
    """One document, on one line."""
    print(json.dumps(plain(document), allow_nan=False))


def iso(created: float) -> str:
    """Seconds since the epoch as ISO 8601 in UTC."""
    return f"{_time(created):%Y-%m-%dT%H:%M:%S.%f}Z"


def local(created: float) -> str:
    """Seconds since the epoch for a person here."""
    try:
        return f"{_time(created).astimezone():%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError):  # the first and last day of the calendar have no local time everywhere
        return iso(created)


def _time(created: float) -> dt.datetime:
    """A time for any float: a writer's mad clock must not stop a listing."""
    try:
        return _EPOCH + dt.timedelta(seconds=created)
    except (OverflowError, ValueError):
        return (dt.datetime.max if created > 0 else dt.datetime.min).replace(tzinfo=dt.UTC)


def snapshot_json(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot as every verb shows it."""
    return {
        "id": snapshot.id,
        "run": snapshot.run,
        "step": snapshot.step,
        "state": snapshot.state,
        "parent": snapshot.parent,
        "created": iso(snapshot.created),
        "logical_bytes": snapshot.logical_bytes,
        "stored_bytes": snapshot.stored_bytes,
        "depth": snapshot.depth,
        "tags": snapshot.tags,
        "metrics": snapshot.metrics,
    }


def clean(text: str) -> str:
    """`text` without what a terminal would act upon; line ends stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def line(text: str = "") -> None:
    """A line for people, on stdout."""
    print(clean(text))


def note(text: str) -> None:
    """A line beside the data, on stderr."""
    print(clean(text), file=sys.stderr)


def note_unknown(view: View) -> bool:
    """Say which records a look at all snapshots has left out; whether there are any."""
    from ..catalog.history import PUT_BACK
    from ..text import counted, some

    if unknown := [*view.damaged, *view.unread]:
        note(f"snapstore: warning: left out: {counted(len(unknown), 'record')} that cannot be read: {some(unknown)}; "
             "run 'snapstore check'")  # fmt: skip
    if view.missing:
        names = some([f"{s.ref} (id:{s.id[:12]})" for s in view.missing])
        note(f"snapstore: warning: gone from the store: {counted(len(view.missing), 'record')} that the index knows, "
             f"of {names}; {PUT_BACK}")  # fmt: skip
    return bool(unknown or view.missing)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table. A column whose name starts with `>` is flushed right."""
    cells = [[clean(str(cell)).replace("\n", " ") for cell in row] for row in rows]
    names = [column.removeprefix(">") for column in columns]
    right = [column.startswith(">") for column in columns]
    longest = max((len(cell) for row in cells for cell in row), default=0)
    if sys.stdout.isatty() and len(cells) <= RICH_ROWS and longest <= MAX_PADDED:
        _rich_table(names, right, cells)
        return
    widths = [min(MAX_PADDED, max(len(row[i]) for row in [names, *cells])) for i in range(len(names))]
    for row in [names, *cells]:
        padded = (
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        )  # fmt: skip
        print("  ".join(padded).rstrip())


def _rich_table(names: Sequence[str], right: Sequence[bool], cells: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True, header_style="bold")
    for name, flush in zip(names, right, strict=True):
        drawn.add_column(name, justify="right" if flush else "left", no_wrap=True)
    for row in cells:
        drawn.add_row(*row)
    console = Console(markup=False, emoji=False, highlight=False)
    # On a narrow terminal whole lines wrap, or scroll in a pager; cut columns would lose what was asked for.
    console.width = max(console.width, console.measure(drawn, options=console.options.update(width=10_000)).maximum)
    console.print(drawn, soft_wrap=True)


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show on a terminal that something goes on, once it takes longer than a second."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    status = Console(stderr=True, markup=False).status(text)
    timer = threading.Timer(SPINNER_AFTER_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()

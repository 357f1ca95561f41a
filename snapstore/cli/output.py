"""Print JSON documents, tables and lines on stdout; notes and a spinner on stderr.

Strings from a repository are not trusted: `text.printable` escapes their control characters and line ends; JSON escapes
them itself. Without a terminal, tables are as wide as they need to be: no column wraps or is cut in a pipe.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from ..errors import OutputError
from ..retention import utc
from ..state.values.containers import step
from ..text import counted, printable, some

if TYPE_CHECKING:
    from ..catalog.history import View
    from ..convert import Exported
    from ..format.records import Snapshot

#: The spinner appears only after this time [s].
SPINNER_AFTER_S = 1.0

#: Longer tables are printed without rich, which needs more than a second for a thousand rows.
RICH_ROWS = 200

#: Cells are padded up to this width; longer ones are printed whole and shift the rest of their row.
MAX_PADDED = 200

#: A note names at most so many files, tensors or values.
NAMED = 5

#: Longer integers are shown in hexadecimal.
MAX_BITS = 4096


def plain(value: Any) -> Any:
    """Return `value` for JSON: NaN and infinities as strings that float() reads, values without a JSON form as text."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return hex(value)  # Python refuses to write and read longer ones in decimal
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


@contextmanager
def writing() -> Iterator[None]:
    """Name stdout in the errors of the block that prints. A reader that has closed the pipe has read enough.

    Raises:
        OutputError: stdout cannot be written.
    """
    try:
        yield
    except BrokenPipeError:
        discard_stdout()
    except OSError as error:
        text = f"stdout: cannot be written: {error.strerror}; what the verb has done stays done"
        raise OutputError(text) from error


def discard_stdout() -> None:
    """Discard what is still printed: after `snapstore show REF | head`, the verb ends with its own exit code."""
    with suppress(OSError, ValueError):  # a test's stdout has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def print_json(document: dict[str, Any]) -> None:
    """Print one document, on one line."""
    with writing():
        print(json.dumps(plain(document), allow_nan=False))


def iso(created: float) -> str:
    """Return seconds since the epoch as ISO 8601 in UTC."""
    return f"{utc(created):%Y-%m-%dT%H:%M:%S.%f}Z"


def local(created: float) -> str:
    """Return seconds since the epoch as local time."""
    try:
        return f"{utc(created).astimezone():%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError):  # the first or last day of the calendar, in some time zones
        return iso(created)


def fields_json(result: Any, *names: str) -> dict[str, Any]:
    """Return fields of a result: snapshots as ids, (snapshot, message) as a map, dataclasses as all their fields."""
    from ..format.records import Snapshot

    def form(value: Any) -> Any:
        if isinstance(value, list):
            return [form(item) for item in value]
        if isinstance(value, tuple):
            return {"id": value[0].id, "message": value[1]}
        value = value.id if isinstance(value, Snapshot) else value
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

    return {name: form(getattr(result, name)) for name in names}


def snapshot_json(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as every verb prints it in JSON."""
    fields = fields_json(snapshot, "id", "run", "step", "state", "parent")
    names = ("logical_bytes", "stored_bytes", "depth", "tags", "metrics")
    return {**fields, "created": iso(snapshot.created), **fields_json(snapshot, *names)}


def line(text: str = "") -> None:
    """Print a line on stdout."""
    with writing():
        print(printable(text))


def note(*lines: str) -> None:
    """Print lines on stderr; if it cannot be written, a verb goes on without them."""
    with suppress(OSError):
        for text in lines:
            print(printable(text), file=sys.stderr)


def note_unknown(view: View) -> bool:
    """Print a warning about records that a listing leaves out; return whether there are any."""
    from ..catalog.history import PUT_BACK

    if unknown := [*view.damaged, *view.unread, *view.repeated]:
        left_out = counted(len(unknown), "record")
        note(f"snapstore: warning: left out {left_out} that cannot be read: {some(unknown)}; run 'snapstore check'")
    if view.missing:
        names = some([f"{s.ref} (id:{s.id[:12]})" for s in view.missing])
        gone = counted(len(view.missing), "record")
        note(f"snapstore: warning: gone from the store: {gone} that the index knows, of {names}; {PUT_BACK}")
    return bool(unknown or view.missing)


def note_left_out(unknown: Mapping[str, str]) -> bool:
    """Print a warning about the records (key: why) that a verb has left out; return whether there are any."""
    from ..catalog.history import PUT_BACK

    if unknown:
        advice = PUT_BACK if "is gone" in unknown.values() else "run 'snapstore check'"
        left_out = f"{counted(len(unknown), 'record')}, unreadable or gone"
        note(f"snapstore: warning: left out {left_out}: {some(list(unknown))}; {advice}")
    return bool(unknown)


def note_changes(exported: Exported, to: str) -> None:
    """Print which values are left out of an export, or have another type there; `to` is the format."""
    if exported.dropped:
        left_out = f"left out {counted(len(exported.dropped), 'value')}"
        if to in ("torch", "dcp"):
            note(f"{left_out} of each rank's own: {some(exported.dropped, NAMED)}")
        else:
            note(f"{left_out}: {to} holds tensors only")
    if exported.by_rank:
        values = f"{counted(len(exported.by_rank), 'value')} of each rank's own"
        note(f"wrote {values} as a dict by rank: {some(exported.by_rank, NAMED)}; --per-rank N takes those of rank N")
    if exported.changed:
        changes = [f"{value.path} ({value.was} as {value.written_as})" for value in exported.changed]
        note(f"written as another type for torch.load(weights_only=True): {some(changes, NAMED)}")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table. A column whose name starts with `>` is aligned right."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    names = [column.removeprefix(">") for column in columns]
    right = [column.startswith(">") for column in columns]
    longest = max((len(cell) for row in cells for cell in row), default=0)
    if sys.stdout.isatty() and len(cells) <= RICH_ROWS and longest <= MAX_PADDED:
        _rich_table(names, right, cells)
        return
    widths = [min(MAX_PADDED, max(len(row[i]) for row in [names, *cells])) for i in range(len(names))]
    for row in [names, *cells]:
        cell_widths = zip(row, widths, right, strict=True)
        padded = (cell.rjust(width) if flush else cell.ljust(width) for cell, width, flush in cell_widths)
        with writing():
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
    # On a narrow terminal lines wrap, or scroll in a pager; a cut column would lose data.
    console.width = max(console.width, console.measure(drawn, options=console.options.update(width=10_000)).maximum)
    console.print(drawn, soft_wrap=True)


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a spinner on a terminal while the block runs, after its first second."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    console = Console(stderr=True, markup=False)
    status = console.status(printable(text), spinner="dots" if console.encoding.startswith("utf") else "line")
    timer = threading.Timer(SPINNER_AFTER_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()

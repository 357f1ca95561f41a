"""Print JSON documents, tables and lines on stdout; notes and progress on stderr.

Strings from a repository are not trusted: `text.printable` escapes their control characters and line ends; JSON escapes
them itself. Without a terminal, tables are as wide as they need to be: no column wraps or is cut in a pipe.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from ..errors import OutputError
from ..retention import utc
from ..state.values.containers import step
from ..storage import progress
from ..text import counted, human_bytes, printable, some

if TYPE_CHECKING:
    from ..catalog.history import View
    from ..convert import Exported
    from ..format.records import Snapshot
    from ..storage.progress import Progress

#: On a terminal, the progress appears after this time [s]; elsewhere, a line of it is printed this often [s].
SPINNER_AFTER_S, LINE_EVERY_S = 1.0, 30.0
#: The rate is that of so many last seconds.
RATE_OVER_S = 10.0
#: On a terminal, the line is rewritten this often.
SIGNS_PER_S = 8

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
    """Show how far the block is, after its first second: on a terminal in one line, else in a line now and then."""
    with progress.shown() as counted_bytes:
        line_of = ProgressLine(printable(text), counted_bytes)
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            with _rewritten_line(line_of):
                yield
        else:
            with _lines_now_and_then(line_of):
                yield


class ProgressLine:
    """Says how far a verb is: "restoring exp@3: 1.2GB of 3.4GB (35 %), 210.3MB/s, 11 s left"."""

    def __init__(self, text: str, counted_bytes: Progress) -> None:
        self._text, self._bytes = text, counted_bytes
        self._began_s = time.monotonic()
        self._seen = deque([(self._began_s, 0)])  # (time, bytes done) of RATE_OVER_S, and the last one before

    def __call__(self) -> str:
        """Return the line as it is now; any thread may call this, one at a time."""
        now_s, done, total = time.monotonic(), self._bytes.done_bytes, self._bytes.total_bytes
        self._seen.append((now_s, done))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - RATE_OVER_S:
            self._seen.popleft()
        (then_s, before), words = self._seen[0], []
        if done or total:
            rate = (done - before) / max(now_s - then_s, 1e-9)
            is_share = 0 < total >= done
            words.append(human_bytes(done) + (f" of {human_bytes(total)} ({done / total:.0%})" if is_share else ""))
            words.append(f"{human_bytes(rate)}/s")
            if is_share and rate > 0:
                words.append(f"{_duration((total - done) / rate)} left")
        else:
            words.append(_duration(now_s - self._began_s))
        if (retrying := progress.retrying()) is not None:
            words.append(f"retrying {retrying[0]} since {_duration(retrying[1])}")
        return f"{self._text}: {', '.join(words)}"


def _duration(seconds: float) -> str:
    """Return a time in whole seconds, minutes or hours."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@contextmanager
def _rewritten_line(line_of: Callable[[], str]) -> Iterator[None]:
    """Show a line on the terminal, and rewrite it; it is gone at the end."""
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    # COLUMNS may be that of another terminal: a line that is longer than this one cannot be taken off
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    console = Console(stderr=True, _environ=env)
    is_utf = console.encoding.startswith("utf")
    signs = Spinner("dots" if is_utf else "line").frames

    def drawn() -> Text:
        sign = signs[int(SIGNS_PER_S * time.monotonic()) % len(signs)]
        return Text(f"{sign} {line_of()}", no_wrap=True, overflow="ellipsis" if is_utf else "crop")

    # rich sends what is printed meanwhile to the console, above the line: right only if stdout is a terminal as well
    live = Live(
        get_renderable=drawn,
        console=console,
        transient=True,
        refresh_per_second=SIGNS_PER_S,
        redirect_stdout=sys.stdout.isatty(),
    )

    def start() -> None:
        with suppress(RuntimeError, OSError):  # it starts a thread, too; the terminal may be closed
            live.start()

    timer = threading.Timer(SPINNER_AFTER_S, start)
    try:
        with _running(timer, timer.cancel):
            yield
    finally:
        with suppress(OSError):  # the terminal was closed meanwhile, as after `disown`
            live.stop()


@contextmanager
def _lines_now_and_then(line_of: Callable[[], str]) -> Iterator[None]:
    """Print a line on stderr every LINE_EVERY_S."""
    ended = threading.Event()

    def print_lines() -> None:
        while not ended.wait(LINE_EVERY_S):
            if _takes_more():
                note(f"snapstore: {line_of()}")

    with _running(threading.Thread(target=print_lines, name="snapstore-progress"), ended.set):
        yield


def _takes_more() -> bool:
    """Return whether stderr can be written at once: while a pipe is full, the verb goes on without its lines."""
    try:
        return bool(select.select([], [sys.stderr], [], 0)[1])
    except (OSError, ValueError):  # it has no descriptor
        return True


@contextmanager
def _running(thread: threading.Thread, end: Callable[[], object]) -> Iterator[None]:
    """Run a thread beside the block, unless the process may start no more: a verb needs no progress."""
    thread.daemon = True
    with suppress(RuntimeError):
        thread.start()
    try:
        yield
    finally:
        end()
        if thread.ident is not None:
            thread.join()

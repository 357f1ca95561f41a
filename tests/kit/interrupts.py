"""Ctrl-C at a chosen place: wherever CPython may run a signal handler in some files of the package.

CPython runs handlers after calls and at the start of functions, never between the end of a `with` block and the
`__exit__` of its lock. So a trace function that raises KeyboardInterrupt does so only there. One place is left out,
because no code can protect it: the start of an `__exit__` that is written in Python.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import snapstore

_ROOT = str(Path(snapstore.__file__).parent)


@cache
def places(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions of a function before which Ctrl-C may strike."""
    regions = dis._parse_exception_table(code)

    def handler(offset: int) -> int | None:
        return next((region.target for region in regions if region.start <= offset < region.end), None)

    found = set()
    for before, after in pairwise(dis.get_instructions(code)):
        called = before.opname.startswith("CALL") and handler(before.offset) == handler(after.offset)
        if called or (before.opname == "RESUME" and code.co_name != "__exit__"):
            found.add(after.offset)
    return frozenset(found)


def _ctrl_c() -> None:
    raise KeyboardInterrupt


class Interrupter:
    """Counts the places for a Ctrl-C that a call passes, and raises KeyboardInterrupt at one of them.

    Args:
        files: paths below the package, such as "storage/locks.py".
        at: number of the place; None: none.
        strike: is called there; raises KeyboardInterrupt unless it is given.

    Attributes:
        passed: (file, line) of each place, in their order.
    """

    def __init__(self, *files: str, at: int | None = None, strike: Callable[[], object] = _ctrl_c) -> None:
        self._files, self._at, self._strike = {f"{_ROOT}/{file}" for file in files}, at, strike
        self.passed: list[tuple[str, int]] = []

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in this thread; return what it returns."""
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = (
            True  # CPython 3.12 traces opcodes only if a frame asks for it before `settrace`
        )
        sys.settrace(self._trace)
        try:
            return function(*args)
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in places(frame.f_code):
            self.passed.append((frame.f_code.co_filename.removeprefix(f"{_ROOT}/"), frame.f_lineno))
            if len(self.passed) - 1 == self._at:
                self._strike()
        return self._trace

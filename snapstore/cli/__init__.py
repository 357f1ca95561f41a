"""The shell: one function per verb, each a thin wrapper around a method of Repository (docs/cli.md).

Read app.py first. A fast start is a feature: a verb imports what it needs when it runs. `--help` imports no part of the
store, and only `save`, `restore`, `import`, `export`, `diff` and `doctor` import torch.

app.py           the typer app, and the options, exit codes and errors that all verbs share
completers.py    complete runs, references, tags and metrics in bash, zsh and fish
output.py        print JSON documents, tables and lines on stdout; notes and progress on stderr
save_restore.py  init, save and restore
inspect.py       log, show, diff and blame
transfer.py      import and export
retention.py     tag, untag, forget, unforget and gc
maintenance.py   check, repair, compact, recode, copy, index, doctor, completion and demo
planning.py      stats, du, estimate and report
doctor/          the tests of a machine and of a place
"""

from __future__ import annotations

import io
import os
import signal
import sys

from . import completers, inspect, maintenance, planning, retention, save_restore, transfer
from .app import commands

__all__ = [
    "commands",
    "completers",
    "inspect",
    "main",
    "maintenance",
    "planning",
    "retention",
    "save_restore",
    "transfer",
]


def main() -> None:
    """Run the command line, and end the process with the verb's exit code."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: a file that we write must not get its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115, PTH123 - until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a name that the locale lacks is no error
    # SIGTERM would end the process between writing a file and naming it; as an exception it lets `finally` clean up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if completers.VARIABLE in os.environ:
        completers.begin()
    commands(prog_name="snapstore")

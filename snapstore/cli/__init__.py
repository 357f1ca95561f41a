"""The shell: one function per verb, each a thin wrapper around a method of Repository (docs/cli.md).

Read app.py first: options, exit codes and errors that all verbs share. The verbs are in save_restore.py, inspect.py,
transfer.py, retention.py, maintenance.py and planning.py; output.py prints, doctor/ tests a machine.

A fast start is a feature: a verb imports what it needs when it runs. `--help` imports no part of the store, and only
`save`, `restore`, `import`, `export`, `diff` and `doctor` import torch.
"""

from __future__ import annotations

import io
import os
import signal
import sys

from . import inspect, maintenance, planning, retention, save_restore, transfer
from .app import commands

__all__ = ["commands", "inspect", "main", "maintenance", "planning", "retention", "save_restore", "transfer"]


def main() -> None:
    """Run the command line, and end the process with the verb's exit code."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: a file that we write must not get its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115, PTH123 - until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a name that the locale lacks is no error
    # SIGTERM would end the process between writing a file and naming it; as an exception it lets `finally` clean up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    commands(prog_name="snapstore")

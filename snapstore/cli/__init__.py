"""The shell: one function per verb, each a thin cover over Repository (docs/cli.md).

    shell.py    what all verbs share: options, exit codes, errors, the repository
    output.py   JSON documents, tables, times and sizes; the spinner
    files.py    .pt and .safetensors, in and out
    doctor.py   what `doctor` looks at
    saving.py, looking.py, keeping.py, caring.py    the verbs

Starting fast is a feature: a verb imports what it needs when it runs. `--help` imports no part of the store, and only
`save`, `restore`, `diff` and `doctor` import torch.
"""

from __future__ import annotations

import signal
import sys

from . import inspect, maintenance, retention, save_restore  # importing a module registers its verbs
from .app import app

__all__ = ["app", "inspect", "main", "maintenance", "retention", "save_restore"]


def main() -> None:
    """Entry point of `snapstore`; ends the process with the verb's exit code."""
    # A plain SIGTERM would kill us between writing a file and naming it; as an exception it lets `finally` tidy up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app(prog_name="snapstore")

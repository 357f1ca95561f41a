"""Run verbs of the shell in this process. They are built once; typer's own runner builds them all for each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from unittest import mock

from typer import testing
from typer.main import get_command
from typer.testing import CliRunner, Result

from snapstore import cli

_command = cache(get_command)


def invoke(args: Sequence[str], env: Mapping[str, str | None] | None = None) -> Result:
    """Return what `snapstore ARGS` prints and how it ends."""
    with mock.patch.object(testing, "_get_command", _command):
        return CliRunner().invoke(cli.commands, args, env=env, prog_name="snapstore")

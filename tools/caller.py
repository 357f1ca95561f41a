"""Paths on the command line. The tools run in the repository, but a relative path is one of the caller's folder."""

import os
from pathlib import Path


def path(text: str) -> Path:
    """Return a path of the command line; the scripts of tools/ export the folder from which they were called."""
    return Path(os.environ.get("SNAPSTORE_CALLER_FOLDER", ""), text)

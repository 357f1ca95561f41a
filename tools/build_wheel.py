"""The command of setuptools that builds a wheel: with the extension, for every CPython from 3.11 on; pyproject.toml
names it.

Without a compiler there is no extension. Then the wheel keeps the tag of the Python that built it.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel


class BuildWheel(bdist_wheel):  # type: ignore[misc]  # setuptools has no types
    """Builds a wheel; see the module."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of the Python, of its ABI, and of the platform."""
        extensions = self.get_finalized_command("build_ext").get_outputs()
        if all(Path(path).exists() for path in extensions):
            self.py_limited_api = "cp311"
        tag: tuple[str, str, str] = super().get_tag()
        return tag

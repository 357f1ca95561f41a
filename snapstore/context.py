"""Context: an open repository as its verbs see it. It is the one argument that they take.

A Context is made once, by `Repository`, and never changed. Every verb of the shell ends in a function that takes one.
"""

from __future__ import annotations

from dataclasses import dataclass

from .catalog.index import Index
from .engine.registry import Engines
from .format.records import Config
from .options import SaveOptions
from .storage.base import ObjectStore


@dataclass(frozen=True, slots=True)
class Context:
    """An open repository.

    Attributes:
        store: where its objects lie.
        index: this machine's index of its records and manifest headers.
        engines: the engines that hash, encode and decode its chunks.
        config: its config; reconstructed if `config_problem` is set.
        options: how this process saves.
        config_problem: why the config in the store cannot be used; "": it can.
    """

    store: ObjectStore
    index: Index
    engines: Engines
    config: Config
    options: SaveOptions
    config_problem: str = ""

    def close(self) -> None:
        """Release threads, index and temporary files."""
        self.engines.close()
        self.index.close()

"""snapstore: an incremental snapshot store for training state.

    with SnapshotManager("/data/snaps", run="exp1", save_interval_steps=100, keep=[KeepLast(3)]) as snapshots:
        ...
        if snapshots.should_save(step):
            snapshots.save(step, {"model": model, "optimizer": optimizer})

The data path, folder by folder; each folder's docstring names the file to read first:

    save      state/flatten -> save/staging copy -> format/chunking split -> engine/ digest -> save/bases known? base?
              -> save/chunk_writer delta or full -> engine/ planes, codecs -> format/blob -> chunks/uploader packs
              -> save/manifest_writer -> protocol/session commit the record -> catalog/index
    restore   catalog/index record -> format/manifest -> restore/pipeline -> chunks/reader get ranges, decode, add
              up the chain, verify -> state/restore_plan put together

Ranks of a torch.distributed job save one snapshot together: save/rank_job -> save/together, over distributed/.

`save/pipeline.py` and `restore/pipeline.py` tell these two stories; docs/design/walk.md walks through them frame by
frame. `protocol/` keeps saves and deletions apart, and deletes (`gc`); `retention.py` says what to keep; `check/` finds
damage and `repair/` heals it; `rewrite/` recodes and compacts; `inspect/` counts and compares. `storage/` keeps objects
and knows nothing of snapshots. `Repository` and `SnapshotManager` are what users call.

Importing this package imports neither torch nor any GPU library; saving and restoring do when they meet a tensor.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from .catalog.history import View
    from .check.report import CheckResult, Problem
    from .distributed.base import Ranks
    from .distributed.torch_ranks import TorchRanks
    from .errors import (
        AlreadyExistsError,
        CapabilityError,
        ConflictError,
        FormatError,
        IntegrityError,
        InvalidInputError,
        NotFoundError,
        RanksError,
        SnapstoreError,
        StorageError,
        StorageFullError,
        UnknownFormatError,
        UnsupportedLeafError,
    )
    from .format.records import Config, ManifestRef, Snapshot
    from .inspect.diff import DiffResult, TensorDiff
    from .inspect.stats import GroupStats, StatsResult
    from .manager import SnapshotManager
    from .options import SaveOptions
    from .protocol.forget import ForgetResult
    from .protocol.gc import GcResult
    from .repair.report import RepairAction, RepairResult
    from .repository import Repository
    from .retention import (
        KeepBest,
        KeepDaily,
        KeepEvery,
        KeepHourly,
        KeepLast,
        KeepMonthly,
        KeepSteps,
        KeepWeekly,
        KeepWithin,
        KeepYearly,
        Policy,
        SnapshotLike,
    )
    from .rewrite.compact import CompactResult
    from .rewrite.recode import RecodeResult
    from .save.handle import SaveHandle
    from .state.per_rank import PerRank
    from .state.rng import RngState
    from .storage.base import ObjectInfo, ObjectStore

_HOME = {
    "AlreadyExistsError": "errors",
    "CapabilityError": "errors",
    "CheckResult": "check.report",
    "CompactResult": "rewrite.compact",
    "Config": "format.records",
    "ConflictError": "errors",
    "DiffResult": "inspect.diff",
    "ForgetResult": "protocol.forget",
    "FormatError": "errors",
    "GcResult": "protocol.gc",
    "GroupStats": "inspect.stats",
    "IntegrityError": "errors",
    "InvalidInputError": "errors",
    "KeepBest": "retention",
    "KeepDaily": "retention",
    "KeepEvery": "retention",
    "KeepHourly": "retention",
    "KeepLast": "retention",
    "KeepMonthly": "retention",
    "KeepSteps": "retention",
    "KeepWeekly": "retention",
    "KeepWithin": "retention",
    "KeepYearly": "retention",
    "ManifestRef": "format.records",
    "NotFoundError": "errors",
    "ObjectInfo": "storage.base",
    "ObjectStore": "storage.base",
    "PerRank": "state.per_rank",
    "Policy": "retention",
    "Problem": "check.report",
    "Ranks": "distributed.base",
    "RanksError": "errors",
    "RecodeResult": "rewrite.recode",
    "RepairAction": "repair.report",
    "RepairResult": "repair.report",
    "Repository": "repository",
    "RngState": "state.rng",
    "SaveHandle": "save.handle",
    "SaveOptions": "options",
    "Snapshot": "format.records",
    "SnapshotLike": "retention",
    "SnapshotManager": "manager",
    "SnapstoreError": "errors",
    "StatsResult": "inspect.stats",
    "StorageError": "errors",
    "StorageFullError": "errors",
    "TensorDiff": "inspect.diff",
    "TorchRanks": "distributed.torch_ranks",
    "UnknownFormatError": "errors",
    "UnsupportedLeafError": "errors",
    "View": "catalog.history",
}

__all__ = [
    "AlreadyExistsError",
    "CapabilityError",
    "CheckResult",
    "CompactResult",
    "Config",
    "ConflictError",
    "DiffResult",
    "ForgetResult",
    "FormatError",
    "GcResult",
    "GroupStats",
    "IntegrityError",
    "InvalidInputError",
    "KeepBest",
    "KeepDaily",
    "KeepEvery",
    "KeepHourly",
    "KeepLast",
    "KeepMonthly",
    "KeepSteps",
    "KeepWeekly",
    "KeepWithin",
    "KeepYearly",
    "ManifestRef",
    "NotFoundError",
    "ObjectInfo",
    "ObjectStore",
    "PerRank",
    "Policy",
    "Problem",
    "Ranks",
    "RanksError",
    "RecodeResult",
    "RepairAction",
    "RepairResult",
    "Repository",
    "RngState",
    "SaveHandle",
    "SaveOptions",
    "Snapshot",
    "SnapshotLike",
    "SnapshotManager",
    "SnapstoreError",
    "StatsResult",
    "StorageError",
    "StorageFullError",
    "TensorDiff",
    "TorchRanks",
    "UnknownFormatError",
    "UnsupportedLeafError",
    "View",
]


if not TYPE_CHECKING:  # or a misspelt name would pass a type checker

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used: the shell's `--help` needs none of them."""
        if name == "__version__":
            return import_module(".format.records", __name__).VERSION
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""snapstore: an incremental snapshot store for training state.

    with SnapshotManager("/data/snaps", run="exp1", save_interval_steps=100, keep=[KeepLast(3)]) as snapshots:
        ...
        if snapshots.should_save(step):
            snapshots.save(step, {"model": model, "optimizer": optimizer})

The data path, folder by folder; each folder's docstring names the file to read first:

    save      state/walk/flatten -> save/staging copy -> format/chunking split -> engine/ digest
              -> save/known_chunks dedup -> save/chunk_writer delta or full -> engine/ planes, codecs
              -> format/blobs/blob -> chunks/uploader packs -> save/manifest_writer
              -> protocol/claim commit the record -> catalog/index
    restore   catalog/index record -> format/manifests/manifest -> restore/pipeline -> chunks/reader get ranges,
              decode, add up the chain, verify -> state/fill/plan put together

Ranks of a torch.distributed job save one snapshot together: save/ranks/job -> save/ranks/together, over distributed/.

`save/pipeline.py` and `restore/pipeline.py` run these two paths; docs/design/walk.md follows them call by call.

__main__.py    `python -m snapstore`: the shell
cli/           the shell: one function for each verb
integrations/  one module for each trainer
manager.py     SnapshotManager: what a training loop calls
steps.py       its steps: list and restore them
dcp/           torch.distributed.checkpoint, with a repository as its storage
convert/       checkpoints of other libraries, in and out
repository.py  Repository: the data under one URL, and one method for each verb
snapshots.py   its snapshots: look them up, restore, read and compare them
copy/          copies of snapshots to another repository, and mirrors
repair/        heal damage, or set it aside
rewrite/       recode and compact
check/         find damage
inspect/       count and compare
save/          the write path
restore/       the read path
chunks/        packs of blobs: put, read, verify
protocol/      keep a gc from deleting what a running save needs, and delete
context.py     an open repository, the one argument of all verbs
catalog/       config, records and policies, and their index
engine/        hash, encode and decode chunks, on the CPU or a GPU
distributed/   messages between the ranks of a job
options.py     how saves are stored
checks.py      checks of arguments
format/        bytes of blobs, packs, manifests and records
state/         a training state as trees and arrays, and back
storage/       stores of objects: local disk, memory, S3; they know nothing of snapshots
retention.py   which snapshots of a run stay, and why
threads.py     pools of threads that survive a fork and the interpreter's exit
arrays.py      types of NumPy arrays that many modules share
text.py        words that errors and reports share, and the log
errors.py      errors, by how a caller would handle them

Importing this package imports neither torch nor any GPU library. A save or a restore imports them at the first tensor.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from .catalog.history import View as View
    from .check.fallback import Skipped as Skipped
    from .check.report import CheckResult as CheckResult
    from .check.report import Problem as Problem
    from .copy.copy import CopyResult as CopyResult
    from .distributed.base import Ranks as Ranks
    from .distributed.torch_ranks import TorchRanks as TorchRanks
    from .errors import AlreadyExistsError as AlreadyExistsError
    from .errors import CapabilityError as CapabilityError
    from .errors import ConflictError as ConflictError
    from .errors import FormatError as FormatError
    from .errors import IntegrityError as IntegrityError
    from .errors import InvalidInputError as InvalidInputError
    from .errors import NotFoundError as NotFoundError
    from .errors import RanksError as RanksError
    from .errors import SnapstoreError as SnapstoreError
    from .errors import StorageError as StorageError
    from .errors import StorageFullError as StorageFullError
    from .errors import UnknownFormatError as UnknownFormatError
    from .errors import UnsupportedLeafError as UnsupportedLeafError
    from .format.records import Config as Config
    from .format.records import ManifestRef as ManifestRef
    from .format.records import Snapshot as Snapshot
    from .inspect.blame import Blame as Blame
    from .inspect.blame import BlameResult as BlameResult
    from .inspect.diff import DiffResult as DiffResult
    from .inspect.diff import TensorDiff as TensorDiff
    from .inspect.divergence import DivergenceResult as DivergenceResult
    from .inspect.lazy import LazyTensors as LazyTensors
    from .inspect.lazy import TensorHandle as TensorHandle
    from .inspect.report_page import RunReport as RunReport
    from .inspect.stats import GroupStats as GroupStats
    from .inspect.stats import StatsResult as StatsResult
    from .inspect.tables import SnapshotList as SnapshotList
    from .inspect.usage import Usage as Usage
    from .inspect.usage import UsageResult as UsageResult
    from .manager import SnapshotManager as SnapshotManager
    from .options import SaveOptions as SaveOptions
    from .protocol.forget import ForgetResult as ForgetResult
    from .protocol.gc import GcResult as GcResult
    from .repair.report import RepairAction as RepairAction
    from .repair.report import RepairResult as RepairResult
    from .repository import Repository as Repository
    from .retention import KeepBest as KeepBest
    from .retention import KeepBytes as KeepBytes
    from .retention import KeepDaily as KeepDaily
    from .retention import KeepEvery as KeepEvery
    from .retention import KeepHourly as KeepHourly
    from .retention import KeepLast as KeepLast
    from .retention import KeepMonthly as KeepMonthly
    from .retention import KeepSteps as KeepSteps
    from .retention import KeepWeekly as KeepWeekly
    from .retention import KeepWithin as KeepWithin
    from .retention import KeepYearly as KeepYearly
    from .retention import Policy as Policy
    from .retention import SnapshotLike as SnapshotLike
    from .rewrite.compact import CompactResult as CompactResult
    from .rewrite.recode import RecodeResult as RecodeResult
    from .save.background import SaveHandle as SaveHandle
    from .save.hooks import Ages as Ages
    from .save.hooks import CommitEvent as CommitEvent
    from .save.hooks import FailureEvent as FailureEvent
    from .state.fill.fit import FitOptions as FitOptions
    from .state.fill.fit import Mismatches as Mismatches
    from .state.fill.fit import NameOptions as NameOptions
    from .state.folder import Unpacked as Unpacked
    from .state.folder import pack_folder as pack_folder
    from .state.folder import unpack_folder as unpack_folder
    from .state.walk.per_rank import PerRank as PerRank
    from .state.walk.per_rank import RankValues as RankValues
    from .state.walk.resumable import ResumableLoader as ResumableLoader
    from .state.walk.resumable import resumable as resumable
    from .state.walk.rng import RngState as RngState
    from .storage.base import ObjectInfo as ObjectInfo
    from .storage.base import ObjectStore as ObjectStore

#: The public names of each module.
_NAMES = {
    "catalog.history": "View",
    "check.fallback": "Skipped",
    "check.report": "CheckResult Problem",
    "copy.copy": "CopyResult",
    "distributed.base": "Ranks",
    "distributed.torch_ranks": "TorchRanks",
    "errors": (
        "AlreadyExistsError CapabilityError ConflictError FormatError IntegrityError InvalidInputError "
        "NotFoundError RanksError SnapstoreError StorageError StorageFullError UnknownFormatError "
        "UnsupportedLeafError"
    ),
    "format.records": "Config ManifestRef Snapshot",
    "inspect.blame": "Blame BlameResult",
    "inspect.diff": "DiffResult TensorDiff",
    "inspect.divergence": "DivergenceResult",
    "inspect.lazy": "LazyTensors TensorHandle",
    "inspect.report_page": "RunReport",
    "inspect.stats": "GroupStats StatsResult",
    "inspect.tables": "SnapshotList",
    "inspect.usage": "Usage UsageResult",
    "manager": "SnapshotManager",
    "options": "SaveOptions",
    "protocol.forget": "ForgetResult",
    "protocol.gc": "GcResult",
    "repair.report": "RepairAction RepairResult",
    "repository": "Repository",
    "retention": (
        "KeepBest KeepBytes KeepDaily KeepEvery KeepHourly KeepLast KeepMonthly KeepSteps KeepWeekly KeepWithin "
        "KeepYearly Policy SnapshotLike"
    ),
    "rewrite.compact": "CompactResult",
    "rewrite.recode": "RecodeResult",
    "save.background": "SaveHandle",
    "save.hooks": "Ages CommitEvent FailureEvent",
    "state.fill.fit": "FitOptions Mismatches NameOptions",
    "state.folder": "Unpacked pack_folder unpack_folder",
    "state.walk.per_rank": "PerRank RankValues",
    "state.walk.resumable": "ResumableLoader resumable",
    "state.walk.rng": "RngState",
    "storage.base": "ObjectInfo ObjectStore",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)


if not TYPE_CHECKING:  # else a type checker would accept any misspelt name

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used: the shell's `--help` needs none of them."""
        if name == "__version__":
            return import_module(".format.records", __name__).VERSION
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | {"__version__", *__all__})

"""mypy --strict accepts right uses of the public API and rejects wrong ones; `help()` shows its types."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

import snapstore
from kit.processes import ROOT, run_python

RIGHT = """
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, assert_type

import torch

import snapstore
from snapstore import (
    Ages, AlreadyExistsError, Blame, BlameResult, CapabilityError, CheckResult, CommitEvent, CompactResult, Config,
    ConflictError, CopyResult, DiffResult,
    DivergenceResult, FailureEvent, FitOptions, ForgetResult,
    FormatError, GcResult, GroupStats, IntegrityError, InvalidInputError, KeepBest, KeepBytes, KeepDaily, KeepEvery,
    KeepHourly,
    KeepLast, KeepMonthly, KeepSteps, KeepWeekly, KeepWithin, KeepYearly, LazyTensors, ManifestRef, NotFoundError,
    Mismatches, NameOptions,
    ObjectInfo, ObjectStore, PerRank, Policy, Problem, RankValues, Ranks, RanksError, RecodeResult, RepairAction,
    RepairResult, Repository, ResumableLoader, RngState, RunReport, SaveHandle, SaveOptions, Skipped, Snapshot,
    SnapshotLike, SnapshotList, SnapshotManager, SnapstoreError, StatsResult, StorageError, StorageFullError,
    TensorDiff, TensorHandle, TorchRanks,
    UnknownFormatError, UnsupportedLeafError, Unpacked, Usage, UsageResult, View, resumable,
)


def training(path: Path, state: dict[str, Any]) -> None:
    options = SaveOptions(restore_cost=2, pack_bytes=1 << 20, threads=None)
    with SnapshotManager(
        path, run="a", save_interval_steps=10, keep=[KeepLast(3), KeepBest("loss", n=2, mode="max")], async_save=True,
        on_busy="skip", keep_base=False, read_only=False, options=options,
    ) as snapshots:
        assert_type(snapshots, SnapshotManager)
        assert_type(snapshots.run, str)
        assert_type(snapshots.repository, Repository)
        assert_type(snapshots.should_save(10), bool)
        handle = snapshots.save(10, state, metrics={"loss": 0.5}, metadata={"lr": [1e-3]}, tags=["best"], force=True)
        assert_type(handle, SaveHandle)
        assert_type(handle.skipped, bool)
        assert_type(handle.done(), bool)
        assert_type(handle.result(), Snapshot | None)
        assert_type(handle.result(timeout=1.5), Snapshot | None)
        assert_type(snapshots.latest_step(), int | None)
        assert_type(snapshots.highest_step(), int | None)
        assert_type(snapshots.best_step(), int | None)
        assert_type(snapshots.all_steps(), list[int])
        assert_type(snapshots.restore(), dict[Any, Any])
        assert_type(snapshots.restore(part="model"), Any)
        assert_type(snapshots.restore(10, part=None, rename={"a": "b"}), dict[Any, Any])
        assert_type(snapshots.restore_into(state, "best"), Snapshot)
        assert_type(snapshots.restore_into(state, strict=False, part="model", rename={"a": "b"}), Snapshot)
        assert_type(snapshots.restore_into(state, fallback=True), Snapshot)
        assert_type(snapshots.restore_into(state, fallback=(skipped := Skipped())), Snapshot)
        assert_type(skipped.snapshots, list[tuple[int, str, str]])
        assert_type(snapshots.restore(10, keys=["model.*"], device="cpu"), dict[Any, Any])
        snapshots.wait_until_finished()
        snapshots.check_for_errors()
        snapshots.close()


def hooks(path: Path) -> None:
    def both(event: CommitEvent | FailureEvent) -> None:
        assert_type(event.run, str)
        assert_type(event.step, int)
        assert_type(event.ages, Ages)
        assert_type(event.ages.commit_s, float)
        assert_type(event.ages.mirror_s, float | None)
        if isinstance(event, FailureEvent):
            assert_type(event.error, BaseException)
            assert_type(event.attempt, int)
            assert_type(event.will_retry, bool)
        else:
            assert_type(event.snapshot, Snapshot)

    SnapshotManager(path, run="a", on_commit=both, on_failure=[both]).close()
    SnapshotManager(path, run="a", on_commit=lambda event: print(event.snapshot), on_failure=None).close()


def repositories(state: dict[str, Any]) -> None:
    repository = Repository.create("/data/snaps", chunk_bytes=1 << 18, options=SaveOptions())
    assert_type(repository, Repository)
    assert_type(Repository.open(Path("/data/snaps")), Repository)
    with Repository.open("/data/snaps") as opened:
        assert_type(opened, Repository)
    assert_type(repository.url, str)
    assert_type(SnapshotManager(repository, run="a", parent="b@3", keep=KeepLast(3)).repository, Repository)
    saved = repository.save(
        state, run="a", step=1, parent="b@3", bases=("b@latest",), metrics={"loss": 1}, tags=("t",), full=True
    )
    assert_type(saved, Snapshot)
    assert_type(repository.restore("a@1"), dict[Any, Any])
    assert_type(repository.restore("a@1", keys="model.*", per_rank=0), dict[Any, Any])
    weights: list[float] = repository.restore("a@1", part="weights")
    part: str | None = "weights" if weights else None
    assert_type(repository.restore("a@1", part=part, types=[Path]), Any | dict[Any, Any])
    assert_type(repository.named_tensors("a@1", keys="model.*", device="cpu"), Iterator[tuple[str, Any]])
    assert_type(snapstore.pack_folder("x", follow_links=True), Iterator[tuple[str, Any]])
    assert_type(snapstore.unpack_folder(repository.tensors("a@1"), Path("y")), Unpacked)
    assert_type(repository.first_difference("a", "b"), DivergenceResult)
    blamed = repository.blame("a", since=10)
    assert_type(blamed, BlameResult)
    assert_type(blamed.found, list[Blame])
    assert_type(repository.tensors("a@1", keys=["model"]), LazyTensors)
    assert_type(repository.tensors("a@1")["model.weight"], TensorHandle)
    assert_type(repository.restore("a@best", part="model", rename={"module.": ""}), Any)
    assert_type(repository.restore_into("a@1", state, rename=str.lower, strict=Mismatches()), Snapshot)
    assert_type(repository.save(repository.named_tensors("a@1"), run="b", step=1), Snapshot)
    assert_type(repository.restore_into("a@1", state, keys="model.*"), Snapshot)
    assert_type(repository.snapshots(), SnapshotList)
    saved_before: list[Snapshot] = repository.snapshots("a")
    assert_type(repository.snapshots("a")[-1], Snapshot)
    assert_type(repository.snapshots("a")[-5:], SnapshotList)
    assert_type(saved_before[-1], Snapshot)
    assert_type(repository.snapshots().to_pandas(), Any)
    assert_type(repository.snapshot("a@latest"), Snapshot)
    assert_type(repository.children("a@1"), SnapshotList)
    assert_type(repository.tag("a@1", "t"), Snapshot)
    assert_type(repository.untag("a@1", "t"), Snapshot)
    assert_type(repository.unforget("a@1"), Snapshot)
    assert_type(repository.policies("a"), list[Policy])
    repository.set_policies("a", [KeepLast(1)])
    repository.set_policies("a", KeepLast(1))
    assert_type(repository.rebuild_index(), int)

    forgotten = repository.forget([KeepLast(1), KeepEvery(10)], run="a", dry_run=True, force=False)
    assert_type(forgotten, ForgetResult)
    assert_type(forgotten.kept, list[tuple[Snapshot, tuple[str, ...]]])
    assert_type(forgotten.forgotten, list[Snapshot])
    assert_type(repository.forget_snapshots(["a@1"]), ForgetResult)

    collected = repository.gc(dry_run=True, fence_after_s=60)
    assert_type(collected, GcResult)
    assert_type(collected.deleted_bytes, int)
    assert_type(collected.waiting_for, list[str])

    checked = repository.check("data", share=0.5, subset=(1, 4))
    assert_type(checked, CheckResult)
    assert_type(checked.ok, bool)
    assert_type(checked.problems, list[Problem])
    assert_type(checked.restorable, list[Snapshot])

    assert_type(repository.recode(["a@1"], codec="portable"), RecodeResult)
    assert_type(repository.compact(max_repack_bytes=1 << 20), CompactResult)
    assert_type(repository.copy(["a@1"], to="/tmp/copy"), CopyResult)
    assert_type(repository.repair(apply=True), RepairResult)
    assert_type(repository.repair().actions, list[RepairAction])
    assert_type(repository.view(), View)
    assert_type(repository.config, Config)
    store: ObjectStore = repository.store
    assert_type([info for info in store.list("packs/")], list[ObjectInfo])

    assert_type(repository.report(["a"]), RunReport)
    usage = repository.du("part")
    assert_type(usage, UsageResult)
    assert_type(usage.rows, list[Usage])
    stats = repository.stats()
    assert_type(stats, StatsResult)
    assert_type(stats.ratio, float)
    assert_type(stats.unneeded_bytes, int)
    assert_type(stats.groups, dict[str, GroupStats])

    diff = repository.diff("a@1", "a@2")
    assert_type(diff, DiffResult)
    assert_type(diff.a, Snapshot)
    assert_type(diff.tensors, list[TensorDiff])
    assert_type(diff.tensors[0].changed_share, float | None)
    assert_type(diff.plain, list[tuple[str, str, str]])


def snapshot(s: Snapshot) -> None:
    for text in (s.id, s.run, s.state, s.key, s.ref, s.policy, s.reason):
        assert_type(text, str)
    for number in (s.step, s.seq, s.revision, s.generation, s.depth, s.chunks, s.new_chunks, s.logical_bytes):
        assert_type(number, int)
    for seconds in (s.created, s.stall_s, s.total_s, s.ratio):
        assert_type(seconds, float)
    assert_type(s.parent, str | None)
    assert_type(s.bases, list[str])
    assert_type(s.manifests, list[ManifestRef])
    like: SnapshotLike = s
    assert_type(s.tags, list[str])
    assert_type(s.metrics, dict[str, float])
    assert_type(s.metadata, Any)


def policies() -> Sequence[Policy]:
    return (
        KeepLast(3), KeepEvery(100), KeepSteps([1, 2]), KeepBest("loss"), KeepWithin("1d"), KeepHourly(24),
        KeepDaily(7), KeepWeekly(4), KeepMonthly(12), KeepYearly(3), KeepBytes("2T"),
    )


def generators() -> None:
    rng = RngState(cuda=False)
    assert_type(rng.state_dict(), dict[str, Any])
    rng.load_state_dict(rng.state_dict())


def position(loader: torch.utils.data.DataLoader[torch.Tensor]) -> None:
    assert_type(resumable(loader), ResumableLoader[torch.Tensor])
    for batch in resumable(loader):
        assert_type(batch, torch.Tensor)


def several_ranks(path: Path, loader: dict[str, int]) -> None:
    channel: Ranks = TorchRanks(None, silent_s=60.0, total_s=600)
    assert_type(channel.look("key"), bytes | None)
    with SnapshotManager(path, run="a", ranks=channel) as snapshots:
        snapshots.handle_preemption(end=False, timeout=20.0)
        snapshots.handle_preemption(signals=[signal.SIGUSR1], notice=path / "stop")
        snapshots.handle_preemption(signals={10}, notice=urllib.request.Request("http://host/", headers={"a": "b"}))
        snapshots.handle_preemption(notice=path.exists)
        assert_type(snapshots.reached_preemption(3), bool)
        own = PerRank(loader)
        assert_type(own.value, Any)
        assert_type(snapshots.restore_into({"loader": own}, per_rank=0), Snapshot)
        assert_type(snapshots.restore(3, per_rank="drop"), dict[Any, Any])
        of_all: RankValues = snapshots.restore(3)["loader"]
        assert_type(of_all[0], Any)
        assert_type(dict(of_all), dict[int, Any])
        snapshots.close(timeout=5.0)
    SnapshotManager(path, run="a", ranks=False).close()


def errors() -> None:
    base: list[type[SnapstoreError]] = [
        AlreadyExistsError, CapabilityError, ConflictError, FormatError, IntegrityError, InvalidInputError,
        NotFoundError, RanksError, StorageError,
    ]
    lookup: type[KeyError] = NotFoundError
    value: type[ValueError] = InvalidInputError
    leaf: type[InvalidInputError] = UnsupportedLeafError
    unknown: type[FormatError] = UnknownFormatError
    full: type[StorageError] = StorageFullError
    plain: type[Exception] = SnapstoreError
    try:
        snapstore.Repository.open("/data/snaps")
    except (snapstore.NotFoundError, snapstore.StorageError) as error:
        assert_type(error, NotFoundError | StorageError)
"""

#: Every line with a mark has errors of exactly the kind in the mark. No other line has an error.
WRONG = """
from snapstore import KeepBest, KeepLast, Repository, SaveOptions, Snapshot, SnapshotManager
from snapstore import NotFoundError, StorageError


def uses(snapshots: SnapshotManager, repository: Repository, snapshot: Snapshot) -> None:
    SnapshotManager("/data/snaps")  # error: call-arg
    SnapshotManager("/data/snaps", run=3)  # error: arg-type
    SnapshotManager("/data/snaps", run="a", on_busy="drop")  # error: arg-type
    SnapshotManager("/data/snaps", run="a", keep=["last 3"])  # error: list-item
    SnapshotManager("/data/snaps", run="a", interval=10)  # error: call-arg
    SnapshotManager("/data/snaps", run="a", on_commit=print, on_failure="log")  # error: arg-type
    snapshots.save(1)  # error: call-arg
    snapshots.save("1", {})  # error: arg-type
    snapshots.save(1, {}, {"loss": 0.5})  # error: call-arg
    snapshots.save(1, {}, metrics={"loss": "low"})  # error: dict-item
    snapshots.save(1, {}).result().step  # error: union-attr
    snapshots.save(1, {}).step  # error: attr-defined
    snapshots.latest_step() + 1  # error: operator
    snapshots.all_steps().step  # error: attr-defined
    snapshots.restore(1.5)  # error: call-overload
    step: int = snapshots.best_step()  # error: assignment
    Repository.open(3)  # error: arg-type
    Repository.create("/data/snaps", 4096)  # error: call-arg
    repository.save({}, "a", 1)  # error: call-arg
    repository.restore("a@1", "w")  # error: call-overload
    repository.restore("a@1", into={})  # error: call-overload
    repository.restore("a@1").model  # error: attr-defined
    repository.restore("a@1", per_rank="all")  # error: call-overload
    repository.restore_into("a@1", {})["w"]  # error: index
    repository.forget([KeepLast(1)])  # error: call-arg
    repository.gc(True)  # error: call-arg
    repository.check("data").okay  # error: attr-defined
    repository.snapshots().run  # error: attr-defined
    repository.stats()["ratio"]  # error: index
    repository.diff("a@1")  # error: call-arg
    snapshot.parent.upper()  # error: union-attr
    snapshot.step = 3  # error: misc
    snapshot.metrics["loss"] = "low"  # error: assignment
    KeepLast("3")  # error: arg-type
    KeepBest("loss", mode="lowest")  # error: arg-type
    SaveOptions(threads="4")  # error: arg-type
    StorageError("full") + 1  # error: operator
    wrong: type[StorageError] = NotFoundError  # error: assignment
"""


MISSPELT = """
import snapstore
from snapstore import KeepLats  # error: attr-defined
snapstore.KeepLats(3)  # error: attr-defined
"""

VERSION = "from typing import assert_type\nimport snapstore\nassert_type(snapstore.__version__, str)\n"

#: A variable needs no annotation.
POLICIES = """
from snapstore import KeepEvery, KeepLast, SnapshotManager
keep = [KeepLast(3), KeepEvery(100)]
SnapshotManager("/data/snaps", run="a", keep=keep)
"""


def mypy(folder: Path, sources: dict[str, str]) -> dict[str, str]:
    """Check modules with mypy --strict, in one call, for it takes a second to start; return what it says of each.

    In this process it would leave a million objects, and let the garbage collector run less often.
    """
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    files = [str(folder / f"{name}.py") for name in sources]
    command = ["-m", "mypy", "--strict", "--config-file", "pyproject.toml", "--no-error-summary"]
    # Its cache is that of `tools/test`, which fills it beside the first tests.
    done = run_python(*command, *files, cwd=ROOT, MYPYPATH=str(ROOT))
    assert not done.stderr, done.stderr
    said = dict.fromkeys(sources, "")
    for line in done.stdout.splitlines(keepends=True):
        said[Path(line.partition(":")[0]).stem] += line
    return said


def errors_in(report: str) -> dict[int, set[str]]:
    """Return the kinds of the errors by line."""
    errors: dict[int, set[str]] = {}
    for line in report.splitlines():
        if match := re.fullmatch(r".+?:(\d+): error: .* \[([a-z-]+)\]", line):
            errors.setdefault(int(match[1]), set()).add(match[2])
    return errors


#: Names that the code of README and docs takes from the reader's script.
THEIRS = {
    **{name: f"class {name}: ..." for name in ("Config", "Mode", "Point", "Vocabulary")},
    "Net": "Net: typing.Any",
    "SnapstoreLoadStrategy": "from snapstore.integrations.megatron import SnapstoreLoadStrategy",
    "TOTAL": "TOTAL: int",
    "config": "config: dict[str, typing.Any]",
    "data": "data: typing.Any",
    "loader": "loader: torch.utils.data.DataLoader[torch.Tensor]",
    "make_model": "make_model: typing.Callable[[], typing.Any]",
    "model": "model: torch.nn.Module",
    "optimizer": "optimizer: torch.optim.Optimizer",
    "rank": "rank: int",
    "repository": "repository: snapstore.Repository",
    "save": "save: typing.Any",
    "sharded_state": "sharded_state: dict[str, typing.Any]",
    "signal": "import signal",
    "snapshots": "snapshots: snapstore.SnapshotManager",
    "snapstore": "",
    "stage": "stage: torch.nn.Module",
    "start": "start: int",
    "state": "state: dict[str, typing.Any]",
    "step": "step: int",
    "total": "total: int",
    "torch": "",
    "train": "train: typing.Callable[..., torch.Tensor]",
}

#: The same for the pages about trainers.
OF_TRAINERS = THEIRS | {"model": "model: typing.Any", "train": "train: typing.Any"}
TRAINERS = ("accelerate", "deepspeed", "lightning", "megatron", "torchtitan", "transformers")
#: Users' functions may have no types. Their calls of snapstore are still checked.
UNTYPED = "# mypy: " + ", ".join(
    f"{rule}=False" for rule in ("disallow_untyped_defs", "disallow_untyped_calls", "disallow_any_generics")
)

#: Correct code that torch's types refuse.
TORCH_DOES_NOT_SAY = ("DataLoader(inputs", "average.module.weight", "state['gradients'].state_dict()")


def code_of_pages() -> Iterator[str]:
    """Yield each Python block of README and docs as a module, which first defines the names of the reader's script."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            nodes = list(ast.walk(ast.parse(block)))
            names = {(node.id, type(node.ctx)) for node in nodes if isinstance(node, ast.Name)}
            bound = {name for name, context in names if context is ast.Store} | {*dir(builtins)}
            imported = (a for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names)
            bound |= {a.asname or a.name.partition(".")[0] for a in imported}
            bound |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler)}
            bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
            taken = sorted({name for name, context in names if context is ast.Load} - bound)
            theirs = OF_TRAINERS if page.stem in TRAINERS else THEIRS
            yield "\n".join(
                ["import typing", "import torch", "import snapstore", *map(theirs.__getitem__, taken), block]
            )


def module_of_pages() -> str:
    """Return the code of all pages as one module, each block as a function."""
    blocks = list(code_of_pages())
    assert 'metrics={"loss": loss}' in blocks[0]
    functions = [UNTYPED]
    for number, block in enumerate(blocks):
        functions += [f"def block_{number}() -> None:", textwrap.indent(block, "    ")]
    return "\n".join(functions)


METRICS = """
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
from snapstore import SnapshotManager

def uses(snapshots: SnapshotManager, loss: torch.Tensor, row: dict[str, float], own: dict[str, torch.Tensor]) -> None:
    snapshots.save(1, {}, metrics={"loss": loss, "epoch": 3, "lr": 1e-3, "acc": np.float32(0.5), "d": Decimal(1)})
    snapshots.save(1, {}, metrics={"f": Fraction(1, 3), "mean": np.mean(np.ones(3)), "flag": True})
    snapshots.save(1, {}, metrics=row)
    snapshots.save(1, {}, metrics=own)
    snapshots.repository.save({}, run="a", step=1, metrics={"loss": loss, "lr": 1e-3})
    snapshots.save(1, {}, metrics={"loss": "0.5"})  # error: dict-item
    snapshots.save(1, {}, metrics={"loss": None})  # error: dict-item
    snapshots.save(1, {}, metrics={"loss": 1j})  # error: dict-item
    snapshots.save(1, {}, metrics=[("loss", 0.5)])  # error: arg-type
"""


@pytest.mark.slow
def test_right_uses_pass_and_wrong_uses_are_errors_on_their_lines(tmp_path):
    """Right uses have the documented types; metrics may be of every type that supports float; all pages pass."""
    uses = {"right": RIGHT, "wrong": WRONG, "metrics": METRICS}
    uses |= {"misspelt": MISSPELT, "version": VERSION, "policies": POLICIES}
    pages = module_of_pages()
    said = mypy(tmp_path, uses | {"pages": pages})
    for name, source in uses.items():
        lines = enumerate(source.splitlines(), 1)
        marks = {n: {line.split("# error: ")[1]} for n, line in lines if "# error: " in line}
        assert errors_in(said[name]) == marks, said[name]
        assert marks or not said[name], said[name]
    lines = pages.splitlines()
    left = [n for n in errors_in(said["pages"]) if not any(text in lines[n - 1] for text in TORCH_DOES_NOT_SAY)]
    assert not left, said["pages"]


def test_the_snippet_names_all_that_is_public():
    assert [name for name in snapstore.__all__ if not re.search(rf"\b{name}\b", RIGHT)] == []


@pytest.mark.parametrize("name", snapstore.__all__)
def test_every_public_name_resolves_and_explains_itself(name):
    value = getattr(snapstore, name)
    assert inspect.isclass(value) or inspect.isfunction(value)
    assert value.__name__ == name
    assert name in dir(snapstore)
    doc = value.__doc__
    assert doc
    assert not doc.startswith(f"{name}("), "this is the docstring that @dataclass writes"


def functions_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods, the properties and the special methods that a class defines, with their names."""
    for name, value in vars(cls).items():
        if name.startswith("_") and not name.endswith("__"):
            continue
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        function = function.fget if isinstance(function, property) else function
        # Methods that @dataclass and msgspec write have no file of their own.
        if inspect.isfunction(function) and function.__code__.co_filename.startswith(str(ROOT)):
            yield f"{cls.__name__}.{name}", function


def public_classes() -> list[type]:
    return [getattr(snapstore, name) for name in snapstore.__all__]


def test_every_public_method_is_annotated_and_explained():
    seen, bare, unexplained = 0, [], []
    for name, function in (found for cls in public_classes() for found in functions_of(cls)):
        seen += 1
        parameters = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
        bare += [f"{name}({p})" for p in [*parameters, "return"] if p not in function.__annotations__]
        if not name.endswith("__") and not function.__doc__:
            unexplained.append(name)
    assert seen > 60
    assert bare == []
    assert unexplained == []


def named_in(annotation: Any) -> Iterator[str]:
    """Yield the names of the classes of this package in an annotation."""
    if inspect.isclass(annotation) and annotation.__module__.startswith("snapstore"):
        yield annotation.__name__
    for part in get_args(annotation):
        yield from named_in(part)


def test_every_type_in_a_public_signature_is_public():
    """The types of parameters, of results and of their fields are public: users import them for annotations."""
    public = {name: getattr(snapstore, name) for name in snapstore.__all__}
    known = public | {"DataLoader": torch.utils.data.DataLoader, "urllib": urllib}
    annotated = [*public_classes(), *(function for cls in public_classes() for _, function in functions_of(cls))]
    named = {
        name
        for thing in annotated
        for annotation in get_type_hints(thing, localns=known).values()  # a name that is not public may raise here
        for name in named_in(annotation)
    }
    assert len(named) > 20
    assert named - public.keys() == set()


def test_the_types_are_shipped():
    assert (Path(inspect.getfile(snapstore)).parent / "py.typed").read_bytes() == b""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["snapstore"]


def test_the_lazy_names_match_what_a_checker_sees():
    source = Path(inspect.getfile(snapstore)).read_text()
    block = textwrap.dedent(source.split("if TYPE_CHECKING:\n")[1].split("\n_HOME")[0])
    imports = re.findall(r"from \.([\w.]+) import (\w+) as (\w+)\n", block)
    assert len(imports) == block.count(" import ")
    assert [name for _, name, shown in imports if name != shown] == []
    seen = {name: module for module, name, _ in imports}
    assert seen == snapstore._HOME
    assert snapstore.__all__ == sorted(seen)

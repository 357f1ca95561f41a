"""The paths of the matrix: each trains, saves after STEPS steps, and resumes in a new model with a new optimizer.

In: a case and the paths to try. Out: for each path, how the resumed run compares with the uninterrupted one, by
snapstore and by torch.save: "same", "differs", or the text of an error. The peer of a plain path is torch.save with
load_state_dict, and that of a trainer its own checkpoint files, which torch.save writes. A path on which the
uninterrupted training itself fails has the outcome "not run".
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException

import snapstore

from .optimizers import Optimizer
from .training import BATCH, MORE, STEPS, Case, Data, Run, build, limit, result, train

#: An outcome of a run.
SAME, DIFFERS, NOT_RUN, ERROR, TOLD = "same", "differs", "not run", "error", "told"
ERROR_CHARACTERS = 300
LIMIT_S = 60  # of a training: an optimizer may not converge in its own loop
TOTAL = STEPS + MORE
_State = dict[str, Any]
_Resume = Callable[[_State], object]


class Outcome(NamedTuple):
    """The two outcomes of a pair, each "same", "differs" or "error: ..."; or "not run: ..." twice."""

    snapstore: str
    torch_save: str


def missing() -> dict[str, str]:
    """Return the paths whose package is not installed, with the package."""
    return {path: path for path in FRAMEWORKS if find_spec(path) is None}


def outcomes(case: Case, optimizer: Optimizer, paths: Iterable[str], folder: Path, device: str) -> dict[str, Outcome]:
    """Return the outcome of each path; files go to a new folder."""
    asked, found = set(paths), dict[str, Outcome]()

    def start() -> tuple[Any, Any]:
        return build(case, optimizer, device)

    if plain := [path for path in WAYS if path in asked]:
        found |= _plain(start, plain, folder)
    for path in FRAMEWORKS:
        if path in asked:
            found[path] = _framework(FRAMEWORKS[path](start, folder / path, device))
    return found


def attempt(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or the text of its error."""
    try:
        with limit(LIMIT_S):
            return function()
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # DCP's is a BaseException
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        text = " ".join(str(cause).split())
        return f"{ERROR}: {type(cause).__name__}: {text}"[:ERROR_CHARACTERS]


def _compared(found: Run | str, wanted: Run) -> str:
    if isinstance(found, str):
        return found
    return SAME if repr(found) == repr(wanted) else DIFFERS  # repr: NaN equals NaN, and 0.0 differs from -0.0


# -- the plain loop


def _plain(start: Callable[[], tuple[Any, Any]], paths: list[str], folder: Path) -> dict[str, Outcome]:
    """Train once, save by each path and by torch.save, and resume from each."""
    with ExitStack() as stack:

        def uninterrupted() -> tuple[dict[str, _Resume | str], Run]:
            model, optimizer = start()
            train(model, optimizer, 0, STEPS)
            state = {"model": model, "optimizer": optimizer}
            ways = {path: WAYS[path] for path in paths} | {"torch.save": _torch_save}
            saved = {path: attempt(lambda path=path, way=way: way(state, folder, stack)) for path, way in ways.items()}  # type: ignore[misc]
            return saved, train(model, optimizer, STEPS, MORE)

        def resumed(resume: _Resume) -> Run:
            model, optimizer = start()
            resume({"model": model, "optimizer": optimizer})
            return train(model, optimizer, STEPS, MORE)

        first = attempt(uninterrupted)
        if isinstance(first, str):
            return dict.fromkeys(paths, _not_run(first))
        saved, wanted = first
        found = {
            path: one if isinstance(one, str) else _compared(attempt(lambda one=one: resumed(one)), wanted)  # type: ignore[misc]
            for path, one in saved.items()
        }
        for path, one in saved.items():
            if isinstance(one, _Exported) and one.told and found[path] != SAME:
                found[path] = f"{TOLD}: {one.told}"[:ERROR_CHARACTERS]
    return {path: Outcome(found[path], found["torch.save"]) for path in paths}


def _not_run(error: str) -> Outcome:
    text = f"{NOT_RUN}: {error.removeprefix(f'{ERROR}: ')}"
    return Outcome(text, text)


def _load(state: _State, loaded: _State) -> None:
    for name, target in state.items():
        target.load_state_dict(loaded[name])


def _torch_save(state: _State, folder: Path, stack: ExitStack) -> _Resume:
    buffer = io.BytesIO()
    torch.save({name: one.state_dict() for name, one in state.items()}, buffer)

    def resume(fresh: _State) -> None:
        buffer.seek(0)
        _load(fresh, torch.load(buffer, weights_only=False))

    return resume


def _saved(state: _State, folder: Path, stack: ExitStack) -> snapstore.Repository:
    where, create = str(folder / "repository"), not (folder / "repository").exists()
    opened = snapstore.Repository.create(where) if create else snapstore.Repository.open(where)
    repository = stack.enter_context(opened)
    if not repository.snapshots():
        repository.save(state, run="plain", step=STEPS)
    return repository


def _restore_into(state: _State, folder: Path, stack: ExitStack) -> _Resume:
    repository = _saved(state, folder, stack)
    return lambda fresh: repository.restore_into(f"plain@{STEPS}", fresh)


def _restore(state: _State, folder: Path, stack: ExitStack) -> _Resume:
    repository = _saved(state, folder, stack)
    return lambda fresh: _load(fresh, repository.restore(f"plain@{STEPS}"))


@dataclass(frozen=True)
class _Exported:
    """An exported file, and what snapstore told when it wrote it."""

    path: Path
    told: str

    def __call__(self, fresh: _State) -> None:
        """Load the file."""
        _load(fresh, torch.load(self.path, weights_only=False))


def _export(state: _State, folder: Path, stack: ExitStack) -> _Resume:
    from snapstore.convert import export_snapshot

    path = folder / "exported.pt"
    exported = export_snapshot(_saved(state, folder, stack), f"plain@{STEPS}", path, to="torch")
    forms = [one for one in exported.changed if one.written_as == "its plain form"]
    return _Exported(path, f"{forms[0].path} ({forms[0].was}) is written as its plain form" if forms else "")


def _dcp(state: _State, folder: Path, stack: ExitStack) -> _Resume:
    from snapstore import dcp

    repository = stack.enter_context(snapstore.Repository.create(str(folder / "dcp")))
    dcp.save(dict(state), dcp.SnapstoreWriter(repository, run="dcp"), STEPS)
    return lambda fresh: dcp.load(dict(fresh), dcp.SnapstoreReader(repository, run="dcp"), STEPS)


#: Plain path -> the function that saves, and returns the one that loads.
WAYS: dict[str, Callable[[_State, Path, ExitStack], _Resume]] = {
    "restore_into": _restore_into,
    "restore": _restore,
    "dcp": _dcp,
    "export": _export,
}


# -- trainers


class _Framework:
    """A training by a package, which saves nothing, files of its own or a snapshot after STEPS steps, or resumes."""

    def __init__(self, start: Callable[[], tuple[Any, Any]], folder: Path, device: str) -> None:
        self.start, self.folder, self.device = start, folder, device

    def manager(self) -> snapstore.SnapshotManager:
        """Return a manager that saves after STEPS steps."""
        return snapstore.SnapshotManager(self.folder / "snapshots", run="trained", save_interval_steps=STEPS)

    def run(self, saves: str = "", resumes: str = "") -> Run:
        """Train, and return the result; `saves` and `resumes` are "", "files" or "snapshots"."""
        raise NotImplementedError


def _framework(one: _Framework) -> Outcome:
    files = attempt(lambda: one.run("files"))
    wanted = files if isinstance(files, Run) else attempt(one.run)
    if isinstance(wanted, str):
        return _not_run(wanted)
    snapshots = attempt(lambda: one.run("snapshots"))
    if isinstance(snapshots, Run) and repr(snapshots) != repr(wanted):
        snapshots = f"{ERROR}: the training that saves snapshots differs from the one that saves none"
    found = {}
    for how, saved in (("files", files), ("snapshots", snapshots)):
        resumed = saved if isinstance(saved, str) else attempt(lambda how=how: one.run(resumes=how))  # type: ignore[misc]
        if isinstance(resumed, Run) and MORE <= len(resumed.losses) < len(wanted.losses):  # a step may have several
            found[how] = _compared(resumed, wanted._replace(losses=wanted.losses[-len(resumed.losses) :]))
        else:
            found[how] = DIFFERS if isinstance(resumed, Run) else resumed
    return Outcome(found["snapshots"], found["files"])


class _Trainer(_Framework):
    def run(self, saves: str = "", resumes: str = "") -> Run:
        import transformers

        from snapstore.integrations.transformers import SnapshotCallback, checkpoint_dir

        class Save(transformers.TrainerCallback):  # type: ignore[misc]  # transformers has no types
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                control.should_save = saves == "files" and state.global_step == STEPS

        own = self.folder / "files"
        model, optimizer = self.start()
        args = transformers.TrainingArguments(
            str(own),
            max_steps=TOTAL,
            per_device_train_batch_size=BATCH,
            use_cpu=self.device == "cpu",
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            report_to=[],
        )
        with ExitStack() as stack:
            callbacks: list[Any] = [Save()]
            path: str | None = str(own / f"checkpoint-{STEPS}") if resumes == "files" else None
            if "snapshots" in (saves, resumes):
                manager = stack.enter_context(self.manager())
                callbacks.append(SnapshotCallback(manager))
                if resumes:
                    path = stack.enter_context(checkpoint_dir(manager, STEPS))
            trainer = transformers.Trainer(
                model, args, train_dataset=Data(), callbacks=callbacks, optimizers=(optimizer, None)
            )
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train(resume_from_checkpoint=path)
        return result(model)


class _Lightning(_Framework):
    def run(self, saves: str = "", resumes: str = "") -> Run:
        import lightning.pytorch as pl
        from torchdata.stateful_dataloader import StatefulDataLoader

        from snapstore.integrations.lightning import SnapshotCallback

        model, optimizer = self.start()

        class Module(pl.LightningModule):  # type: ignore[misc]  # mypy skips lightning
            def __init__(self) -> None:
                super().__init__()
                self.net = model

            def training_step(self, batch: Any, number: int) -> Any:
                return self.net(**batch)["loss"]

            def configure_optimizers(self) -> Any:
                return optimizer

        own = self.folder / "files"
        callbacks: list[Any] = []
        if saves == "files":
            callbacks = [pl.callbacks.ModelCheckpoint(own, "{step}", every_n_train_steps=STEPS, save_top_k=-1)]
        elif "snapshots" in (saves, resumes):
            callbacks = [SnapshotCallback(self.manager, resume=STEPS if resumes else None)]
        trainer = pl.Trainer(
            max_steps=TOTAL,
            accelerator="cpu" if self.device == "cpu" else "gpu",
            devices=1,
            callbacks=callbacks,
            default_root_dir=self.folder,
            logger=False,
            enable_checkpointing=bool(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        path = own / f"step={STEPS}.ckpt" if resumes == "files" else None
        trainer.fit(Module(), StatefulDataLoader(Data(), BATCH), ckpt_path=path, weights_only=False)
        return result(model)


class _Accelerate(_Framework):
    def run(self, saves: str = "", resumes: str = "") -> Run:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        from snapstore.integrations.accelerate import load_state, save_state

        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, own = Accelerator(cpu=self.device == "cpu"), str(self.folder / "files")
        model, optimizer = accelerator.prepare(*self.start())
        with ExitStack() as stack:
            if "snapshots" in (saves, resumes):
                manager = stack.enter_context(self.manager())
            if resumes == "files":
                accelerator.load_state(own)
            elif resumes:
                load_state(accelerator, manager, STEPS)
            first = Run([], "") if resumes else train(model, optimizer, 0, STEPS)
            if saves == "files":
                accelerator.save_state(own, safe_serialization=False)
            elif saves:
                save_state(accelerator, manager, STEPS)
            last = train(model, optimizer, STEPS, MORE)
        return last._replace(losses=first.losses + last.losses)


#: Package of a trainer -> its trainings.
FRAMEWORKS: dict[str, type[_Framework]] = {
    "transformers": _Trainer,
    "lightning": _Lightning,
    "accelerate": _Accelerate,
}
PATHS = (*WAYS, *FRAMEWORKS)

"""One command imports what a training has left in a folder, verifies it, and follows a training that still runs."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from kit.processes import ROOT, environment, run_python
from kit.repositories import OPTIONS, same
from kit.shell import invoke
from kit.waits import until
from snapstore import InvalidInputError, Repository
from snapstore.convert import import_checkpoints, watching
from snapstore.convert.logged_metrics import metrics_in_name, metrics_of_lightning, metrics_of_trainer
from snapstore.storage.memory import MemoryStore

GUIDE = ROOT / "docs" / "guides" / "import-export.md"


@pytest.fixture
def repository():
    with Repository.create(MemoryStore(), chunk_bytes=1024, options=OPTIONS) as opened:
        yield opened


def state(step, size=3000):
    torch.manual_seed(0)
    weights = torch.randn(size)
    weights[step % size] += 1
    args = argparse.Namespace(lr=np.float64(0.1), out=Path("x"))
    return {"model": {"w": weights}, "args": args, "rng": np.random.RandomState(step).get_state()}


def series(folder, steps, name="step_{}.pt"):
    """Write checkpoints of torch.save; return their paths."""
    folder.mkdir(exist_ok=True)
    for step in steps:
        torch.save(state(step), folder / name.format(step))
    return [folder / name.format(step) for step in steps]


def shell(*args, code=0, cwd=None):
    """Run the shell in a process of its own."""
    done = run_python("-m", "snapstore", *args, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def inside(*args, code=0):
    """Run the shell in this process."""
    done = invoke([*map(str, args)])
    assert done.exit_code == code, done.output + done.stderr
    return done


def steps_of(url, run):
    with Repository.open(url) as repository:
        return [snapshot.step for snapshot in repository.snapshots(run)]


# --- the guide ---


def sections():
    """Return the commands of the guide's first section, each with the lines that it prints."""
    text = GUIDE.read_text()
    found = re.findall(r"^```console\n(.*?)^```$", text[: text.index("\n## 2.")], re.S | re.M)
    return [(block.splitlines()[0].removeprefix("$ "), block.splitlines()[1:]) for block in found]


def general(line, folder=""):
    """Return a line of output without the numbers that differ from run to run."""
    line = line.replace(str(folder), "/tmp/guide") if folder else line
    line = re.sub(r"id:[0-9a-f]{12}", "id:", line)
    return re.sub(r"\d+(\.\d+)?(B|kB|MB|GB| times)", "N", line)


def test_the_guide_imports_twenty_files_and_deletes_them_when_they_are_verified(tmp_path):
    """Both commands run in a shell, with the installed command."""
    steps = range(100, 2100, 100)
    files = series(tmp_path / "ckpts", steps)
    kept = {step: state(step) for step in steps}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "snapstore").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m snapstore "$@"\n')
    (tmp_path / "bin" / "snapstore").chmod(0o755)
    env = environment(PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    commands = sections()
    assert [command.partition(" ")[0] for command, _ in commands] == ["snapstore", "snapstore"]
    for number, (command, expected) in enumerate(commands):
        if number == 1:
            files[7].rename(tmp_path / "moved.pt")
            files[7].write_bytes((tmp_path / "moved.pt").read_bytes()[:-100])
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 3, done.stdout + done.stderr  # it is skipped, but does not verify
            assert f"error: ckpts/{files[7].name}: not a PyTorch file" in done.stderr
            assert len(list((tmp_path / "ckpts").iterdir())) == 20
            (tmp_path / "moved.pt").rename(files[7])
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        printed = [general(line, tmp_path) for line in [*done.stderr.splitlines(), *done.stdout.splitlines()]]
        wanted = [general(line) for line in expected if line != "..."]
        assert [line for line in printed if line in wanted] == wanted
        assert len(list((tmp_path / "ckpts").iterdir())) == (20 if number == 0 else 0)
    with Repository.open(tmp_path / "snaps") as repository:
        snapshots = repository.snapshots("ckpts")
        assert [snapshot.step for snapshot in snapshots] == list(steps)
        assert [one.parent for one in snapshots[1:]] == [one.id for one in snapshots[:-1]]
        assert sum(one.stored_bytes for one in snapshots[1:]) < 0.75 * sum(one.logical_bytes for one in snapshots[1:])
        for step in steps:
            assert same(repository.restore(f"ckpts@{step}"), kept[step])


# --- what a folder holds ---


def test_dates_and_metrics_are_kept(repository, tmp_path):
    for step, name in ((1, "step_1_val_loss=0.25.pt"), (20, "epoch=2-step=20-loss=1.5e-3-acc=.5.ckpt")):
        torch.save(state(step), tmp_path / name)
        os.utime(tmp_path / name, (1e9 + step, 1e9 + step + 0.25))
    (tmp_path / "checkpoint-30").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "checkpoint-30" / "model.safetensors")
    history = [{"step": 20, "loss": 9.0}, {"step": 30, "loss": 0.5, "epoch": 1.5}, {"step": 30, "eval_loss": 0.75}]
    stated = {"global_step": 30, "log_history": history}
    (tmp_path / "checkpoint-30" / "trainer_state.json").write_text(json.dumps(stated))
    for number, path in enumerate(sorted((tmp_path / "checkpoint-30").iterdir())):
        os.utime(path, (2e9 + number, 2e9 + number))
    found = list(import_checkpoints(repository, [tmp_path], run="r"))
    assert [(one.snapshot.step, one.snapshot.created) for one in found] == [
        (1, 1e9 + 1.25),
        (20, 1e9 + 20.25),
        (30, 2e9 + 1),
    ]
    assert [one.snapshot.metrics for one in found] == [
        {"val_loss": 0.25},
        {"loss": 1.5e-3, "acc": 0.5},
        {"loss": 0.5, "eval_loss": 0.75},
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("epoch=3-step=500-val_loss=0.12", {"val_loss": 0.12}),
        ("step_100_val_loss=0.12", {"val_loss": 0.12}),
        ("step100_top1=71.5_f1=0.5", {"top1": 71.5, "f1": 0.5}),
        ("reward=-3.5-lr=1e-05", {"reward": -3.5, "lr": 1e-05}),
        ("loss=0.12.5", {}),
        ("loss=12k", {}),
        ("iter=5", {}),
        ("loss", {}),
    ],
)
def test_metrics_in_names(name, expected):
    assert metrics_in_name(name) == expected


def test_metrics_of_files_that_lie():
    entry = {"step": 3, "a": True, "b": "1", "c": 10**400, "d": None, "e\n": 1.0, "f" * 300: 1.0, "ok": 2}
    lies = [
        7,
        {"step": 3, "loss": float("inf")},
        entry,
        {"step": "3", "x": 1},
        {"step": 3} | dict.fromkeys(map(str, range(300)), 1),
    ]
    found = metrics_of_trainer({"global_step": 3, "log_history": lies})
    assert found["ok"] == 2
    assert found.keys().isdisjoint({"a", "b", "c", "d", "e\n", "f" * 300, "loss", "x"})
    assert len(found) == 200
    assert metrics_of_trainer({"log_history": {"a": 1}}) == metrics_of_trainer({"log_history": [{"a": 1}]}) == {}
    version = {"pytorch-lightning_version": "2"}
    for callbacks in (3, [1], {"a": 1}, {"a": {"monitor": 3, "current_score": 1.0}}, {"a": {"monitor": "x"}}):
        assert metrics_of_lightning(version | {"callbacks": callbacks}) == {}
    scores = {"monitor": "x", "current_score": torch.tensor(0.5)}
    assert metrics_of_lightning(version | {"callbacks": {"a": scores}}) == {"x": 0.5}
    assert metrics_of_lightning({"callbacks": {"a": scores}}) == {}
    assert metrics_of_lightning(version | {"callbacks": {"a": scores | {"current_score": torch.ones(2)}}}) == {}


def test_checkpoints_of_the_trainer(tmp_path, monkeypatch):
    """The output folder has a model of its own, too, which is named, and imported by itself with --format."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hugging_face = pytest.importorskip("kit.hugging_face")
    trainer = hugging_face.trainer(tmp_path / "out")
    trainer.train()
    trainer.save_model()
    done = inside("import", tmp_path / "out", "--repo", tmp_path / "snaps", "--verify")
    assert "imported 3 checkpoints into out" in done.stdout
    assert "verified 3 checkpoints" in done.stdout
    assert "model.safetensors" in done.stderr
    with Repository.open(tmp_path / "snaps") as repository:
        snapshots = {snapshot.step: snapshot for snapshot in repository.snapshots("out")}
        assert sorted(snapshots) == [3, 6, 8]
        for step, snapshot in snapshots.items():
            history = json.loads((tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text())
            logged = {
                name: value for one in history["log_history"] if one["step"] == step for name, value in one.items()
            }
            logged = {name: value for name, value in logged.items() if name not in ("step", "epoch")}
            assert snapshot.metrics == logged
            assert snapshot.metrics["loss"] > 0
            assert snapshot.metrics["eval_loss"] > 0
            newest = max(path.stat().st_mtime for path in (tmp_path / "out" / f"checkpoint-{step}").iterdir())
            assert abs(snapshot.created - newest) < 1e-3
    done = inside("import", tmp_path / "out", "--repo", tmp_path / "snaps", "--run", "last", "--format", "hf")
    assert "left out 3 files: checkpoint-3, checkpoint-6, checkpoint-8" in done.stderr
    with Repository.open(tmp_path / "snaps") as repository:
        model = repository.restore("last@0")["model"]
        assert same(model, repository.restore("out@8")["model"])


LIGHTNING = textwrap.dedent("""
    import sys, warnings
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl, torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from omegaconf import OmegaConf
    from torch.utils.data import DataLoader, TensorDataset

    class Model(pl.LightningModule):
        def __init__(self, config):
            super().__init__()
            self.save_hyperparameters(config)
            self.net = torch.nn.Linear(8, config.width)

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def validation_step(self, batch, index):
            self.log("val_loss", self.net(batch[0]).square().mean())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(16, 8)), 4)
    name = "{epoch}-{step}-{val_loss:.3f}"
    saves = ModelCheckpoint(sys.argv[1], filename=name, monitor="val_loss", save_top_k=-1, save_last=True)
    model = Model(OmegaConf.create({"width": 4, "twice": "${width}"}))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(max_epochs=3, accelerator="cpu", devices=1, callbacks=[saves], **quiet).fit(model, data, data)
""")


def test_checkpoints_of_lightning(tmp_path):
    pytest.importorskip("lightning")
    pytest.importorskip("omegaconf")
    folder = tmp_path / "version_0" / "checkpoints"
    done = run_python("-c", LIGHTNING, folder)
    assert done.returncode == 0, done.stderr
    assert f"import {folder}, which holds" in inside("import", tmp_path, "--repo", tmp_path / "snaps", code=1).stderr
    assert not (tmp_path / "snaps").exists()
    done = inside("import", folder, "--repo", tmp_path / "snaps", "--run", "pl", "--verify")
    assert "last.ckpt: skipped, pl@12 is there" in done.stdout
    assert "verified 4 checkpoints" in done.stdout
    with Repository.open(tmp_path / "snaps") as repository:
        assert [snapshot.step for snapshot in repository.snapshots("pl")] == [4, 8, 12]
        for snapshot in repository.snapshots("pl"):
            name = snapshot.metadata["imported"]["from"]
            assert abs(snapshot.metrics["val_loss"] - metrics_in_name(name.removesuffix(".ckpt"))["val_loss"]) < 1e-3
            found, saved = repository.restore(snapshot.ref), torch.load(folder / name, weights_only=False)
            assert found.pop("hyper_parameters") == {"width": 4, "twice": "${width}"}
            assert found.pop("hparams_type") == "omegaconf.dictconfig.DictConfig"
            del saved["hyper_parameters"], saved["hparams_type"]
            assert same(found, saved)


def many_kinds():
    """Return a state with tensors of every layout."""
    tied = torch.nn.Parameter(torch.randn(300, 4))
    images = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    more = {"empty": torch.empty(0, 3), "scalar": torch.tensor(3), "half": torch.randn(7).bfloat16(), "images": images}
    return {
        "a": {"tied": tied, "part": torch.randn(9, 9)[::2].t(), **more},
        "tied": tied,
        "long": b"x" * 9000,
        "1": [1],
    }


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors", "hf"])
def test_a_series_of_each_format_is_verified(tmp_path, kind):
    """Also after the snapshots were rewritten."""
    (tmp_path / "ckpts").mkdir()
    names = {"torch": "epoch_{}.pt", "dcp": "step-{}", "safetensors": "{}.safetensors", "hf": "checkpoint-{}"}
    for step in (5, 10):
        path = tmp_path / "ckpts" / names[kind].format(step)
        tensors = {name: value.clone() for name, value in many_kinds()["a"].items()}
        if kind == "torch":
            torch.save(many_kinds(), path)
        elif kind == "dcp":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save({"model": tensors, "step": step}, checkpoint_id=str(path), no_dist=True)
        else:
            if kind == "hf":
                path.mkdir()
                (path / "tokenizer.json").write_bytes(b"x" * 9000)
                (path / "pytorch_model.bin").write_bytes(b"a copy")
                path = path / "model.safetensors"
            save_file({name: value.detach().contiguous() for name, value in tensors.items()}, path)
    command = ("import", tmp_path / "ckpts", "--repo", tmp_path / "snaps", "--verify")
    assert "verified 2 checkpoints" in inside(*command).stdout
    assert steps_of(tmp_path / "snaps", "ckpts") == [5, 10]
    inside("compact", "--repo", tmp_path / "snaps")
    done = inside(*command)
    assert "verified 2 checkpoints" in done.stdout
    left_out = f"{tmp_path}/ckpts/checkpoint-5: left out 1 file: pytorch_model.bin"
    assert (left_out in done.stderr) == (kind == "hf")


def test_a_checkpoint_of_the_trainer_without_weights_is_named(tmp_path):
    """FSDP with sharded states has them in a folder of DCP."""
    out = tmp_path / "out"
    for step in (1, 2):
        (out / f"checkpoint-{step}" / "pytorch_model_fsdp_0").mkdir(parents=True)
        (out / f"checkpoint-{step}" / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"x")
    (out / "training_args.bin").write_bytes(b"x")
    save_file({"w": torch.ones(3)}, out / "checkpoint-2" / "model.safetensors")
    done = inside("import", out, "--repo", tmp_path / "snaps", code=3)
    assert f"{out}/checkpoint-1: holds checkpoints (pytorch_model_fsdp_0); name them" in done.stderr
    assert "not imported: 1 file: " in done.stderr
    assert steps_of(tmp_path / "snaps", "out") == [2]


def test_what_a_folder_holds_beside_its_checkpoints(tmp_path):
    """Links, unfinished files and other files are no checkpoints. A last one has the step of another."""
    series(tmp_path / "ckpts", [1, 2])
    torch.save(state(2) | {"global_step": 2}, tmp_path / "ckpts" / "last.ckpt")
    (tmp_path / "ckpts" / "latest.pt").symlink_to("step_2.pt")
    (tmp_path / "ckpts" / "notes.txt").write_text("x")
    (tmp_path / "ckpts" / "empty").mkdir()
    for name in (".hidden.pt", "step_3.pt.tmp", "tmp-checkpoint-4"):
        (tmp_path / "ckpts" / name).write_bytes(b"unfinished")
    done = inside("import", tmp_path / "ckpts", "--repo", tmp_path / "snaps", "--json")
    document = json.loads(done.stdout)
    skipped = [(Path(one["source"]).name, one["skipped"], one["differs"]) for one in document["imported"]]
    assert skipped == [("step_1.pt", False, False), ("step_2.pt", False, False), ("last.ckpt", True, False)]
    assert document["failed"] == []
    left_out = [str(tmp_path / "ckpts" / name) for name in (".hidden.pt", "empty", "latest.pt", "notes.txt")]
    assert done.stderr.splitlines()[-1] == f"not imported: 4 files: {', '.join(left_out)}"
    assert document["left_out"] == left_out


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_model_beside_files_with_steps_is_not_the_checkpoint(tmp_path, name):
    """The files with steps would be bytes in a snapshot of the model."""
    series(tmp_path / "ckpts", [1, 2])
    if name == "pytorch_model.bin":
        torch.save({"w": torch.ones(2)}, tmp_path / "ckpts" / name)
    else:
        save_file({"w": torch.ones(2)}, tmp_path / "ckpts" / name)
    done = inside("import", tmp_path / "ckpts", "--repo", tmp_path / "snaps", "--verify")
    assert steps_of(tmp_path / "snaps", "ckpts") == [1, 2]
    assert f"not imported: 1 file: {tmp_path / 'ckpts' / name}" in done.stderr


def test_verify_finds_what_differs(tmp_path):
    """A fingerprint samples a file; --verify compares all of it."""
    (one,) = series(tmp_path / "ckpts", [1])
    command = ("import", one, "--repo", tmp_path / "snaps", "--run", "r")
    inside(*command, "--verify")
    for change, expected in (
        (lambda s: s["model"]["w"].__setitem__(2999, 7.0), "model.w: has other values"),
        (
            lambda s: s["model"].update(w=s["model"]["w"].double()),
            "model.w: is tensor float32[3000], in the file tensor",
        ),
        (lambda s: s["model"].update(v=torch.ones(2)), "model.v: is not in the snapshot"),
        (lambda s: s["model"].clear(), "model.w: is not in the file"),
        (lambda s: s.update(args=argparse.Namespace(lr=0.2)), "args.lr: "),
        (lambda s: s.update(more=1), "more: , in the file 1"),
    ):
        changed = state(1)
        change(changed)
        torch.save(changed, one)
        done = inside(*command, "--verify", "--json", code=3)
        (document,) = json.loads(done.stdout)["imported"]
        assert document["skipped"]
        assert any(text.startswith(expected) or expected in text for text in document["unequal"]), document
        assert "is not equal to r@1" in done.stderr
        assert "keep the file" in done.stderr
    torch.save(state(1), one)
    assert "verified 1 checkpoint:" in inside(*command, "--verify").stdout


# --- files that cannot be read ---


class Unknown:
    pass


def test_a_file_that_cannot_be_read_does_not_lose_the_others(tmp_path):
    files = series(tmp_path / "ckpts", range(1, 7))
    good = files[2].read_bytes()
    files[2].write_bytes(good[: len(good) // 2])
    torch.save({"a": Unknown()}, files[4])
    torch.save({}, tmp_path / "ckpts" / "best.pt")
    command = ("import", tmp_path / "ckpts", "--repo", tmp_path / "snaps")
    done = shell(*command, code=3)
    assert f"error: {files[2]}: not a PyTorch file, or damaged" in done.stderr
    assert re.search(rf"error: {files[4]}: refused: it holds a Python object \(\S*Unknown\)", done.stderr)
    assert f"error: {tmp_path}/ckpts/best.pt: no step found" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "3 checkpoints not imported; 4 checkpoints imported or there already; repair or remove" in last
    assert steps_of(tmp_path / "snaps", "ckpts") == [1, 2, 4, 6]
    document = json.loads(inside(*command, "--json", code=3).stdout)
    failed = [tmp_path / "ckpts" / "best.pt", files[2], files[4]]
    assert [one["source"] for one in document["failed"]] == list(map(str, failed))
    files[2].write_bytes(good)
    for path in (files[4], tmp_path / "ckpts" / "best.pt"):
        path.unlink()
    if os.geteuid():  # root reads all
        (tmp_path / "ckpts" / "checkpoint-9").mkdir(mode=0)
        assert "checkpoint-9" in inside(*command, code=3).stderr
        (tmp_path / "ckpts" / "checkpoint-9").rmdir()
    done = inside(*command, "--verify")
    assert "imported 1 checkpoint into ckpts" in done.stdout
    assert "verified 5 checkpoints" in done.stdout
    assert "ckpts@latest is step 3, which was saved last; ckpts@highest is step 6" in done.stderr
    files[0].write_bytes(b"x")
    files[1].write_bytes(b"x")
    inside("import", files[0], files[1], "--repo", tmp_path / "snaps", "--run", "none", code=1)
    with Repository.open(tmp_path / "snaps") as opened, pytest.raises(InvalidInputError, match=r"step_1\.pt: not a Py"):
        list(import_checkpoints(opened, [tmp_path / "ckpts"], run="none"))


def test_nothing_is_made_for_a_folder_without_checkpoints(tmp_path):
    (tmp_path / "empty").mkdir()
    for source, message in (("empty", "expected a folder of DCP"), ("missing", "is missing")):
        assert message in inside("import", tmp_path / source, "--repo", tmp_path / "snaps", code=1).stderr
    inside("import", tmp_path / "empty", "--repo", tmp_path / "snaps", "--watch", "--verify", code=2)
    assert not (tmp_path / "snaps").exists()


def test_an_import_that_was_killed_goes_on(tmp_path):
    series(tmp_path / "ckpts", range(60))
    command = ["-m", "snapstore", "import", str(tmp_path / "ckpts"), "--repo", str(tmp_path / "snaps")]
    running = subprocess.Popen([sys.executable, *command], env=environment(), stdout=subprocess.DEVNULL)
    until(lambda: running.poll() is not None or len(list((tmp_path / "snaps").glob("records/**/*"))) > 5)
    running.kill()
    running.wait()
    done = run_python(*command, "--verify")
    assert done.returncode == 0, done.stderr
    assert "verified 60 checkpoints" in done.stdout
    assert steps_of(tmp_path / "snaps", "ckpts") == list(range(60))


# --- a training that still runs ---


def test_a_training_is_followed_while_it_writes(tmp_path):
    """A half-written file waits; Ctrl-C ends with 0; what is in the run is skipped after a new start."""
    folder = tmp_path / "ckpts"
    series(folder, [10, 2])
    command = [sys.executable, "-m", "snapstore", "import", folder, "--repo", tmp_path / "snaps", "--watch"]

    def heeds_ctrl_c():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it

    printed, errors = tmp_path / "printed", tmp_path / "errors"

    def start():
        with printed.open("w") as output, errors.open("w") as error:
            files = {"stdout": output, "stderr": error}
            return subprocess.Popen([*map(str, command)], env=environment(), preexec_fn=heeds_ctrl_c, **files)

    def ended(running):
        running.send_signal(signal.SIGINT)
        assert running.wait(300) == 0, errors.read_text()
        assert "Traceback" not in errors.read_text()
        assert "error" not in errors.read_text()
        return printed.read_text()

    def steps():
        return steps_of(tmp_path / "snaps", "ckpts") if (tmp_path / "snaps" / "config").exists() else []

    running = start()
    try:
        until(lambda: steps() == [2, 10])
        (whole,) = series(tmp_path / "elsewhere", [20])
        data = whole.read_bytes()
        with (folder / "step_20.pt").open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            series(folder, [30])
            until(lambda: 30 in steps())
            time.sleep(2 * watching.LOOK_S)
            assert steps() == [2, 10, 30]
            file.write(data[len(data) // 2 :])
        until(lambda: "ckpts@20" in printed.read_text())
        assert "imported 4 checkpoints into ckpts" in ended(running)
        running = start()
        series(folder, [40])
        until(lambda: "ckpts@40" in printed.read_text())
        output = ended(running)
        assert "step_20.pt: skipped, ckpts@20 is there" in output
        assert "imported 1 checkpoint into ckpts" in output
    finally:
        running.kill()
        running.wait()
    with Repository.open(tmp_path / "snaps") as repository:
        assert [snapshot.step for snapshot in repository.snapshots("ckpts")] == [2, 10, 30, 20, 40]
        assert same(repository.restore("ckpts@20"), state(20))


def test_what_is_complete(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    assert not watching.is_complete(folder, "hf", 1e9)
    (folder / "trainer_state.json").write_text('{"global_step"')
    assert not watching.is_complete(folder, "hf", 0)
    (folder / "trainer_state.json").write_text('{"global_step": 5}')
    assert watching.is_complete(folder, "hf", 0)
    other = folder.rename(tmp_path / "model_5")
    assert not watching.is_complete(other, "hf", 0)
    assert watching.is_complete(other, "hf", watching.PATIENCE_S)
    (tmp_path / "step_1.pt").write_bytes(b"PK\x03\x04")
    assert not watching.is_complete(tmp_path / "step_1.pt", "file", 0)
    assert watching.is_complete(tmp_path / "step_1.pt", "file", watching.PATIENCE_S)
    assert not watching.is_complete(tmp_path / "gone.pt", "file", watching.PATIENCE_S)


def test_a_checkpoint_that_the_trainer_deletes_meanwhile_is_no_error(repository, tmp_path, monkeypatch):
    """It keeps the newest few. One that is written again is tried again."""
    folder, told = tmp_path / "ckpts", []
    monkeypatch.setattr(watching, "LOOK_S", 0.01)
    series(folder, [1])
    kept = {"step_1.pt": lambda path: path.unlink(), "step_2.pt": lambda path: path.write_bytes(path.read_bytes())}

    def is_complete(path, *args):
        kept.pop(path.name, lambda path: None)(path)
        series(folder, [2] if "step_2.pt" in kept else [])
        return True

    monkeypatch.setattr(watching, "is_complete", is_complete)
    follow = watching.watch(
        repository, folder, run="r", failed=lambda path, error: told.append((path.name, str(error)))
    )
    assert next(follow).snapshot.step == 2
    assert told == []


def test_a_watch_tells_once_of_a_file_that_stays_damaged(repository, tmp_path, monkeypatch):
    """It goes on with the others, and tries the file again when it has changed."""
    folder, told = tmp_path / "ckpts", []
    monkeypatch.setattr(watching, "LOOK_S", 0.01)
    monkeypatch.setattr(watching, "PATIENCE_S", 0.05)
    series(folder, [1, 2])
    good = (folder / "step_1.pt").read_bytes()
    (folder / "step_1.pt").write_bytes(good[:100])
    follow = watching.watch(
        repository, folder, run="r", failed=lambda path, error: told.append((path.name, str(error)))
    )
    assert next(follow).snapshot.step == 2
    looks = []

    def sleep(seconds):
        looks.extend([seconds] if told else [])
        if len(looks) == 5:
            (folder / "step_1.pt").write_bytes(good)

    monkeypatch.setattr(watching.time, "sleep", sleep)
    assert next(follow).snapshot.step == 1
    assert [name for name, _ in told] == ["step_1.pt"]
    assert len(looks) >= 6

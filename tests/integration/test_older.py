"""Repositories of an older release are read and saved into; that release refuses what it does not know, by its name."""

import inspect
import os
import subprocess
import tarfile
from functools import cache

import pytest
import torch

from kit.processes import ROOT, run_python
from kit.states import same
from snapstore import KeepLast, Repository, SaveOptions, SnapshotManager
from snapstore.catalog import config
from snapstore.protocol import joining

#: The commit before manifests had features beside `ranks`; and the last one that does not know pages of records.
OLDER, BEFORE_PAGES = "cd1843d1", "ced9941c~1"
OPTIONS = SaveOptions(threads=2)
SAVE = """
import sys, torch, snapstore
with snapstore.SnapshotManager(sys.argv[1], run="r", async_save=False) as manager:
    manager.save(9, {"w": torch.ones(4)})
"""


def state_of(step):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(step + 1):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "columns": torch.arange(6000.0).reshape(60, 100).t()}


#: Writes four steps of `state_of` with the older release, and what it restores of them.
WRITE = f"""
import sys, torch, snapstore
{inspect.getsource(state_of)}
with snapstore.Repository.create(sys.argv[1], chunk_bytes=4096) as repo:
    for step in range(4):
        repo.save(state_of(step), run="r", step=step, tags=["first"] if step == 0 else [])
    torch.save({{name: repo.restore(f"r@{{step}}") for step, name in enumerate("abcd")}}, sys.argv[2])
"""


@pytest.fixture(scope="module")
def release_of(tmp_path_factory):
    """Return the folder of the release of a commit; it has no extension in C, so its engine is NumPy's."""

    @cache
    def extracted(commit):
        folder = tmp_path_factory.mktemp("older")
        archive = folder / "older.tar"
        command = ["git", "-C", ROOT, "archive", "-o", archive, commit, "snapstore"]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip(f"no git, or no history since {commit}")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        return folder

    return extracted


@pytest.fixture(scope="module")
def older(release_of):
    """The folder of the older release."""
    return release_of(OLDER)


def run(older, *arguments):
    """Run Python with the older release."""
    done = run_python(*arguments, cwd=older, PYTHONPATH=os.fspath(older))
    return done.returncode, done.stdout, done.stderr


def test_an_older_repository_is_read_and_saved_into(older, tmp_path):
    code, _, errors = run(older, "-c", WRITE, tmp_path / "r", tmp_path / "states.pt")
    assert code == 0, errors
    expected = torch.load(tmp_path / "states.pt", weights_only=False)
    with Repository.open(tmp_path / "r", options=OPTIONS) as repo:
        for step, name in enumerate("abcd"):
            same(repo.restore(f"r@{step}"), expected[name])
            target = state_of(0)
            repo.restore_into(f"r@{step}", target)
            same(target["optimizer"].state_dict(), expected[name]["optimizer"])
        assert repo.restore("r@0")["columns"].is_contiguous()
        state = state_of(3)
        saved = repo.save(state, run="r", step=4)
        assert saved.new_chunks == 0, "its chunks are those of the older snapshot"
        assert repo.restore("r@4")["columns"].stride() == state["columns"].stride()
        repo.tag("r@1", "again")
        repo.forget([KeepLast(1)], run="r")
        repo.gc()
        same(repo.restore("r@first"), expected["a"])
        same(repo.restore("r@again"), expected["b"])
        assert not repo.check("restore").problems


def snapstore(older, folder, *arguments):
    code, out, errors = run(older, "-m", "snapstore", *arguments, "--repo", folder)
    return code, out + errors


@pytest.fixture
def newer(tmp_path, monkeypatch):
    """A repository without pages, with a snapshot that the older release can read, and one that it cannot."""
    monkeypatch.setattr(config, "NEW_FEATURES", ())
    with Repository.create(tmp_path / "r", chunk_bytes=4096, options=OPTIONS) as repo:
        repo.save({"w": torch.arange(5000.0)}, run="r", step=1)
        repo.save({"w": torch.arange(5000.0), "x": torch.ones(50, 60).t()}, run="r", step=2)
        repo.save({"w": torch.arange(9000.0)}, run="gone", step=1)
        repo.save({"w": torch.arange(4.0)}, run="gone", step=2)
        repo.forget([KeepLast(1)], run="gone")
    return tmp_path / "r"


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "index" not in path.parts}


def test_an_older_release_names_the_feature(older, newer, tmp_path):
    before = files(newer)
    code, text = snapstore(older, newer, "restore", "r@1", "-o", tmp_path / "x.pt")
    assert code == 0, text
    code, text = snapstore(older, newer, "restore", "r@2", "-o", tmp_path / "y.pt")
    assert code, text
    assert "needs 'strides', which this snapstore" in text
    assert "use the release that wrote it, or a newer one" in text
    for verb in (["check", "--restore"], ["gc"], ["repair"], ["log"]):
        code, text = snapstore(older, newer, *verb)
        assert "damage" not in text.lower().replace("undamaged", ""), f"{verb}: {text}"
        assert bool(code) == ("'strides'" in text) == (verb != ["log"]), f"{verb}: {text}"
        assert files(newer) == before, f"{verb}: its gc stops, and nothing is deleted or changed"


def test_an_older_release_saves_beside_it_and_loses_nothing(older, newer):
    code, _, errors = run(older, "-c", SAVE, newer)
    assert code == 0 or "'strides'" in errors
    with Repository.open(newer, options=OPTIONS) as repo:
        assert repo.restore("r@2")["x"].stride() == (1, 60)
        assert not repo.check("restore").problems
        if code == 0:
            assert (repo.restore("r@9")["w"] == 1).all()


# --- pages of records ------------------------------------------------------------------------------------------------


@pytest.fixture
def joined(tmp_path):
    """A repository of this release with a page: committed, forgotten and swept snapshots, and a loose record."""
    with Repository.create(tmp_path / "r", chunk_bytes=4096, options=OPTIONS) as repo:
        for step in range(5):
            repo.save({"w": torch.arange(5000.0) + step}, run="r", step=step)
        repo.forget_snapshots(["r@0", "r@1"])
        repo.gc()
        repo.forget_snapshots(["r@2"])
        assert joining.join(repo.context, "r", at_least=1).snapshots == 4
    return tmp_path / "r"


@pytest.mark.parametrize("commit", [OLDER, BEFORE_PAGES])
def test_a_release_without_pages_refuses_them_by_name(release_of, commit, joined, tmp_path):
    release, before = release_of(commit), files(joined)
    verbs = (
        ["log", "--all"], ["gc"], ["check", "--restore"], ["repair", "--apply"], ["tag", "r@4", "best"],
        ["forget", "--run", "r", "--keep-last", "1"], ["restore", "r@4", "-o", tmp_path / "x.pt"],
    )  # fmt: skip
    for verb in verbs:
        refused(snapstore(release, joined, *verb), verb)
        assert files(joined) == before, verb
    code, _, errors = run(release, "-c", SAVE, joined)
    refused((code, errors.splitlines()[-1]), "save")  # without the lines of code
    assert files(joined) == before
    with Repository.open(joined, options=OPTIONS) as repo:
        assert (repo.restore("r@4")["w"] == torch.arange(5000.0) + 4).all()
        assert repo.check("restore").ok


def refused(answer, verb):
    """Require that a verb has failed because of the feature, and does not speak of damage."""
    code, text = answer
    assert code, f"{verb}: {text}"
    assert "features ['pages'] are unknown to this snapstore" in text, f"{verb}: {text}"
    assert "damage" not in text.lower(), f"{verb}: {text}"


def test_nobody_joins_in_a_repository_of_an_older_release(older, tmp_path, monkeypatch):
    """Its config does not have the feature, and never gets it: the older release can still read it."""
    monkeypatch.setattr(joining, "AT_LEAST", 2)
    code, _, errors = run(older, "-c", WRITE, tmp_path / "r", tmp_path / "states.pt")
    assert code == 0, errors
    before = files(tmp_path / "r")
    with SnapshotManager(tmp_path / "r", run="r", keep=[KeepLast(2)], options=OPTIONS) as manager:
        for step in range(4, 80):
            manager.save(step, {"w": torch.full((50,), float(step))}).result()
    with Repository.open(tmp_path / "r", options=OPTIONS) as repo:
        repo.gc()
        assert joining.join(repo.context, "r", at_least=1) == joining.JoinResult()
        assert [s.step for s in repo.snapshots("r")] == [0, 78, 79]  # the first has a tag
    after = files(tmp_path / "r")
    kinds = {path.relative_to(tmp_path / "r").parts[0] for path in after}
    assert not kinds & {"pages", "volumes"}
    records = {path: data for path, data in before.items() if "snapshots" in path.parts or path.name == "config"}
    assert records.items() <= after.items(), "no record is ever deleted"
    assert len([path for path in after if "snapshots" in path.parts]) > 200
    code, text = snapstore(older, tmp_path / "r", "restore", "r@79", "-o", tmp_path / "x.pt")
    assert code == 0, text
    assert (torch.load(tmp_path / "x.pt")["w"] == 79).all()

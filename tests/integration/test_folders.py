"""Folders of files as snapshots: every file comes back, and a forged index writes nothing outside."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kit.repositories import created, opened
from kit.shell import invoke
from snapstore import (
    AlreadyExistsError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    Repository,
    SnapshotManager,
    StorageError,
    pack_folder,
    unpack_folder,
)
from snapstore.state import folder as folders
from snapstore.state.folder import INDEX, MAGIC, FolderEntry, FolderIndex

RNG = np.random.default_rng(3)


def write(root: Path) -> Path:
    """A folder with files of every kind and size."""
    root.mkdir()
    (root / "deep/er").mkdir(parents=True)
    (root / "nothing").mkdir()
    (root / "empty").touch()
    (root / "model.safetensors").write_bytes(RNG.bytes(300_000))
    (root / "deep/er/large.bin").write_bytes(RNG.bytes(1_000_000))
    for number in range(200):
        (root / f"deep/small-{number}").write_bytes(RNG.bytes(number * 3))
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    Path(os.fsdecode(os.fsencode(root) + b"/not-utf8-\xff %.\n")).write_text("name")
    (root / "to-large").symlink_to("deep/er/large.bin")
    (root / "deep/up").symlink_to("../empty")
    (root / "to-folder").symlink_to("deep")
    (root / "dangling").symlink_to("none")
    return root


def contents(root: Path) -> dict[bytes, Any]:
    """Everything in a folder: bytes and whether it is executable, the target of a link, or None of a folder."""
    found: dict[bytes, Any] = {}
    for above, below, files in os.walk(root):
        for path in (Path(above, name) for name in (*below, *files)):
            name = os.fsencode(path.relative_to(root))
            if path.is_symlink():
                found[name] = str(path.readlink())
            else:
                found[name] = None if path.is_dir() else (path.read_bytes(), os.access(path, os.X_OK))
    return found


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of several blocks, and several blocks of small files."""
    monkeypatch.setattr(folders, "BLOCK_BYTES", 200_000)
    monkeypatch.setattr(folders, "TOGETHER_BYTES", 20_000)
    monkeypatch.setattr(folders, "SMALL_BYTES", 5_000)


@pytest.mark.usefixtures("small_blocks")
def test_a_folder_there_and_back(tmp_path):
    root = write(tmp_path / "there")
    with opened(created(64 * 1024)) as repository:
        snapshot = repository.save(pack_folder(root), run="r", step=0)
        done = unpack_folder(repository.tensors("r@0"), tmp_path / "back")
        assert contents(tmp_path / "back") == contents(root)
        assert (done.files, done.nbytes) == (209, snapshot.logical_bytes - len(repository.restore("r@0")[INDEX]))
        unpack_folder(repository.restore("r@0"), tmp_path / "again")
        assert contents(tmp_path / "again") == contents(root)
        names = list(repository.tensors("r@0"))
        assert [name for name in names if name.startswith("file:deep")] == [
            f"file:deep/er/large.bin{number}" for number in ("", ";1", ";2", ";3", ";4")
        ]
        assert 4 < len([name for name in names if name.startswith("small:")]) < 40
        assert not list(tmp_path.glob(".snapstore-*"))


@pytest.mark.usefixtures("small_blocks")
def test_a_second_save_stores_changed_chunks_alone(tmp_path):
    root = write(tmp_path / "there")
    with opened(created(64 * 1024)) as repository:
        first = repository.save(pack_folder(root), run="r", step=0)
        assert repository.save(pack_folder(root), run="r", step=1).new_chunks == 0
        data = bytearray((root / "deep/er/large.bin").read_bytes())
        data[500_000] ^= 1
        (root / "deep/er/large.bin").write_bytes(data)
        assert repository.save(pack_folder(root), run="r", step=2).new_chunks == 1
        (root / "deep/a-new-one").write_bytes(RNG.bytes(900))
        third = repository.save(pack_folder(root), run="r", step=3)
        assert third.new_chunks <= 3, "the block of the new file, and the index"
        assert third.stored_bytes < first.stored_bytes / 10
        unpack_folder(repository.tensors("r@3"), tmp_path / "back")
        assert contents(tmp_path / "back") == contents(root)


def test_an_empty_folder_and_the_manager(tmp_path):
    (tmp_path / "there").mkdir()
    with SnapshotManager(created(), run="r") as snapshots:
        snapshots.save(0, pack_folder(tmp_path / "there"))
        (tmp_path / "back").mkdir()
        unpack_folder(snapshots.restore(0), tmp_path / "back")
    assert contents(tmp_path / "back") == {}


# --- what cannot be packed -------------------------------------------------------------------------------------------


def test_links_out_of_the_folder(tmp_path):
    root = tmp_path / "there"
    root.mkdir()
    (tmp_path / "blob").write_text("outside")
    (root / "model").symlink_to("../blob")
    with pytest.raises(
        InvalidInputError, match=r"there/model: is a link to \.\./blob, outside of the folder; pass follow"
    ):
        list(pack_folder(root))
    unpack_folder(dict(pack_folder(root, follow_links=True)), tmp_path / "back")
    assert contents(tmp_path / "back") == {b"model": (b"outside", False)}
    (root / "model").unlink()
    (root / "model").symlink_to(root / "absolute")
    with pytest.raises(InvalidInputError, match="an absolute path"):
        list(pack_folder(root))
    (root / "model").unlink()
    (root / "file").write_text("inside")
    (root / "model").symlink_to("../there/file")
    with pytest.raises(InvalidInputError, match="outside of the folder"):  # it would lead elsewhere from a copy
        list(pack_folder(root))
    (root / "model").unlink()
    (root / "model").symlink_to("../..")
    with pytest.raises(InvalidInputError, match="only files are followed"):
        list(pack_folder(root, follow_links=True))


def test_pipes_and_sockets(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInputError, match="pipe: is a device, socket or pipe"):
        list(pack_folder(tmp_path))
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "s"))
        with pytest.raises(InvalidInputError, match="s: is a device, socket or pipe"):
            list(pack_folder(tmp_path))
    with pytest.raises(InvalidInputError, match="expected a folder, found none"):
        pack_folder(tmp_path / "none")


@pytest.mark.parametrize("change", ["write", "truncate", "remove", "replace", "add", "link", "folder"])
def test_changes_meanwhile(tmp_path, change):
    """Something changes when the first file was read: before its turn, or after it."""
    root = tmp_path / "there"
    root.mkdir()
    for name in ("a", "b"):
        (root / name).write_bytes(RNG.bytes(100_000))
    (root / "link").symlink_to("a")

    def changing() -> Any:
        blocks = pack_folder(root)
        yield next(blocks)
        target = root / "b"
        if change == "write":
            target.write_bytes(RNG.bytes(100_000))
        elif change == "truncate":
            os.truncate(target, 70_000)
        elif change == "remove":
            target.unlink()
        elif change == "replace":
            target.unlink()
            target.symlink_to("a")
        elif change == "add":
            (root / "c").touch()
        elif change == "link":
            (root / "link").unlink()
            (root / "link").symlink_to("b")
        else:
            (root / "a-folder").mkdir()
        yield from blocks

    with opened(created()) as repository:
        with pytest.raises(
            (InvalidInputError, StorageError), match=r"changed while the folder was saved|cannot be read"
        ):
            repository.save(changing(), run="r", step=0)
        assert repository.snapshots() == []


# --- forged indexes --------------------------------------------------------------------------------------------------


def blocks(*entries: FolderEntry) -> dict[str, Any]:
    data = MAGIC + msgspec.msgpack.encode(FolderIndex(list(entries), 2**26))
    return {INDEX: np.frombuffer(data, np.uint8), "file:x": np.arange(9, dtype=np.uint8), "file:f": np.zeros(3)}


def file(name: bytes, **fields: Any) -> FolderEntry:
    return FolderEntry(**{"name": name, "kind": "file", "size": 9, "block": "file:x", **fields})


def link(name: bytes, target: bytes) -> FolderEntry:
    return FolderEntry(name, "link", target=target)


def below(name: bytes) -> FolderEntry:
    return FolderEntry(name, "folder")


FORGED = {
    "above": [file(b"../x")],
    "absolute": [file(b"/tmp/x")],
    "dots": [below(b"a"), file(b"a/..")],
    "dots inside": [below(b"a"), below(b"a/.."), file(b"a/../../x")],
    "a dot": [file(b".")],
    "no name": [file(b"")],
    "two slashes": [below(b"a"), file(b"a//x")],
    "zero": [file(b"a\0b")],
    "through a link": [link(b"a", b".."), file(b"a/x")],
    "a link and a folder": [link(b"a", b".."), below(b"a"), file(b"a/x")],
    "under a file": [file(b"a"), file(b"a/x")],
    "no folder": [file(b"a/x")],
    "twice": [file(b"a"), file(b"a")],
    "link above": [link(b"a", b"../x")],
    "link absolute": [link(b"a", b"/etc/passwd")],
    "link to the absolute folder": [link(b"a", b"/")],
    "link over a link": [below(b"d"), link(b"d/l", b".."), link(b"m", b"d/l/../x")],
    "another kind": [FolderEntry(b"a", "device")],
    "too long": [file(b"a", size=10)],
    "too far": [file(b"a", start=5)],
    "behind": [file(b"a", size=2**62)],
    "negative": [file(b"a", start=-1)],
    "negative size": [file(b"a", size=-1)],
    "folder with bytes": [FolderEntry(b"a", "folder", size=4)],
    "one block many times": [file(b"%d" % number) for number in range(1000)],
    "no block": [file(b"a", block="file:none")],
    "numbers": [file(b"a", block="file:f")],
    "the index": [file(b"a", block="folder", size=10**6)],
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_forged_indexes_write_nothing(tmp_path, name):
    (tmp_path / "inner").mkdir()
    with pytest.raises(FormatError, match="folder: "):
        unpack_folder(blocks(*FORGED[name]), tmp_path / "inner/out")
    assert contents(tmp_path) == {b"inner": None}


def test_good_ones_pass(tmp_path):
    good = [
        below(b"d"),
        file(b"d/x"),
        link(b"l", b"d/x"),
        link(b"d/up", b"../l"),
        link(b"self", b"self"),
        file(b"e", size=0),
    ]
    assert unpack_folder(blocks(*good), tmp_path / "out").files == 5
    assert (tmp_path / "out/l").read_bytes() == bytes(range(9))


@pytest.mark.parametrize(
    "index",
    [
        MAGIC,
        MAGIC + b"\x81",
        MAGIC + msgspec.msgpack.encode([[1, 2]]),
        MAGIC + msgspec.msgpack.encode([["a"]]),
        MAGIC + b"\x90",
    ],
)
def test_garbage_in_the_index(tmp_path, index):
    with pytest.raises(FormatError, match="index does not decode"):
        unpack_folder({INDEX: np.frombuffer(index, np.uint8)}, tmp_path / "out")


@pytest.mark.parametrize("block_bytes", [0, -1])
def test_blocks_of_no_bytes(tmp_path, block_bytes):
    data = MAGIC + msgspec.msgpack.encode(FolderIndex([], block_bytes))
    with pytest.raises(FormatError, match="folder: blocks of"):
        unpack_folder({INDEX: np.frombuffer(data, np.uint8)}, tmp_path / "out")


def test_places_that_are_refused(tmp_path, monkeypatch):
    state = blocks(file(b"a"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    for name in ("full", "full/x"):
        with pytest.raises(AlreadyExistsError):
            unpack_folder(state, tmp_path / name)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(AlreadyExistsError):
        unpack_folder(state, tmp_path / "link")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", "", "..", "missing/..", tmp_path / "here", "../here/.", "/"):
        with pytest.raises(InvalidInputError, match="expected the name of a new or an empty folder"):
            unpack_folder(state, name)
    assert not any((tmp_path / "here").iterdir())
    with pytest.raises(InvalidInputError, match="the folder above is missing"):
        unpack_folder(state, tmp_path / "none/out")
    with pytest.raises(InvalidInputError, match="does not hold a folder"):
        unpack_folder({"x": np.zeros(3)}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damage_leaves_no_folder(tmp_path, monkeypatch):
    root = write(tmp_path / "there")
    with opened(created()) as repository:
        repository.save(pack_folder(root), run="r", step=0)
        tensors = repository.tensors("r@0")

        def damaged(self: Any, first: int, end: int) -> Any:
            raise IntegrityError("a chunk is damaged")

        index = tensors[INDEX].read()
        monkeypatch.setattr(type(tensors[INDEX]), "read_bytes", damaged)
        with pytest.raises(IntegrityError):
            unpack_folder({**tensors, INDEX: index}, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"there"}


# --- the shell -------------------------------------------------------------------------------------------------------


def test_the_shell(tmp_path):
    root, place = write(tmp_path / "there"), str(tmp_path / "r")
    Repository.create(place).close()

    def run(*words: str) -> Any:
        return invoke([words[0], "--repo", place, "--json", *words[1:]])

    saved = run("save", str(root), "--run", "r", "--step", "1")
    assert json.loads(saved.stdout)["snapshot"]["run"] == "r"
    done = run("restore", "r@latest", "-o", str(tmp_path / "back"))
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert (document["folder"], document["files"]) == (str(tmp_path / "back"), 209)
    assert contents(tmp_path / "back") == contents(root)
    again = run("restore", "r@latest", "-o", str(tmp_path / "back"))
    assert (again.exit_code, json.loads(again.stdout)["error"]["kind"]) == (1, "AlreadyExistsError")
    (root / "out").symlink_to("/etc/hostname")
    assert run("save", str(root), "--run", "r", "--step", "2").exit_code == 1
    assert run("save", str(root), "--run", "r", "--step", "2", "--follow-links").exit_code == 0
    with Repository.open(place) as repository:
        repository.save({"x": np.zeros(3)}, run="s", step=1)
    state = run("restore", "s@1", "-o", str(tmp_path / "s"))
    assert "expected a name that ends in .pt" in json.loads(state.stdout)["error"]["message"]

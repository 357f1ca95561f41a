"""Training and every verb work in every locale, also with paths that are not UTF-8 and with an ASCII output.

The tests start real processes. Python decodes the bytes of a path by the locale; bytes that it cannot decode become
lone surrogates, which no encoder takes. With LC_ALL=C and without UTF-8 mode, that is every byte above 127.
"""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import safetensors.torch
import torch

from kit.processes import environment
from kit.repositories import OPTIONS, opened, save
from snapstore import InvalidInputError, Repository
from snapstore.protocol import liveness
from snapstore.protocol import liveness as this_process
from snapstore.storage import urls

#: A name that is not UTF-8 and has a line break; it ends with "ü", two bytes in UTF-8.
RAW = b"r\xff\xfc\n\xc3\xbc"
NAME = os.fsdecode(RAW)

LOCALES = {
    "UTF-8": {"LC_ALL": "C.UTF-8"},
    "C": {"LC_ALL": "C"},
    "C in ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "none": {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ASCII out": {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"},
    "ASCII all": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"},
}
VARIABLES = ("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONCOERCECLOCALE")

#: Runs several verbs in one process. Each argument of the script is one verb: its words in hexadecimal.
VERBS = """
import sys
from snapstore import cli
sys.argv, lines = ["snapstore"], [[bytes.fromhex(word) for word in line.split(",")] for line in sys.argv[1:]]
import os
for line in lines:
    sys.argv[1:] = map(os.fsdecode, line)
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, (line, end.code)
"""

TRAIN = """
import os, sys, torch
from snapstore import KeepLast, SnapshotManager
place = os.fsdecode(bytes.fromhex(sys.argv[1]))
with SnapshotManager(place, run="r", keep=[KeepLast(2)]) as snapshots:
    for step in range(3):
        snapshots.save(step, {"gewicht\\u00fc\\u2028": torch.arange(2000) + step}).result()
with SnapshotManager(place, run="r") as snapshots:
    assert snapshots.restore()["gewicht\\u00fc\\u2028"][0] == 2
    snapshots.restore(keys="nichts\\u00fc\\n")
"""


def process(locale, folder, *args):
    env = {name: value for name, value in environment().items() if name not in VARIABLES}
    env |= LOCALES[locale] | {"SNAPSTORE_REPO": str(folder / NAME), "SNAPSTORE_CACHE_DIR": str(folder / f"cache{NAME}")}
    return subprocess.run([sys.executable, *args], cwd=folder, env=env, capture_output=True, timeout=300, check=False)


def verbs(locale, folder, *lines):
    """Run verbs that all succeed; return the lines of their output."""
    words = [",".join(os.fsencode(word).hex() for word in line) for line in lines]
    done = process(locale, folder, "-c", VERBS, *words)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"Traceback" not in done.stderr
    return done.stdout.decode("ascii" if "ASCII" in locale or locale == "none" else "utf-8").splitlines()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("locale", LOCALES)
def test_the_shell(tmp_path, locale):
    state = {"gewicht ü\u2028": torch.arange(5000), "w": torch.ones(3)}
    torch.save(state, tmp_path / "plain.pt")
    (tmp_path / "plain.pt").rename(tmp_path / f"{NAME}.pt")
    out = verbs(
        locale, tmp_path,
        ["init", "--chunk-bytes", "4096"],
        ["save", f"{NAME}.pt", "--run", "r", "--step", "1"],
        ["log"], ["show", "r@1"], ["show", "r@1", "--json"],
        ["restore", "r@1", "-o", f"o{NAME}.pt"],
        ["restore", "r@1", "-o", f"o{NAME}.safetensors", "--json"],
        ["save", f"o{NAME}.safetensors", "--run", "r", "--step", "2"],
        ["save", f"o{NAME}.pt", "--run", "r", "--step", "3", "--json"],
        ["diff", "r@1", "r@3"], ["check", "--restore"], ["doctor"],
        ["log", "--repo", f"file://{tmp_path}/{NAME}", "--json"],
        ["forget", "--run", "r", "--keep-last", "1"], ["gc"], ["repair"], ["check", "--restore"],
    )  # fmt: skip
    assert all(line.isprintable() for line in out)
    shown = r"r\xff\xfc\n" + ("ü" if "UTF-8" in locale or locale == "C" else r"\xc3\xbc")
    assert (out[0] == f"created a repository at {tmp_path}/{shown}") or locale == "ASCII out"
    documents = [json.loads(line) for line in out if line.startswith("{")]
    assert len(documents) == 4
    assert "gewicht ü\u2028" in [tensor["path"] for tensor in documents[0]["tensors"]], "JSON is exact"
    assert os.fsencode(documents[1]["file"].encode("utf-8", "surrogateescape")) == b"o" + RAW + b".safetensors"
    assert [s["step"] for s in documents[3]["snapshots"]] == [1, 2, 3]
    assert out[-1] == "no problems"
    copies = [tmp_path / "copy.pt", tmp_path / "copy.safetensors"]
    for copy in copies:
        (tmp_path / f"o{NAME}{copy.suffix}").rename(copy)
    for restored in (torch.load(copies[0]), safetensors.torch.load_file(copies[1])):
        assert restored.keys() == state.keys()
        assert all(torch.equal(restored[name], state[name]) for name in state)
    with Repository.open(tmp_path / NAME) as repository:
        assert [s.step for s in repository.snapshots()] == [3]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("locale", LOCALES)
def test_training(tmp_path, locale):
    done = process(locale, tmp_path, "-c", TRAIN, os.fsencode(tmp_path / NAME).hex())
    assert done.stderr.splitlines()[-1].startswith(b"snapstore.errors.NotFoundError: keys 'nichts"), done.stderr
    with Repository.open(tmp_path / NAME) as repository:
        assert [s.step for s in repository.snapshots("r")] == [1, 2]


def test_one_index_in_every_locale(tmp_path):
    """The name of the index comes from the bytes of the repository's path, so it is the same in every locale."""
    for locale in LOCALES:
        verbs(locale, tmp_path, ["log"] if (tmp_path / NAME).exists() else ["init"])
    assert len([path for path in (tmp_path / f"cache{NAME}").iterdir() if path.is_dir()]) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("locale", ["C in ASCII", "UTF-8"])
def test_a_terminal(tmp_path, locale):
    """On a terminal rich draws the tables; in ASCII it has no characters for lines."""
    import pty

    save_into(tmp_path)
    env = {name: value for name, value in environment().items() if name not in VARIABLES} | LOCALES[locale]
    ours, theirs = pty.openpty()
    read = []

    def drain():
        try:
            while piece := os.read(ours, 65536):
                read.append(piece)
        except OSError:  # all ends of the other side are closed
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    command = [sys.executable, "-m", "snapstore", "--repo", str(tmp_path / NAME), "show", "a@1"]
    code = subprocess.run(command, env=env, stdout=theirs, stderr=theirs, timeout=300, check=False).returncode
    os.close(theirs)
    reader.join()
    os.close(ours)
    text = b"".join(read).decode("utf-8" if locale == "UTF-8" else "ascii")
    assert code == 0, text
    assert "constant" in text
    assert ("─" in text) == (locale == "UTF-8")


def save_into(folder):
    with Repository.create(folder / NAME, chunk_bytes=1024, options=OPTIONS) as repository:
        save(repository, "a", 1, 1)


# --- names that come from the machine ---


@pytest.mark.parametrize("name", ["h\udcff\n", "hü", "h\udcc3\udcbc"])
def test_the_name_of_the_host(tmp_path, monkeypatch, name):
    """Every session records it; a host has the same name in every locale."""
    monkeypatch.setattr(this_process.socket, "gethostname", lambda: name)
    assert this_process.host_name() == {"h\udcff\n": "h\\xff\n"}.get(name, "hü")
    save_into(tmp_path)
    with opened(tmp_path / NAME) as repository:
        session = this_process.this_session("7" * 32, "snapshots/a/x")
        repository.store.put(f"sessions/{'7' * 32}", liveness.records.encode(session))
        assert repository.gc(fence_after_s=0).fenced == ["7" * 32]
        np.testing.assert_array_equal(repository.restore("a@1")["version"], 1)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///data/%FF%0A", "/data/\udcff\n"),
        ("file:///data/\udcff%C3%BC", "/data/\udcffü"),
        ("file://localhost/a%2520b", "/a%20b"),
    ],
)
def test_file_urls(url, path):
    assert urls._path_of_file_url(url.removeprefix("file://")) == path


def test_a_path_that_no_bytes_have(tmp_path):
    for make in (Repository.open, Repository.create):
        with pytest.raises(InvalidInputError, match=r"\\ud800: cannot be the name of a directory here"):
            make(f"{tmp_path}/\ud800")
    assert list(tmp_path.iterdir()) == []

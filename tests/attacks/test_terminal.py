"""No name adds a line to the shell's output or to an error, and none sends a control character to a terminal.

The names come from states, records, notes, folders, files and command lines. `--json` prints them exactly.
"""

import ast
import json
import logging
import os
import pickle
import shutil
import sys
import traceback
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch

from kit.objects import flip_file, keys_of, replace
from kit.processes import ROOT
from kit.samples import sampled
from kit.shell import invoke
from snapstore import KeepLast, Repository, RngState, SaveOptions, SnapshotManager
from snapstore.errors import SnapstoreError
from snapstore.format import records
from snapstore.format.records import Config, Lost, Mark, Quarantine, RunPolicies, Session
from snapstore.storage.local import LocalStore
from snapstore.text import printable

pytestmark = pytest.mark.usefixtures("remembering")

#: Begins a line if anything prints a name as it is.
FORGED = "FORGED no problems"
#: C0 with ANSI's escape, BEL and backspace; DEL; C1; directions; invisible characters; other ends of lines.
HOSTILE = (
    f"n\n{FORGED}\r{FORGED}\r\n{FORGED}\x1b[2J\x1b[1A\x1b]0;t\x07\x08\x00\x0b{FORGED}\x0c{FORGED}\x1c{FORGED}\x7f"
    f"\x85{FORGED}\x9b31m\u202e\u2066\u200b\ufeff\u2028{FORGED}\u2029{FORGED}"
)
#: A hostile name for a file: no "/" and no NUL.
FILE = HOSTILE.replace("\0", "")[:80]
SURROGATE = f"s\ud800\udcff\n{FORGED}"


def require_safe(text, about):
    """Check that every line is printable, and that no name has begun a line."""
    for line in text.split("\n"):
        assert line.isprintable(), (about, line)
        assert not line.lstrip().startswith(FORGED), (about, line)


class Shell:
    """Runs verbs on a repository; checks all that they print, as text and as JSON."""

    def __init__(self, url):
        self.env = {"SNAPSTORE_REPO": str(url)}

    def __call__(self, *args):
        args = [os.fspath(arg) for arg in args]
        for more in (["-v"], ["--json"]):  # -v prints all else as well
            result = invoke([*args, *more], env=self.env)
            assert result.exception is None or isinstance(result.exception, SystemExit), (args, result.exception)
            require_safe(result.stderr, args)
            if more != ["--json"]:
                require_safe(result.stdout, args)
                assert "this is a bug" not in result.stderr, result.stderr
        lines = result.stdout.splitlines()
        assert len(lines) <= 1, lines
        return json.loads(lines[0]) if lines else None


READING = [
    ("log",),
    ("log", "--all"),
    ("log", "--run", "r"),
    ("show", "r@0"),
    ("show", "r@1"),
    ("show", "r@latest"),
    ("show", "r@9"),
    ("diff", "r@0", "r@1"),
    ("diff", "r@0", "r@latest"),
    ("blame", "r"),
    ("stats",),
    ("du", "--by", "tensor"),
    ("check",),
    ("check", "--read-data"),
    ("check", "--restore"),
    ("repair",),
    ("forget", "--run", "r", "-n"),
    ("forget", "--run", "r", "--keep-last", "1", "-n"),
    ("forget", "r@0", "-n"),
    ("untag", "r@0", "none", "-n"),
    ("gc", "-n"),
    ("compact", "-n"),
    ("recode", "--all", "-n"),
]
#: These leave the repository with other snapshots, or other states of them.
CHANGING = [
    ("tag", "r@0", "new"),
    ("unforget", "r@0"),
    ("repair", "--apply"),
    ("repair", "--apply", "--drop", "--purge", "--level", "restore"),
    ("recode", "--all"),
    ("compact",),
    ("index", "rebuild"),
    ("index", "rebuild", "--forget-missing"),
    ("gc",),
    ("forget", "--run", "r", "--keep-last", "1"),
    ("gc", "--fence-after", "0s"),
    ("check", "--restore"),
]


def some(verbs):
    """Return every third verb of a list, different ones in each run, and always the first and the last."""
    return [verb for i, verb in enumerate(verbs) if i in (0, len(verbs) - 1, *sampled(len(verbs), 3))]


def state(step):
    """Return a state with hostile names of parts, tensors and values, and hostile values."""
    w = torch.arange(3000) + step
    return {
        HOSTILE: {"w": w, HOSTILE: {"v": w * 2}, "plain": HOSTILE * (1 + step), 1: [w + 1]},
        f"{HOSTILE}2": torch.full((step + 1,), 7),
        SURROGATE: {SURROGATE: w.double()},
        "plain": {HOSTILE: [step, HOSTILE]},
        "rng": RngState(),
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("terminal") / "repo"
    with Repository.create(root, chunk_bytes=1024, options=SaveOptions(threads=1, pack_bytes=8192)) as repository:
        for step in range(3):
            repository.save(
                state(step),
                run="r",
                step=step,
                metrics={HOSTILE: step},
                metadata={HOSTILE: [HOSTILE], "safetensors": {HOSTILE: HOSTILE}},
            )
    return root


@pytest.fixture
def root(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(made, tmp_path / "repo")


def test_names_in_states_and_records(root, tmp_path):
    shell = Shell(root)
    for args in READING:
        shell(*args)
    shown = shell("show", "r@1")
    assert shown["metadata"] == {HOSTILE: [HOSTILE], "safetensors": {HOSTILE: HOSTILE}}
    assert shown["snapshot"]["metrics"] == {HOSTILE: 1.0}
    assert f"{HOSTILE}.{HOSTILE}.v" in [tensor["path"] for tensor in shown["tensors"]]
    assert (f"{HOSTILE}.plain") in [change["path"] for change in shell("diff", "r@0", "r@1")["plain"]]
    for number, name in enumerate([f"{FILE}.pt", f"{FILE}.safetensors"]):
        out = tmp_path / f"{number}{name}"
        only = ["--tensors-only"] if out.suffix == ".safetensors" else []
        document = shell("restore", "r@1", "-o", out, *only, "--force")
        assert document["file"] == str(out)
        assert out.is_file()
    shell("restore", "r@1", "-o", tmp_path / f"{FILE}.safetensors")  # an error names what would be lost
    shell("restore", "r@1", "-o", out, "--keys", HOSTILE, "--force")
    shell("restore", "r@1", "-o", out, "--keys", f"{HOSTILE}*", "--tensors-only", "--force")
    for args in CHANGING:
        shell(*args)


def test_files_that_are_saved(root, tmp_path, monkeypatch):
    """Files of torch and of safetensors bring their own names."""
    import safetensors.torch

    shell = Shell(root)
    torch.save({HOSTILE: torch.zeros(2000), "x": {HOSTILE: HOSTILE}}, tmp_path / f"{FILE}.pt")
    safetensors.torch.save_file({HOSTILE: torch.zeros(2000)}, tmp_path / f"{FILE}.safetensors", {HOSTILE: HOSTILE})
    (tmp_path / f"{FILE}.bin").write_bytes(b"\x80\x02c" + b"os\nsystem\n(X" + HOSTILE.encode())
    name = f"m\x1b[2J\x0b{FORGED}"  # pickle takes these in the name of a class
    monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
    setattr(module, name, type(name, (), {"__module__": name}))
    torch.save({"x": getattr(module, name)}, tmp_path / f"{FILE}.pth")
    for ending in ("pt", "safetensors", "bin", "pth", "txt", "missing.pt"):
        for step in ("1", "x\n"):
            shell("save", tmp_path / f"{FILE}.{ending}", "--run", "r", "--step", step, "--tag", "t")
    shell("show", "r@latest")
    (tmp_path / "folder\n.pt").mkdir()
    shell("save", tmp_path / "folder\n.pt", "--run", "r", "--step", "1")
    shell("restore", "r@0", "-o", tmp_path / "folder\n.pt")
    shell("restore", "r@0", "-o", tmp_path / f"{FILE}.pt")
    shell("restore", "r@0", "-o", tmp_path / FILE / "x.pt")
    shell("restore", "r@0", "-o", tmp_path / f"{FILE}.pt" / "x.pt")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", [HOSTILE.replace("\0", ""), FILE, SURROGATE[:1] + SURROGATE[2:]], ids=["long", "file", "bytes"]
)
def test_command_lines(root, tmp_path, name):
    shell = Shell(root)
    for args in (
        ("log", "--run", name), ("show", name), ("show", f"r@{name}"), ("show", f"{name}@1"), ("show", f"id:{name}"),
        ("show", f"id:{'0' * 20}{name}"), ("diff", name, name), ("tag", "r@0", name), ("untag", "r@0", name),
        ("untag", "r@0", name, "-n"), ("forget", name), ("forget", "--run", name, "--keep-last", "1"),
        ("forget", "--run", "r", "--keep-best", name), ("forget", "--run", "r", "--keep-steps", name),
        ("forget", "--run", "r", "--keep-within", name), ("forget", "--run", "r", "--keep-last", name),
        ("unforget", name), ("gc", "--fence-after", name), ("check", f"--read-data={name}"),
        ("check", "--restore", "--max-decoded", name), ("compact", "--max-repack-size", name), ("compact", name),
        ("recode", name), ("recode", "--codec", name), ("index", name), ("repair", "--level", name), (name,),
        (f"--{name}",), ("log", f"--{name}"), ("log", f"-{name}"), ("log", name), ("log", "-n", name),
        ("restore", "r@0", "-o", name), ("restore", "r@0", "-o", f"{name}.pt", "--keys", name),
        ("restore", name, "-o", tmp_path / "x.pt"), ("restore", "r@0", "-o", tmp_path / "x.pt", "--keys", name),
        ("init", tmp_path / name[:50]), ("init", tmp_path / name[:50]), ("init", f"s3://{name}"), ("init", f"s3://bucket/{name}"),
        ("init", f"s3://bucket/x?{name}"), ("init", f"s3://bucket/x?storage_class={name}"),
        ("init", f"memory://{name}"), ("init", f"file://{name}"), ("init", f"{name}://x"), ("init", f"file:///{name}/x/y"),
        ("log", "--repo", name), ("log", "--repo", tmp_path / name[:50]), ("doctor", tmp_path / name[:50]),
        ("doctor", tmp_path / f"{name[:50]}2"), ("init", tmp_path / "c", "--chunk-bytes", name),
        ("save", tmp_path / "x.pt", "--run", name, "--step", "1"),
        ("save", tmp_path / "x.pt", "--run", "r", "--step", "5", "--metric", f"{name}=1"),
        ("save", tmp_path / "x.pt", "--run", "r", "--step", "5", "--metric", name),
        ("save", tmp_path / "x.pt", "--run", "r", "--step", "5", "--parent", name, "--base", name),
        ("save", tmp_path / "x.pt", "--run", "r", "--step", "5", "--tag", name),
    ):  # fmt: skip
        shell(*args)


HOSTILE_FIELDS = {
    "state": HOSTILE, "write_id": HOSTILE, "parent": HOSTILE, "bases": [HOSTILE], "tags": [HOSTILE, "x"],
    "metrics": {HOSTILE: 1.0}, "policy": HOSTILE, "reason": HOSTILE,
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("field", [*HOSTILE_FIELDS, "all but the state", "all"])
def test_forged_records(root, field):
    names = [
        name
        for name in HOSTILE_FIELDS
        if field in (name, "all") or (field != "state" and name != "state" and " " in field)
    ]
    with Repository.open(root) as repository:
        forged = repository.snapshot("r@1").revised()
        forged = msgspec.structs.replace(forged, **{name: HOSTILE_FIELDS[name] for name in names})
        repository.store.put(forged.key, records.encode(forged))
    shell = Shell(root)
    for args in some(READING):
        shell(*args)
    if field == "all but the state":
        shown = shell("show", f"id:{forged.id}")["snapshot"]
        assert (shown["tags"], shown["parent"], shown["metrics"]) == ([HOSTILE, "x"], HOSTILE, {HOSTILE: 1.0})
        for args in (("tag", "r@1", "y"), ("untag", "r@1", HOSTILE), ("forget", "r@1"), ("show", f"r@{HOSTILE}")):
            shell(*args)
    for args in some(CHANGING):
        shell(*args)


def objects(name):
    """Objects of every kind but records, with a hostile string in every field that takes one."""
    ids = f"{7:032x}"
    session = Session(id=ids, key=name, host=name, boot_id=name, pid=1, started=0.0)
    best = {"kind": "KeepBest", "metric": name, "n": 1, "mode": "min"}
    config = Config(uuid=ids, version=1, chunk_bytes=1024, digest_seed=7, features=[], created=0.0, writer=name)
    return [
        ("config", msgspec.structs.replace(config, features=[name])),
        ("config", msgspec.structs.replace(config, version=9)),
        (f"sessions/{ids}", session),
        (f"sessions/{ids}", msgspec.structs.replace(session, key=f"snapshots/r/{9:012d}-{ids}.0")),
        (f"sessions/{ids}", msgspec.structs.replace(session, id=name)),
        ("policies/r.0", RunPolicies(run="r", revision=0, policies=[{"kind": name, name: name}])),
        ("policies/r.0", RunPolicies(run="r", revision=0, policies=[{"kind": "KeepLast", name: 1}])),
        ("policies/r.0", RunPolicies(run="r", revision=0, policies=[best])),
        ("policies/r.0", RunPolicies(run=name, revision=0, policies=[])),
        (f"gc/{ids}.mark", Mark(id=name, started=0.0, packs=b"", manifests=b"")),
        (f"gc/{ids}.lost", Lost(id=ids, found=0.0, reason=name)),
        ("gc/{pack}.quarantine", Quarantine(pack=ids * 2, found=0.0, reason=name)),
    ]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(len(objects(HOSTILE))))
def test_forged_objects_of_other_kinds(root, number):
    key, value = objects(HOSTILE)[number]
    store = LocalStore(root)
    name = keys_of(store, "packs/")[0][-64:]
    key = key.format(pack=name)
    if isinstance(value, Quarantine):
        value = msgspec.structs.replace(value, pack=name)
    replace(store, key, records.encode(value))
    shell = Shell(root)
    for args in some([*READING, *CHANGING]):
        shell(*args)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("prefix", ["packs/", "manifests/", "snapshots/", "policies/", "config"])
def test_damage(root, prefix):
    """Errors about damage name tensors and parts, which are hostile here."""
    with Repository.open(root) as repository:
        repository.set_policies("r", [KeepLast(2)])
    for key in keys_of(LocalStore(root)):
        if key.startswith(prefix):
            flip_file(root / key, (root / key).stat().st_size // 2)
    shell = Shell(root)
    for args in [*some(READING), *some(CHANGING), ("restore", "r@0", "-o", root / "x.pt")]:
        shell(*args)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("folder", ["", "packs", "packs/ab", "snapshots", "snapshots/r", "sessions", "gc", "policies"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_foreign_files(root, folder, kind):
    (root / folder).mkdir(parents=True, exist_ok=True)
    name = os.fsencode(root / folder / FILE) + b"\xff"
    if kind == "file":
        Path(os.fsdecode(name)).write_text("x")
    else:
        Path(os.fsdecode(name)).symlink_to("elsewhere")
    shell = Shell(root)
    for args in some([*READING, *CHANGING]):
        shell(*args)


def test_repositories_and_caches_of_hostile_names(tmp_path, monkeypatch):
    place = tmp_path / os.fsdecode(FILE.encode() + b"\xff")
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / f"cache{place.name}"))
    torch.save({"w": torch.arange(2000)}, tmp_path / "x.pt")
    shell = Shell(place)
    shell("init")
    for url in (place, f"file://{place}"):
        shell = Shell(url)
        shell("save", tmp_path / "x.pt", "--run", "r", "--step", "0")
        shell("doctor", url)
        assert [s["run"] for s in shell("log")["snapshots"]]
        for args in some([*READING, *CHANGING]):
            shell(*args)
    shutil.rmtree(place)
    for args in some(READING):
        shell(*args)
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", f"cache{place.name}")
    shell("init", tmp_path / "new")


# --- errors of the library ---


def raised(call):
    """Return the error of a call; check its text, the last lines of its traceback, and it again after pickling."""
    with pytest.raises(SnapstoreError) as caught:
        call()
    error = caught.value
    for shown in (str(error), "".join(traceback.format_exception_only(error)), str(pickle.loads(pickle.dumps(error)))):
        require_safe(shown, repr(call))
    return error


class Unhappy:
    def state_dict(self):
        return {HOSTILE: 1}

    def load_state_dict(self, state):
        raise ValueError(f"unexpected key {HOSTILE}")


def test_errors_of_saves_and_restores(root, tmp_path):
    with Repository.open(root) as repository:
        zeros = torch.zeros(3)
        loop = {HOSTILE: []}
        loop[HOSTILE].append(loop)
        for call in (
            lambda: repository.save({HOSTILE: object(), f"{HOSTILE}2": object()}, run="r", step=9),
            lambda: repository.save({HOSTILE: {object(): 1}}, run="r", step=9),
            lambda: repository.save({HOSTILE: torch.zeros(3, device="meta")}, run="r", step=9),
            lambda: repository.save({"x": type("C\n\x1b[2J", (), {})()}, run="r", step=9),
            lambda: repository.save(loop, run="r", step=9),
            lambda: repository.save({}, run=HOSTILE, step=9),
            lambda: repository.save({}, run="r", step=HOSTILE),
            lambda: repository.save({}, run="r", step=9, tags=[HOSTILE]),
            lambda: repository.save({}, run="r", step=9, metrics={HOSTILE: HOSTILE}),
            lambda: repository.save({}, run="r", step=9, metrics={SURROGATE: 1}),
            lambda: repository.save({}, run="r", step=9, metadata={HOSTILE: object()}),
            lambda: repository.save({}, run="r", step=9, parent=HOSTILE),
            lambda: repository.save({}, run="r", step=9, bases=[HOSTILE]),
            lambda: repository.restore(HOSTILE),
            lambda: repository.restore("r@1", keys=f"{HOSTILE}9"),
            lambda: repository.restore("r@1", keys=[f"{HOSTILE}*x"]),
            lambda: repository.restore("r@1", device=HOSTILE),
            lambda: repository.restore_into("r@1", {HOSTILE: {"w": zeros, f"{HOSTILE}3": 1}, "plain": 5}),
            lambda: repository.restore_into("r@1", {f"{HOSTILE}2": Unhappy()}),
            lambda: repository.restore_into("r@1", Unhappy()),
            lambda: repository.policies(HOSTILE) or repository.set_policies(HOSTILE, []),
            lambda: repository.recode(codec=HOSTILE),
            lambda: repository.check(HOSTILE),
            lambda: repository.forget([KeepLast(1)], run=HOSTILE),
            lambda: Repository.open(tmp_path / FILE),
            lambda: Repository.open(f"s3://{HOSTILE}"),
            lambda: SnapshotManager(root, run=HOSTILE),
            lambda: repository.store.get(HOSTILE),
            lambda: repository.store.list(HOSTILE),
        ):
            raised(call)
        error = raised(lambda: repository.restore_into("r@1", {HOSTILE: {"w": zeros}, "plain": {"x": 1}}))
        assert len(str(error).split("\n")) > 3, "our own lines stay"
        repository.save({"x": {HOSTILE: 1}}, run="q", step=0)
        unhappy = raised(lambda: repository.restore_into("q@0", {"x": Unhappy()}))
        assert "Unhappy.load_state_dict failed: unexpected key" in str(unhappy)


def every_error(base=SnapstoreError):
    yield base
    for kind in base.__subclasses__():
        yield from every_error(kind)


@pytest.mark.parametrize("kind", sorted(set(every_error()), key=lambda kind: kind.__name__))
def test_no_error_carries_a_name_raw(kind):
    """The base class escapes the text of every error, so that no caller can forget it."""
    for error in (kind(f"{HOSTILE}: cannot be"), kind("first", f"  {HOSTILE}"), kind(HOSTILE, HOSTILE, SURROGATE)):
        require_safe(str(error), kind)
        require_safe("".join(traceback.format_exception_only(error)), kind)
        assert len(str(error).split("\n")) == len(error.args)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(kind()) == ""


def test_our_own_lines_are_arguments():
    """A line end in the text of an error would be escaped: `raise Kind(first, second)` has two lines."""
    for path in sorted((ROOT / "snapstore").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                texts = [part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant)]
                assert not [text for text in texts if isinstance(text, str) and "\n" in text], f"{path}:{node.lineno}"


def test_printable():
    for number in {*range(0x10000), *sampled(sys.maxunicode + 1, 31)}:
        shown = printable(chr(number))
        assert shown.isprintable(), hex(number)
        assert shown == chr(number) or shown.startswith("\\"), hex(number)
    assert printable("a\tb ü 模型 \udcff\ud800\u202e") == r"a\tb ü 模型 \xff\ud800\u202e"


def test_log_lines_of_the_shell(capsys):
    log = logging.getLogger("snapstore")
    from snapstore.cli.app import _logging

    with _logging(verbose=False):
        log.warning("%s", HOSTILE)
    require_safe(capsys.readouterr().err, "log")

"""The processes of chaos.py: a launcher, which forks, and its children, which are workers and verbs of the shell.

    python -m kit.chaos_worker     one JSON request a line on stdin, one JSON event a line on stdout

Every child is an ordinary process: it dies with its launcher, and its death is a real one. A worker calls random verbs
of the Python interface and writes a journal: a line before and a line after every call. A line is one write(2), so a
kill during a call cannot lose the line before it. Times are CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import botocore.session  # noqa: F401  this and the rest are imported once, not in every child
import safetensors.torch
import torch

import snapstore.cli
import snapstore.inspect.diff
import snapstore.inspect.stats
import snapstore.protocol.gc
import snapstore.repair.repair
import snapstore.rewrite.compact
import snapstore.rewrite.recode
import snapstore.save.pipeline
from kit import hosts
from kit.lying_proxy import LyingProxy, Memory, Told
from kit.ranks import save_shared
from kit.repositories import same, version_of
from snapstore import KeepBest, KeepEvery, KeepLast, Repository, Snapshot, SnapshotManager
from snapstore.errors import SnapstoreError
from snapstore.protocol import joining
from snapstore.storage.s3.store import S3Store

#: Runs whose snapshots nobody forgets, and runs whose snapshots anybody may forget.
KEPT, CHURNED = ("kept-a", "kept-b"), ("churned-a", "churned-b")
#: So few steps that several writers meet at each.
STEPS = 60
SHARED_TAG = "best"
FLAT = "flat/"
OPTIONS = hosts.OPTIONS
#: Exit code of a child that an unexpected exception has ended.
WRONG = 97


def expected(run: str, version: int) -> Any:
    """Return the state of a version; what the shell saves is flat."""
    if not run.startswith(FLAT):
        return hosts.values(run, version)
    state = hosts.values(run.removeprefix(FLAT), version)
    flat = {f"model.{name}": value for name, value in state["model"].items()} | {"noise": state["noise"]}
    return {name: torch.from_numpy(value) for name, value in sorted(flat.items())}


def write_state(path: Path, run: str, version: int) -> None:
    """Write a file for the shell to save."""
    about = {"origin": f"{FLAT}{run}:{version}"}
    safetensors.torch.save_file(expected(FLAT + run, version), path, metadata=about)


class Journal:
    """A file to which lines are only added."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._count = 0

    def write(self, **line: Any) -> None:
        """Write one line, with the time."""
        os.write(self._fd, (json.dumps({"at": time.monotonic()} | line) + "\n").encode())

    def begin(self, verb: str, **about: Any) -> int:
        """Write that a call begins; return the number for the line of its end."""
        self._count += 1
        self.write(begin=self._count, verb=verb, **about)
        return self._count


#: Errors that a verb may raise while others save, forget and collect. Everything else is a false alarm or worse.
ALLOWED = {
    "save": {"ConflictError", "NotFoundError"},
    "manager": {"ConflictError"},
    "restore": {"NotFoundError"},
    "forget": {"ConflictError", "InvalidInputError", "NotFoundError"},
    "unforget": {"ConflictError", "InvalidInputError", "NotFoundError"},
    "tag": {"ConflictError", "NotFoundError", "InvalidInputError"},
    "untag": {"ConflictError", "NotFoundError"},
    "show": {"NotFoundError"},
    "diff": {"NotFoundError"},
    "compact": {"ConflictError"},
    "recode": {"ConflictError"},
    "repair": {"ConflictError"},
}


class Worker:
    """One process's life: random verbs until it is told to stop, or killed.

    Args:
        settings: seed; url; journal; stop, a file that tells it to stop; calm: only processes are killed or stopped, so
            verbs may fail only as `ALLOWED` says; fence_s: what `gc` is given now and then; lies: their sorts.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.random = Random(settings["seed"])
        self.journal = Journal(Path(settings["journal"]))
        self.repository: Repository | None = None

    #: How often each verb is called.
    weights: ClassVar[dict[str, int]] = {
        "save": 30, "save_ranks": 8, "manager": 12, "restore": 20, "restore_into": 5, "forget": 10, "unforget": 4,
        "tag": 5, "untag": 2, "gc": 12, "compact": 4, "recode": 2, "check": 4, "repair": 2, "rebuild_index": 2,
        "look": 5, "diff": 3,
    }  # fmt: skip
    #: How often the repository is closed after a verb.
    closes = 0.1

    def main(self) -> None:
        """Call verbs until the end."""
        names, weights = list(self.weights), list(self.weights.values())
        while not Path(self.settings["stop"]).exists():
            if self.repository is None:
                with self.call("open"):
                    self.repository = self.open()
            if self.repository is None:
                time.sleep(0.02)
                continue
            getattr(self, self.random.choices(names, weights)[0])(self.repository)
            if self.random.random() < self.closes:
                self.repository.close()
                self.repository = None

    def open(self) -> Repository:
        """Open the repository as every script does."""
        return self.open_another()

    def open_another(self) -> Repository:
        """Open the same repository once more, for another rank."""
        return Repository.open(self.settings["url"], options=OPTIONS)

    @contextmanager
    def call(self, verb: str, *, may_fail: bool = True, **about: Any) -> Iterator[dict[str, Any]]:
        """Write a call and its error into the journal. The line of its end has what the block puts into the dict."""
        number = self.journal.begin(verb, **about)
        result: dict[str, Any] = {}
        try:
            yield result
        except SnapstoreError as error:
            kind = type(error).__name__
            self.journal.write(end=number, verb=verb, error=kind, message=str(error)[:500])
            allowed = (kind in ALLOWED.get(verb, ()) and may_fail) or not self.settings["calm"]
            if not allowed:
                self.journal.write(wrong=f"{verb}: {kind}: {error}", trace=traceback.format_exc()[-3000:])
        except Exception as error:  # noqa: BLE001
            self.journal.write(end=number, verb=verb, error=type(error).__name__, message=str(error)[:500])
            self.journal.write(wrong=f"{verb}: {error!r}", trace=traceback.format_exc()[-3000:])
        else:
            self.journal.write(end=number, verb=verb, **result)

    def wrong(self, what: str) -> None:
        """Record something that must not happen."""
        self.journal.write(wrong=what)

    def some(self, repository: Repository, *states: str) -> Any:
        """Return a random snapshot; None if there is none."""
        found: list[Any] = []
        with self.call("log"):
            view = repository.view()
            found = view.snapshots(None, states or ("committed",))
        return self.random.choice(found) if found else None

    # -- verbs

    def save(self, repository: Repository) -> None:
        """Save with random options."""
        run, version = (
            self.random.choice(KEPT + CHURNED),
            self.random.randrange(10**6 if self.random.random() < 0.7 else 5),
        )
        tags = self._tags()
        options: dict[str, Any] = {"full": self.random.random() < 0.1}
        if self.random.random() < 0.2 and (other := self.some(repository)) is not None:
            options |= {"bases": [f"id:{other.id}"]} if self.random.random() < 0.5 else {"parent": f"id:{other.id}"}
        with self.call("save", run=run, version=version, tags=tags) as result:
            snapshot = repository.save(
                hosts.values(run, version), run=run, step=self.random.randrange(STEPS), tags=tags,
                metadata=[run, version], metrics={"loss": self.random.random()}, **options,
            )  # fmt: skip
            result |= {"committed": snapshot.id}

    def save_ranks(self, repository: Repository) -> None:
        """Save as a job of ranks, each a thread with a repository of its own; they die and stop together."""
        run, version, tags = self.random.choice(KEPT + CHURNED), self.random.randrange(10**6), self._tags()
        with self.call("save", run=run, version=version, tags=tags, ranks=True) as result, ExitStack() as stack:
            others = [self.open_another() for _ in range(self.random.randint(1, 2))]
            for other in others:
                stack.callback(other.close)
            words = save_shared(
                [repository, *others], run, self.random.randrange(STEPS), version, silent_s=60.0, tags=tags,
                make=lambda run, version, rank, count: hosts.values(run, version), save_options=None,
            )  # fmt: skip
            errors = [word for word in words if not isinstance(word, Snapshot)]
            ids = {word.id for word in words if isinstance(word, Snapshot)}
            if len(ids) > 1 or (ids and errors and self.settings["calm"]):
                self.wrong(f"ranks disagree: {words}")
            if not ids:
                raise errors[0]
            if foreign := [error for error in errors if not isinstance(error, SnapstoreError)]:
                raise foreign[0]
            result |= {"committed": ids.pop()}

    def _tags(self) -> list[str]:
        return self.random.choice([[], [], [], [], [SHARED_TAG], [self._new_tag()]])

    def _new_tag(self) -> str:
        """Return a tag that no other snapshot ever gets: this snapshot would lose it."""
        return f"only-{self.random.randrange(2**64):x}-{os.getpid()}"

    def manager(self, repository: Repository) -> None:
        """Save a few steps with a manager, in the background or not, with a retention policy or not."""
        run = self.random.choice(KEPT + CHURNED)
        keep = [KeepLast(self.random.randint(1, 4)), KeepEvery(steps=20)] if run in CHURNED else []
        asynchronous = self.random.random() < 0.7
        forgets = self.journal.begin("forget", run=run, unknown=True) if keep else 0
        with self.call("manager", run=run):  # noqa: SIM117
            with SnapshotManager(repository, run=run, keep=keep, async_save=asynchronous) as manager:
                for step in range(first := self.random.randrange(STEPS), first + self.random.randint(1, 4)):
                    version = self.random.randrange(10**6)
                    tags = self._tags()
                    with self.call("manager", run=run, version=version, tags=tags) as result:
                        handle = manager.save(step, hosts.values(run, version), metadata=[run, version], tags=tags)
                        result |= {"committed": handle.result().id}  # type: ignore[union-attr]
        if keep:
            self.journal.write(end=forgets, verb="forget", unknown=True)

    def restore(self, repository: Repository) -> None:
        """Restore a snapshot, and compare every bit."""
        if (snapshot := self.some(repository)) is None:
            return
        with self.call("restore", may_fail=snapshot.run in CHURNED, id=snapshot.id):
            state = repository.restore(f"id:{snapshot.id}")
            if not same(state, expected(*version_of(snapshot))):
                self.wrong(f"restored {snapshot.ref} id:{snapshot.id}: other bytes")

    def restore_into(self, repository: Repository) -> None:
        """Restore a snapshot in place, and compare every bit."""
        snapshot = self.some(repository)
        if snapshot is None or isinstance(snapshot.metadata, dict):
            return
        with self.call("restore", may_fail=snapshot.run in CHURNED, id=snapshot.id):
            into = hosts.values(snapshot.run, 0)
            repository.restore_into(f"id:{snapshot.id}", into)
            if not same(into, expected(*version_of(snapshot))):
                self.wrong(f"restored into {snapshot.ref} id:{snapshot.id}: other bytes")

    def forget(self, repository: Repository) -> None:
        """Forget snapshots of a churned run, by policy or by name."""
        run, dry = self.random.choice(CHURNED), self.random.random() < 0.1
        if self.random.random() < 0.4:
            snapshot = self.some(repository)
            if snapshot is not None and snapshot.run in CHURNED:
                with self.call("forget", ids=[] if dry else [snapshot.id]) as result:
                    force = self.random.random() < 0.2
                    repository.forget_snapshots([f"id:{snapshot.id}"], force=force, dry_run=dry)
                    result |= {"forgotten": [] if dry else [snapshot.id]}
            return
        keep = self.random.choice([[KeepLast(3)], [KeepEvery(steps=7)], [KeepBest("loss", n=2), KeepLast(1)]])
        with self.call("forget", run="" if dry else run) as result:
            forgotten = repository.forget(keep, run=run, dry_run=dry).forgotten
            result |= {"forgotten": [] if dry else [s.id for s in forgotten]}

    def unforget(self, repository: Repository) -> None:
        """Bring a forgotten snapshot back; a gc may be deleting it at this moment."""
        if (snapshot := self.some(repository, "forgotten")) is not None:
            with self.call("unforget", id=snapshot.id) as result:
                repository.unforget(f"id:{snapshot.id}")
                result |= {"unforgotten": snapshot.id}

    def tag(self, repository: Repository) -> None:
        """Set the tag that all share, or one that nobody ever removes."""
        if (snapshot := self.some(repository)) is None:
            return
        name = self.random.choice([SHARED_TAG, self._new_tag()])
        with self.call("tag", id=snapshot.id, tag=name) as result:
            repository.tag(f"id:{snapshot.id}", name)
            result |= {"tagged": snapshot.id, "tag": name}

    def untag(self, repository: Repository) -> None:
        """Remove the shared tag."""
        with self.call("untag"):
            repository.untag(f"{self.random.choice(KEPT + CHURNED)}@{SHARED_TAG}", SHARED_TAG)

    def gc(self, repository: Repository) -> None:
        """Collect garbage; with `fence_s` that may fence a live save, which then must fail."""
        fence_s = self.settings["fence_s"] if self.random.random() < 0.3 else 3600.0
        with self.call("gc"):
            repository.gc(dry_run=self.random.random() < 0.1, fence_after_s=fence_s)

    def compact(self, repository: Repository) -> None:
        """Compact all that is worth it."""
        with self.call("compact") as result:
            report = repository.compact(dry_run=self.random.random() < 0.1)
            result |= {"rewritten": len(report.rewritten), "failed": [str(why)[:300] for _, why in report.failed]}

    def recode(self, repository: Repository) -> None:
        """Recode; everything is portable already, so nothing changes."""
        with self.call("recode"):
            repository.recode()

    def check(self, repository: Repository) -> None:
        """Check; it must find nothing, whatever others are doing."""
        level = self.random.choice(["metadata", "data", "restore"])
        with self.call("check", level=level):
            found = repository.check(level)
            if found.problems and self.settings["calm"]:
                self.wrong(f"check {level}: a false alarm: {found.problems[:5]}")

    def repair(self, repository: Repository) -> None:
        """Repair; there is nothing to repair but what dead processes have left."""
        apply = self.random.random() < 0.7
        drop = apply and self.settings["calm"] and self.random.random() < 0.3
        with self.call("repair", apply=apply, drop=drop):
            report = repository.repair(
                apply=apply, drop=drop, level=self.random.choice(["metadata", "data", "restore"])
            )
            if (report.lost or report.dropped) and self.settings["calm"]:
                self.wrong(f"repair gives up what is whole: {report.lost} {report.dropped}")

    def rebuild_index(self, repository: Repository) -> None:
        """Rebuild the index while others use it."""
        with self.call("index"):
            repository.rebuild_index(forget_missing=self.random.random() < 0.5)

    def look(self, repository: Repository) -> None:
        """Call stats, and list a snapshot's children."""
        with self.call("stats"):
            repository.stats()
        with self.call("show"):
            repository.children(f"{self.random.choice(KEPT + CHURNED)}@latest")

    def diff(self, repository: Repository) -> None:
        """Compare two snapshots of any runs."""
        one, other = self.some(repository), self.some(repository)
        if one is not None and other is not None:
            with self.call("diff"):
                repository.diff(f"id:{one.id}", f"id:{other.id}")


class LiedTo(Worker):
    """A worker whose server lies at most once in a call, each time in another request and in another way."""

    weights: ClassVar[dict[str, int]] = Worker.weights | {"gc": 40, "forget": 15, "compact": 8, "restore": 8, "look": 2}
    closes = 0.3

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._server = os.environ["AWS_ENDPOINT_URL_S3"].removeprefix("http://")
        self._memory, self._proxy, self._inside = Memory(), None, False
        self._confirms = self.random.random() < 0.5
        snapstore.protocol.claim.HEARTBEAT_S = 0.2

    def open(self) -> Repository:
        """Open through the proxy that there is, or through a new one: its URL is new, so it has no index yet."""
        if self._proxy is None or self.random.random() < 0.5:
            if self._proxy is not None:
                self._proxy.__exit__()
            self._proxy = LyingProxy(
                self._server, random=self.random, memory=self._memory, tell=self._tell, confirmed=self._confirms,
                sorts=frozenset(self.settings["lies"]),
            ).__enter__()  # fmt: skip
            os.environ["AWS_ENDPOINT_URL_S3"] = self._proxy.url
        return self.open_another()

    def open_another(self) -> Repository:
        """Open the repository through the same proxy."""
        store = S3Store(self.settings["url"], connect_timeout_s=1.0, read_timeout_s=1.0, attempts=3)
        put = store.put

        def put_slowly(key: str, data: Any) -> None:
            """Put; often wait before the record, so that others meet a save that has written everything else."""
            if key.startswith("snapshots/") and key.endswith(".0") and self.random.random() < 0.4:
                time.sleep(self.random.uniform(0.0, 3.0))
            put(key, data)

        store.put = put_slowly  # type: ignore[method-assign]
        options = replace(OPTIONS, verify_writes="full" if self._confirms else "sample")
        return Repository.open(store, options=options)

    def _tell(self, told: Told) -> None:
        self.journal.write(lie=told.lie, verb=told.verb, kind=told.kind, target=told.target)
        if told.hung:
            self.wrong(f"hangs: {told.verb} {told.target}: {told.lie}")

    @contextmanager
    def call(self, verb: str, *, may_fail: bool = True, **about: Any) -> Iterator[dict[str, Any]]:
        """Do a call, in which the server lies at most once."""
        outermost = not self._inside and self._proxy is not None
        if outermost:
            self._inside = True
            self._proxy.arm(self.random.choice([4, 16, 64]))
        try:
            with super().call(verb, may_fail=may_fail, **about) as result:
                yield result
        finally:
            if outermost:
                self._inside = False
                self._proxy.disarm()


# --- the launcher ----------------------------------------------------------------------------------------------------


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)


def _child(request: dict[str, Any]) -> None:
    """Be a worker, or one verb of the shell; the caller ends the process."""
    os.environ.update(request["environment"])
    joining.AT_LEAST = 3  # so that they join all the time
    off_s, real = request.get("clock_off_s", 0.0), time.time
    if off_s:
        time.time = lambda: real() + off_s
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 2)
    if "argv" in request:
        stdout = os.open(request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(stdout, 1)
        sys.argv = ["snapstore", *request["argv"]]
        snapstore.cli.main()
    else:
        os.dup2(output, 1)
        (LiedTo if request["lies"] else Worker)(request).main()


def launcher() -> None:
    """Fork children, pass on signals, mount, and report the end of each child, until stdin ends."""
    children: set[int] = set()
    me = os.getpid()
    parent = os.getppid()
    _die_with_parent(parent)

    def say(**event: Any) -> None:
        os.write(1, (json.dumps(event) + "\n").encode())

    say(ready=True)
    pending = b""
    while True:
        while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            children.discard(ended[0])
            say(ended=ended[0], code=os.waitstatus_to_exitcode(ended[1]), at=time.monotonic())
        if not select.select([0], [], [], 0.02)[0]:
            continue
        data = os.read(0, 65536)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for request in map(json.loads, lines):
            if "signal" in request:
                if request["pid"] in children:  # not reaped yet, so no other process has its pid
                    os.kill(request["pid"], request["signal"])
            elif "mount" in request:
                done = subprocess.run(request["mount"], capture_output=True, text=True, check=False)
                say(mounted=done.returncode, message=done.stderr)
            else:
                pid = os.fork()
                if pid == 0:
                    code = WRONG
                    try:
                        os.setpgid(0, 0)
                        _die_with_parent(me)
                        _child(request)
                        code = 0
                    except SystemExit as ended_:
                        code = ended_.code if isinstance(ended_.code, int) else int(bool(ended_.code))
                    except BaseException:  # noqa: BLE001
                        traceback.print_exc()
                    finally:
                        sys.stdout.flush()
                        os._exit(code)
                children.add(pid)
                say(started=pid)


if __name__ == "__main__":
    launcher()

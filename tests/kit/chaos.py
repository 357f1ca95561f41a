"""Chaos: real processes on one repository, killed, stopped and disturbed at random, and a judge of what is left.

    with Chaos(folder, url, kinds=KINDS["processes"], seed=SEED) as chaos:
        chaos.run(seconds=20)
    judge(chaos, store)

Several workers and verbs of the shell (chaos_worker.py) save, restore, forget, tag, collect, compact, check and repair
all at once. `DEEDS` has the actions of each kind of chaos; each can be tried alone. Every decision comes from the seed
and is logged. Processes cannot be replayed, so a failure is read from `folder`: the decisions, each process's journal
and its stderr.
"""

from __future__ import annotations

import hashlib
import json
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from kit import chaos_worker
from kit.chaos_worker import ALLOWED, CHURNED, KEPT, SHARED_TAG, STEPS
from kit.lying_proxy import SORTS
from kit.processes import environment
from kit.repositories import check_clean, check_restores, same, version_of
from kit.tally import tally
from snapstore import KeepLast, Repository
from snapstore.errors import SnapstoreError
from snapstore.storage.base import ObjectStore

#: Class of chaos -> what it does to the processes, beside running them.
KINDS: dict[str, frozenset[str]] = {
    "processes": frozenset({"kill", "stop", "caches", "clocks"}),
    "links": frozenset({"kill", "links"}),
    "mounts": frozenset({"kill", "stop", "mounts"}),
    "renames": frozenset({"kill", "stop", "renames"}),
    "lies": frozenset({"reads", "writes"}),
    "lies about reads": frozenset({"reads"}),
    "lies about writes": frozenset({"writes"}),
    "slow lies": frozenset({"slow"}),
    "everything": frozenset({"kill", "stop", "caches", "clocks", "links", "renames"}),
}
#: Deeds that make verbs fail in ways that they otherwise must not.
ROUGH = {"links", "mounts", "renames", *SORTS}
#: A verb, or a process that was told to end, hangs if it takes longer [s].
HANGS_AFTER_S = 180.0
YEAR_S = 365 * 86_400.0
#: Exit codes of the shell: ok, error, partial, busy.
CODES = {0, 1, 3, 11}


@dataclass
class Child:
    """A process. `stopped_until`: when it goes on, if it is stopped; `shell`: the verb's call, None for a worker."""

    about: str
    journal: Path | None
    began: float
    stopped_until: float = 0.0
    shell: dict[str, Any] | None = None
    doomed: bool = False


@dataclass
class Entry:
    """A call of a journal: its begin, and its end if there is one."""

    begin: dict[str, Any]
    end: dict[str, Any] | None = None

    @property
    def began(self) -> float:
        return float(self.begin["at"])

    @property
    def ended(self) -> float:
        """Return infinity for a call that was killed or has failed: a part of it may be done, or may be done later."""
        return float(self.end["at"]) if self.end is not None and "error" not in self.end else float("inf")


@dataclass
class Chaos:
    """The driver.

    Args:
        folder: an empty one, for everything but the repository.
        url: where the repository is made.
        kinds: of chaos, see `DEEDS`.
        fence_s: what workers give gc as `fence_after_s` now and then. On S3 that may fence a live save; it must fail.
    """

    folder: Path
    url: str
    kinds: frozenset[str]
    seed: int
    fence_s: float = 0.0
    workers: int = 3
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.children: dict[int, Child] = {}
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._links: list[tuple[float, Path]] = []
        self._swapped_until = 0.0
        self._number = 0
        for name in ("journals", "output", "canary", "files", "volume", *(f"cache{i}" for i in range(3))):
            (self.folder / name).mkdir(parents=True)
        self._log = (self.folder / "decisions.jsonl").open("w", buffering=1)
        self._shell_journal = chaos_worker.Journal(self.folder / "journals" / "shell.jsonl")
        self.canary = self._make_canary()
        self.mounted = "mounts" in self.kinds
        #: Where the objects really are. With mounts, the repository's place is an empty folder until it is mounted.
        self.truth = str(self.folder / "volume") if self.mounted else self.url
        Repository.create(self.truth, chunk_bytes=1024, options=chaos_worker.OPTIONS).close()

    # -- the launcher

    def __enter__(self) -> Chaos:
        command = [sys.executable, "-m", chaos_worker.__name__]
        if self.mounted:
            Path(self.url).mkdir()
            command = ["unshare", "-m", "--propagation", "private", *command]
        errors = (self.folder / "output" / "launcher").open("w")
        self._launcher = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            env=environment(OMP_NUM_THREADS="1", SNAPSTORE_CACHE_DIR=str(self.folder / "cache0")),
        )  # fmt: skip
        errors.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._next() == {"ready": True}, "the launcher has died"
        if self.mounted:
            self._mount()
        return self

    def __exit__(self, *_: object) -> None:
        self._launcher.kill()  # and its children with it
        self._launcher.wait()
        assert self._launcher.stdin is not None
        self._launcher.stdin.close()
        self._reader.join()
        assert self._launcher.stdout is not None
        self._launcher.stdout.close()
        self._log.close()

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        for line in self._launcher.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def _next(self) -> dict[str, Any]:
        event = self._events.get(timeout=HANGS_AFTER_S)
        assert event is not None, "the launcher has died: " + (self.folder / "output" / "launcher").read_text()[-2000:]
        return event

    def _ask(self, **request: Any) -> None:
        assert self._launcher.stdin is not None
        self._launcher.stdin.write((json.dumps(request) + "\n").encode())
        self._launcher.stdin.flush()

    def _answer(self, kind: str) -> dict[str, Any]:
        """Return the next event of a kind; handle the ends of processes that come before it."""
        while True:
            event = self._next()
            if kind in event:
                return event
            self._ended(event)

    def log(self, what: str, **about: Any) -> None:
        """Log a decision."""
        self._log.write(json.dumps({"at": time.monotonic(), "do": what} | about) + "\n")

    # -- a run

    def run(self, seconds: float) -> None:
        """Cause chaos for this time; then end all processes."""
        ends = time.monotonic() + seconds
        if "links" in self.kinds:
            self._unpack_links()
        deeds = [deed for kind, deed in DEEDS.items() if kind in self.kinds]
        while time.monotonic() < ends and not self.wrong:
            while sum(child.shell is None for child in self.children.values()) < self.workers:
                self._start_worker()
            shells = sum(child.shell is not None for child in self.children.values())
            if not self.kinds & SORTS and not shells and self.random.random() < 0.5:
                self._start_shell()
            if deeds and self.random.random() < 0.3:
                self.random.choice(deeds)(self)
            if "links" in self.kinds and self.random.random() < 0.1 and not self._swapped_until:
                self._plant(Path(self.truth) / self._free_name())
            self._watch(self.random.uniform(0.01, 0.1))
        self._end_all()

    def _watch(self, seconds: float) -> None:
        """Handle processes that end, that must go on, or that hang, for this time."""
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for pid, child in self.children.items():
                if child.stopped_until and child.stopped_until < now:
                    child.stopped_until = 0.0
                    self._ask(pid=pid, signal=signal.SIGCONT)
                if child.shell is not None and now - child.began > HANGS_AFTER_S:
                    self.wrong.append(f"hangs: {child.about}")
                    self._ask(pid=pid, signal=signal.SIGKILL)
            away = self._swapped_until and not self.mounted  # a link in a folder that is away cannot be removed
            for entry in [entry for entry in self._links if entry[0] < now and not away]:
                self._links.remove(entry)
                with suppress(FileNotFoundError):
                    if entry[1].is_symlink():
                        entry[1].unlink()
            if self._swapped_until and self._swapped_until < now:
                self._swap_back()
            if now >= until:
                return
            with suppress(queue.Empty):
                event = self._events.get(timeout=min(0.02, until - now))
                assert event is not None, "the launcher has died"
                self._ended(event)

    def _end_all(self) -> None:
        """Undo all stops, links and swaps; then wait until every process ends after its verb."""
        (self.folder / "stop").touch()
        if self._swapped_until:
            self._swap_back()
        for child in self.children.values():
            child.stopped_until = min(child.stopped_until, 1.0)
        self._links = [(0.0, link) for _, link in self._links]
        ends = time.monotonic() + HANGS_AFTER_S
        while self.children and time.monotonic() < ends:
            self._watch(0.05)
        self.wrong += [f"hangs: {child.about}" for child in self.children.values()]

    def _environment(self) -> dict[str, str]:
        return {"SNAPSTORE_CACHE_DIR": str(self.folder / f"cache{self.random.randrange(2)}")}

    def _clock(self) -> float:
        if "clocks" not in self.kinds or self.random.random() < 0.7:
            return 0.0
        return self.random.choice([-YEAR_S, -3600.0, 3600.0, YEAR_S])

    @property
    def calm(self) -> bool:
        """Whether verbs must succeed, but for `ALLOWED`."""
        return self.kinds.isdisjoint(ROUGH)

    def _start_worker(self) -> None:
        self._number += 1
        journal = self.folder / "journals" / f"worker{self._number}.jsonl"
        request = {
            "url": self.url, "seed": self.random.randrange(2**32), "journal": str(journal), "calm": self.calm,
            "stop": str(self.folder / "stop"), "clock_off_s": self._clock(), "environment": self._environment(),
            "output": str(self.folder / "output" / f"worker{self._number}"), "fence_s": self.fence_s,
            "lies": sorted(self.kinds & SORTS),
        }  # fmt: skip
        self._ask(**request)
        pid = self._answer("started")["started"]
        self.children[pid] = Child(f"worker {self._number}", journal, time.monotonic())
        self.log("start", pid=pid, **request)
        self._count("processes")

    def _start_shell(self) -> None:
        self._number += 1
        line, about = self._command()
        argv = ["--repo", self.url, "--json", *line]
        stdout, output = (self.folder / "output" / f"shell{self._number}{end}" for end in (".json", ""))
        begun = self._shell_journal.begin(line[0], **about)
        request = {
            "argv": argv, "stdout": str(stdout), "output": str(output), "environment": self._environment(),
            "clock_off_s": self._clock(),
        }  # fmt: skip
        self._ask(**request)
        pid = self._answer("started")["started"]
        shell = {"line": line, "begun": begun, "stdout": stdout, "output": output} | about
        self.children[pid] = Child("snapstore " + " ".join(line), None, time.monotonic(), shell=shell)
        self.log("shell", pid=pid, **request)
        self._count("processes")
        self._count("verbs")

    def _command(self) -> tuple[list[str], dict[str, Any]]:
        """Return a random verb of the shell, and the fields of its line in the journal."""
        random = self.random
        run, churned, step = random.choice(KEPT + CHURNED), random.choice(CHURNED), random.randrange(STEPS)
        ref = f"{run}@{random.choice(['latest', SHARED_TAG, str(step)])}"
        file = self.folder / "files" / f"{self._number}.safetensors"
        which = random.randrange(17)
        if which < 4:
            version = random.randrange(10**6)
            chaos_worker.write_state(file, run, version)
            tags = random.choice([[], [f"only-shell-{self._number}"]])
            flags = [word for tag in tags for word in ("--tag", tag)]
            about = {"run": chaos_worker.FLAT + run, "version": version, "tags": tags}
            return ["save", str(file), "--run", run, "--step", str(step), *flags], about
        lines: list[tuple[list[str], dict[str, Any]]] = [
            (["restore", ref, "-o", str(file), "--tensors-only"], {"file": str(file)}),
            (["forget", "--run", churned, "--keep-last", str(random.randint(2, 5))], {"run": churned}),
            (["gc"], {}), (["gc", "-n"], {}), (["tag", ref, SHARED_TAG], {}),
            (["untag", ref, SHARED_TAG], {}), (["check", "--restore"], {}), (["check", "--read-data=50%"], {}),
            (["repair"], {}), (["log", "--all"], {}), (["stats"], {}), (["compact"], {}),
            (["index", "rebuild"], {}),
        ]  # fmt: skip
        return lines[which - 4]

    def _ended(self, event: dict[str, Any]) -> None:
        child = self.children.pop(event["ended"])
        self.log("ended", pid=event["ended"], code=event["code"])
        if child.doomed and event["code"] == -signal.SIGKILL:
            return
        if child.shell is not None:
            self._judge_shell(child, event)
        elif event["code"] != 0:
            output = (self.folder / "output" / child.about.replace(" ", "")).read_text()
            self.wrong.append(f"{child.about} (pid {event['ended']}) ended with {event['code']}: {output[-2000:]}")

    def _judge_shell(self, child: Child, event: dict[str, Any]) -> None:
        """Judge the exit code and the errors of a verb, and write its end into the journal."""
        shell, code = child.shell, event["code"]
        assert shell is not None
        verb, said, end = (
            shell["line"][0],
            shell["output"].read_text(),
            {"end": shell["begun"], "verb": shell["line"][0]},
        )
        found: dict[str, Any] = {}
        with suppress(ValueError):
            found = json.loads(shell["stdout"].read_text())
        if "Traceback" in said or "this is a bug" in said:
            self.wrong.append(f"{child.about}: {said[-2000:]}")
        kind = found.get("error", {}).get("kind", "")
        if self.calm and (code not in CODES or (kind and kind not in ALLOWED.get(verb, {"nothing"}))):
            self.wrong.append(f"{child.about}: exit code {code}: {said[-1500:]} {json.dumps(found)[:1500]}")
        if code < 0:
            self.wrong.append(f"{child.about}: died by signal {-code}: {said[-1500:]}")
        if code:
            self._shell_journal.write(**end, error=kind or str(code))
        elif verb == "save":
            self._shell_journal.write(**end, committed=found["snapshot"]["id"])
        elif verb == "forget":
            self._shell_journal.write(**end, forgotten=found["forgotten"])
        else:
            self._shell_journal.write(**end)
            if verb == "restore":
                self._judge_file(Path(shell["file"]))

    def _judge_file(self, file: Path) -> None:
        """Check a restored file, if its snapshot was saved by the shell."""
        from snapstore.convert import files

        state, about = files.read(file)
        run, _, version = about.get("origin", "").partition(":")
        if about and not same(dict(state), chaos_worker.expected(run, int(version))):
            self.wrong.append(f"{file}: other bytes")

    def _count(self, what: str, count: int = 1) -> None:
        if not count:
            return
        self.counts[what] += count
        tally(f"{'lying S3' if self.kinds & SORTS else 'chaos'}: {what}", count)

    # -- deeds

    def _victim(self) -> tuple[int, Child] | None:
        able = [(pid, child) for pid, child in self.children.items() if not child.doomed]
        return self.random.choice(able) if able else None

    def kill(self) -> None:
        """SIGKILL."""
        if (victim := self._victim()) is not None:
            victim[1].doomed = True
            self.log("kill", pid=victim[0])
            self._ask(pid=victim[0], signal=signal.SIGKILL)
            self._count("kills")

    def stop(self) -> None:
        """SIGSTOP, and SIGCONT later."""
        victim = self._victim()
        if victim is not None and not victim[1].stopped_until:
            seconds = self.random.choice([0.1, 0.5, 3.0])
            victim[1].stopped_until = time.monotonic() + seconds
            self.log("stop", pid=victim[0], seconds=seconds)
            self._ask(pid=victim[0], signal=signal.SIGSTOP)
            self._count("stops")

    def lose_cache(self) -> None:
        """Lose a host's cache, replace it by noise or by a link that leads nowhere, or bring an old one back."""
        cache, kept = self.folder / f"cache{self.random.randrange(2)}", self.folder / "cache2" / "old"
        how = self.random.choice(["lost", "noise", "old", "kept", "link"])
        self.log("cache", folder=str(cache), how=how)
        indexes = [file.parent for file in cache.glob("**/data.mdb")]
        with suppress(OSError):  # a process uses it at this moment
            if how == "kept":
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(cache, kept)
                return
            if cache.is_symlink():
                cache.unlink()
            shutil.rmtree(cache, ignore_errors=True)  # live processes keep what they have open
            if how == "link":
                cache.symlink_to(self.folder / "unmounted")
            for folder in indexes if how == "noise" else []:
                folder.mkdir(parents=True)
                (folder / "data.mdb").write_bytes(self.random.randbytes(32768))
            if how == "old" and kept.exists():
                shutil.copytree(kept, cache, ignore=shutil.ignore_patterns("held"))
        self._count("caches lost")

    def _unpack_links(self) -> None:
        """Plant links where a repository has folders of its own, as a foreign archive may."""
        root = Path(self.truth)
        for name in self.random.sample(["index", "tmp", "gc", "sessions", "policies"], 2):
            shutil.rmtree(root / name, ignore_errors=True)
            self._plant(root / name)

    def _free_name(self) -> str:
        """Return a name that the repository could use, and most likely does not."""
        random = self.random
        name, two = random.randbytes(16).hex(), f"{random.randrange(256):02x}"
        run = random.choice(KEPT + CHURNED)
        return random.choice([
            f"packs/{two}", f"packs/{two}/{name}{name}", f"manifests/{two}", f"manifests/{two}/{name}{name}",
            f"snapshots/linked-{name}", f"snapshots/{run}",
            f"snapshots/{run}/{random.randrange(100):012}-{name}.0", f"policies/{run}.{random.randrange(20)}",
            f"sessions/{name}", f"gc/{name}.mark", f"gc/{name}.wait", f"tmp/{name}", "tmp", "policies", "gc",
            "index", "index/data.mdb", "index/lock.mdb", "index/used",
        ])  # fmt: skip

    def _plant(self, place: Path) -> None:
        """Plant a link at a free name for a while; it leads to another program's files, or into the repository."""
        root, canary = Path(self.truth), self.folder / "canary"
        if place.parent.resolve() != root.resolve() / place.parent.relative_to(root):  # below a link that we planted
            return
        like = canary / place.name
        targets = [canary, canary / "file", canary / "missing", root, root / "config"]
        target = like if like.exists() else self.random.choice(targets)
        with suppress(OSError):
            place.symlink_to(target)  # never replaces anything
            self._links.append((time.monotonic() + self.random.uniform(0.1, 2.0), place))
            self.log("link", place=str(place), target=str(target))
            self._count("links planted")

    def swap_volume(self) -> None:
        """Take the volume away from all processes for a moment; an empty folder is in its place."""
        if self._swapped_until:
            return
        seconds = self.random.uniform(0.02, 0.8)
        self._swapped_until = time.monotonic() + seconds
        self.log("swap", seconds=seconds, how="umount" if self.mounted else "rename")
        if self.mounted:
            self._mounting("umount", "-l", self.url)
        else:
            Path(self.url).rename(f"{self.url}.away")
            Path(self.url).mkdir()
        self._count("volumes swapped")

    def _swap_back(self) -> None:
        self.log("swap back")
        self._swapped_until = 0.0
        if self.mounted:
            self._mount()
            return
        Path(self.url).rename(self.folder / f"below{self.counts['volumes swapped']}")
        Path(f"{self.url}.away").rename(self.url)

    def _mount(self) -> None:
        self._mounting("mount", "--bind", self.truth, self.url)

    def _mounting(self, *command: str) -> None:
        self._ask(mount=command)
        assert (answer := self._answer("mounted"))["mounted"] == 0, answer

    # -- what must stay

    def _make_canary(self) -> dict[str, str]:
        """Write files of another program, some with names like ours."""
        folder, names = self.folder / "canary", Random(self.seed)
        for name in ("file", "data.mdb", "lock.mdb", "used", "config", f"{names.randbytes(32).hex()}",
                     f"{names.randbytes(16).hex()}.mark", f"000000000001-{names.randbytes(16).hex()}.0"):  # fmt: skip
            (folder / name).write_bytes(names.randbytes(1000))
        for name in ("index", "tmp", "ab"):
            (folder / name).mkdir()
            for file in ("data.mdb", "lock.mdb", f"{names.randbytes(32).hex()}", ".tmp-1234"):
                (folder / name / file).write_bytes(names.randbytes(100))
        return self.canary_now()

    def canary_now(self) -> dict[str, str]:
        """Return mode, time and content of each file of the other program."""
        found: dict[str, str] = {}
        for path in sorted((self.folder / "canary").rglob("*")):
            status = path.lstat()
            content = (status.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) if path.is_file() else ""
            found[str(path.relative_to(self.folder))] = f"{status.st_mode:o} {content}"
        return found


DEEDS: dict[str, Callable[[Chaos], None]] = {
    "kill": Chaos.kill, "stop": Chaos.stop, "caches": Chaos.lose_cache,
    "mounts": Chaos.swap_volume, "renames": Chaos.swap_volume,
}  # fmt: skip


def may_mount(folder: Path) -> bool:
    """Whether this user can have mounts of its own."""
    command = ["unshare", "-m", "mount", "--bind", str(folder), str(folder)]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


# --- the judge -------------------------------------------------------------------------------------------------------


def journals(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(process, line) of every line; a process that died in a write leaves none."""
    for path in sorted((folder / "journals").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                yield path.stem, json.loads(line)


def calls(folder: Path) -> tuple[list[Entry], list[str]]:
    """Every call of every process, and what they found wrong."""
    found: dict[tuple[str, int], Entry] = {}
    wrong: list[str] = []
    for name, line in journals(folder):
        if "wrong" in line:
            wrong.append(f"{name}: {line['wrong']}\n{line.get('trace', '')}")
        elif "lie" in line:
            continue
        elif "begin" in line:
            found[name, line["begin"]] = Entry(line)
        else:
            found[name, line["end"]].end = line
    return list(found.values()), wrong


def judge(chaos: Chaos, store: ObjectStore) -> None:
    """Check what is left when all is over, as a process without faults; raise AssertionError.

    Every snapshot that was reported as committed is there and restores bit for bit, unless a process may have forgotten
    it; one with a tag of its own must be there always. No verb has failed in a way that it must not. Nothing was
    written into the folder that took the volume's place. After a gc nothing is left that nobody needs.
    """
    entries, wrong = calls(chaos.folder)
    chaos._count("verbs", len(entries))
    chaos._count("saves by ranks", sum("committed" in (e.end or {}) for e in entries if e.begin.get("ranks")))
    told = Counter(f"{line['verb']} {line['lie']}" for _, line in journals(chaos.folder) if "lie" in line)
    chaos._count("lies told", told.total())
    wrong += chaos.wrong
    now = chaos.canary_now()
    changed = {name for name in now.keys() | chaos.canary.keys() if now.get(name) != chaos.canary.get(name)}
    wrong += [f"another program's file, reached through a link, has changed: {name}" for name in sorted(changed)]
    places = [Path(chaos.url)] if chaos.mounted else chaos.folder.glob("below*")
    astray = (path for place in places for path in place.rglob("*") if path.is_file())
    wrong += [f"written where the volume was away: {path}" for path in astray]
    with Repository.open(store, options=chaos_worker.OPTIONS) as repository:
        view = repository.view()
        states = {s.id: s for s in view.snapshots(states=None)}
        wrong += [f"record damaged: {key}: {why}" for key, why in (*view.damaged.items(), *view.unread.items())]
        wrong += lost(entries, states) + damaged(repository)
    about = f"seed {chaos.seed}, {dict(chaos.counts)}, see {chaos.folder}"
    assert not wrong, f"{about}: {len(wrong)} wrong:\n" + "\n".join(wrong[:12])
    with Repository.open(store, options=chaos_worker.OPTIONS) as repository:
        found = check_restores(repository, about, expected=chaos_worker.expected)
        chaos._count("snapshots verified", len(found))
        before = {s.id for s in repository.snapshots()}
        assert {s.id for s in found} == before, about
        repository.save(chaos_worker.hosts.values("kept-a", 1), run="kept-a", step=STEPS, metadata=["kept-a", 1])
        repository.forget([KeepLast(3)], run="kept-a")
        while (result := repository.gc(fence_after_s=0.0)).fenced:
            pass
        assert result.waiting_for == [], about
    check_clean(store, about, expected=chaos_worker.expected)


def lost(entries: list[Entry], states: dict[str, Any]) -> list[str]:
    """Return what is lost: snapshots that were reported as committed, are gone, and cannot have been forgotten."""
    forgets = [entry for entry in entries if entry.begin["verb"] == "forget"]
    unforgets: dict[str, float] = {}
    for entry in entries:
        if entry.end is not None and "unforgotten" in entry.end:
            name = entry.end["unforgotten"]
            unforgets[name] = max(entry.began, unforgets.get(name, 0.0))
    tagged = {
        entry.end["tagged"] for entry in entries if entry.end and str(entry.end.get("tag", "")).startswith("only-")
    }
    wrong: list[str] = []
    for entry in entries:
        if entry.end is None or "committed" not in entry.end:
            continue
        name, run, version = entry.end["committed"], entry.begin["run"], entry.begin["version"]
        snapshot, plain = states.get(name), run.removeprefix(chaos_worker.FLAT)
        about = f"{plain} id:{name}, committed at {entry.end['at']:.3f}"
        if snapshot is None:
            wrong.append(f"lost: {about}: no record")
        elif snapshot.run != plain or (snapshot.write_id and version_of(snapshot) != (run, version)):
            wrong.append(f"{about}: is another snapshot: {snapshot.metadata}")
        elif snapshot.state not in ("committed", "forgotten", "swept"):
            wrong.append(f"lost: {about}: is {snapshot.state}")
        elif snapshot.state != "committed":
            last = unforgets.get(name, 0.0)
            keeps = name in tagged or any(tag.startswith("only-") for tag in entry.begin["tags"])
            if keeps or not any(_may_forget(forget, name, plain, last) for forget in forgets):
                wrong.append(
                    f"lost: {about}: is {snapshot.state} ({snapshot.reason}), and nobody can have asked for it"
                )
    return wrong


def damaged(repository: Repository) -> list[str]:
    """Return the committed and forgotten snapshots that do not restore, and why."""
    wrong: list[str] = []
    for snapshot in repository.view().snapshots(states=("committed", "forgotten")):
        about = f"{snapshot.state} {snapshot.ref} id:{snapshot.id}, created at {snapshot.created:.1f}"
        try:
            if not same(repository.restore(f"id:{snapshot.id}"), chaos_worker.expected(*version_of(snapshot))):
                wrong.append(f"lost: {about}: other bytes")
        except SnapstoreError as error:
            wrong.append(f"lost: {about}: {type(error).__name__}: {error}")
    return wrong


def _may_forget(forget: Entry, name: str, run: str, since: float) -> bool:
    """Return whether a call may have forgotten a snapshot after `since`: the begin of its last unforget, or 0."""
    if forget.ended < since:
        return False
    if forget.end is not None and "forgotten" in forget.end:
        return name in forget.end["forgotten"]
    return name in forget.begin.get("ids", ()) or forget.begin.get("run") == run

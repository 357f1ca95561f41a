"""`tools/bench scale --history`: the cost of a save, a policy, a cold start and a gc after many snapshots of a run.

history_write.py writes the histories, as pages. Each one is measured in two places: requests on a real S3 server, by
counting what botocore sends, retries included; CPU time in a folder. CPU times are medians of saves after three others,
with the floor measured in turns with them. The floor of a save is one into a run of few snapshots, in a repository
without another: one into a new run of the same repository would hide what grows with the repository. The floor of a
policy is the same run with fifty snapshots, all of them loose. Every measured run has fifty loose snapshots at first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock
from uuid import uuid4

import numpy as np
from botocore.httpsession import URLLib3Session

from benchmarks import page
from benchmarks.history_write import EACH_PAGE, RunHistory, fresh_cache, upload, write_histories
from benchmarks.page import ROOT, Row, row
from snapstore import KeepLast, Repository, SaveOptions, SnapshotManager
from snapstore.storage.base import ObjectStore
from snapstore.storage.local import LocalStore
from snapstore.storage.memory import MemoryStore
from snapstore.storage.s3.store import S3Store

MiB = 1024 * 1024
RUN, KEEP = "mine", 3
#: Saves of a measured run since its last join: fifty of its snapshots are loose then, three of them joined as kept.
LOOSE = 47
#: Saves that are measured, and saves before them: too few for a join.
WARM, MEASURED = 3, 10
#: Snapshots ever made -> the most requests of a save with a policy, in one run; and beside the other runs.
MOST_REQUESTS, MOST_BESIDE = {100_000: 55, 1_000_000: 70}, 160


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        made: snapshots ever made, of all runs.
        runs: how many runs they are spread over, beside one.
        real: real saves, to count what is left of them.
        policy: kept snapshots of the first policy.
        kept: snapshots of a run that keeps all.
        swept, beside: snapshots of the memory figure: swept, and kept.
    """

    made: Sequence[int] = (1000, 100_000, 1_000_000)
    runs: int = 300
    real: int = 10_000
    policy: int = 5000
    kept: int = 100_000
    swept: int = 1_000_000
    beside: int = 1000


QUICK = Sizes((1000, 10_000), 20, 1000, 200, 2000, 10_000, 100)


@dataclass
class Requests:
    """Counts the HTTP requests that botocore sends, of all clients of this process."""

    sent: Counter[str] = field(default_factory=Counter)

    def count(self, work: Callable[[], Any]) -> int:
        """Return the number of requests of some work."""
        before = self.sent.total()
        work()
        return self.sent.total() - before


@contextmanager
def counted() -> Iterator[Requests]:
    """Count requests until the end of the block."""
    requests, send = Requests(), URLLib3Session.send

    def sent(session: URLLib3Session, request: Any) -> Any:
        requests.sent[request.method] += 1
        return send(session, request)

    with mock.patch.object(URLLib3Session, "send", sent):
        yield requests


class Saver:
    """Saves the next steps of a run, synchronously and in one thread."""

    def __init__(self, place: Path | ObjectStore, keep: int | None, run: str = RUN) -> None:
        policies = () if keep is None else (KeepLast(keep),)
        options = SaveOptions(threads=1)
        self._manager = SnapshotManager(place, run=run, keep=policies, async_save=False, options=options)
        self._next = (self._manager.latest_step() or 0) + 1

    def __call__(self) -> None:
        """Save a step."""
        self._manager.save(self._next, {"w": np.arange(64) + self._next}, metrics={"loss": 1 / self._next})
        self._next += 1

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()


def end_policies(place: Path | ObjectStore) -> None:
    """Remove the stored policies of the run, of which a manager without any warns."""
    with Repository.open(place) as repository:
        repository.set_policies(RUN, ())


def cpu_ms(work: Callable[[], Any]) -> float:
    """Return the CPU time of a call [ms]."""
    began = time.process_time()
    work()
    return 1000 * (time.process_time() - began)


def in_turns(*works: Callable[[], Any], times: int = MEASURED) -> list[float]:
    """Return the median CPU time of each of some works, called in turns [ms]."""
    for work in works * WARM:
        work()
    took_ms = [[cpu_ms(work) for work in works] for _ in range(times)]
    return [median(column) for column in zip(*took_ms, strict=True)]


def histories_of(made: int, runs: int) -> list[RunHistory]:
    """Return runs under a policy which have made so many snapshots together; that of RUN is the first.

    The other runs are active: they have saved 0 to 62 times since their last join.
    """
    each = made // runs
    others = [RunHistory(f"other-{n}", each, KEEP, loose=min(each, n % EACH_PAGE)) for n in range(1, runs)]
    return [RunHistory(RUN, each, KEEP, loose=min(each, LOOSE)), *others]


def is_at_most(name: str, value: float, unit: str, most: float | None) -> Row:
    """Return a row with an upper limit as its goal; None: without one."""
    return row(name, value, unit) if most is None else row(name, value, unit, f"<= {most:,}", value <= most)


def cold_requests(store: S3Store, requests: Requests, after: str, runs: int) -> list[Row]:
    """Return the requests of processes that find no cache."""

    def policy() -> None:
        with Repository.open(store) as repository:
            repository.forget(KeepLast(KEEP), run=RUN)

    def restore() -> None:
        with Repository.open(store) as repository:
            assert "w" in repository.restore(f"{RUN}@latest")

    def collect() -> None:
        with Repository.open(store) as repository:
            repository.gc()

    def first_save() -> None:
        with Saver(store, KEEP) as save:
            save()

    works: dict[str, tuple[Callable[[], None], int | None]] = {
        "cold open and policy step": (policy, 100 if runs == 1 else None),
        "cold restore latest": (restore, 70 if runs == 1 else None),
        "cold gc": (collect, None if runs == 1 else 15_000),
        "cold open and first save with KeepLast(3)": (first_save, None),
    }
    rows = []
    for name, (work, most) in works.items():
        fresh_cache()
        rows.append(is_at_most(f"{name} {after}", requests.count(work), "requests", most))
    return rows


def warm_requests(store: S3Store, requests: Requests, made: int, after: str, runs: int) -> list[Row]:
    """Return the requests of saves with a policy, and without one; also of one that joins records."""
    rows, joins = list[Row](), 0
    for keep in (KEEP, None):
        if keep is None:
            end_policies(store)
        with Saver(store, keep) as save:
            warm = [requests.count(save) for _ in range(WARM)]
            measured = [requests.count(save) for _ in range(MEASURED)]
        if keep is None:
            joins = max(warm)
            rows.append(is_at_most(f"save {after} (requests_save)", mean(measured), "requests", 16))
            continue
        most = MOST_REQUESTS.get(made, 55) if runs == 1 else MOST_BESIDE
        name = f"_1e{len(str(made)) - 1}" if runs == 1 else f"_{runs - 1}_runs"
        rows.append(
            is_at_most(f"save with KeepLast(3) {after} (requests_keeplast{name})", mean(measured), "requests", most)
        )
    return [*rows, row(f"save that joins records {after}", joins, "requests")]


def saves_of(folder: Path, place: Path, after: str, runs: int) -> list[Row]:
    """Return the CPU time of saves over their floors, in a folder."""
    floor = folder / "floor"
    write_histories(floor, [RunHistory(RUN, 50, KEEP, loose=50)])
    with Saver(place, KEEP) as save, Saver(floor, KEEP) as floor_save:
        keep_ms, keep_floor_ms = in_turns(save, floor_save)
    end_policies(place)
    with Saver(place, None) as save, Saver(folder / "new", None) as floor_save:
        save_ms, floor_ms = in_turns(save, floor_save, times=2 * MEASURED)
    for made in (floor, folder / "new"):
        shutil.rmtree(made)
    most = 1.3 if runs == 1 else 1.9
    return [
        row(f"save {after}", save_ms, "ms of CPU"),
        is_at_most(f"save {after}, over one into a new run", save_ms / floor_ms, "times", 1.2),
        row(f"save with KeepLast(3) {after}", keep_ms, "ms of CPU"),
        is_at_most(f"save with KeepLast(3) {after}, over that at 50 snapshots", keep_ms / keep_floor_ms, "times", most),
    ]


def after_saves(folder: Path, url: str, made: int, runs: int) -> list[Row]:
    """Return the figures of one history: `made` snapshots in some runs."""
    after = f"after {made:,} snapshots" + (f" in {runs} runs" if runs > 1 else "")
    place = folder / "history"
    began = time.monotonic()
    objects = write_histories(place, histories_of(made, runs))
    most = made / 60 + 300 * runs
    rows = [is_at_most(f"objects {after}, as the bench writes them", objects, "", round(most))]
    store = S3Store(f"{url}/{made}-{runs}")
    upload(place, store)
    wrote_s = time.monotonic() - began
    with counted() as requests:
        rows += cold_requests(store, requests, after, runs)
        rows += warm_requests(store, requests, made, after, runs)
    store.delete([info.key for info in store.list("")])
    asked_s = time.monotonic() - began - wrote_s
    rows += saves_of(folder, place, after, runs)
    shutil.rmtree(place)
    print(f"  {after}: to write took {wrote_s:.0f} s, requests {asked_s:.0f} s", flush=True)
    return rows


def real_saves(folder: Path, count: int) -> list[Row]:
    """Return how many objects real saves leave, and the same for a history that this bench writes."""
    fresh_cache()
    store = MemoryStore()
    with Saver(store, KEEP) as save:
        save_ms = mean(cpu_ms(save) for _ in range(count))
    left = Counter(info.key.split("/")[0] for info in store.list(""))
    write_histories(folder / "written", [RunHistory(RUN, count, KEEP)])
    written = Counter(info.key.split("/")[0] for info in LocalStore(folder / "written").list(""))
    kept = left["manifests"] + left["packs"] + KEEP
    after = f"after {count:,} real saves under KeepLast(3)"
    return [
        is_at_most(f"objects {after}", left.total(), "", round(count / 60) + 300 + kept),
        row(f"pages {after}", left["pages"], ""),
        row(f"pages after {count:,} saves, as the bench writes them", written["pages"], ""),
        row(f"a save of {count:,} real ones under KeepLast(3), mean", save_ms, "ms of CPU"),
    ]


def kept_all(folder: Path, count: int) -> list[Row]:
    """Return the figures of runs that keep all snapshots: saves, and the newest lines of a log in a shell."""
    from benchmarks.scale import shell  # scale.py imports this module

    log_s = []
    for kept in (100, count):
        write_histories(folder / f"kept-{kept}", [RunHistory(RUN, kept, loose=min(kept, LOOSE))])
        took = [shell(folder / f"kept-{kept}", "log", "--limit", "20", "--run", RUN) for _ in range(4)]
        assert len(took[-1][3]["snapshots"]) == 20, took[-1][3]
        log_s.append(mean(one[1] for one in took[1:]))  # the first one fills the cache
    after = f"after {count:,} kept snapshots"
    rows = [
        row(f"log --limit 20 {after}, warm", log_s[1], "s of CPU"),
        is_at_most(f"log --limit 20 {after}, over that after 100", log_s[1] / log_s[0], "times", 1.5),
    ]
    with Saver(folder / f"kept-{count}", None) as save, Saver(folder / "new", None) as floor_save:
        save_ms, floor_ms = in_turns(save, floor_save, times=2 * MEASURED)
    return [
        *rows,
        row(f"save {after}", save_ms, "ms of CPU"),
        is_at_most(f"save {after}, over one into a new run", save_ms / floor_ms, "times", 1.2),
    ]


def use_once(place: Path, keep: int) -> None:
    """Open, list and save once with a policy; print the peak of this process's memory [KiB]."""
    with Repository.open(place) as repository:
        repository.snapshots(RUN)
    with Saver(place, keep) as save:
        save()
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


def memory(folder: Path, swept: int, kept: int) -> list[Row]:
    """Return how much more memory a process takes after many snapshots than in an empty repository."""
    histories = {
        "an empty repository": RunHistory(RUN, 0),
        f"{swept:,} swept and {kept:,} kept snapshots": RunHistory(RUN, swept + kept, KEEP, after=kept - KEEP),
        f"the same, all saved with KeepLast({kept})": RunHistory(RUN, swept + kept, kept),
    }
    rows, peaks_mib = [], list[float]()
    for name, history in histories.items():
        write_histories(folder / "memory", [history])
        code = "import sys; from pathlib import Path; from benchmarks.history import use_once\n"
        code += "use_once(Path(sys.argv[1]), int(sys.argv[2]))"
        command = [sys.executable, "-c", code, str(folder / "memory"), str(kept)]
        paths = os.environ | {"PYTHONPATH": f"{ROOT / 'tools'}:{ROOT}"}
        done = subprocess.run(command, env=paths, check=True, capture_output=True, text=True)
        peaks_mib.append(int(done.stdout.split()[-1]) / 1024)
        rows.append(row(f"memory of a process: {name}", peaks_mib[-1], "MiB"))
        shutil.rmtree(folder / "memory")
        if len(peaks_mib) > 1:
            rows.append(
                is_at_most(f"memory beyond an empty repository: {name}", peaks_mib[-1] - peaks_mib[0], "MiB", 64)
            )
    return rows


def figures(folder: Path, sizes: Sizes, only: Sequence[str] = ()) -> list[Row]:
    """Return all rows, or those of some parts: saves, policy, real, kept, memory. Each part is printed when it ends."""
    from benchmarks.scale import first_policy

    if "SNAPSTORE_TEST_S3" not in os.environ:
        sys.exit('bench: scale --history needs an S3 server: run tools/bench, or eval "$(tools/s3-server start)"')
    url = f"{os.environ['SNAPSTORE_TEST_S3']}/history-{uuid4().hex[:8]}"
    both = [(made, runs) for made in sizes.made for runs in (1, sizes.runs) if made >= 10 * runs]
    parts: list[tuple[str, Callable[[Path], list[Row]]]] = [
        *(("saves", partial(after_saves, url=url, made=made, runs=runs)) for made, runs in both),
        ("policy", partial(first_policy, count=sizes.policy)),
        ("real", partial(real_saves, count=sizes.real)),
        ("kept", partial(kept_all, count=sizes.kept)),
        ("memory", partial(memory, swept=sizes.swept, kept=sizes.beside)),
    ]
    if unknown := set(only) - {name for name, _ in parts}:
        sys.exit(f"bench: --only: no part {', '.join(sorted(unknown))}; see tools/bench scale --help")
    rows: list[Row] = []
    for number, (name, part) in enumerate(parts):
        if only and name not in only:
            continue
        below, began = folder / str(number), time.monotonic()
        below.mkdir()
        of_part = part(below)
        shutil.rmtree(below)
        print(f"{page.figures(of_part)}{name}: {time.monotonic() - began:.0f} s", flush=True)
        rows += of_part
    return rows

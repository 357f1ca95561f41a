"""When a rank of a gloo job is killed or stopped in a save, the others do not hang, and the next attempt resumes.

The ranks are real processes. After each attempt: no rank that lives hangs; none reports the save as committed if it is
not; no save and no restore has called a collective; every snapshot is whole to the bit; the job resumes from the
newest, also on another number of ranks; gc frees the rest.
"""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kit.forked import Forked
from kit.objects import flip
from kit.processes import environment
from kit.rank_worker import POINTS, expected
from kit.repositories import same
from kit.samples import SEED, THOROUGH, some
from kit.tally import EXAMPLES, tally
from snapstore import Repository
from snapstore.format.keys import pack_key
from snapstore.storage.local import LocalStore

SILENT_S = 2.0
HANG_S = 100.0


class Rank:
    """One process of a job, and the JSON that it has printed."""

    def __init__(self, folder: Path, **options):
        log = folder / f"{options['place'][-8:]}.{options['rank']}.log"
        env = environment(GLOO_SOCKET_IFNAME="lo", SNAPSTORE_THREADS="1")
        self.process = Forked("-m", "kit.rank_worker", json.dumps(options), log=log, env=env)

    def is_stopped(self):
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def text(self):
        return self.process.text()

    def words(self):
        found = {}
        for line in self.text().splitlines():
            if line.startswith("{"):
                found |= json.loads(line)
        return found


def job(folder, count, *, repository=None, strike=None, rank=None, awake_s=None, **options):
    """Run an attempt of a job; return its ranks when they have ended. `strike` is for `rank` alone."""
    repository = repository or str(folder / "repository")
    options = {"parallel": "fsdp", "steps": 2, "silent_s": SILENT_S} | options
    place = f"file://{folder}/{os.urandom(4).hex()}"
    ranks = [
        Rank(folder, place=place, repository=repository, rank=r, count=count,
             strike=strike if r == rank else None, **options)
        for r in range(count)
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + HANG_S
        others = [r for number, r in enumerate(ranks) if number != rank]
        stopped_at = None
        while any(r.process.poll() is None for r in others if r.process):
            assert time.monotonic() < deadline, "\n".join(r.text() for r in ranks)
            if rank is not None and strike[2] == "SIGSTOP" and ranks[rank].process.poll() is None:
                if stopped_at is None and ranks[rank].is_stopped():
                    stopped_at = time.monotonic()
                if stopped_at is not None and awake_s is not None and time.monotonic() > stopped_at + awake_s:
                    ranks[rank].process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
        if rank is not None:
            if awake_s is None:
                ranks[rank].process.kill()
            else:
                ranks[rank].process.send_signal(signal.SIGCONT)
            ranks[rank].process.wait(timeout=HANG_S)
        return ranks
    finally:
        for r in ranks:
            r.process.kill()
            r.process.wait()


def committed(repository):
    with Repository.open(repository) as repository:
        return {s.step for s in repository.snapshots("job")}


def packs_needed(repository, snapshot):
    """Return the keys of the packs that a snapshot of several ranks needs."""
    index = repository.context.index
    roots = [index.header(ref) for ref in snapshot.manifests]
    headers = [*roots, *(header for root in roots for header in index.headers(root.children))]
    return {pack_key(name) for header in headers for name in header.pack_names}


def check(folder, ranks, hit, repository=None):
    """Check what must hold after an attempt in which rank `hit` was struck; return the committed steps."""
    place = repository or folder / "repository"
    steps = committed(place)
    for number, rank in enumerate(ranks):
        words = rank.words()
        if number == hit and "ended" not in words:
            continue
        assert "ended" in words, rank.text()
        before, after = words["collectives"]
        assert after == before, f"a save or a restore has called collectives: {rank.text()}"
        if "committed" in words:
            assert words["committed"] in steps, rank.text()
        if "failed" in words and words["failed"] in steps:
            assert "whether it was committed" in words["error"], rank.text()
    with Repository.open(place) as repository:
        repository.gc(fence_after_s=0)
        assert repository.check("restore").ok
        for snapshot in repository.snapshots("job"):
            assert same(dict(repository.restore(f"id:{snapshot.id}", keys="model.*")["model"]), expected(snapshot.step))
        assert list(repository.store.list("sessions/")) == []
        assert repository.gc(fence_after_s=0).deleted_objects == 0
    return steps


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_a_job_saves_and_resumes_on_other_numbers_of_ranks(tmp_path, parallel):
    last = 0
    for count in (4, 2, 1):
        ranks = job(tmp_path, count, parallel=parallel, same=False)
        for rank in ranks:
            words = rank.words()
            assert words.get("committed") == last + 2, rank.text()
            assert words.get("restored", 0) == last
        last += 2
        assert check(tmp_path, ranks, None) == set(range(1, last + 1))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"] if THOROUGH else [("fsdp", "ddp")[SEED % 2]])
def test_a_job_falls_back_and_goes_on(tmp_path, parallel):
    """A pack of the newest snapshot is damaged: real ranks restore the one before, and save the same steps again."""
    job(tmp_path, 2, parallel=parallel)
    store = LocalStore(tmp_path / "repository")
    with Repository.open(store) as repository:
        newest, whole = repository.snapshot("job@2"), repository.snapshot("job@1")
        packs = [packs_needed(repository, s) for s in (newest, whole)]
    key = min(packs[0] - packs[1])
    flip(store, key, len(store.get(key)) // 2)
    ranks = job(tmp_path, 2, parallel=parallel, fallback=True)
    for rank in ranks:
        words = rank.words()
        assert (words.get("restored"), words.get("committed")) == (1, 3), rank.text()
        before, after = words["collectives"]
        assert before == after
    with Repository.open(store) as repository:
        assert {s.id for s in repository.check("restore").damaged} <= {newest.id}
        for step in (1, 2, 3):
            assert same(dict(repository.restore(f"job@{step}", keys="model.*")["model"]), expected(step))


def test_collectives_of_every_kind_are_counted(tmp_path):
    """`check` rejects a save or a restore that calls a collective; without this, that would prove nothing."""
    for rank in job(tmp_path, 2, steps=1, call=True):
        seen = rank.words().get("seen", {})
        assert "full_tensor" in seen, rank.text()
        assert all(seen.values()), seen


CASES = [(rank, point, sent) for sent in ("SIGKILL", "SIGSTOP") for rank in (0, 1) for point in POINTS[rank]]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("rank", "point", "sent"), some(CASES, 4))
def test_a_rank_is_killed_or_stopped_in_a_save(tmp_path, rank, point, sent):
    ranks = job(tmp_path, 2, strike=[1, point, sent], rank=rank)
    steps = check(tmp_path, ranks, rank)
    assert 1 in steps, "\n".join(r.text() for r in ranks)
    assert (2 in steps) == (point in ("reported", "committed", "ended")), "\n".join(r.text() for r in ranks)
    if rank == 0 and "failed" in (words := ranks[1].words()):
        assert words["error"].startswith(f"save job@{words['failed']}: rank 0"), words
        assert "; nothing was committed" in words["error"], words
        assert sent == "SIGSTOP" or "; start the job again: " in words["error"], words
    again = job(tmp_path, 2, steps=1)
    for number, r in enumerate(again):
        assert r.words().get("restored") == max(steps), r.text()
        assert r.words()["own"] == {"rank": number, "step": max(steps)}
    check(tmp_path, again, None)
    tally("ranks: processes killed" if sent == "SIGKILL" else "ranks: processes stopped")


@pytest.mark.slow
@pytest.mark.skipif(not THOROUGH, reason="test_ranks_faults.py has it on threads")
@pytest.mark.parametrize("number", range(EXAMPLES))
def test_two_attempts_at_once_one_of_which_dies_and_gcs_beside_them(tmp_path, number):
    """The other attempt commits every step; each snapshot is whole, and gc deletes nothing that it needs."""
    rank, point, _ = CASES[(SEED + number) % len(CASES)]
    job(tmp_path, 2, steps=1)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(job, tmp_path, 2 + number % 2, steps=4, same=False)
        struck = pool.submit(job, tmp_path, 2, steps=3, strike=[1, point, "SIGKILL"], rank=rank, same=False)
        while not (whole.done() and struck.done()):
            with Repository.open(tmp_path / "repository") as repository:
                repository.gc()
    for one in whole.result():
        said = [json.loads(line) for line in one.text().splitlines() if line.startswith("{")]
        assert len([words for words in said if "committed" in words]) == 4, one.text()
    check(tmp_path, whole.result(), None)
    tally("ranks: two attempts at once")


@pytest.mark.slow
@pytest.mark.parametrize("told", some([0, 1], 1))
def test_sigterm_to_one_rank_ends_all_after_one_save(tmp_path, told):
    """The ranks run at different speeds, and still save the same step."""
    place = f"file://{tmp_path}/{os.urandom(4).hex()}"
    ranks = [
        Rank(tmp_path, place=place, repository=str(tmp_path / "repository"), rank=r, count=2, parallel="ddp",
             steps=2000, silent_s=30, preempt=True)
        for r in range(2)
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + HANG_S
        while not (tmp_path / "repository" / "config").exists():
            assert time.monotonic() < deadline, "\n".join(r.text() for r in ranks)
            time.sleep(0.05)
        time.sleep(2)
        ranks[told].process.send_signal(signal.SIGTERM)
        for r in ranks:
            assert r.process.wait(timeout=HANG_S) == 128 + signal.SIGTERM, r.text()
    finally:
        for r in ranks:
            r.process.kill()
            r.process.wait()
    (step,) = committed(tmp_path / "repository")
    assert [r.words()["last"] for r in ranks] == [step, step]


@pytest.mark.slow
@pytest.mark.parametrize("rank", some([0, 1], 1))
def test_a_rank_that_wakes_up_after_the_others_have_gone_on(tmp_path, rank):
    """It neither commits the save that the others have abandoned, nor reports it as committed."""
    ranks = job(tmp_path, 2, strike=[1, "written", "SIGSTOP"], rank=rank, awake_s=3 * SILENT_S)
    assert check(tmp_path, ranks, rank) == {1}
    assert ranks[rank].words().get("failed") == 2, ranks[rank].text()

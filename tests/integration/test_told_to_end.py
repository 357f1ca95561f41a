"""A job of real ranks is told to end at a random moment: one snapshot of one step, and the next attempt resumes there.

A chain of attempts in one repository. In each, one to three random ranks are told, by SIGTERM, SIGUSR1, SIGUSR2, a file
or a URL, at random moments: before or in the restore, before the first step, in a step, in a save, while other ranks
are told too. After each: all processes end with one status, which belongs to one of the ways in which they were told;
all have saved the same step, which is the newest snapshot, once; the next attempt restores exactly its bits.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import random
import signal
import threading
import time

import pytest

from kit.forked import Forked
from kit.processes import environment
from kit.rank_worker import expected
from kit.repositories import same
from kit.samples import SEED, THOROUGH
from kit.tally import EXAMPLES, tally
from snapstore import Repository

HANG_S = 120.0
KINDS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "notice")
STATUS = {kind: 128 + getattr(signal, kind, signal.SIGTERM) for kind in KINDS}


@pytest.fixture
def notices(tmp_path):
    """Yield the URL of a server: /NAME says TRUE once the file NAME is there, and FALSE or 404 before."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            is_there = (tmp_path / self.path[1:]).exists()
            body = b"TRUE" if is_there else b"FALSE"
            self.send_response(200 if is_there or random.random() < 0.5 else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=functools.partial(server.serve_forever, 0.05), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def tellings(dice, count, *, resumes):
    """Return by rank [point, delay, kind]; of one to three ranks, and often of two at nearly the same moment."""
    chosen = dice.sample(range(count), dice.choice([1, 1, 2, min(3, count)]))
    point = dice.choice(["handled", "step 1", "step 3", "save 1", "save 2", *["restoring"] * 2 * resumes])
    delay_s = dice.choice([0.0, dice.random() * 0.01, dice.random() * 0.1, dice.random()])
    found = {}
    for number, rank in enumerate(chosen):
        later_s = dice.choice([0.0, dice.random() * 0.01, 3 * dice.random()]) if number else 0.0
        found[rank] = [point, delay_s + later_s, dice.choice(KINDS)]
    return found


def attempt(folder, url, dice, count, *, resumes):
    """Run one attempt; return what was told, and by rank the exit status and what it said."""
    told, name = tellings(dice, count, resumes=resumes), os.urandom(4).hex()
    shared = {
        "place": f"file://{folder}/{name}", "repository": str(folder / "repository"), "count": count, "timeout": 25.0,
        "parallel": dice.choice(["ddp", "fsdp"]), "every": dice.choice([3, 7, 1000]), "meets": dice.random() < 0.7,
        "async_save": dice.random() < 0.8, "on_busy": dice.choice(["wait", "skip"]), "step_s": dice.random() * 0.05,
    }  # fmt: skip
    ranks, env = [], environment(GLOO_SOCKET_IFNAME="lo", SNAPSTORE_THREADS="1")
    for rank in range(count):
        flag = f"{name}.flag{rank}"
        notice = f"{url}/{flag}" if dice.random() < 0.5 else str(folder / flag)
        own = {"rank": rank, "flag": str(folder / flag), "notice": notice, "tell": told.get(rank)}
        log = folder / f"{name}.{rank}.log"
        ranks.append(Forked("-m", "kit.told_worker", json.dumps(shared | own), log=log, env=env))
    try:
        deadline = time.monotonic() + HANG_S
        statuses = [one.wait(timeout=max(0.1, deadline - time.monotonic())) for one in ranks]
    except Exception as error:
        raise AssertionError(f"{error}: {shared} {told}\n" + "\n".join(one.text() for one in ranks)) from error
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    said = []
    for one in ranks:
        words = {}
        for line in one.text().splitlines():
            if line.startswith("{"):
                words |= json.loads(line)
        said.append(words)
    context = f"{shared} {told} {statuses}\n" + "\n".join(one.text() for one in ranks)
    return told, statuses, said, context


def run_chain(folder, url, seed, attempts, count=4):
    """Run a chain of attempts, and check each; return the times from the first telling to the last end [s]."""
    dice, before, times = random.Random(seed), 0, []
    for number in range(attempts):
        told, statuses, said, context = attempt(folder, url, dice, count, resumes=number > 0)
        context = f"seed {seed}, attempt {number}: {context}"
        assert len(set(statuses)) == 1, context
        assert statuses[0] in {STATUS[kind] for *_, kind in told.values()}, context
        assert {words["status"] for words in said} == set(statuses), context
        assert {words.get("restored", 0) for words in said} == {before}, context
        assert not before or all(words["same"] for words in said), context
        assert len({words["last"] for words in said}) == 1, context
        last = said[0]["last"]
        with Repository.open(folder / "repository") as repository:
            made = [one.step for one in repository.snapshots("job") if one.step > before]
            assert max(made) == last > before, context
            assert len(made) == len(set(made)), context
            assert same(dict(repository.restore(f"job@{last}", keys="model.*")["model"]), expected(last)), context
            assert list(repository.store.list("sessions/")) == [], context
        first = min(words["told_at"] for words in said if "told_at" in words)
        times.append(max(words["ended_at"] for words in said) - first)
        before = last
        tally("jobs of four ranks told to end")
    with Repository.open(folder / "repository") as repository:
        assert repository.check("restore").ok
    return times


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("chain", range(20 * EXAMPLES if THOROUGH else 1))
def test_a_job_that_is_told_to_end_saves_one_step_and_resumes_there(tmp_path, notices, chain):
    run_chain(tmp_path, notices, SEED + 1000 * chain, 10 if THOROUGH else 2)

"""Ranks save a snapshot to S3 whole or not at all, also if one rank's requests fail or its process is killed."""

from __future__ import annotations

import os

import pytest
from test_rank_processes import CASES, check, job

from kit.ranks import part_of, save_shared
from kit.repositories import OPTIONS, check_clean, opened, same, values
from kit.s3_stores import fresh_url, impatient, needs_server
from kit.samples import some
from kit.tally import tally
from kit.tcp_proxy import Proxy, answer, lose_answer
from snapstore import Repository, Snapshot, StorageError
from snapstore.storage.s3.store import S3Store

pytestmark = needs_server
KILLS = [(rank, point) for rank, point, sent in CASES if sent == "SIGKILL"]


@pytest.fixture
def url():
    found = fresh_url()
    Repository.create(found, chunk_bytes=1024, options=OPTIONS).close()
    return found


def test_ranks_save_and_others_restore(url):
    for step, count in enumerate((3, 2)):
        words = save_shared([url] * count, "a", step, step)
        assert all(isinstance(word, Snapshot) and word.id == words[0].id for word in words), words
    assert words[0].depth > 0
    whole = values("a", 1)["model"]["drift"]
    with opened(url) as repository:
        for rank in range(4):
            target = part_of(whole.new_zeros(whole.shape), rank, 4)
            repository.restore_into("a@1", {"model": {"drift": target}}, keys="model.drift")
            assert same(target.data, part_of(whole, rank, 4).data)
        repository.forget_snapshots(["a@0"])
        repository.gc()
    check_clean(S3Store(url))


@pytest.mark.parametrize("rank", some(range(2), 1))
@pytest.mark.parametrize("fault", ["lost answers", "no answers to PUT"])
def test_the_requests_of_one_rank_fail(url, monkeypatch, rank, fault):
    """A rank repeats requests whose answers are lost; a rank that cannot write ends the save on all ranks."""
    save_shared([url] * 2, "a", 0, 0)
    with Proxy(os.environ["AWS_ENDPOINT_URL_S3"].removeprefix("http://")) as proxy:
        straight = S3Store(url)
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
            faulty = impatient(url)
        if fault == "lost answers":
            proxy.fault(lambda method, target: method == "PUT", lose_answer(), times=2)
        else:
            proxy.fault(lambda method, target: method == "PUT", answer(503, "SlowDown"), times=10**6)
        stores = [faulty if number == rank else straight for number in range(2)]
        words = save_shared(stores, "a", 1, 1)
        if fault == "lost answers":
            assert all(isinstance(word, Snapshot) for word in words), words
        else:
            assert all(isinstance(word, StorageError) for word in words), words
            assert f"rank {rank}" in str(words[1 - rank])
    with opened(url) as repository:
        assert [s.step for s in repository.snapshots("a")] == [0, 1][: 2 if fault == "lost answers" else 1]
    words = save_shared([url] * 3, "a", 2, 2)
    assert all(isinstance(word, Snapshot) for word in words), words
    with opened(url) as repository:
        repository.gc(fence_after_s=0)
    check_clean(S3Store(url))
    tally("ranks: S3 faults")


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "point"), some(KILLS, 1))
def test_a_process_is_killed_in_a_save(tmp_path, rank, point):
    """The result is the same as on a disk; S3 has no locks, so a gc fences the dead session after a time of silence."""
    repository = fresh_url()
    ranks = job(tmp_path, 2, repository=repository, strike=[1, point, "SIGKILL"], rank=rank)
    steps = check(tmp_path, ranks, rank, repository)
    assert (2 in steps) == (point in ("reported", "committed", "ended")), "\n".join(r.text() for r in ranks)
    again = job(tmp_path, 3, repository=repository, steps=1, same=False)
    assert {r.words().get("restored") for r in again} == {max(steps)}, "\n".join(r.text() for r in again)
    check(tmp_path, again, None, repository)
    tally("ranks: processes killed")

"""Every verb of the shell ends soon, with a result or an error, whatever numbers, times and names a record has."""

import contextlib
import shutil
import tempfile
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kit.forge import little_memory, little_time
from kit.repositories import created, opened
from kit.samples import SEED, THOROUGH, examples
from kit.shell import invoke
from kit.tally import EXAMPLES, tally
from snapstore import KeepEvery, KeepLast, KeepWithin, Repository, SaveOptions, retention
from snapstore.catalog import policy_store
from snapstore.errors import InvalidInputError, SnapstoreError
from snapstore.format import records
from snapstore.format.keys import record_key
from snapstore.format.records import RunPolicies, Snapshot
from snapstore.state.tree.encode import encode_plain

MIB = 1024 * 1024
TIMES = st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e300, -1e300, 253402300800.0, -62135596801.0, 0.0])
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**53 - 1, 2**53, 2**63 - 1, 2**64 - 1, -(2**63), 10**12])
TEXTS = st.sampled_from(
    ["", "x", "\x1b[31m", "\u202e", "ü" * 1000, "@", "r@0", "a.b", "\0", "latest", "7", "x" * 10**5]
)
METADATA = st.sampled_from([None, 10**5000, [[[1]]], {"a": 1}, {(10**5000,): 2}, "x" * 10_000, float("nan"), "\udc80"])
FIELDS = {
    "step": st.sampled_from([5, 7, 10**12 - 1]), "seq": NUMBERS, "revision": st.sampled_from([0, 1, 10**9 - 1]),
    "state": st.sampled_from(["committed", "forgotten", "aborted", "swept", "novel"]), "write_id": TEXTS,
    "parent": st.none() | TEXTS | st.sampled_from(["a" * 32, "b" * 32]),
    "bases": st.lists(TEXTS | st.sampled_from(["a" * 32, "b" * 32]), max_size=3), "tags": st.lists(TEXTS, max_size=3),
    "metrics": st.dictionaries(TEXTS, TIMES, max_size=3), "metadata_node": METADATA, "created": TIMES,
    "generation": NUMBERS, "depth": NUMBERS, "chunks": NUMBERS, "new_chunks": NUMBERS, "stored_bytes": NUMBERS,
    "stall_s": TIMES, "total_s": TIMES, "policy": TEXTS, "reason": TEXTS,
}  # fmt: skip
VERBS = (
    ["log"], ["log", "--all", "--json"], ["log", "-n", "1"], ["show", "id:b"], ["show", "id:b", "--json"],
    ["stats"], ["blame", "r"], ["du"], ["check"], ["check", "--restore", "--json"], ["gc", "-n"], ["gc"],
    ["compact", "-n"], ["repair"], ["repair", "--apply"], ["tag", "id:b", "t"], ["untag", "id:b", "x"],
    ["diff", "r@0", "id:b"], ["unforget", "id:b"], ["forget", "--run", "r", "--keep-last", "1", "-n"],
    ["forget", "--run", "r", "--keep-within", "1d"],
    ["forget", "--run", "r", "--keep-best", "x"], ["forget", "id:b", "--force"], ["index", "rebuild"],
    ["restore", "id:b", "-o", "out.pt", "--force"], ["recode", "--all", "-n"],
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make a repository of one snapshot; return it and the snapshot's record."""
    folder = tmp_path_factory.mktemp("records") / "repo"
    with Repository.create(folder, chunk_bytes=1024, options=SaveOptions(threads=1)) as repository:
        repository.save({"w": np.arange(2000), "n": 1}, run="r", step=0)
        return folder, repository.snapshot("r@0")


@contextlib.contextmanager
def copied(folder, tmp_path_factory):
    """Yield a copy of a repository in a place that no other copy had: the index of a place knows what was lost there.

    The copy stays if the block fails.
    """
    place = Path(tempfile.mkdtemp(prefix="place-", dir=tmp_path_factory.getbasetemp()))
    shutil.copytree(folder, place / "repo")
    yield place / "repo"
    shutil.rmtree(place)


@settings(max_examples=10 * EXAMPLES, deadline=None)
@given(st.fixed_dictionaries({}, optional=FIELDS), st.lists(st.sampled_from(VERBS), min_size=1, max_size=5))
@example({"created": 1e300, "stall_s": float("nan")}, [["log"], ["show", "id:b"], ["show", "id:b", "--json"]])
@example({"metadata_node": 10**5000}, [["show", "id:b"], ["show", "id:b", "--json"]])
@example({"seq": 2**64 - 1}, [["log"], ["tag", "id:b", "t"]])
@example({"seq": 2**53}, [["log"], ["tag", "id:b", "t"]])
@example({"seq": 2, "generation": 2**53}, [["log"]])
@example({"revision": 10**9 - 1}, [["tag", "id:b", "t"], ["forget", "id:b", "--force"], ["repair", "--apply"]])
def test_any_record(made, tmp_path_factory, changes, verbs):
    """Mitigation: fields are typed, and every verb works with any value that the types allow."""
    tally("fuzz inputs")
    folder, good = made
    if "metadata_node" in changes:
        changes["metadata_node"] = msgspec.Raw(msgspec.msgpack.encode(encode_plain(changes["metadata_node"])))
    forged = msgspec.structs.replace(good, **{"id": "b" * 32, "step": 5, "seq": 1} | changes)
    with copied(folder, tmp_path_factory) as root:
        (root / record_key("r", forged.step, forged.id, forged.revision)).write_bytes(records.encode(forged))
        with contextlib.chdir(root.parent):
            for args in verbs:
                traced = THOROUGH or zlib.crc32(repr(args).encode()) % 5 == SEED % 5  # it takes five times as long
                with little_memory(128 * MIB) if traced else little_time():
                    result = invoke(args, env={"SNAPSTORE_REPO": str(root)})
                said = (args, result.exit_code, result.output[-2000:], result.exception)
                assert result.exception is None or isinstance(result.exception, SystemExit), said
                assert "this is a bug" not in result.output, said
            with Repository.open(root, options=SaveOptions(threads=1)) as repository:
                for _ in range(2):  # the second save takes its number from the first
                    saved = repository.save({"w": np.arange(2000) + 1}, run="r", step=9)
                    assert repository.restore(f"id:{saved.id}")["w"][0] == 1
                assert (repository.restore(f"id:{good.id}")["w"] == np.arange(2000)).all()


SEQS = st.sampled_from([2**64 - 1, 2**63, 2**53 + 1, 2**53, 2**53 - 1, 2**42, 2**40 - 1, 9])


@settings(max_examples=10 * EXAMPLES, deadline=None)
@given(st.lists(SEQS, min_size=1, max_size=4), st.sampled_from(["committed", "forgotten", "aborted", "swept"]))
@example([2**64 - 1], "committed")
@example([2**53], "aborted")
@example([2**40 * (number + 1) for number in range(40)], "committed")
def test_forged_seqs_stop_no_save_and_are_repaired(made, tmp_path_factory, seqs, state):
    """New saves take numbers below the forged ones; a repair gives those snapshots numbers below the new saves."""
    tally("fuzz inputs")
    folder, good = made
    with copied(folder, tmp_path_factory) as root:
        for number, seq in enumerate(seqs):
            forged = msgspec.structs.replace(good, id=f"{number:032x}", step=5, seq=seq, state=state)
            (root / forged.key).write_bytes(records.encode(forged))
        with Repository.open(root, options=SaveOptions(threads=1)) as repository:
            first = repository.save({"w": np.arange(2000) + 1}, run="r", step=7)
            assert repository.save({"w": np.arange(2000) + 2}, run="r", step=8).seq > first.seq
            assert repository.repair(apply=True).ok
            assert repository.save({"w": np.arange(2000) + 3}, run="r", step=9).seq < 2**50
            assert repository.snapshot("r@latest").step == 9
            order = [s.step for s in repository.view().snapshots("r", states=None) if s.state != "aborted" or s.seq]
            assert order[-3:] == [7, 8, 9]
            assert len(order) == 4 + len(seqs)
            repository.gc()
            assert repository.check("restore").ok
            assert repository.repair().actions[0].kind == "index"


POLICIES = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(
            ["KeepLast", "KeepEvery", "KeepBest", "KeepWithin", "KeepSteps", "KeepDaily", "KeepBytes", "x"]
        )
    },
    optional={
        name: NUMBERS | TIMES | TEXTS | st.none() | st.lists(NUMBERS | TEXTS, max_size=3)
        for name in ("n", "steps", "metric", "mode", "duration", "size", "y")
    },
)


@settings(max_examples=examples(40) * EXAMPLES, deadline=None)
@given(st.lists(POLICIES, max_size=4))
def test_any_policy(made, stored):
    """Mitigation: stored policies are built by their own constructors, which check the arguments."""
    tally("fuzz inputs")
    data = records.encode(RunPolicies(run="r", revision=0, policies=stored))
    with little_memory(), contextlib.suppress(SnapstoreError):
        found = policy_store.decode(data, "policies/r.0")
        made_of = [retention.from_dict(policy) for policy in found]
        retention.apply(made_of, [made[1]], force=True)
        assert retention.describe(made_of)


@pytest.mark.parametrize("revision", [str(2**64 - 1), "10000000000", "9" * 200, "07", "999999999"])
def test_a_forged_revision_of_policies(revision):
    """It would leave no number for later policies. No snapstore writes so many revisions: the object is not ours."""
    store = created()
    policy = RunPolicies(run="a", revision=min(int(revision), 2**64 - 1), policies=[])
    store.put(f"policies/a.{revision}", records.encode(policy))
    with opened(store) as repository:
        if revision == "999999999":
            with pytest.raises(InvalidInputError, match=r"policies/a\.999999999: .* remove this object"):
                repository.set_policies("a", [KeepLast(2)])
            return
        (stray,) = repository.check().problems
        assert (stray.kind, stray.key) == ("policy", f"policies/a.{revision}")
        repository.set_policies("a", [KeepLast(2)])
        assert repository.policies("a") == [KeepLast(2)]


def test_policies_of_every_kind_are_stored_and_read():
    from snapstore import retention

    keep = [
        KeepLast(3),
        KeepEvery(steps=7),
        KeepWithin("3d"),
        retention.KeepSteps((1, 2)),
        retention.KeepBest("x", n=2),
    ]
    data = records.encode(RunPolicies(run="r", revision=0, policies=[retention.to_dict(policy) for policy in keep]))
    assert [retention.from_dict(policy) for policy in policy_store.decode(data, "policies/r.0")] == keep


def test_a_record_of_a_hundred_thousand_tags():
    """Tags take memory by their stored bytes: each of them is one string."""
    snapshot = Snapshot(
        id="b" * 32, run="r", step=5, seq=1, state="committed", write_id="", tags=[f"t{i}" for i in range(100_000)]
    )
    with little_memory(32 * MIB):
        assert len(records.decode(records.encode(snapshot), Snapshot, snapshot.key).tags) == 100_000

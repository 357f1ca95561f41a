"""Every verb ends soon on small objects that ask for much work: declared sizes, shared chains, many names."""

import functools
import os
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.forge import (
    MIB,
    World,
    budget,
    delta,
    difference,
    digest,
    forge_blob,
    full,
    header_of,
    little_memory,
    little_time,
    noise,
    reheader,
    rewrite,
)
from kit.processes import run_python
from kit.samples import THOROUGH, sampled
from kit.shell import invoke
from kit.tally import EXAMPLES, tally
from snapstore import Repository, SaveOptions
from snapstore.chunks import limits
from snapstore.errors import CapabilityError, FormatError, IntegrityError, NotFoundError, SnapstoreError
from snapstore.format import records
from snapstore.format.manifests import manifest
from snapstore.format.manifests.manifest import Box, TensorEntry
from snapstore.state.tree.encode import encode_plain

GIB = 1024 * MIB


def zeros(size, heads, depth, *, kept=True):
    """Make chains of `depth` blobs that share all but the newest; `kept`: their references name chunks of the table."""
    world, zero = World(size), np.zeros(size, np.uint8)
    base, same = world.whole_pack(full(zero), delta(zero, zero))
    others = [zero.copy() for _ in range(heads)]
    for i, other in enumerate(others):
        other[i] = 1
    newest = world.whole_pack(*(delta(other, zero) for other in others))
    chains = [
        (digest(other), [head, *[same] * (depth - 2), base][-depth:])
        for other, head in zip(others, newest, strict=True)
    ]
    table = world.table(chains)
    if not kept:
        table.ref_digests[:] = np.frombuffer(digest(zero), np.uint8)
        table.ref_digests[table.starts[:-1]] = table.digests
    world.commit(world.manifest(chains, table=table))
    return world


VERBS = {
    "restore": lambda repo: repo.restore("r@0"),
    "check": lambda repo: repo.check("restore"),
    "stats": lambda repo: repo.stats(),
    "du": lambda repo: repo.du("tensor"),
    "diff": lambda repo: repo.diff("r@0", "r@0"),
    "compact": lambda repo: repo.compact(),
    "recode": lambda repo: repo.recode(["r@0"]),
    "repair": lambda repo: repo.repair(level="restore", apply=True, drop=True, purge=True),
    "gc": lambda repo: repo.gc(),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("verb", VERBS)
def test_chains_that_share_their_blobs(verb, kept):
    """200 KB whose chains take 10 GB of decoding. Mitigation: work is counted first; stored bytes set its limit."""
    world = zeros(MIB, 40, 255, kept=kept)
    assert world.stored_bytes < 250_000
    with world.open() as repo, little_time(5.0):
        try:
            VERBS[verb](repo)
        except CapabilityError as error:
            assert "has to decode 10.7GB" in str(error)  # noqa: PT017
        else:
            assert verb != "restore"
    if verb == "check":
        with world.open() as repo:
            result = repo.check("restore")
            assert "SNAPSTORE_MAX_DECODED=10695475200" in result.problems[0].message
            assert not result.ok
            assert (result.damaged, [s.ref for s in result.unknown]) == ([], ["r@0"])
            assert result.decoded_bytes == 0


def test_the_limit_can_be_raised(monkeypatch):
    world = zeros(64 * 1024, 20, 200)
    monkeypatch.setattr(limits, "MIN_DECODED_BYTES", MIB)
    monkeypatch.setattr(limits, "DECODED_RATIO", 1)
    with world.open() as repo:
        with pytest.raises(CapabilityError, match=r"restoring 1.3MB: has to decode 262.1MB \(262144000 bytes\)"):
            repo.restore("r@0")
        assert not repo.check("restore").ok
        assert not repo.check("restore", max_decoded_bytes=262_143_999).ok
        assert repo.check("restore", max_decoded_bytes=262_144_000).ok
        monkeypatch.setenv("SNAPSTORE_MAX_DECODED", "250M")
        assert repo.check("restore").ok
        assert repo.restore("r@0")["w"].numpy().sum() == 20
        monkeypatch.setenv("SNAPSTORE_MAX_DECODED", "many")
        with pytest.raises(ValueError, match="SNAPSTORE_MAX_DECODED=many: expected a number of bytes"):
            repo.restore("r@0")


def test_no_chain_that_a_save_makes_reaches_the_limit(monkeypatch, tmp_path):
    """Equal chunks are stored once and decoded once each, so stored bytes explain little of the work."""
    monkeypatch.setattr(limits, "MIN_DECODED_BYTES", 0)
    monkeypatch.setattr(limits, "DECODED_RATIO", 1)
    rows, one = 50, np.random.default_rng(0).standard_normal(2048).astype(np.float32)
    restored = {*sampled(60, 15), 59}
    with Repository.create(tmp_path / "repo", chunk_bytes=one.nbytes) as repo:
        for step in range(60):
            one.view(np.uint32)[step] += 1
            saved = repo.save({"w": np.tile(one, (rows, 1))}, run="r", step=step)
            if step in restored:
                np.testing.assert_array_equal(repo.restore(saved.ref)["w"], np.tile(one, (rows, 1)))
        assert max(manifest.read(repo.store, saved.manifests[0], None).table.depths) > 16


def test_the_shell_passes_the_limit_on(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MIN_DECODED_BYTES", 0)
    monkeypatch.setattr(limits, "DECODED_RATIO", 0)
    with Repository.create(tmp_path / "repo") as repo:
        repo.save({"w": noise(1, MIB)}, run="r", step=0)
    env = {"SNAPSTORE_REPO": str(tmp_path / "repo")}
    for args, code in (
        (["--max-decoded", "2M"], 0), (["--max-decoded", "1000K"], 20), ([], 20), (["--max-decoded", "much"], 2),
    ):  # fmt: skip
        result = invoke(["check", "--restore", *args], env=env)
        assert result.exit_code == code, result.output
        assert ("1.0MB decoded" in result.output) == (code == 0)


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_a_record_that_says_a_thousand_bytes_and_restores_four_gibibytes():
    """Mitigation: the record's size must be that of its manifests, and theirs that of their tables."""
    world, (zero, stored) = World(8 * MIB), zero_blob(8 * MIB)
    (place,) = world.whole_pack(stored)
    data = world.manifest([(zero, [place])] * 512)
    ref = world.commit(data).manifests[0]
    lies = {
        "the record": (data, {"logical_bytes": 1000}),
        "and the reference": (data, {"manifests": [msgspec.structs.replace(ref, logical_bytes=1000)]}),
        "and the header": (reheader(data, logical_bytes=1000), {}),
    }  # fmt: skip
    for told, changes in lies.values():
        world.store._objects.pop(f"snapshots/r/{0:012d}-{'a' * 32}.0")
        if "manifests" not in changes:
            world.commit(told, **changes)
        else:
            world.commit(**changes)
        with budget(world), world.open() as repo:
            with pytest.raises(
                (FormatError, IntegrityError), match=r"\b1000\b.*\b4294967296\b|\b4294967296\b.*\b1000\b"
            ):
                repo.restore("r@0")
            result = repo.check("restore")
        assert not result.ok
        assert result.restorable == []


def test_tensors_that_share_chunks():
    """Mitigation: a chunk is in one box, so the rows of the table bound the restored bytes."""
    world, chunk = World(), noise(1)
    (place,) = world.pack(full(chunk))
    entries = [
        TensorEntry((f"w{i}",), "tensor", "uint8", (world.size,), False, None, (Box((0,), (world.size,), 0, 1),), None)
        for i in range(5000)
    ]
    tree = ["dict", [f"w{i}" for i in range(5000)], [["tensor", i, False] for i in range(5000)]]
    for logical_bytes in (world.size, 5000 * world.size):
        again = World()
        again.store, again.packs = world.store, world.packs
        again.commit(
            again.manifest([(digest(chunk), [place])], tensors=entries, tree=tree, logical_bytes=logical_bytes),
            id=records.new_id(),
        )
    with budget(world), world.open() as repo:
        for snapshot in repo.snapshots():
            with pytest.raises(FormatError, match=r"chunks 0.1, expected the next from 1: each has one tensor"):
                repo.restore(f"id:{snapshot.id}")
        assert repo.check("metadata").restorable == []


@functools.cache
def zero_blob(size):
    return digest(np.zeros(size, np.uint8)), full(np.zeros(size, np.uint8))


def claim(gibibytes, size=64 * MIB):
    """Make a repository whose one chunk is stored once and fills a huge tensor; nothing in it is false."""
    world, (zero, data) = World(size), zero_blob(size)
    (place,) = world.whole_pack(data)
    world.commit(world.manifest([(zero, [place])] * (gibibytes * GIB // size)))
    return world


def test_a_terabyte_that_is_stored_in_half_a_megabyte(monkeypatch):
    """It may be honest, so it is no damage. Mitigation: a restore that does not fit into memory is refused at once."""
    world = claim(1250)
    assert world.stored_bytes < 700_000
    for verb, run in VERBS.items():
        with budget(world), world.open() as repo:
            if verb == "restore":
                with pytest.raises(
                    CapabilityError, match=r"1342177280000 bytes\) of memory, .* are available here; rest"
                ):
                    run(repo)
            elif verb == "check":
                result = run(repo)
                assert result.ok
                assert result.decoded_bytes == 64 * MIB
            else:
                run(repo)
    monkeypatch.setenv("SNAPSTORE_MAX_MEMORY", "64M")
    with claim(1).open() as repo, pytest.raises(CapabilityError, match=r"67.1MB are allowed by SNAPSTORE_MAX_MEMORY"):
        repo.restore("r@0")


def test_restoring_into_tensors_takes_no_memory(monkeypatch):
    monkeypatch.setenv("SNAPSTORE_MAX_MEMORY", "0")
    monkeypatch.setattr(limits, "SMALL_BYTES", 0)
    with Repository.open(World(MIB).store, options=SaveOptions(threads=1)) as repo:
        state = {"a": np.arange(2**20, dtype=np.float32), "b": [np.ones(10**6)], "text": b"x" * 10**6}
        repo.save(state, run="r", step=0)
        with pytest.raises(CapabilityError, match=r"restoring 3 tensors: needs 13.2MB \(13194304 bytes\)"):
            repo.restore("r@0")
        with pytest.raises(CapabilityError, match=r"needs 8.0MB"):
            repo.restore("r@0", keys="b")
        mine = {"a": np.zeros(2**20, np.float32), "b": [np.zeros(10**6)]}
        repo.restore_into("r@0", mine, keys=["a", "b"])
        np.testing.assert_array_equal(mine["a"], state["a"])
        np.testing.assert_array_equal(mine["b"][0], state["b"][0])


LIMITED = """
import resource, sys
sys.path[:0] = {path!r}
import test_work
from snapstore.errors import CapabilityError
with test_work.claim(4, 2**23).open() as repo:
    for which, at in ((resource.RLIMIT_DATA, 5), (resource.RLIMIT_AS, 0)):
        used = int(open("/proc/self/statm").read().split()[at]) * resource.getpagesize()
        before = resource.getrlimit(which)
        resource.setrlimit(which, (used + 2**31, before[1]))
        try:
            repo.restore("r@0")
        except CapabilityError as error:
            assert "(4294967296 bytes) of memory" in str(error), error
        else:
            raise SystemExit("restored")
        resource.setrlimit(which, before)
"""


def test_limits_of_a_process():
    """`ulimit -d` and `-v` count: no MemoryError half way."""
    code = LIMITED.format(path=sys.path)
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


# --- what is honest, and small --------------------------------------------------------------------------------------


def test_sparse_deltas_of_long_chains_are_each_decoded_once():
    """A new state, of which each of many steps changes a thousandth, stays far from every limit."""
    rng, state = np.random.default_rng(1), {"w": np.zeros(2**17, np.float32)}
    steps = 200 if THOROUGH else 40
    world = World(MIB // 4)
    options = SaveOptions(threads=1, restore_cost=100.0)
    with Repository.open(world.store, options=options) as repo:
        for step in range(steps):
            state["w"][rng.integers(0, 2**17, 130)] += rng.standard_normal(130).astype(np.float32)
            repo.save(state, run="r", step=step)
        result = repo.check("restore")
        assert result.ok
        assert len(result.restorable) == steps
        chunks = MIB // 2 * steps
        assert chunks <= result.decoded_bytes <= 1.5 * chunks  # not steps / 2 times as much
        assert result.decoded_bytes < limits.DECODED_RATIO / 16 * world.stored_bytes
        np.testing.assert_array_equal(repo.restore("r@latest")["w"], state["w"])


def test_a_constant_state_is_decoded_once(monkeypatch):
    monkeypatch.setattr(limits, "MIN_DECODED_BYTES", 0)
    world = World(MIB)
    with Repository.open(world.store, options=SaveOptions(threads=1)) as repo:
        for step in range(4):
            repo.save({"w": np.zeros(64 * MIB, np.uint8), "v": np.full(2**20, step, np.float32)}, run="r", step=step)
        result = repo.check("restore")
        assert result.ok
        assert result.decoded_bytes <= 2 * 5 * MIB
        assert repo.restore("r@3")["w"].sum() == 0
        assert repo.diff("r@0", "r@3").tensors[1].changed_share == 1


def test_older_snapshots_are_proven_by_newer_ones_only_where_they_are_good():
    """A chain has a blob in its middle that does not give its chunk, and a newest blob that compensates for it."""
    world = World()
    a, b, c, wrong = noise(1), noise(2), noise(3), noise(4)
    broken = forge_blob(difference(wrong, a), digest(b), digest(a))
    made_up_for = forge_blob(difference(c, wrong), digest(c), digest(b))
    pa, pb, pc = world.pack(full(a), broken, made_up_for)
    chains = [(digest(c), [pc, pb, pa]), (digest(b), [pb, pa])]
    for seq, chain in enumerate(reversed(chains)):
        table = world.table([chain])
        names = [digest(c), digest(b), digest(a)][-len(chain[1]) :]
        table.ref_digests = np.array([list(name) for name in names], np.uint8)
        world.commit(world.manifest([chain], table=table), id=f"{seq:032x}", step=seq, seq=seq)
    with world.open() as repo:
        np.testing.assert_array_equal(repo.restore("r@1")["w"].numpy(), c)
        with pytest.raises(IntegrityError, match="digest mismatch"):
            repo.restore("r@0")
        result = repo.check("restore")
        assert "r@0" in {s.ref for s in result.damaged}  # and r@1, since a repair does not trust the blob
        assert result.restorable == []


def test_one_blob_in_two_chains_of_which_one_is_broken():
    """The newest blob of a chain is only as good as the blobs below it."""
    world = World()
    a, b = noise(1), noise(2)
    pb, pa, bad = world.pack(delta(b, a), full(a), full(b))
    for seq, base in enumerate((bad, pa, bad)):
        world.commit(world.manifest([(digest(b), [pb, base])]), id=f"{seq:032x}", step=seq, seq=seq)
    world.commit(world.manifest([(digest(b), [pb, pa]), (digest(b), [pb, bad])]), id=f"{9:032x}", step=9, seq=9)
    with world.open() as repo:
        result = repo.check("restore")
        assert {s.ref for s in result.damaged} >= {"r@0", "r@2", "r@9"}
        np.testing.assert_array_equal(repo.restore("r@1")["w"].numpy(), b)


def test_a_blob_that_two_snapshots_have_and_that_gives_neither_chunk():
    """The first snapshot that needs the blob finds it damaged; all later ones are damaged as well."""
    world = World()
    a, b, c = noise(1), noise(2), noise(3)
    wrong, onto = world.pack(rewrite(full(a), digest=digest(b)), delta(c, b))
    for seq, chain in enumerate([[wrong], [wrong], [onto, wrong], [wrong]]):
        chunk = c if len(chain) == 2 else b
        world.commit(world.manifest([(digest(chunk), chain)], sequence=seq), id=f"{seq:032x}", step=seq, seq=seq)
    with world.open() as repo:
        result = repo.check("restore")
        assert result.restorable == []
        assert [s.ref for s in result.damaged] == ["r@0", "r@1", "r@2", "r@3"]


# --- everything at once ---------------------------------------------------------------------------------------------


@st.composite
def hostile(draw):
    """Draw a repository of few bytes that declares and shares much; some are honest."""
    size = draw(st.sampled_from([64, 8192, MIB, 16 * MIB]))
    heads, depth = draw(st.integers(1, 20)), draw(st.sampled_from([1, 2, 9, 100, 255]))
    world = zeros(size, heads, depth, kept=draw(st.booleans()))
    store = world.store
    (key,) = [key for key in store._objects if key.startswith("manifests/")]
    data = store.get(key)
    m = manifest.decode(data, "m")
    rows = np.array(draw(st.lists(st.integers(0, heads - 1), min_size=1, max_size=500)), np.int64)
    changes = {}
    if draw(st.booleans()):  # many rows of few blobs
        table = m.table.take(rows)
        n = len(table)
        entry = msgspec.structs.replace(m.tensors[0], shape=(n * size,), boxes=(Box((0,), (n * size,), 0, n),))
        changes = {"table": table, "tensors": [entry], "logical_bytes": n * size}
    if draw(st.integers(0, 4)) == 0:  # many tensors of few rows
        changes["tensors"] = (changes.get("tensors") or m.tensors) * draw(st.integers(1, 300))
        changes["tree"] = ["list", [["tensor", i, False] for i in range(len(changes["tensors"]))]]
    if draw(st.integers(0, 4)) == 0:
        changes["logical_bytes"] = draw(st.sampled_from([0, 1000, 2**40, 2**62]))
    if draw(st.integers(0, 4)) == 0:
        node = draw(st.sampled_from([["list", []], None, ["dict", [], []], 2**63, ["set", [1, 2]]]))
        changes["tree"] = ["list", [node] * draw(st.sampled_from([10, 10_000, 200_000]))]
    if draw(st.integers(0, 4)) == 0:
        keys = [["int", (i * (2**61 - 1)).to_bytes(12, "little")] for i in range(draw(st.integers(1, 20_000)))]
        changes["tree"] = draw(st.sampled_from([["set", keys], ["dict", keys, [None] * len(keys)]]))
    fields = {
        "tree": m.tree, "tensors": m.tensors, "table": m.table, "packs": m.header.pack_names,
        "pack_sizes": m.header.pack_size_list, "logical_bytes": m.header.logical_bytes, "inline": b"",
    } | changes  # fmt: skip
    made = world.manifest(**fields)
    for number in range(draw(st.integers(1, 3))):
        lie = {"logical_bytes": 1000} if draw(st.integers(0, 4)) == 0 else {}
        world.commit(made, id=f"{number:032x}", step=number + 1, seq=number + 1, **lie)
    return world


@settings(max_examples=5 * EXAMPLES, deadline=None)
@given(hostile(), st.lists(st.sampled_from(sorted(VERBS)), min_size=1, max_size=4))
def test_every_verb_on_every_hostile_repository(world, verbs):
    """Mitigation: all of the above. The stored bytes and the limit on decoding bound time and memory."""
    tally("fuzz inputs")
    before, ratio = limits.MIN_DECODED_BYTES, limits.DECODED_RATIO
    limits.MIN_DECODED_BYTES = 64 * MIB
    try:
        with world.open() as repo:
            for verb in verbs:
                with budget(world, decoded_bytes=64 * MIB + ratio * world.stored_bytes, fits=verb == "restore"):
                    try:
                        VERBS[verb](repo)
                    except SnapstoreError:
                        continue
    finally:
        limits.MIN_DECODED_BYTES = before


def test_the_hostile_repositories_are_good_ones():
    with zeros(8192, 5, 9).open() as repo:
        assert repo.restore("r@0")["w"].numpy().sum() == 5
        assert repo.check("restore").ok
    (manifested,) = (data for key, (data, _) in claim(1).store._objects.items() if key.startswith("manifests/"))
    assert header_of(manifested).chunks == 16
    with pytest.raises(AssertionError, match="were taken"), little_time(0.0):
        sum(range(10**6))
    with pytest.raises(AssertionError, match="were allocated"), little_memory(MIB):
        bytearray(2 * MIB)
    assert os.environ.get("SNAPSTORE_MAX_MEMORY") is None


# --- words ----------------------------------------------------------------------------------------------------------


def test_keys_of_a_path_that_is_long_and_full_of_dots():
    """Every prefix of a path up to a dot is matched. Mitigation: by one expression, not by one match a dot."""
    with Repository.open(World(8192).store, options=SaveOptions(threads=1)) as repo:
        repo.save({"a" + "." * 200_000: np.arange(3), "b": 1}, run="r", step=0)
        with little_time(2.0):
            assert list(repo.restore("r@0", keys=["b*"])) == ["b"]
            with pytest.raises(NotFoundError, match="matches nothing"):
                repo.restore("r@0", keys="*x*y*")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a", {"a.b.c", "a.d"}), ("a.b", {"a.b.c"}), ("a.*", {"a.b.c", "a.d"}), ("*.c", {"a.b.c"}),
        ("*d", {"a.d", "d"}),
        ("a.b.c", {"a.b.c"}), ("[ad]", {"a.b.c", "a.d", "d"}), ("?", {"a.b.c", "a.d", "d"}), ("*b*", {"a.b.c"}),
        ("*", {"a.b.c", "a.d", "d"}), ("a*b*c", {"a.b.c"}), ("a.", set()), ("b", set()), ("A", set()), (".", set()),
    ],
)  # fmt: skip
def test_patterns_match_a_path_or_what_is_above_it(pattern, expected):
    from snapstore.state.fill.selection import Selection

    paths = {"a.b.c": ("a", "b", "c"), "a.d": ("a", "d"), "d": ("d",)}
    assert {name for name, path in paths.items() if Selection(pattern).matches(path)} == expected


def test_many_leaves_below_a_long_key_or_far_down():
    """Every leaf has a path. Mitigation: paths share their beginnings, and are cut when they are shown."""
    deep = [0] * 8_000
    for _ in range(150):
        deep = [deep]
    tree = ["dict", ["x" * 300_000, "deep"], [encode_plain([0] * 8_000), encode_plain(deep)]]
    changed = ["dict", tree[1], [encode_plain([1] * 8_000), encode_plain(deep)]]
    world = World()
    for number, node in enumerate((tree, changed)):
        made = world.manifest(tree=node, tensors=[])
        world.commit(made, id=f"{number:032x}", step=number, seq=number)
    with little_memory(64 * MIB), world.open() as repo:
        assert len(repo.restore("r@0")["deep"]) == 1
        found = repo.diff("r@0", "r@1").plain
    assert len(found) == 8_000
    assert max(len(path) for path, _, _ in found) <= 1000
    assert found[7][0].endswith("....7")


def test_a_long_cell_does_not_widen_every_row(tmp_path):
    """A hundred rows beside a tag of 100 KB. Mitigation: nothing is padded beyond 200 characters."""
    with Repository.create(tmp_path / "repo", options=SaveOptions(threads=1)) as repo:
        good = repo.save({"n": 1}, run="r", step=0, metrics={"loss": 1.5})
        for seq in range(1, 100):
            tags = ["x" * 100_000] if seq == 7 else []
            snapshot = msgspec.structs.replace(good, id=f"{seq:032x}", step=seq, seq=seq, tags=tags)
            repo.store.put(snapshot.key, records.encode(snapshot))
    result = invoke(["log"], env={"SNAPSTORE_REPO": str(tmp_path / "repo")})
    assert result.exit_code == 0
    assert 100_000 < len(result.stdout) < 200_000
    assert result.stdout.count("loss=1.5") == 99, "beside the long tag there is no room for it"


def test_many_damaged_chunks_do_not_keep_their_memory():
    """An error holds the frames that it came through, and each holds a chunk. Mitigation: reports keep its text."""
    world = World(MIB)
    base = np.zeros(MIB, np.uint8)
    (place,) = world.whole_pack(full(base))
    others = [i.to_bytes(16, "big") for i in range(200)]
    world.commit(world.manifest([(other, [place]) for other in others]))
    with little_memory(150 * MIB), world.open() as repo:  # up to three batches of 24 MiB are read at a time
        result = repo.check("restore")
    assert "more chunks that are lost: 180" in " ".join(problem.message for problem in result.problems)

"""Pages of records: bytes round-trip, no damaged or forged page is accepted, and pages say what rules in them."""

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kit.objects import flip
from snapstore.catalog import joined as rows_module
from snapstore.catalog.joined import WHOLE, Joined, repeated_by_pages, rows_of
from snapstore.catalog.pages import PageReader
from snapstore.errors import FormatError, IntegrityError, StorageError
from snapstore.format import pages, records
from snapstore.format.keys import page_key, parse_page_key, parse_volume_key, volume_key
from snapstore.format.records import ABORTED, COMMITTED, FORGOTTEN, SWEPT, Snapshot
from snapstore.storage.memory import MemoryStore

IDS = [f"{n:032x}" for n in (0, 1, 2, 255, 256, 2**127, 2**128 - 1)]
STATES = st.sampled_from([COMMITTED, FORGOTTEN, SWEPT, ABORTED])
SEQS = st.sampled_from([0, 1, 2, 7, 2**41, 2**52])
FACTS = st.dictionaries(st.sampled_from(IDS), st.tuples(st.integers(0, 3), STATES, SEQS), max_size=7)


def record(name, revision, state, seq, **fields):
    """Return a record; its step, date and write id follow from these."""
    return Snapshot(
        id=name, run="a", step=IDS.index(name), seq=seq, state=state, revision=revision, created=float(revision),
        write_id=f"{IDS.index(name):016x}{revision:016x}", **fields,
    )  # fmt: skip


def page_of(number, facts, mends=()):
    """Return a page of facts: id -> (revision, state, seq)."""
    chosen = [record(name, *fact) for name, fact in facts.items()]
    return pages.make_page("a", number, [(r, records.encode(r)) for r in chosen], mends)


def with_pages(before, pages):
    """Return what a run says with some more pages."""
    before.bodies.update({page.number: page for page in pages})
    return before.with_pages([(page.number, rows_of(page), page.mends) for page in pages], {})


def joined_of(*pages):
    """Return what pages of a run say."""
    return with_pages(Joined("a"), pages)


def graves_of(joined):
    """Return what is left of records of which pages have graves."""
    whole = {s.id for s in joined.records(None, flags=WHOLE)}
    return sorted(joined.records(None, whole), key=lambda s: s.step)


def left_of(found):
    """Return what a page keeps of a record."""
    if not pages.is_grave(found):
        return found
    return msgspec.structs.replace(found, write_id="")


@given(FACTS, st.lists(st.integers(0, 10**9 - 1), max_size=3))
def test_round_trip(facts, mends):
    key = page_key("a", 1234)
    page = pages.read_page(page_of(1234, facts, mends), key)
    assert (page.run, page.number, page.mends, page.key, page.unknown) == ("a", 1234, mends, key, {})
    joined = joined_of(page)
    assert {name: left_of(record(name, *fact)) for name, fact in facts.items()} == {
        name: found for name in IDS if (found := joined.record_of(name)) is not None
    }
    assert sorted(s.id for s in joined.records(None)) == sorted(facts)
    assert sorted(s.id for s in graves_of(joined)) == sorted(name for name in facts if page.grave_record(name))


@given(st.lists(FACTS, max_size=6), st.data())
def test_pages_say_what_rules_in_them(of_pages, data):
    """The highest revision of each snapshot rules; if two pages have it, the lower one."""
    rows_module.SEGMENT_ROWS = data.draw(st.sampled_from([1, 3, 65_536]))
    rules = {}
    for facts in of_pages:
        for name, fact in facts.items():
            if name not in rules or fact[0] > rules[name][0]:
                rules[name] = fact
    read = [pages.read_page(page_of(n, facts), page_key("a", n)) for n, facts in enumerate(of_pages)]
    joined, left = Joined("a"), read
    while left:
        count = data.draw(st.integers(1, len(left)))
        joined, left = with_pages(joined, left[:count]), left[count:]
    assert joined.count == len(of_pages)
    for name in IDS:
        revision = rules[name][0] if name in rules else -1
        assert joined.revision_of(name) == revision
        for other in range(5):
            key = record(name, other, COMMITTED, 1).key
            assert joined.covers(key) == (other <= revision)
        if name in rules:
            rule = record(name, *rules[name])
            assert left_of(rule) == joined.record_of(name)
            assert joined.key_of(name) == rule.key
            assert not joined.makes_void(rule)
            assert joined.makes_void(msgspec.structs.replace(rule, state="other", write_id="other"))
            assert joined.makes_void(rule.revised()) is False
        else:
            assert joined.record_of(name) is None
    _compare_questions(joined, {name: left_of(record(name, *fact)) for name, fact in rules.items()}, data)


def _compare_questions(joined, rules, data):
    """Compare the answers from rows with those from whole records."""
    seqs = [s.seq for s in rules.values()]
    assert records.highest_seq(joined.seqs) == records.highest_seq(seqs)
    assert joined.above(2) == {s.key: s.seq for s in rules.values() if s.seq > 2 and not pages.is_grave(s)}
    but = data.draw(st.sets(st.sampled_from(IDS)))
    left = sorted((s for s in rules.values() if s.id not in but), key=lambda s: (s.seq, s.id))
    committed = [s for s in left if s.state == COMMITTED]
    assert joined.last(2, but) == committed[-2:]
    for states in (None, (COMMITTED,), (SWEPT, ABORTED), (FORGOTTEN, SWEPT)):
        chosen = [s for s in left if states is None or s.state in states]
        assert joined.has(states, but) == bool(chosen)
        assert sorted(joined.records(states, but), key=lambda s: (s.seq, s.id)) == chosen
        if states is not None:
            for step in range(len(IDS)):
                assert joined.at_step(step, states, but) == [s for s in chosen if s.step == step]
            for prefix in ("0", "000000000000000000000000000000ff", "8", "f" * 31):
                found = joined.with_prefix(prefix, states, but)
                assert sorted(s.id for s in found) == sorted(s.id for s in chosen if s.id.startswith(prefix))
    assert joined.repeated_steps([1, 9], but) == [(1, s.seq, s.id) for s in committed if s.step == 1]


@pytest.fixture(autouse=True)
def _segments(monkeypatch):
    monkeypatch.setattr(rows_module, "SEGMENT_ROWS", rows_module.SEGMENT_ROWS)


def test_ids_with_equal_halves_are_found():
    """They are forged; a row of one is not taken for that of another."""
    names = sorted(f"{hi:016x}{lo:016x}" for hi in (7, 9) for lo in range(5))
    made = [Snapshot(id=n, run="a", step=i, seq=i, state=SWEPT, revision=2, write_id="") for i, n in enumerate(names)]
    joined = joined_of(pages.read_page(pages.make_page("a", 0, [(s, b"") for s in made[::2]]), page_key("a", 0)))
    joined = with_pages(
        joined, [pages.read_page(pages.make_page("a", 1, [(s, b"") for s in made[1::2]]), page_key("a", 1))]
    )
    assert joined.revisions_of([*names, f"{7:016x}{5:016x}", f"{8:016x}{0:016x}"]) == [2] * 10 + [-1] * 2
    assert [joined.record_of(name).step for name in names] == [*range(10)]


def test_the_past_of_swept_snapshots_is_kept():
    first = record(IDS[0], 2, SWEPT, 5, metrics={"loss": 0.5}, reason="kept by no policy", policy="KeepLast(1)")
    second = record(IDS[1], 3, SWEPT, 6, parent=IDS[0], metrics={"loss": float("nan")})
    third = record(IDS[2], 1, COMMITTED, 7, parent=IDS[1])
    other = record(IDS[3], 2, SWEPT, 8, parent="f" * 32)
    chosen = [(r, records.encode(r)) for r in (third, second, first, other)]
    joined = joined_of(pages.read_page(pages.make_page("a", 0, chosen), page_key("a", 0)))
    found = {s.id: s for s in graves_of(joined)}
    assert found[IDS[0]] == left_of(first)
    assert found[IDS[1]].parent == IDS[0]
    assert np.isnan(found[IDS[1]].metrics["loss"])
    assert found[IDS[3]].parent == "f" * 32
    assert joined.record_of(IDS[2]) == third


def test_an_aborted_record_with_a_number_stays_whole():
    """A copy takes its number from it."""
    begun, fence = record(IDS[0], 0, ABORTED, 9, reason="a copy of it has begun"), record(IDS[1], 0, ABORTED, 0)
    data = pages.make_page("a", 0, [(r, records.encode(r)) for r in (begun, fence)])
    page = pages.read_page(data, page_key("a", 0))
    assert page.live == [begun]
    assert len(page.graves) == 1


@pytest.mark.parametrize("kind", ["page", "volume"])
def test_every_flip_and_truncation_is_found(kind):
    good, key = page_of(0, {IDS[0]: (1, COMMITTED, 3), IDS[5]: (2, SWEPT, 4)}), page_key("a", 0)
    read = pages.read_page
    if kind == "volume":
        key, good = pages.make_volume("a", 0, [good])
        read = lambda data, key: [*pages.read_volume(data, key)]  # noqa: E731
    read(good, key)
    for at in range(len(good)):
        for bad in (good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]):
            with pytest.raises((FormatError, IntegrityError), match=r"^(pages|volumes)/a/"):
                read(bad, key)
    with pytest.raises(IntegrityError, match="moved or altered"):
        read(good, key.replace("/a/", "/b/"))


def forged(**fields):
    """Return a page with some fields as given, and a valid checksum."""
    payload = msgspec.msgpack.decode(records.payload_of(page_of(0, {}), pages.PAGE, "page", "x"))
    return records.enveloped(pages.PAGE, msgspec.msgpack.encode(payload | fields))


def frame(value):
    return zstandard.ZstdCompressor().compress(value if isinstance(value, bytes) else msgspec.msgpack.encode(value))


def rows(*graves):
    return np.array([*graves], pages.GRAVE).tobytes()


GRAVE = (b"\1" * 16, 1, 0, 1, 0)
LIVE = record(IDS[0], 1, COMMITTED, 3)
NAME = LIVE.key.removeprefix("snapshots/a/")


@pytest.mark.parametrize(
    "fields",
    [
        {"graves": b"x"},
        {"graves": rows(GRAVE, GRAVE)},
        {"graves": rows((b"\2" * 16, 1, 0, 1, 0), GRAVE)},
        {"graves": rows((b"\1" * 16, 1, 0, 1, 2))},
        {"graves": rows((b"\1" * 16, 10**12, 0, 1, 0))},
        {"graves": rows((b"\1" * 16, 1, 0, 10**9, 0))},
        {"graves": rows(*((n.to_bytes(16, "big"), 1, 0, 1, 0) for n in range(1, 1026)))},
        {"live": b"no frame"},
        {"live": frame({"a": 1})},
        {"live": frame([[NAME, records.encode(LIVE)]] * 2)},
        {"live": frame([[f"../{NAME}", records.encode(LIVE)]])},
        {"live": zstandard.ZstdCompressor(write_content_size=False).compress(b"\x90" * 100)},
        {"live": frame(bytes(pages.MAX_LIVE_BYTES + 1))},
        {"run": "../b"},
        {"number": -1},
        {"write_id": "x"},
        {"mends": [10**9]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_forged_pages_are_refused(fields):
    with pytest.raises((FormatError, IntegrityError), match=r"^pages/a/0000000/00: "):
        pages.read_page(forged(**fields), page_key("a", 0))


def test_one_record_that_does_not_decode_costs_no_other():
    """It is unknown, as a loose one would be; of the others nothing is lost."""
    bad = bytearray(records.encode(LIVE))
    bad[-1] ^= 1
    other = record(IDS[1], 0, COMMITTED, 4)
    name = other.key.removeprefix("snapshots/a/")
    data = forged(live=frame([[NAME, bytes(bad)], [name, records.encode(other)]]))
    page = pages.read_page(data, page_key("a", 0))
    assert page.live == [other]
    assert [*page.unknown] == [LIVE.key]
    joined = joined_of(page)
    assert joined.revision_of(IDS[0]) == 1
    assert joined.record_of(IDS[0]) is None
    assert joined.makes_void(LIVE)


def test_a_past_that_does_not_decode_decides_nothing():
    page = pages.read_page(forged(graves=rows(GRAVE), past=b"no frame"), page_key("a", 0))
    (left,) = graves_of(joined_of(page))
    assert (left.id, left.state, left.created) == ("01" * 16, SWEPT, 0.0)


def test_keys():
    assert page_key("a", 12_345) == "pages/a/0000123/45"
    for number in (0, 99, 100, 10**9 - 1):
        assert parse_page_key(page_key("a.b", number)) == ("a.b", number)
    key = volume_key("a", 0, 63, "f" * 32)
    assert parse_volume_key(key) == ("a", 0, 63)
    for bad in ("pages/a/0/0", "pages/a/0000000/000", "pages/a/0000000", page_key("a", 0) + "x", "pages//0000000/00"):
        assert parse_page_key(bad) is None
    for bad in (volume_key("a", 5, 4, "f" * 32), volume_key("a", 0, 1, "f"), "volumes/a/0-1"):
        assert parse_volume_key(bad) is None


class Counting(MemoryStore):
    """Counts the requests for pages and volumes."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def get(self, key, **options):
        self.asked.append(("get", key))
        return super().get(key, **options)

    def list(self, prefix, *rest):
        self.asked.append(("list", prefix))
        return super().list(prefix, *rest)


def filled(count, volumes=()):
    """Return a store with pages, one swept snapshot in each, and volumes of some of them."""
    store, made = Counting(), []
    store.put("config", b"")
    for number in range(count):
        left = Snapshot(id=f"{number:032x}", run="a", step=number, seq=number, state=SWEPT, revision=2, write_id="")
        made.append(pages.make_page("a", number, [(left, b"")]))
        store.put(page_key("a", number), made[-1])
    for first, last in volumes:
        store.put(*pages.make_volume("a", first, made[first : last + 1]))
    store.asked.clear()
    return store


@pytest.mark.parametrize("volumes", [[], [(0, 9)], [(0, 7), (8, 8), (9, 9)], [(0, 3), (2, 11)], [(5, 8)]])
def test_a_cold_reader_finds_all_pages(volumes):
    store = filled(12, volumes)
    joined = PageReader(store).read("a")["a"]
    assert [s.step for s in graves_of(joined)] == [*range(12)]
    assert (joined.count, joined.damaged) == (12, {})
    assert PageReader(store).read(None)["a"].count == 12


def test_volumes_save_requests():
    store = filled(64, [(0, 63)])
    reader = PageReader(store)
    reader.read("a")
    assert len(store.asked) == 4  # page 0, volumes, one of them, page 64
    store.asked.clear()
    assert reader.read("a")["a"].count == 64
    assert store.asked == [("get", page_key("a", 64))]


def test_a_damaged_volume_costs_only_requests():
    store = filled(9, [(0, 8)])
    flip(store, next(info.key for info in store.list("volumes/")), -1)
    joined = PageReader(store).read("a")["a"]
    assert (joined.count, joined.damaged) == (9, {})


@pytest.mark.parametrize("how", ["damaged", "gone"])
@pytest.mark.parametrize("number", [0, 4, 8])
def test_a_page_that_cannot_be_read_is_read_from_a_volume(how, number):
    store = filled(9, [(0, 8)])
    key = page_key("a", number)
    store.delete([key]) if how == "gone" else flip(store, key, -1)
    joined = PageReader(store, takes_volumes=False).read("a", volumes_too=True)["a"]
    assert [s.step for s in graves_of(joined)] == [*range(9)]
    assert [*joined.damaged] == [key]
    reader = PageReader(store)
    reader.read("a", volumes_too=True)
    assert reader.read("a", list_too=True)["a"].count == 9


def test_a_page_that_is_gone_under_a_reader_is_not_forgotten():
    store = filled(3)
    reader = PageReader(store)
    reader.read("a")
    store.delete([page_key("a", 1)])
    joined = reader.read("a", list_too=True)["a"]
    assert (joined.count, [*joined.damaged]) == (3, [page_key("a", 1)])
    assert joined.revision_of(f"{1:032x}") == 2
    with pytest.raises(IntegrityError, match=r"pages/a/0000000/01: is gone.*nothing was changed"):
        reader.require_whole("a")
    reader.forget()
    assert PageReader(store).read("a")["a"].count == 1


def test_another_page_under_a_known_number_is_read():
    store = filled(3)
    reader = PageReader(store)
    reader.read("a", list_too=True)
    store.delete([page_key("a", 2)])
    store.put(page_key("a", 2), page_of(2, {IDS[6]: (1, COMMITTED, 8)}))
    joined = reader.read("a", list_too=True)["a"]
    assert joined.revision_of(IDS[6]) == 1
    assert joined.revision_of(f"{2:032x}") == -1


def test_a_page_that_cannot_be_read_for_a_moment_is_no_damage(monkeypatch):
    store, left = filled(2), [1]
    real = MemoryStore.get

    def get(self, key, **options):
        if key == page_key("a", 1) and left and left.pop():
            raise StorageError(f"{key}: injected")
        return real(self, key, **options)

    monkeypatch.setattr(MemoryStore, "get", get)
    assert PageReader(store).read("a")["a"].damaged == {}


def test_without_the_feature_nothing_is_read():
    store = filled(2)
    reader = PageReader(store, has_pages=False)
    assert (reader.read("a"), reader.read(None), reader.look("a"), reader.known("a")) == ({}, {}, None, {})
    assert reader.joined_as(LIVE) is None
    assert reader.keys_of(IDS[0]) == set()
    assert store.asked == []


def test_a_failed_look_for_the_next_page_makes_none(monkeypatch):
    store, left = filled(2), [1]
    real = MemoryStore.get

    def get(self, key, **options):
        if key == page_key("a", 2) and left and left.pop():
            raise StorageError(f"{key}: injected")
        return real(self, key, **options)

    reader = PageReader(store)
    reader.read("a")
    monkeypatch.setattr(MemoryStore, "get", get)
    joined = reader.read("a")["a"]
    assert (joined.count, joined.damaged) == (2, {})


@pytest.mark.parametrize("key", [volume_key("a", 0, 10**9 - 2, "f" * 32), page_key("a", 10**9 - 1)])
def test_one_forged_name_costs_little(key):
    """And what is there is found."""
    store = filled(3)
    store.put(key, b"")
    store.asked.clear()
    joined = PageReader(store).read(None)["a"]
    assert [s.step for s in graves_of(joined)] == [0, 1, 2]
    assert len(joined.damaged) <= 2
    assert len(store.asked) < 30


@pytest.mark.parametrize("others", [[], ["c"]])
def test_ids_that_other_runs_have_in_pages(others):
    joined = {"a": joined_of(pages.read_page(page_of(0, {IDS[1]: (2, SWEPT, 0)}), page_key("a", 0)))}
    joined |= {name: Joined(name) for name in others}
    own = record(IDS[1], 1, COMMITTED, 0).key
    forged = own.replace("/a/", "/b/")
    assert repeated_by_pages([own, record(IDS[0], 0, COMMITTED, 0).key], joined) == {}
    assert [*repeated_by_pages([forged], joined)] == [forged]


def cached(store, folder):
    """Return a reader with a cache, as a new process has it."""
    return PageReader(store, folder)


def test_a_process_takes_the_pages_of_an_earlier_one(tmp_path):
    store = filled(5, [(0, 3)])
    for _ in range(2):
        assert cached(store, tmp_path).read("a")["a"].count == 5
    store.asked.clear()
    joined = cached(store, tmp_path).read("a")["a"]
    assert [s.step for s in graves_of(joined)] == [*range(5)]
    assert store.asked == [("list", "pages/a/"), ("get", page_key("a", 4)), ("get", page_key("a", 5))]  # still the same
    store.asked.clear()
    assert cached(store, tmp_path).read(None)["a"].count == 5
    assert store.asked == [("list", "pages/"), ("list", "volumes/"), ("get", page_key("a", 4))]


def test_pages_that_two_processes_add_count_once(tmp_path):
    store = filled(6)
    readers = [cached(store, tmp_path) for _ in range(3)]
    for reader in readers:
        reader.read("a")
    store.put(page_key("a", 6), page_of(6, {IDS[6]: (1, COMMITTED, 9)}))
    for reader in readers:
        reader.read("a")
    joined = cached(store, tmp_path).read("a")["a"]
    assert (joined.count, joined.revision_of(IDS[6])) == (7, 1)


def test_a_damaged_cache_costs_only_requests(tmp_path):
    store = filled(4)
    cached(store, tmp_path).read("a")
    file = tmp_path / f"pages-{records.VERSION}" / "a"
    whole = file.read_bytes()
    for bad in (
        b"",
        whole[:-1],
        whole[:100],
        b"x" * len(whole),
        whole[: len(whole) // 2] + b"x" + whole[len(whole) // 2 + 1 :],
    ):
        file.write_bytes(bad)
        joined = cached(store, tmp_path).read("a")["a"]
        assert [s.step for s in graves_of(joined)] == [0, 1, 2, 3]
    file.unlink()
    file.mkdir()
    assert cached(store, tmp_path).read("a")["a"].count == 4


def test_pages_of_another_time_are_not_believed(tmp_path):
    """An older copy of the repository was put back: what the cache knows is not forgotten without a word."""
    store = filled(4)
    cached(store, tmp_path).read(None)
    store.delete([page_key("a", 3)])
    joined = cached(store, tmp_path).read("a")["a"]
    assert [*joined.damaged] == [page_key("a", 3)]
    store.put(page_key("a", 3), page_of(3, {IDS[6]: (1, COMMITTED, 9)}))
    reader = cached(store, tmp_path)
    joined = reader.read("a")["a"]
    assert (joined.damaged, joined.revision_of(IDS[6])) == ({}, 1)
    store.delete([page_key("a", n) for n in range(4)])
    assert len(cached(store, tmp_path).read(None)["a"].damaged) == 4
    reader.forget()
    assert cached(store, tmp_path).read(None) == {}


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "pages").write_bytes(b"")
    assert cached(filled(3), tmp_path).read("a")["a"].count == 3

"""Every object store keeps this contract. To test a store of your own, subclass `ObjectStoreContract`.

Override the `store` fixture with one that gives an empty store, and `reopened` if another handle can reach the same
objects. Stores that know whether an object is locked also override `locked_elsewhere`. This file needs snapstore,
pytest and hypothesis, and no other file of ours: `PYTHONPATH=.../snapstore/tests/contract pytest test_my_store.py` with

    class TestMyStore(ObjectStoreContract):
        @pytest.fixture
        def store(self):
            return MyStore("an empty place")
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from snapstore.errors import AlreadyExistsError, FormatError, IntegrityError, InvalidInputError, NotFoundError
from snapstore.storage.base import ObjectStore

LockedElsewhere = Callable[[ObjectStore, str], AbstractContextManager[Callable[[], None]]]

NOT_KEYS = [
    "",
    "/",
    "../x",
    "a/../x",
    "a/..",
    "/etc/passwd",
    "a//b",
    "a/",
    "a/./b",
    ".hidden",
    "a/.hidden",
    "-rf",
    "_x",
    "a\0b",
    "a\n",
    "a b",
    "a\\b",
    "ä",
    "a" * 256,
    "tmp/x",
    "index/data.mdb",
]


def keys_of(store: ObjectStore, prefix: str = "") -> list[str]:
    """Return the keys below a prefix, sorted, and with duplicates if a listing has any."""
    return sorted(info.key for info in store.list(prefix))


class ObjectStoreContract:
    #: Programs of twenty operations that run beside a dict; fewer for a store that takes long.
    programs = 25

    @pytest.fixture
    def store(self) -> ObjectStore:
        raise NotImplementedError("override: an empty store")

    @pytest.fixture
    def reopened(self) -> Callable[[ObjectStore], ObjectStore]:
        """Another handle on the same objects, as a new process would get it."""
        pytest.skip("this store cannot be reopened")

    @pytest.fixture
    def locked_elsewhere(self) -> LockedElsewhere:
        """`with locked(store, key) as kill:` another process has the lock of the key until kill()."""
        pytest.skip("this store does not know who locked an object")

    # --- put, get ---

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 4096], ids=["empty", "one", "1MiB"])
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_get_gives_what_put_took(self, store, data, kind):
        store.put("packs/7f/7fab", kind(data))
        assert store.get("packs/7f/7fab") == data
        assert type(store.get("packs/7f/7fab")) is bytes
        assert store.stat("packs/7f/7fab").size_bytes == len(data)

    def test_put_takes_a_copy_and_any_contiguous_view(self, store):
        data = bytearray(16)
        store.put("a", memoryview(data).cast("I"))
        data[:] = b"y" * 16
        assert store.get("a") == bytes(16)
        for wrong in (memoryview(data)[::2], np.zeros((4, 4), np.uint8, order="F")):
            with pytest.raises(InvalidInputError, match="contiguous"):
                store.put("b", wrong)
        assert keys_of(store) == ["a"]

    def test_put_never_replaces(self, store):
        store.put("a/b", b"first")
        before = store.stat("a/b")
        for data in (b"second", b"first", b""):
            with pytest.raises(AlreadyExistsError, match=r"^a/b "):
                store.put("a/b", data)
            with pytest.raises(AlreadyExistsError, match=r"^a/b "):
                store.lock("a/b", data)
        assert store.get("a/b") == b"first"
        assert store.stat("a/b") == before
        assert not store.is_locked("a/b")

    def test_one_of_racing_creators_wins(self, store):
        n_threads, n_rounds = 16, 8
        barrier = threading.Barrier(n_threads)

        def create(me: int) -> list[int]:
            won = []
            for turn in range(n_rounds):
                barrier.wait()
                try:
                    store.put(f"race/{turn}", str(me).encode())
                except AlreadyExistsError:
                    assert store.get(f"race/{turn}").isdigit()  # the loser sees the whole winner at once
                else:
                    won.append(turn)
            return won

        with ThreadPoolExecutor(n_threads) as pool:
            wins = list(pool.map(create, range(n_threads)))
        assert sorted(turn for won in wins for turn in won) == list(range(n_rounds))
        for me, won in enumerate(wins):
            for turn in won:
                assert store.get(f"race/{turn}") == str(me).encode()

    def test_missing_objects(self, store):
        store.put("a/b", b"x")
        for key in ("b", "a", "a/c", "a/b/c", "x/y/z"):
            for call in (store.get, store.stat, store.touch, lambda key: store.get_range(key, 0, 1)):
                with pytest.raises(NotFoundError, match=rf"^{key} "):
                    call(key)
            assert store.is_locked(key) is not True

    def test_get_is_bounded(self, store):
        store.put("a", b"12345")
        assert store.get("a", limit_bytes=5) == b"12345"
        with pytest.raises(FormatError, match=r"^a .*at most 4 bytes, got 5"):
            store.get("a", limit_bytes=4)

    # --- ranges ---

    @pytest.mark.parametrize("place", [(0, 200), (199, 1), (0, 0), (200, 0), (50, 100), (10, 5)], ids=str)
    def test_a_range(self, store, place):
        data, (offset, length) = bytes(range(200)), place
        store.put("a", data)
        view = store.get_range("a", offset, length)
        assert bytes(view) == data[offset : offset + length]
        assert isinstance(view, memoryview)
        assert view.shape == (length,)

    def test_ranges_of_an_empty_object(self, store):
        store.put("a", b"")
        assert bytes(store.get_range("a", 0, 0)) == b""
        with pytest.raises(IntegrityError):
            store.get_range("a", 0, 1)

    def test_views_belong_to_the_caller(self, store):
        store.put("a", b"12345")
        one, other = store.get_range("a", 0, 5), store.get_range("a", 0, 5)
        one[:] = b"xxxxx"
        assert other == b"12345"
        assert store.get("a") == b"12345"

    @pytest.mark.parametrize("bad", [(0, 6), (5, 1), (6, 0), (2, 2**62), (2**70, 1), (1, 2**70)])
    def test_ranges_past_the_end(self, store, bad):
        store.put("a", b"12345")
        with pytest.raises(IntegrityError, match=rf"^a .*{bad[0]}\+{bad[1]}.* 5 bytes"):
            store.get_range("a", *bad)

    @pytest.mark.parametrize("bad", [(-1, 1), (0, -1), (-(2**70), 2**70)])
    def test_negative_ranges(self, store, bad):
        store.put("a", b"12345")
        with pytest.raises(InvalidInputError):
            store.get_range("a", *bad)

    @pytest.mark.parametrize("place", [(150, 50), (0, 0), (0, 100), (20, 7)], ids=str)
    def test_a_range_into_a_given_view(self, store, place):
        data, (offset, length) = bytes(range(200)), place
        store.put("a", data)
        room = bytearray(b"x" * 300)
        into = memoryview(room)[61 : 61 + length]
        assert store.get_range("a", offset, length, into) is into
        expected = bytearray(b"x" * 300)
        expected[61 : 61 + length] = data[offset : offset + length]
        assert room == expected, "and nothing beside it"

    @pytest.mark.parametrize("length", [0, 3, 4, 6, 8])
    def test_a_view_of_another_length_is_refused(self, store, length):
        store.put("a", b"12345678")
        into = memoryview(bytearray(b"x" * length))
        with pytest.raises(InvalidInputError, match=r"^a"):
            store.get_range("a", 0, 5, into)
        assert bytes(into) == b"x" * length, "nothing was written"

    def test_views_that_cannot_be_filled_are_refused(self, store):
        store.put("a", b"12345678")
        table = memoryview(bytearray(4)).cast("B", (2, 2))
        for view in (memoryview(b"xxxx"), memoryview(bytearray(8))[::2], memoryview(bytearray(16)).cast("i"), table):
            with pytest.raises(InvalidInputError, match=r"^a"):
                store.get_range("a", 0, 4, view)

    @pytest.mark.parametrize("bad", [(0, 6), (5, 1), (6, 0), (2, 7)])
    def test_ranges_past_the_end_fill_nothing(self, store, bad):
        store.put("a", b"12345")
        into = memoryview(bytearray(b"x" * bad[1]))
        with pytest.raises(IntegrityError, match=rf"^a .*{bad[0]}\+{bad[1]}.* 5 bytes"):
            store.get_range("a", *bad, into)
        assert bytes(into) == b"x" * bad[1]

    def test_a_view_into_of_a_missing_object(self, store):
        view = memoryview(bytearray(b"x"))
        with pytest.raises(NotFoundError):
            store.get_range("a", 0, 1, view)
        assert bytes(view) == b"x"

    # --- list ---

    def test_list_by_prefix(self, store):
        assert keys_of(store) == []
        assert keys_of(store, "packs/") == []
        names = ["config", "packs/00/00ff", "packs/ff/ff00", "packsx/a", "snapshots/run/0.1-a.0", "snapshots/run2/0"]
        for name in names:
            store.put(name, name.encode())
        assert keys_of(store) == names
        assert keys_of(store, "packs/") == names[1:3]
        assert keys_of(store, "packs/00/") == names[1:2]
        assert keys_of(store, "snapshots/run/") == names[4:5]
        assert keys_of(store, "nothing/here/") == []
        assert keys_of(store, "config/") == []
        for info in store.list(""):
            assert info == store.stat(info.key)
            assert info.size_bytes == len(info.key)

    def test_list_of_keys_alone(self, store):
        """A listing has every key, and may leave out the rest where the caller needs the key alone."""
        names = ["a/b/0", "a/b/1", "a/c/1", "a/c/d/1", "b/1"]
        for name in names:
            store.put(name, name.encode())
        asked = []

        def key_only(keys):
            asked.extend(keys)
            return {key for key in keys if key.endswith("1")}

        found = {info.key: info for info in store.list("a/", key_only)}
        assert sorted(found) == names[:4]
        assert [key for key in names[:4] if not found[key].is_key_only and found[key] != store.stat(key)] == []
        assert not found["a/b/0"].is_key_only
        if any(info.is_key_only for info in found.values()):
            assert {info.key for info in found.values() if info.is_key_only} == set(names[1:4])
            assert asked.count("a/b/0") == 1

    @pytest.mark.parametrize("prefix", ["packs", "/", "../", "a/../", "//", ".", "tmp/", "index/", "a\0/"])
    def test_no_prefix(self, store, prefix):
        with pytest.raises(InvalidInputError):
            store.list(prefix)
        with pytest.raises(InvalidInputError):
            store.sync(prefix)

    def test_list_beside_writers(self, store):
        """A listing has each object that is there all the time once; any other object is whole or absent."""
        staying = sorted(f"p/{i % 4}/stay{i}" for i in range(40))
        for key in staying:
            store.put(key, b"whole")
        stop = threading.Event()

        def churn(me: int) -> None:
            turn = 0
            while not stop.is_set():
                key = f"p/{turn % 4}/churn{me}-{turn}"
                store.put(key, b"whole")
                if turn % 2:
                    store.delete([key])
                turn += 1

        with ThreadPoolExecutor(3) as pool:
            writers = [pool.submit(churn, me) for me in range(3)]
            try:
                for _ in range(20):
                    infos = list(store.list("p/"))
                    found = [info.key for info in infos]
                    assert len(set(found)) == len(found)
                    assert sorted(key for key in found if "stay" in key) == staying
                    assert {info.size_bytes for info in infos} == {5}
            finally:
                stop.set()
            for writer in writers:
                writer.result()

    def test_sizes(self, store):
        for n in range(5):
            store.put(f"packs/0{n}/a", bytes(n))
        store.put("a", b"xx")
        assert store.sizes([]) == {}
        assert store.sizes(["a"]) == {"a": 2}
        assert store.sizes(["b"]) == {}
        assert store.sizes(["packs/03/a", "packs/01/a", "packs/09/a"]) == {"packs/01/a": 1, "packs/03/a": 3}
        assert store.sizes(["a", "packs/04/a"]) == {"a": 2, "packs/04/a": 4}
        assert store.sizes(["packs/04/a", "packs/04/a"]) == {"packs/04/a": 4}
        assert store.sizes({"packs/04/a", "packs/04/a/b"}) == {"packs/04/a": 4}
        for bad in ("../x", "/x"):
            with pytest.raises(InvalidInputError):
                store.sizes([bad, "a"])

    # --- delete, keys, clock ---

    def test_delete_twice_and_put_again(self, store):
        store.put("a/b", b"x")
        store.put("a/c", b"y")
        store.delete(["a/b", "a/b", "never/there", "a/c/under-an-object"])
        store.delete(["a/b"])
        store.delete([])
        assert keys_of(store) == ["a/c"]
        store.put("a/b", b"z")
        assert store.get("a/b") == b"z"

    @pytest.mark.parametrize("key", NOT_KEYS)
    def test_not_a_key(self, store, key):
        calls = [
            lambda: store.put(key, b"x"),
            lambda: store.lock(key, b"x"),
            lambda: store.get(key),
            lambda: store.get_range(key, 0, 1),
            lambda: store.stat(key),
            lambda: store.delete([key]),
            lambda: store.touch(key),
            lambda: store.release(key),
            lambda: store.is_locked(key),
        ]
        for call in calls:
            with pytest.raises(InvalidInputError):
                call()
        assert keys_of(store) == []

    def test_longest_component(self, store):
        store.put("a/" + "b" * 255, b"x")
        assert keys_of(store) == ["a/" + "b" * 255]

    def test_touch_moves_the_time_by_the_clock_of_the_store(self, store):
        before = store.now_s()
        store.put("a", b"x")
        first = store.stat("a").modified_s
        store.touch("a")
        second = store.stat("a").modified_s
        assert before - 2 <= first <= second <= store.now_s() + 2
        assert store.get("a") == b"x"

    def test_sync_and_clean_change_nothing(self, store):
        store.put("a/b/c", b"x")
        for prefix in ("", "a/", "a/b/", "missing/", "a/missing/"):
            store.sync(prefix)
        assert store.clean() == 0
        assert keys_of(store) == ["a/b/c"]

    def test_a_tag_tells_two_objects_apart_that_are_as_large_and_as_old(self, store):
        """`stat` and `list` give the same tag (test_list_by_prefix); it is empty if the store cannot tell."""
        tags = []
        for data in (b"12345", b"12346", b"22345"):
            store.put("a", data)
            tags.append(store.stat("a").tag)
            assert [info.tag for info in store.list("")] == tags[-1:]
            assert store.stat("a").tag == tags[-1], "and it stays"
            store.delete(["a"])
            time.sleep(0.02)  # within a second, and beyond a tick of any clock
        assert len(set(tags)) == 3 or set(tags) == {""}

    def test_a_place_is_of_one_store(self, store):
        with store.sandbox() as sandbox:
            assert isinstance(store.place, str)
            assert len({store.place, sandbox.place, ""}) == 3

    def test_repr_names_the_store(self, store):
        assert store.url in repr(store)

    # --- new repositories ---

    def test_prepare_takes_an_empty_place_only(self, store):
        store.prepare()
        assert keys_of(store) == []
        store.put("a/b", b"x")
        with pytest.raises(InvalidInputError, match="not empty"):
            store.prepare()
        store.delete(["a/b"])

    def test_a_sandbox_is_apart_and_leaves_nothing(self, store):
        store.put("a", b"x")
        with store.sandbox() as sandbox:
            assert keys_of(sandbox) == []
            sandbox.put("a", b"y")
            sandbox.put("b/c", b"z")
            assert keys_of(sandbox) == ["a", "b/c"]
            assert keys_of(store) == ["a"]
        assert store.get("a") == b"x"
        store.delete(["a"])
        store.prepare()

    # --- lock ---

    def test_lock_until_release(self, store):
        store.lock("sessions/a", b"me")
        assert store.get("sessions/a") == b"me"
        assert keys_of(store, "sessions/") == ["sessions/a"]
        assert store.is_locked("sessions/a") in (True, None)
        store.touch("sessions/a")
        assert store.is_locked("sessions/a") in (True, None)
        store.release("sessions/a")
        assert keys_of(store) == []
        assert not store.is_locked("sessions/a")
        store.release("sessions/a")
        store.lock("sessions/a", b"me again")
        store.release("sessions/a")

    def test_release_deletes_what_is_not_locked(self, store):
        store.put("a", b"x")
        assert not store.is_locked("a")
        store.release("a")
        assert keys_of(store) == []

    def test_lock_of_a_name_that_another_process_deleted(self, store):
        store.lock("sessions/a", b"1")
        store.delete(["sessions/a"])
        assert not store.is_locked("sessions/a")
        store.lock("sessions/a", b"2")
        assert store.is_locked("sessions/a") in (True, None)
        store.release("sessions/a")

    def test_lock_ends_with_its_process(self, store, locked_elsewhere):
        with locked_elsewhere(store, "sessions/theirs") as kill:
            assert store.is_locked("sessions/theirs") is True
            kill()
            assert store.is_locked("sessions/theirs") is False
        assert keys_of(store) == ["sessions/theirs"]
        store.release("sessions/theirs")
        assert keys_of(store) == []

    # --- other handles ---

    def test_reopened(self, store, reopened):
        store.put("a/b", b"x")
        store.lock("s", b"y")
        other = reopened(store)
        assert (other.url, other.place) == (store.url, store.place)
        assert keys_of(other) == ["a/b", "s"]
        assert other.get("a/b") == b"x"
        assert other.is_locked("s") in (True, None)
        with pytest.raises(AlreadyExistsError):
            other.put("a/b", b"z")
        other.delete(["a/b"])
        store.release("s")
        assert keys_of(store) == keys_of(other) == []

    # --- the model ---

    def test_behaves_like_a_dict(self, store):
        machine_settings = settings(
            max_examples=self.programs, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        )
        run_state_machine_as_test(lambda: StoreMachine(store), settings=machine_settings)


class StoreMachine(RuleBasedStateMachine):
    """A store beside a dict, which is its model."""

    keys = st.sampled_from(["a", "b/a", "b/b", "b/c/d", "c/a.0"])
    data = st.binary(max_size=64)

    def __init__(self, store: ObjectStore) -> None:
        super().__init__()
        self.store = store
        self.model: dict[str, bytes] = {}
        self.locked: set[str] = set()

    @rule(key=keys, data=data, lock=st.booleans())
    def put(self, key, data, lock):
        put = self.store.lock if lock else self.store.put
        if key in self.model:
            with pytest.raises(AlreadyExistsError):
                put(key, data)
            return
        put(key, data)
        self.model[key] = data
        if lock:
            self.locked.add(key)

    @rule(key=keys)
    def get(self, key):
        if key in self.model:
            assert self.store.get(key) == self.model[key]
        else:
            with pytest.raises(NotFoundError):
                self.store.get(key)

    @rule(key=keys, offset=st.integers(-2, 70), length=st.integers(-2, 70), given=st.booleans())
    def get_range(self, key, offset, length, given):
        data = self.model.get(key)
        into = memoryview(bytearray(max(0, length))) if given else None
        if data is not None and offset >= 0 and length >= 0 and offset + length <= len(data):
            view = self.store.get_range(key, offset, length, into)
            assert into is None or view is into
            assert bytes(view) == data[offset : offset + length]
            return
        expected = NotFoundError if data is None else (InvalidInputError, IntegrityError)
        with pytest.raises(expected):
            self.store.get_range(key, offset, length, into)

    @rule(key=keys, ranges=st.lists(st.tuples(st.integers(-1, 70), st.integers(0, 70)), max_size=4))
    def get_ranges(self, key, ranges):
        data = self.model.get(key)
        offsets = [offset for offset, _ in ranges]
        into = [memoryview(bytearray(length)) for _, length in ranges]
        if data is not None and all(0 <= offset <= offset + length <= len(data) for offset, length in ranges):
            with self.store.kept_open() as get_ranges:
                get_ranges(key, offsets, into)
            assert [bytes(view) for view in into] == [data[offset : offset + length] for offset, length in ranges]
        elif ranges:
            expected = NotFoundError if data is None else (InvalidInputError, IntegrityError)
            with pytest.raises(expected), self.store.kept_open() as get_ranges:
                get_ranges(key, offsets, into)

    @rule(keys=st.lists(keys, max_size=4))
    def delete(self, keys):
        self.store.delete(keys)
        for key in keys:
            self.model.pop(key, None)
        self.locked -= set(keys)

    @rule(key=keys)
    def release(self, key):
        self.store.release(key)
        self.model.pop(key, None)
        self.locked.discard(key)

    @rule(key=keys)
    def touch(self, key):
        if key in self.model:
            self.store.touch(key)
        else:
            with pytest.raises(NotFoundError):
                self.store.touch(key)

    @rule()
    def clean(self):
        assert self.store.clean() == 0

    @rule(key=keys)
    def is_locked(self, key):
        assert self.store.is_locked(key) in (None, key in self.locked)

    @rule(prefix=st.sampled_from(["", "b/", "b/c/", "c/", "z/"]))
    def list_prefix(self, prefix):
        assert keys_of(self.store, prefix) == sorted(key for key in self.model if key.startswith(prefix))

    @invariant()
    def same_objects(self):
        infos = {info.key: info.size_bytes for info in self.store.list("")}
        assert infos == {key: len(data) for key, data in self.model.items()}

    def teardown(self):
        for key in list(self.model):
            self.store.release(key)

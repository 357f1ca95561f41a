"""Paths can name keys of every type, and a copy of a container keeps its kind."""

import collections

import msgspec

from kit.states import bits
from snapstore.state.values.containers import display, like, step


def test_paths():
    assert display(("model", "layers.0", 3)) == "model.layers.0.3"
    assert [step(k) for k in ("a", 1, True, None, 2.5, (1,), 2**70)] == [
        "a",
        1,
        "True",
        "None",
        "2.5",
        "(1,)",
        hex(2**70),
    ]
    msgspec.msgpack.encode([step("\ud800"), step(("\ud800",)), step((10**5000,))])


def test_like_keeps_what_a_container_is():
    for value in (collections.deque([1], maxlen=2), collections.defaultdict(int, a=1), collections.Counter("aa")):
        items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        assert bits(like(value, items)) == bits(value)

"""The verifier lends host memory from the engine: it gives it back once, and never while something still uses it."""

import msgspec
import numpy as np
import pytest

from kit.interrupts import Interrupter
from snapstore import IntegrityError
from snapstore.chunks.verify import Verifier
from snapstore.engine.batches import Chunks, EncodeBatch
from snapstore.format.blobs.blob import DIFFERENCE, ENTRY, FULL

BATCHES, BLOBS = 4, 5


class Late:
    """An engine, and its encoded batches, whose work is done only when a caller waits for it."""

    def __init__(self, wrong=()):
        self.busy: dict[int, int] = {}  # id of a buffer -> work on it that nobody has waited for
        self.lent: list[np.ndarray] = []
        self.given_back: list[np.ndarray] = []
        self.decoded: list[bytes] = []
        self.wrong = set(wrong)  # numbers of batches that do not decode

    def buffer(self, nbytes):
        self.lent.append(np.zeros(nbytes + 100, np.uint8))
        return self.lent[-1]

    def give_back(self, buffer):
        assert any(one is buffer for one in self.lent)
        assert not any(one is buffer for one in self.given_back), "given back once"
        assert not self.busy.get(id(buffer)), "given back while it is in use"
        self.given_back.append(buffer)

    def empty(self, nbytes):
        return np.empty(nbytes, np.uint8)

    def begin(self, memory, work):
        """Return a call that does the work on a lent buffer."""
        buffer = next(one for one in self.lent if np.shares_memory(one, memory))
        self.busy[id(buffer)] = self.busy.get(id(buffer), 0) + 1
        done = []

        def wait():
            if not done:
                done.append(True)
                self.busy[id(buffer)] -= 1
                work()

        return wait

    def start_decode(self, batch):
        def decode():
            assert all(batch.stored[at] for at in batch.offsets.tolist()), "decoded before it was copied"
            number = int(batch.digests[0, 0])
            if number in self.wrong:
                raise IntegrityError("wrong on purpose")
            self.decoded += [row.tobytes() for row in batch.digests]

        return self.begin(batch.stored, decode)


class Blobs(msgspec.Struct):
    """Encoded blobs that are copied when a caller waits."""

    engine: Late
    entries: np.ndarray

    def copy(self, first, last, out):
        return self.engine.begin(out, lambda: out.fill(1))


def batch_of(engine, number):
    """Return a batch whose blobs 0, 2 and 3 are chosen; blob 2 is a delta."""
    entries = np.zeros(BLOBS, ENTRY)
    entries["length"], entries["transform"] = 64, [FULL, FULL, DIFFERENCE, FULL, DIFFERENCE]
    digests = np.full((BLOBS, 16), number, np.uint8)
    digests[:, 1] = np.arange(BLOBS)
    chunks = Chunks.of([np.zeros(32, np.uint8)] * BLOBS)
    ones = np.ones(BLOBS, np.uint8)
    return EncodeBatch(chunks, digests, ones, ones, chunks, digests, ones), Blobs(engine, entries)


def verify(engine, verifier):
    for number in range(BATCHES):
        chosen = np.array([], np.int64) if number == 1 else np.array([0, 2, 3])
        batch, encoded = batch_of(engine, number)
        verifier.start(engine, batch, encoded, chosen=chosen)
    verifier.finish()


def new():
    return Verifier("what was saved", "save again")


def test_all_chosen_blobs_are_decoded_and_all_buffers_come_back():
    engine = Late()
    verify(engine, new())
    wanted = [bytes([number, i]) for number in (0, 2, 3) for i in (0, 2, 3)]
    assert [digest[:2] for digest in engine.decoded] == wanted
    assert len(engine.given_back) == len(engine.lent) == 3


@pytest.mark.parametrize("number", [0, 2, 3])
def test_a_wrong_blob_is_an_error_and_leaves_nothing_in_use(number):
    engine, verifier = Late(wrong=[number]), new()
    with pytest.raises(IntegrityError, match=r"does not decode to what was saved.*save again"):
        verify(engine, verifier)
    verifier.close()
    assert not any(engine.busy.values())
    assert len(engine.given_back) == len(engine.lent)


def test_close_waits_and_decodes_nothing_more():
    for begun in range(BATCHES):
        engine, verifier = Late(), new()
        for number in range(begun):
            verifier.start(engine, *batch_of(engine, number))
        verifier.close()
        assert not any(engine.busy.values())
        assert len(engine.given_back) == len(engine.lent) == begun
        assert len(engine.decoded) == BLOBS * max(0, begun - 1), "the last batch was only copied"


def test_an_interrupt_anywhere_gives_no_buffer_back_that_is_in_use():
    """`Late.give_back` checks it. A buffer for which no call can wait is not given back, and so not lent again."""
    engine, verifier, counter = Late(), new(), Interrupter("chunks/verify.py")
    counter.call(verify, engine, verifier)
    assert len(counter.passed) > 100
    lost = 0
    for at in range(len(counter.passed)):
        engine, verifier = Late(), new()
        with pytest.raises(KeyboardInterrupt):
            Interrupter("chunks/verify.py", at=at).call(verify, engine, verifier)
        verifier.close()
        in_use = [one for one in engine.lent if engine.busy.get(id(one))]
        assert len(in_use) <= 1
        lost += len(engine.lent) > len(engine.given_back)
    assert lost < len(counter.passed) / 2, "most interrupts lose no buffer"

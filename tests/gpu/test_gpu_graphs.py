"""A capture of a CUDA graph and a background save do not disturb each other."""

import threading
import time

import pytest
import torch

from kit.gpu_states import MIB, differing, drift, facts, floats, manager, typed
from snapstore import SaveOptions
from snapstore.engine.cuda import graph_capture
from snapstore.storage.memory import MemoryStore

if torch.cuda.is_available():  # it imports CuPy
    from snapstore.engine.cuda import pinned as pinned_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODES = pytest.mark.parametrize("mode", ["device", "host"])


class Waiting(MemoryStore):
    """A store in which each save waits, before its work in the background begins, until `go` is set."""

    def __init__(self):
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()
        self.go.set()

    def lock(self, key, data):
        self.reached.set()
        assert self.go.wait(60)
        super().lock(key, data)


class Step:
    """A training step that is captured as a CUDA graph and replayed."""

    def __init__(self):
        self.x, self.y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
        self.y.copy_(self.x.add_(1))  # torch loads their kernels
        self.stream = torch.cuda.Stream(priority=-1)  # from a pool that saves do not use

    def capture(self, meanwhile=lambda: None):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):  # in mode "global", torch's default
            self.x.add_(1)
            meanwhile()
            self.y.copy_(self.x)
        return graph

    def check(self, graph):
        self.x.zero_()
        for _ in range(3):
            graph.replay()
        assert (self.x == 3).all()
        assert (self.y == 3).all()


def state_of():
    return {"w": floats(40 * MIB, 1, "cuda"), "b": typed("bfloat16", (8 * MIB,), 2, "cuda", "floats"),
            "n": typed("uint8", (4 * MIB,), 3, "cuda"), "s": floats(9, 4, "cuda")}  # fmt: skip


def options():
    return SaveOptions(threads=4, pack_bytes=4 * MIB)


@MODES
def test_a_whole_save_while_a_graph_is_captured(mode):
    """A background save may run while a graph is captured, from its first allocation to its last release of memory.

    During a capture, CUDA forbids other threads such calls by default.
    """
    state, store, step = state_of(), Waiting(), Step()
    with manager(mode, chunk_bytes=MIB, store=store, options=options()) as made:
        for number in range(3):
            store.reached.clear()
            store.go.clear()
            wanted = facts(state)
            handle = made.save(number, state)
            assert store.reached.wait(60)
            drift(state, number)

            def finished(handle=handle):
                store.go.set()
                deadline = time.monotonic() + 60
                while not handle.done() and time.monotonic() < deadline:
                    time.sleep(0.001)

            graph = step.capture(finished)
            handle.result(60)
            step.check(graph)
            assert differing(facts(made.restore(number)), wanted) == [], number
        assert made.repository.check("restore").ok


@MODES
def test_graphs_are_captured_again_and_again_while_saves_run(mode):
    state, step, captured = state_of(), Step(), 0
    with manager(mode, chunk_bytes=MIB, options=options()) as made:
        wanted = []
        for number in range(4):
            wanted.append(facts(state))
            handle = made.save(number, state)
            drift(state, number)
            while not handle.done():
                step.check(step.capture())
                captured += 1
            handle.result(60)
        assert captured > 0
        for number in range(4):
            assert differing(facts(made.restore(number)), wanted[number]) == [], number


def test_the_thread_that_captures_may_release_page_locked_memory():
    """Python's garbage collector may release page-locked memory in the thread that captures a graph."""
    step, held = Step(), [pinned_memory.pinned(MIB)]
    graph = step.capture(held.clear)
    step.check(graph)


def test_a_thread_has_its_own_mode_again():
    """`beside_captures` relaxes the capture mode of a thread, and restores the former mode at its end."""
    former = graph_capture.exchange(1)
    assert former is not None, "the driver has no cuThreadExchangeStreamCaptureMode"
    try:
        with graph_capture.beside_captures():
            assert graph_capture.exchange(graph_capture.RELAXED) == graph_capture.RELAXED
        assert graph_capture.exchange(1) == 1
    finally:
        graph_capture.exchange(former)

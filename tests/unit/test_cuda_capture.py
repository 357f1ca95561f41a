"""The parts of CUDA graph capture that need no driver work without one."""

import ctypes
from contextlib import suppress

import pytest

from snapstore.engine.cuda import graph_capture


@pytest.fixture
def driver(monkeypatch):
    """Return a function that sets how the driver is loaded."""

    def use(load):
        graph_capture.driver.cache_clear()
        monkeypatch.setattr(ctypes, "CDLL", load)

    yield use
    monkeypatch.undo()
    graph_capture.driver.cache_clear()


def test_the_mode_is_exchanged_and_put_back(driver):
    """The capture mode is relaxed inside the block and put back at its end, also after an error."""
    modes = [0]

    class Function:
        def __call__(self, pointer):
            former = modes[-1]
            modes.append(pointer._obj.value)
            pointer._obj.value = former
            return 0

    class Library:
        cuThreadExchangeStreamCaptureMode = Function()  # noqa: N815

    driver(lambda name: Library)
    with suppress(KeyError), graph_capture.beside_captures():
        assert modes[-1] == graph_capture.RELAXED
        raise KeyError
    assert modes == [0, graph_capture.RELAXED, 0]


@pytest.mark.parametrize("lacks", ["library", "symbol", "context"])
def test_a_driver_that_cannot_exchange_the_mode_raises_no_error(driver, lacks):
    """If the driver cannot exchange the mode, no error is raised."""

    def load(name):
        if lacks == "library":
            raise OSError(name)
        functions = {"cuThreadExchangeStreamCaptureMode": type("", (), {"__call__": lambda self, _: 201})()}
        return type("Library", (), functions if lacks == "context" else {})

    driver(load)
    with graph_capture.beside_captures():
        assert graph_capture.exchange(graph_capture.RELAXED) is None

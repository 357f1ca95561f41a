"""Objects that a piece of work leaves to Python's garbage collector.

A full collection holds the interpreter's lock, for 0.2 s in a process that has imported torch: all training waits. One
comes when the objects that young collections found alive, since the last full one, are a quarter of all older objects.
So each object of a save brings the next pause nearer, even if the save frees the object at its end. This holds for
CPython 3.11 to 3.13, and so does the counter, which knows their generations.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def survivors() -> Iterator[list[int]]:
    """Count the objects that young collections find alive during the block, in any thread.

    Yields:
        A list; after the block it holds the counts.
    """
    found: list[int] = []
    before = 0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal before
        if info["generation"] != 1:
            return
        old = len(gc.get_objects(2))
        if phase == "start":
            before = old
        else:
            found.append(old - before)

    threshold = gc.get_threshold()
    gc.collect()
    gc.freeze()  # older objects are not counted; they stay frozen, for later full collections would walk them again
    gc.set_threshold(200, 5, 1_000_000)  # no full collection
    gc.callbacks.append(note)
    try:
        yield found
        gc.collect(1)
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*threshold)

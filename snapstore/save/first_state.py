"""First state: check a state before a save of it is due, and pin memory for its copies in the background.

In: the states that a manager is told of: when it is made, after a restore, or at a step that is not saved. Out: errors
that come before the training has run for long; and pinned memory, if copies of CUDA tensors will lie in host memory. It
takes seconds to pin, so the first save shall find it.

Only modules, optimizers and containers are asked for their state: a data loader would start its workers, or draw random
numbers. An optimizer has no state before its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

from ..context import Context
from ..engine.registry import Engines
from ..engine.spans import engine_in_use
from ..errors import SnapstoreError
from ..state.walk.flatten import Part, require_stored_forms
from ..text import log
from .background import Background
from .inputs import Lineage, is_stream
from .known_chunks import expected_manifests
from .staging import Staging


@cache
def _log_engine() -> None:
    """Log which code the CPU engine runs, once in each process."""
    log.info("CPU engine: %s", engine_in_use())


class FirstState:
    """What one manager knows of the states that it will save; each rank has its own, so there is nothing to agree on.

    None and an iterator are no states.

    Args:
        expected: the state that will be saved, if it is known already.
        of_rank: whether several ranks save together.

    Raises:
        UnsupportedLeafError: `expected` has values without a stored form; up to 20 are named.
        InvalidInputError: it contains itself, or a `state_dict()` failed.
    """

    def __init__(self, expected: Any, *, of_rank: bool) -> None:
        self._of_rank, self._is_new, self._is_saved = of_rank, True, False
        self._expected = None if is_stream(expected) else expected
        self._memory: tuple[Background, Staging, Engines] | None = None
        self._parts: Sequence[Part] = () if self._expected is None else self._walk(self._expected)

    def use(self, background: Background, staging: Staging, context: Context, lineage: Lineage) -> None:
        """Begin to load kernels; prepare for the expected state now, and for others from now on."""
        _log_engine()
        self._memory = background, staging, context.engines
        if not self._of_rank:
            staging.look_ahead = partial(expected_manifests, context, background.run, lineage)
        context.engines.start_loading()
        parts, self._parts = self._parts, ()
        self._pin(parts)

    def check(self, state: Any) -> None:
        """Check a state that is not saved at this step, and prepare for it, if it is the first one.

        Raises:
            UnsupportedLeafError, InvalidInputError: see the class.
        """
        if self._is_new and state is not None and not is_stream(state):
            self._is_new, self._expected = False, None
            self._pin(self._walk(state))

    def pass_step(self) -> None:
        """Prepare for the expected state once more, at the first step that is not saved: its optimizers have begun."""
        if self._expected is not None:
            self.prepare(self._expected)

    def prepare(self, state: Any) -> None:
        """Prepare for saves of a state; the save raises what is wrong with it."""
        self._expected = None
        if state is not None and not is_stream(state) and self._has_devices():
            with suppress(SnapstoreError):
                self._pin(self._walk(state))

    def note_save(self) -> None:
        """Expect no state after the second save: the first one may come before its optimizers have begun."""
        if self._is_saved:
            self._expected = None
        self._is_saved = True

    def forget(self) -> None:
        """Expect no state any more, and hold none."""
        self._expected, self._parts = None, ()

    def _walk(self, state: Any) -> list[Part]:
        return require_stored_forms(state, of_rank=self._of_rank)

    def _has_devices(self) -> bool:
        if self._memory is None:
            return False
        engines = self._memory[2]
        engines.start_loading()
        return engines.has_devices

    def _pin(self, parts: Sequence[Part]) -> None:
        if parts and self._has_devices() and self._memory is not None:
            background, staging, _ = self._memory
            background.take_early(partial(staging.prepare, parts, is_early=True))

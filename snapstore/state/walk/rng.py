"""The global random generators as an object of a state.

In and out: the generators' states as plain values and arrays, through `state_dict` and `load_state_dict` like any other
object. Saves also look at `per_rank`, and restores at `load_last`. The generators belong to the process: use this in
the thread that draws from them. torch is used only if the user has imported it, or the snapshot has its generators.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from ...errors import InvalidInputError
from ...threads import imported


class RngState:
    """The global random generators as one object of a state: `state = {"rng": snapstore.RngState(), ...}`.

    Covers Python's `random`, NumPy's legacy generator (`np.random.seed`), and, where torch is imported, torch's CPU
    generator and those of all CUDA devices once CUDA is in use. A restore sets the saved generators and no others. A
    snapshot with CUDA generators needs as many visible CUDA devices: with another number, the run would draw different
    numbers, so the restore fails.

    Args:
        cuda: Whether to save and restore CUDA generators; with False such a snapshot restores on any machine.

    Attributes:
        load_last: Makes a restore load this after all other objects, which may draw random numbers when they load.
        per_rank: Makes a save of several ranks keep the generators of each.
    """

    load_last = True
    per_rank = True

    def __init__(self, *, cuda: bool = True) -> None:
        self._cuda = cuda

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states; never imports torch."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
            "numpy": np.random.get_state(legacy=False),
        }
        torch = imported("torch")
        if torch is not None:
            state["torch"] = torch.get_rng_state()
            if self._cuda and torch.cuda.is_available() and torch.cuda.is_initialized():
                state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to saved states.

        Raises:
            InvalidInputError: The snapshot has another number of CUDA generators than there are visible devices.
        """
        cuda = state.get("cuda") if self._cuda else None
        if cuda is not None:
            import torch

            present, saved = torch.cuda.device_count(), len(cuda)
            if present != saved:
                raise InvalidInputError(
                    f"CUDA generators: expected {present}, one per device here, got {saved} in the snapshot; run with "
                    f"{saved} visible devices, or use RngState(cuda=False) to skip CUDA generators"
                )
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        np.random.set_state(state["numpy"])
        if "torch" in state:
            import torch

            torch.set_rng_state(state["torch"].cpu())
            if cuda is not None:
                torch.cuda.set_rng_state_all([one.cpu() for one in cuda])

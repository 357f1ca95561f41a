"""Prepare pytest for the GPU engine: filter warnings, make cuBLAS deterministic, and load the kernels.

pytest turns every warning into an error. CuPy and nvCOMP warn at import, so they are imported here, with warnings
ignored. The variable that makes cuBLAS deterministic must be set before its first use.
"""

import os
import warnings

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

    if torch.cuda.is_available():
        try:
            import cupy  # noqa: F401
            from nvidia import libnvcomp  # noqa: F401
        except ImportError:
            pass  # test_the_packages_are_there fails then

#: Warnings of libraries; a warning of our own code is still an error.
QUIET = ["ignore:::cupy", "ignore:::nvidia", "ignore:ComplexHalf support is experimental"]


def pytest_itemcollected(item):
    """pytest calls this for the tests of this folder alone."""
    for rule in QUIET:
        item.add_marker(pytest.mark.filterwarnings(rule))


@pytest.fixture(scope="session", autouse=True)
def warm():
    """Compile the kernels and load the libraries before the tests: the first save of a process takes seconds."""
    if not torch.cuda.is_available():
        return
    from snapstore import Repository
    from snapstore.storage.memory import MemoryStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"w": torch.randn(300_000, device="cuda"), "small": torch.ones(3, device="cuda")}
        with Repository.create(MemoryStore()) as repository:
            repository.save(state, run="warm", step=0)
            state["w"] *= 1.0001
            repository.save(state, run="warm", step=1)
            repository.restore("warm@1", device="cuda")

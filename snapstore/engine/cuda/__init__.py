"""The GPU engine: batches of chunks to blobs and back on one CUDA device, and copies of a state that lies there.

`engine.registry.Engines` imports it when a CUDA tensor is first seen. Read engine.py first.

engine.py         CudaEngine: the calls of engine.base.Engine on one device
encoding.py       the stages of a batch of chunks to blobs
decoding.py       the stages of a batch of blobs to chunks
streams.py        a CUDA stream with its memory and tables: it runs one batch at a time
pinned.py         page-locked host memory
huffman.py        skewed noise planes to zstd frames and back, by kernels of this package
sparse.py         sparse deltas, from chunks and their bases, and back
nvcomp.py         nvCOMP's codecs for whole batches of blocks
nvcomp_host.py    nvCOMP's codecs for readers in host memory
kernels.py        CUDA C++ kernels, one operation per .cu file, which CuPy compiles in the background
staging.py        copies of the state in device or pinned memory
sources.py        the tensors of a device that a save copies, and digests of their bytes
graph_capture.py  background work that does not break a CUDA graph which the training captures
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ...errors import CapabilityError, InvalidInputError
from ...text import quoted
from .graph_capture import beside_captures as beside_captures

if TYPE_CHECKING:
    from ..cpu import CpuEngine
    from .engine import CudaEngine

NVCOMP_MAJOR = 6
#: The extras are cuda12 and cuda13.
CUDA_MAJORS = ("12", "13")
NO_DEVICE = "no CUDA device: torch sees none; run where there is a GPU and a CUDA build of torch"


def engine_for(device: int, codec: str, cpu: CpuEngine) -> CudaEngine:
    """Return a new engine of CUDA device number `device`, and begin to load its kernels (see `wait_loaded`).

    Args:
        codec: "portable" or "ans".
        cpu: does the work that does not fit on the device.

    Raises:
        CapabilityError: there is no CUDA device, or CuPy or nvCOMP are not installed or do not fit.
    """
    require()
    with _starting(device):
        from . import kernels, nvcomp, nvcomp_host  # noqa: F401  # nvcomp_host: before there are threads (threads.py)
        from .engine import CudaEngine

        nvcomp.check_rooms()
        kernels.start_loading(device)
        return CudaEngine(device, codec, cpu)


def wait_loaded(device: int) -> None:
    """Wait until the kernels of a device are loaded. To compile them on a new machine takes seconds.

    Raises:
        CapabilityError: they do not compile or load.
    """
    from . import kernels

    with _starting(device):
        kernels.wait_loaded(device)


@contextmanager
def _starting(device: int) -> Iterator[None]:
    """Turn every error into a CapabilityError: CuPy may lack NVRTC (its compiler), a library may lack a function."""
    try:
        yield
    except CapabilityError:
        raise
    except Exception as error:
        major = _cuda_major()
        cupy = f"pip install 'cupy-cuda{major}x[ctk]>=14'" if major in CUDA_MAJORS else _advice()
        needs = f"it needs a driver for CUDA {major}, nvCOMP {NVCOMP_MAJOR}, and CuPy with NVRTC: {cupy}"
        if isinstance(error, OSError) and error.errno is not None:  # not of a library that is missing
            needs = "CuPy keeps compiled kernels in ~/.cupy: set CUPY_CACHE_DIR to a folder that can be written"
        raise CapabilityError(
            f"cuda:{device}: the GPU engine cannot start: {type(error).__name__}: {str(error)[:1000]}; {needs}"
        ) from error


def current_engine(codec: str, cpu: CpuEngine) -> CudaEngine:
    """Return a new engine of the current CUDA device, with its kernels loaded.

    Raises:
        CapabilityError: see `engine_for` and `wait_loaded`.
    """
    require()
    import torch

    engine = engine_for(torch.cuda.current_device(), codec, cpu)
    wait_loaded(engine.device.index)
    return engine


def require() -> None:
    """Raise CapabilityError if the GPU engine cannot work here; the error says what to install."""
    import torch

    if not torch.cuda.is_available():
        raise CapabilityError(NO_DEVICE)
    if _allocator() == "pluggable":  # it need not wait for the streams that still read what is freed
        raise CapabilityError(
            "the GPU engine needs torch's own allocator of device memory, and this process has another one "
            "(torch.cuda.memory.CUDAPluggableAllocator)"
        )
    advice = _advice()
    try:
        import cupy  # noqa: F401
        from nvidia import libnvcomp

        if libnvcomp.load_library() is None:
            raise ImportError("libnvcomp cannot be loaded")
    except Exception as error:  # ImportError, or what a build for another CUDA raises
        raise CapabilityError(f"the GPU engine needs CuPy and nvCOMP {NVCOMP_MAJOR}: {error}; {advice}") from error
    if int(libnvcomp.__version__.split(".")[0]) != NVCOMP_MAJOR:
        raise CapabilityError(f"nvCOMP {libnvcomp.__version__}: expected {NVCOMP_MAJOR}.x; {advice}")


def _allocator() -> str:
    """Return the name of torch's allocator of device memory."""
    import torch

    with suppress(AttributeError):  # a build without CUDA
        return torch.cuda.get_allocator_backend()
    return "native"


def _cuda_major() -> str:
    """Return the major version of torch's CUDA."""
    import torch

    return (torch.version.cuda or "unknown").split(".")[0]


def _advice() -> str:
    """Return the command that installs the packages for torch's CUDA, or the torch to install."""
    major = _cuda_major()
    if major in CUDA_MAJORS:
        return f"pip install 'snapstore[cuda{major}]'"
    return f"torch is built for CUDA {major}: install a torch for CUDA {' or '.join(CUDA_MAJORS)}"


def require_device(device: Any) -> None:
    """Check that torch accepts `device`, and that it exists.

    Raises:
        InvalidInputError: torch does not accept it, or it has no memory.
        CapabilityError: there is no such device, or this torch is not built for it.
    """
    import torch

    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"device {quoted(device)}: expected a device of torch, such as cpu or cuda:0"
        ) from error
    if found.type == "meta":
        raise InvalidInputError(
            f"device {quoted(device)}: has no memory; Repository.tensors gives shapes without values"
        )
    if found.type != "cuda":
        try:
            torch.empty(1, device=found)
        except (RuntimeError, AssertionError, ImportError) as error:  # as the kind of the device makes torch raise
            raise CapabilityError(f"{found}: this torch has no such device; give another one") from error
        return
    if not torch.cuda.is_available():
        raise CapabilityError(f"{found}: {NO_DEVICE}, or give another device")
    count = torch.cuda.device_count()
    if (found.index or 0) >= count:
        raise CapabilityError(f"{found}: no such device: expected cuda:0 to cuda:{count - 1}, all that torch sees")

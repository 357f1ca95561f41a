"""The GPU engine: batches of chunks to blobs and back on one CUDA device, and copies of a state that lies there.

`engine.registry.Engines` imports it when a CUDA tensor is first seen. Read engine.py first.

engine.py         CudaEngine: the calls of engine.base.Engine on one device
encoding.py       the stages of a batch of chunks to blobs
decoding.py       the stages of a batch of blobs to chunks
streams.py        a CUDA stream with its memory and tables: one batch at a time runs on one; pinned host memory
huffman.py        skewed noise planes to zstd frames and back, by kernels of this package
nvcomp.py         nvCOMP's codecs, whole batches of blocks
nvcomp_host.py    nvCOMP's codecs for readers in host memory
kernels.py        CUDA C++ kernels, one operation per .cu file, compiled by CuPy when an engine is made
staging.py        copies of the state in device or pinned memory
graph_capture.py  calls that do not break a CUDA graph which the training captures meanwhile
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import CapabilityError, InvalidInputError
from .graph_capture import beside_captures as beside_captures

if TYPE_CHECKING:
    from ..cpu import CpuEngine
    from .engine import CudaEngine

NVCOMP_MAJOR = 6
NO_DEVICE = "no CUDA device: torch sees none; run where there is a GPU and a CUDA build of torch"


def engine_for(device: int, codec: str, cpu: CpuEngine) -> CudaEngine:
    """Return the engine of CUDA device number `device`; `cpu` does what does not fit there.

    Raises:
        CapabilityError: there is no CUDA device, CuPy or nvCOMP are not installed or do not fit, or kernels do not
            compile.
    """
    require()
    try:
        from . import kernels, nvcomp, nvcomp_host  # noqa: F401  # nvcomp_host: before there are threads (threads.py)
        from .engine import CudaEngine

        nvcomp.check_rooms()
        kernels.prepare(device)
        return CudaEngine(device, codec, cpu)
    except CapabilityError:
        raise
    except Exception as error:  # CuPy without NVRTC, its compiler, or a library that lacks a function
        major, _ = _wanted()
        raise CapabilityError(
            f"cuda:{device}: the GPU engine cannot start: {type(error).__name__}: {str(error)[:1000]}; it needs a "
            f"driver for CUDA {major}, nvCOMP {NVCOMP_MAJOR}, and CuPy with NVRTC: pip install 'cupy-cuda{major}x[ctk]'"
        ) from error


def current_engine(codec: str, cpu: CpuEngine) -> CudaEngine:
    """Return the engine of the current CUDA device; raises as `engine_for` does."""
    require()
    import torch

    return engine_for(torch.cuda.current_device(), codec, cpu)


def require() -> None:
    """Check that the GPU engine can work here; else raise CapabilityError, which says what to install."""
    import torch

    if not torch.cuda.is_available():
        raise CapabilityError(NO_DEVICE)
    _, extra = _wanted()
    try:
        import cupy  # noqa: F401
        from nvidia import libnvcomp

        if libnvcomp.load_library() is None:
            raise ImportError("libnvcomp cannot be loaded")
    except Exception as error:  # ImportError, or what a build for another CUDA raises
        raise CapabilityError(f"the GPU engine needs CuPy and nvCOMP {NVCOMP_MAJOR}: {error}; {extra}") from error
    if int(libnvcomp.__version__.split(".")[0]) != NVCOMP_MAJOR:
        raise CapabilityError(f"nvCOMP {libnvcomp.__version__}: expected {NVCOMP_MAJOR}.x; {extra}")


def _wanted() -> tuple[str, str]:
    """Return the major version of torch's CUDA, and the command that installs what fits it."""
    import torch

    major = (torch.version.cuda or "12").split(".")[0]
    return major, f"pip install 'snapstore[cuda{major}]'"


def require_device(device: Any) -> None:
    """Check that `device` is one that torch takes, and exists if it is a CUDA device.

    Raises:
        InvalidInputError: torch does not take it.
        CapabilityError: there is no such CUDA device.
    """
    import torch

    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(f"device {device!r}: expected a device of torch, such as cpu or cuda:0") from error
    if found.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise CapabilityError(f"{found}: {NO_DEVICE}, or give another device")
    count = torch.cuda.device_count()
    if (found.index or 0) >= count:
        raise CapabilityError(f"{found}: no such device: expected cuda:0 to cuda:{count - 1}, all that torch sees")

"""The GPU engine: imported only once a CUDA tensor is seen (`snapstore.engine.registry.Engines`).

staging.py     copies of the state in device or pinned memory
engine.py      CudaEngine: batches of chunks to blobs and back, on one device
capture.py     beside CUDA graphs that the training captures meanwhile
lanes.py       a stream with its memory and tables: one batch at a time runs in one
encoding.py    the stages of a batch on its way to blobs
decoding.py    the stages of a batch on its way back
huffman.py     planes that are noise with a skew to zstd frames and back, by kernels of our own
nvcomp.py      nvCOMP's codecs, whole batches of blocks
hosted.py      nvCOMP's own codecs for readers in host memory
kernels.py     CUDA C++ kernels, one op a .cu file, compiled by CuPy once an engine is made
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import CapabilityError
from .capture import beside_captures as beside_captures

if TYPE_CHECKING:
    from ..cpu import CpuEngine
    from .engine import CudaEngine

NVCOMP_MAJOR = 6
NO_DEVICE = "no CUDA device: torch sees none; run where there is a GPU and a CUDA build of torch"


def engine_for(device: int, codec: str, cpu: CpuEngine) -> CudaEngine:
    """The engine of CUDA device number `device`; `cpu` does what does not fit there.

    Raises:
        CapabilityError: no CUDA device, CuPy or nvCOMP are not installed or do not fit, or kernels cannot be compiled.
    """
    require()
    try:
        from . import kernels, nvcomp, nvcomp_host  # noqa: F401  # hosted: before there are threads (threads.py)
        from .engine import CudaEngine

        nvcomp.check_rooms()
        kernels.prepare(device)
        return CudaEngine(device, codec, cpu)
    except CapabilityError:
        raise
    except Exception as error:  # of CuPy without NVRTC, of its compiler, or of a library without a function
        major, _ = _wanted()
        raise CapabilityError(
            f"cuda:{device}: the GPU engine cannot start: {type(error).__name__}: {str(error)[:1000]}; it needs a "
            f"driver for CUDA {major}, nvCOMP {NVCOMP_MAJOR}, and CuPy with NVRTC: pip install 'cupy-cuda{major}x[ctk]'"
        ) from error


def current_engine(codec: str, cpu: CpuEngine) -> CudaEngine:
    """The engine of the current CUDA device; raises as `engine_for` does."""
    require()
    import torch

    return engine_for(torch.cuda.current_device(), codec, cpu)


def require() -> None:
    """Raise CapabilityError, saying what to install, unless the GPU engine can work here."""
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
    """The major of torch's CUDA, and how to install what fits it."""
    import torch

    major = (torch.version.cuda or "12").split(".")[0]
    return major, f"pip install 'snapstore[cuda{major}]'"


def require_device(device: Any) -> None:
    """Raise CapabilityError, saying what there is, if `device`, as torch takes it, is a CUDA device and not there."""
    import torch

    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise CapabilityError(f"{found}: {NO_DEVICE}, or give another device")
    count = torch.cuda.device_count()
    if (found.index or 0) >= count:
        raise CapabilityError(f"{found}: no such device: expected cuda:0 to cuda:{count - 1}, all that torch sees")

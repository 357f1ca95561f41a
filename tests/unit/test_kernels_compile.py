"""NVIDIA's compiler makes every kernel for a real device, which the emulator of thread blocks cannot show."""

import ctypes
import re
from importlib import metadata

import pytest

from kit.machines import FOLDER, HEADERS, source_of
from kit.samples import some

KERNELS = sorted(file.stem for file in FOLDER.glob("*.cu"))
SIZES = [1, 2, 4, 8]
#: Compute capability -> the bytes of a chunk that `sparse_apply` takes at a time there (kernels.py).
DEVICES = {75: 16 * 1024, 80: 16 * 1024, 90: 32 * 1024}


@pytest.fixture(scope="module")
def nvrtc():
    """NVRTC, the compiler that CuPy uses; it needs no GPU."""
    try:
        files = metadata.files("nvidia-cuda-nvrtc-cu12")
    except metadata.PackageNotFoundError:
        pytest.skip("no nvidia-cuda-nvrtc-cu12, which only the development tools of Linux have")
    return ctypes.CDLL(str(next(f.locate() for f in files if re.fullmatch(r"libnvrtc\.so\.\d+", f.name))))


def compile_errors(nvrtc, source, name, *options):
    """Compile a kernel to machine code; return what the compiler says if it fails."""
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None) == 0
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given) == 0:
            return ""
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        return log.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("capability", some(list(DEVICES), 1))
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_for_a_device(nvrtc, name, capability):
    source = HEADERS[1].read_text() + source_of(name)
    tile = f"-DTILE_BYTES={DEVICES[capability]}"
    for own in [(tile, f"-DELEMENT_SIZE={size}") for size in SIZES] if name == "sparse_apply" else [()]:
        errors = compile_errors(nvrtc, source, name, "-std=c++17", f"--gpu-architecture=sm_{capability}", *own)
        assert not errors, errors


def test_the_compiler_sees_an_error(nvrtc):
    """A kernel with more shared memory than a thread block can have, and one with an unknown name, are errors."""
    kernel = 'extern "C" __global__ void k(int *p) {{ {} }}'
    large = kernel.format("__shared__ int a[20000]; a[p[0]] = 1; p[0] = a[p[1]];")
    assert "shared data" in compile_errors(nvrtc, large, "k", "--gpu-architecture=sm_80")
    assert "undefined" in compile_errors(nvrtc, kernel.format("p[0] = q;"), "k", "--gpu-architecture=sm_80")

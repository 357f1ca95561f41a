"""Where kernels are tested: on a CUDA device, and on a CPU through an emulator of thread blocks (emulator.h)."""

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[2] / "snapstore" / "engine" / "cuda"
HEADERS = Path(__file__).with_name("emulator.h"), FOLDER / "memory.cuh"
COMPILED = Path(__file__).parents[2] / ".pytest_cache" / "emulated"
GUARD = 256  # bytes of a known pattern around every array, to catch a kernel that writes outside of it


class Placed:
    """An array in a machine's memory."""

    def __init__(self, room, start, array, address):
        self.room, self.start, self.dtype, self.shape, self.nbytes = room, start, array.dtype, array.shape, array.nbytes
        self.address = address + start

    def get(self):
        """Return its values now; check that the guards are whole."""
        room = self.room if isinstance(self.room, np.ndarray) else self.room.cpu().numpy()
        end = self.start + self.nbytes
        assert (room[: self.start] == 0xA5).all(), "written before the array"
        assert (room[end:] == 0xA5).all(), "written behind the array"
        return room[self.start : end].copy().view(self.dtype).reshape(self.shape)


def room_for(array, misaligned):
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    room = np.full(flat.size + 2 * GUARD + misaligned, 0xA5, np.uint8)
    room[GUARD + misaligned : GUARD + misaligned + flat.size] = flat
    return room


class Emulator:
    """This CPU: arrays are put between guards, at any misalignment."""

    name = "emulator"

    def put(self, array, misaligned=0):
        room = room_for(array, misaligned)
        aligned = np.empty(room.size + 256, np.uint8)
        aligned = aligned[-aligned.ctypes.data % 256 :][: room.size]
        aligned[:] = room
        return Placed(aligned, GUARD + misaligned, array, aligned.ctypes.data)

    def launch(self, kernel, grid, block, *args):
        function = getattr(emulated(kernel), f"launch_{kernel}")
        grid = (*grid, 1)[:2]
        function(*grid, block, *(a.address if isinstance(a, Placed) else int(a) for a in args))


def source_of(kernel):
    """Return the source of a kernel, without the header for memory."""
    shared = {
        "../native/xxh3.h": kernel == "digest",
        "../native/huffman_tree.h": kernel in ("huffman_encode", "huffman_decode"),
        "zstd.cuh": kernel in ("huffman_decode", "sparse_tables"),
        "sparse.cuh": kernel.startswith("sparse_"),
    }
    files = [*(file for file, used in shared.items() if used), f"{kernel}.cu"]
    return "".join((FOLDER / file).read_text() for file in files)


@cache
def emulated(kernel, *definitions):
    """Return a kernel built for this CPU. `definitions`: -D options of the compiler."""
    source = source_of(kernel)
    (parameters,) = re.findall(
        rf'extern "C" __global__ void (?:__launch_bounds__\(.*?\) )?{kernel}\((.*?)\)', source, re.DOTALL
    )
    names = re.findall(r"(\w+)(?:,|$)", parameters)
    types = [re.sub(r"\s*\w+$", "", p.strip()) for p in parameters.split(",")]
    casts = ", ".join(f"({t})a{i}" for i, t in enumerate(types))
    signature = ", ".join(f"uint64_t a{i}" for i in range(len(names)))
    code = (
        f'#include "{HEADERS[0]}"\n#include "{HEADERS[1]}"\n{source}\n'
        f'extern "C" void launch_{kernel}(unsigned x, unsigned y, unsigned block, {signature}) '
        f"{{ launch(x, y, block, [=] {{ {kernel}({casts}); }}); }}\n"
    )
    # with _FORTIFY_SOURCE, a jump to another fibre's stack looks like an attack, and the program aborts
    flags = [*definitions, "-O1", "-U_FORTIFY_SOURCE", "-w", "-std=c++17", "-shared", "-fPIC", "-fno-strict-aliasing"]
    loaded = ctypes.CDLL(str(compiled(code, flags)))
    getattr(loaded, f"launch_{kernel}").argtypes = [ctypes.c_uint] * 3 + [ctypes.c_uint64] * len(names)
    return loaded


def compiled(code, flags):
    """Return the library of a source. It is compiled once for all processes of the tests, and for later runs."""
    parts = [code, *flags, *(header.read_text() for header in HEADERS)]
    library = COMPILED / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.so"
    if not library.exists():
        COMPILED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=COMPILED) as folder:
            source, new = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            source.write_text(code)
            subprocess.run(["g++", *flags, "-o", new, source], check=True)
            new.rename(library)
    return library


class Device:
    """The current CUDA device."""

    name = "cuda"

    def put(self, array, misaligned=0):
        room = torch.from_numpy(room_for(array, misaligned)).cuda()
        return Placed(room, GUARD + misaligned, array, room.data_ptr())

    def launch(self, kernel, grid, block, *args):
        from snapstore.engine.cuda import kernels

        assert block == kernels.THREADS[kernel]
        values = [a.address if isinstance(a, Placed) else int(a) for a in args]
        kernels.launch(kernel, grid, torch.cuda.current_stream(), values)
        torch.cuda.synchronize()


MACHINES = [
    pytest.param(
        Emulator, id="emulator", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
    ),
    pytest.param(
        Device, id="cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]  # fmt: skip

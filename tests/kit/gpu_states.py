"""States of known bytes on any device, exact comparison, and other helpers that the tests of the GPU engine share."""

import gc
import hashlib
import json
import math
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch import nn

from kit.objects import keys_of
from kit.packs import scan
from kit.processes import environment
from kit.states import DTYPES
from snapstore import AlreadyExistsError, Repository, SaveOptions, SnapshotManager
from snapstore.format.hashing import checksum
from snapstore.format.keys import pack_key
from snapstore.format.manifests import manifest
from snapstore.state.values.arrays import as_bytes
from snapstore.state.values.tensors import TORCH_DTYPES
from snapstore.storage.memory import MemoryStore

MIB = 1024 * 1024
OPTIONS = SaveOptions(threads=4)

# --- states


def content(kind, size, seed=0):
    """Return (size,) uint8: random bits, floats of one scale, or mostly one value."""
    rng = np.random.default_rng(seed)
    if kind == "noise":
        return rng.integers(0, 256, size, np.uint8)
    if kind == "floats":
        return rng.normal(0, 0.02, size // 4 + 1).astype(np.float32).view(np.uint8)[:size].copy()
    out = np.full(size, seed % 2, np.uint8)
    out[seed % 7 :: 23] = rng.integers(0, 256, len(range(seed % 7, size, 23)), np.uint8)
    return out


def typed(name, shape, seed=0, device="cpu", kind="noise"):
    """A tensor of any dtype, by its bytes."""
    size = math.prod(shape) * TORCH_DTYPES[name][0]
    data = content(kind, size, seed)
    if name == "bool":
        data &= 1
    memory = torch.from_numpy(data) if size else torch.empty(0, dtype=torch.uint8)
    return memory.to(device).view(getattr(torch, name)).view(shape)


def floats(count, seed=0, device="cpu"):
    return typed("float32", (count,), seed, device, "floats")


def every_dtype(device, sizes):
    """Return a state with every dtype of torch, in tensors of about these sizes [bytes] and in odd shapes."""
    state = {}
    for i, name in enumerate(DTYPES):
        itemsize = TORCH_DTYPES[name][0]
        own = {"scalar": (), "empty": (0,), "void": (3, 0, 2), "seven": (7,), "matrix": (33, 5)}
        own |= {str(size): (size // itemsize,) for size in sizes}
        kinds = ("noise", "floats", "sparse")
        state[name] = {
            key: typed(name, shape, 31 * i + j, device, kinds[(i + j) % 3])
            for j, (key, shape) in enumerate(own.items())
        }
    return state


def odd_ones(device):
    """Return a state of views, conjugates, parameters and ties: all that is not a plain tensor in C order."""
    grid = floats(300 * 200, 1, device).view(300, 200)
    raw = typed("uint8", (20_011,), 2, device)
    waves = torch.complex(floats(3000, 3, device), floats(3000, 4, device)).view(60, 50)
    parameter = nn.Parameter(floats(5000, 5, device).view(50, 100))
    tied = floats(2000, 6, device)
    return {
        "transposed": grid.t(), "strided": grid[::2, 1::3], "narrow": grid[:, 5:150], "reversed dims": grid[None].mT,
        "from the third": raw[3:], "between": raw[1:5000:3], "odd": raw[7:4110], "row": grid[7],
        "expanded": floats(50, 7, device).expand(40, 50), "scalar view": grid[3, 4],
        "conj": waves.conj(), "conj of some": waves[::2].conj(), "adjoint": waves.mH, "conj scalar": waves[0, 0].conj(),
        "negative": waves.conj().imag, "imaginary": waves.imag,
        "parameter": parameter, "frozen": nn.Parameter(floats(1500, 8, device), requires_grad=False),
        "half": nn.Parameter(typed("bfloat16", (40, 60), 9, device, "floats")),
        "grad": floats(3000, 10, device).requires_grad_(), "tied": tied, "again": tied, "part": tied[100:1900],
    }  # fmt: skip


def facts(state):
    """path -> type, dtype, shape, requires_grad and digest of the bytes, of every leaf; JSON keeps it as it is."""
    found = {}

    def walk(value, path):
        if isinstance(value, dict):
            for key, child in value.items():
                walk(child, f"{path}/{key}")
        elif isinstance(value, list | tuple):
            for i, child in enumerate(value):
                walk(child, f"{path}/{i}")
        elif isinstance(value, torch.Tensor):
            data = hashlib.sha256(as_bytes(value).tobytes()).hexdigest()
            kind = "parameter" if isinstance(value, nn.Parameter) else "tensor"
            found[path] = [kind, str(value.dtype), list(value.shape), value.requires_grad, data]
        elif isinstance(value, np.ndarray):
            found[path] = ["array", value.dtype.str, list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        else:
            found[path] = repr(value)

    walk(state, "")
    return found


def differing(a, b):
    """Paths at which two facts differ."""
    return sorted(path for path in a.keys() | b.keys() if a.get(path) != b.get(path))


def tensors(state):
    """All tensors of a state."""
    if isinstance(state, torch.Tensor):
        return [state]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [t for child in children for t in tensors(child)]


def moved(value, device):
    """Return a copy on another device, moved as bytes: so any dtype works."""
    flat = value.detach().reshape(-1).view(torch.uint8).to(device)
    return flat.view(value.dtype).view(value.shape)


def drift(state, step):
    """Flip the lowest bit of some bytes of every plain tensor, in place; the same ones on every device."""
    for value in tensors(state):
        if value.numel() and value.is_contiguous() and not value.is_conj() and not value.is_neg():
            flat = value.detach().reshape(-1).view(torch.uint8)
            flat[step % 5 :: 29 + step % 7] ^= 1


def scrambled(state):
    """Return the same structure with other values, for a restore to overwrite."""
    if isinstance(state, dict):
        return {key: scrambled(child) for key, child in state.items()}
    if not isinstance(state, torch.Tensor):
        return state
    fresh = torch.full((state.numel() * state.dtype.itemsize,), 1, dtype=torch.uint8, device=state.device)
    fresh = fresh.view(state.dtype).view(state.shape)
    if isinstance(state, nn.Parameter):
        return nn.Parameter(fresh, state.requires_grad)
    return fresh.requires_grad_(state.requires_grad)


# --- repositories


def repository(chunk_bytes=4096, store=None, **options):
    """Create a repository."""
    options = {"threads": 4, **options}
    return Repository.create(store or MemoryStore(), chunk_bytes=chunk_bytes, options=SaveOptions(**options))


def manager(staging="device", chunk_bytes=4096, store=None, run="r", **options):
    """Return a manager of a repository; create the repository if it is not there."""
    store = store or MemoryStore()
    with suppress(AlreadyExistsError):
        Repository.create(store, chunk_bytes=chunk_bytes, options=OPTIONS).close()
    return SnapshotManager(store, run=run, staging=staging, **{"options": OPTIONS, **options})


def blobs_of(data):
    """(offset, header) of every blob in a pack's bytes."""
    return list(scan(memoryview(bytes(data)), "pack"))


def reseal(data, offset, length):
    """Make a blob's checksum right again."""
    data[offset + 8 : offset + 16] = checksum(bytes(data[offset + 16 : offset + length])).to_bytes(8, "little")


def codecs_of(store):
    """The codecs of all planes in all packs."""
    found = set()
    for key in keys_of(store, "packs/"):
        for _, header in blobs_of(store.get(key)):
            found.update(header.codecs[: header.element_size])
    return found


def codecs_in_use(repo, store):
    """Return the codecs of all planes that snapshots need; packs may hold planes that no snapshot needs."""
    found = set()
    for ref in (ref for snapshot in repo.snapshots() for ref in snapshot.manifests):
        m = manifest.read(store, ref, None)
        packs = [dict(blobs_of(store.get(pack_key(name)))) for name in m.header.pack_names]
        for pack, offset in zip(m.table.ref_packs.tolist(), m.table.ref_offsets.tolist(), strict=True):
            header = packs[pack][offset]
            found.update(header.codecs[: header.element_size])
    return found


# --- processes


def python(code, *args, gpu, timeout=110):
    """Run code in a process of its own; return its last line, read as JSON. Without `gpu` it sees no GPU."""
    env = environment() if gpu else environment(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], env=env, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


# --- device memory


@contextmanager
def headroom(nbytes):
    """Let torch take this much more device memory, and no more."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def exhaust():
    """Take all that `headroom` leaves; the memory is held as long as the result is."""
    taken = []
    for size in (64 * MIB, 8 * MIB, MIB, 128 * 1024, 8 * 1024, 512):
        while len(taken) < 100_000:
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    return taken


def settles(check, seconds=5.0):
    """Wait until a check passes that ending threads make pass; return whether it does."""
    deadline = time.monotonic() + seconds
    while not check() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return check()

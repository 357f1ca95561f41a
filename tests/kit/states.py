"""Exact comparison of states, a snapshot in memory, and objects to put into a state."""

import collections
import io
import struct

import msgspec
import numpy as np
import torch
from torch import nn

from snapstore.state.fill.fit import Fit
from snapstore.state.fill.plan import RestorePlan
from snapstore.state.fill.selection import parts_needed
from snapstore.state.tree.decode import unpack_nodes
from snapstore.state.tree.encode import encode_plain, pack
from snapstore.state.values.arrays import as_bytes, copy_box
from snapstore.state.values.tensors import TORCH_DTYPES, StoredPart, TensorSpec
from snapstore.state.walk.flatten import flatten

#: The names of the dtypes that this torch has; older ones lack some that a snapshot can hold.
DTYPES = [name for name in TORCH_DTYPES if hasattr(torch, name)]


def through_torch(value, *, weights_only=False):
    """Return a value as torch.save and torch.load give it back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def packed(value):
    return msgspec.msgpack.encode(encode_plain(value))  # bytes, in which nan equals nan


def same(a, b):
    """Check that two values are equal to the type and the bit, tensors by their bytes."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        assert as_bytes(a).tobytes() == as_bytes(b).tobytes()
    elif isinstance(a, np.ndarray):
        assert (a.dtype.str, a.shape, as_bytes(a).tobytes()) == (b.dtype.str, b.shape, as_bytes(b).tobytes())
    elif isinstance(a, dict):
        assert packed(list(a)) == packed(list(b))
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
        for left, right in zip(a.values(), b.values(), strict=True):
            same(left, right)
    elif isinstance(a, list | tuple | collections.deque):
        for left, right in zip(a, b, strict=True):
            same(left, right)
    elif len(a) > 4096 if isinstance(a, bytes | bytearray) else False:
        assert a == b
    else:
        assert packed(a) == packed(b)


class Saved:
    """A snapshot in memory: the bytes of every array and the packed trees."""

    def __init__(self, state):
        parts = flatten(state)
        self.parts = [StoredPart(p.name, unpack_nodes(pack(p.tree)), p.specs) for p in parts]
        self.bytes = []
        for part in parts:
            self.bytes.append([])
            for held in part.arrays:
                memory = np.empty(held.spec.nbytes, np.uint8)
                held.copy_into(memory)
                assert memory.tobytes() == as_bytes(held.value).tobytes()
                self.bytes[-1].append(memory)

    def spec(self, name, index=0):
        return next(part.specs[index] for part in self.parts if part.name == name)

    def target(self, **options):
        names = parts_needed([part.name for part in self.parts], Fit.of(options.get("keys")).parts_keys)
        self.read = [i for i, part in enumerate(self.parts) if part.name in names]
        return RestorePlan([self.parts[i] for i in self.read], **options)

    def restore(self, **options):
        target = self.target(**options)
        self.buffers = []
        for want in target.wants:
            buffer = target.buffers.buffer(want)
            assert buffer is target.buffers.buffer(want)
            assert buffer.dtype in (np.uint8, torch.uint8)
            assert buffer.shape == (self.bytes[self.read[want.part]][want.entry].size,)
            stored, sizes = self.bytes[self.read[want.part]][want.entry], (len(buffer),)
            copy_box((buffer, sizes, (0,)), (stored, sizes, (0,)), sizes)
            self.buffers.append(buffer)
        for want in target.wants:
            target.buffers.complete(want)
        return target.finish()


def again(state, **options):
    return Saved(state).restore(**options)


def random_tensor(name, shape, seed=0):
    size = int(np.prod(shape)) * TORCH_DTYPES[name][0]
    noise = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    if name == "bool":
        noise &= 1
    memory = torch.from_numpy(noise) if size else torch.empty(0, dtype=torch.uint8)
    return memory.view(getattr(torch, name)).view(shape)


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(dtype)


def train(model, optimizer, steps=3):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.linspace(0, 1, 12).view(3, 4).to(next(model.parameters()).dtype)).square().mean()
        loss.backward()
        if type(optimizer).__name__ == "SparseAdam":
            for parameter in model.parameters():
                parameter.grad = parameter.grad.to_sparse()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


class Loader:
    """Stands in for torchdata's StatefulDataLoader: the state of a fresh one is costly, so it counts calls for it."""

    def __init__(self):
        self.position, self.asked = 0, 0

    def state_dict(self):
        self.asked += 1
        return {
            "_snapshot": {"_steps": self.position, "workers": [{"id": 0, "rng": (3, None, b"x")}]},
            "_iterator_finished": False,
        }

    def load_state_dict(self, state):
        self.position = state["_snapshot"]["_steps"]


def bits(value):
    """Return a form of plain values in which == means same type and same bits."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, dict):
        extra = (getattr(value, "default_factory", None), getattr(value, "_metadata", None))
        return kind, extra, [(bits(k), bits(v)) for k, v in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, map(bits, value)))
    if isinstance(value, list | tuple | collections.deque):
        return kind, getattr(value, "maxlen", None), [bits(v) for v in value]
    return kind, value


def spec(**changes):
    fields = {
        "path": ("a",),
        "kind": "tensor",
        "dtype": "float32",
        "shape": (2, 3),
        "requires_grad": False,
        "tie": None,
    }
    return TensorSpec(**{**fields, **changes})

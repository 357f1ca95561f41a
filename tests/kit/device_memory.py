"""Restores and saves through the memory of any device; CPU tensors stand in for it where there is none."""

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from kit.states import DTYPES, Saved, again, net, random_tensor, same, train
from snapstore.errors import InvalidInputError
from snapstore.state.values.arrays import as_bytes, as_memory

SHAPES = [(), (0,), (0, 3), (1,), (7, 5), (2, 3, 4)]


def everywhere(device):
    return True


def ours(device):
    """Return the predicate `on_device` of a device, or of CPU tensors that stand in for one."""
    kind = torch.device(device).type
    return lambda other: other.type == kind


def noise(name, shape, device, seed=7):
    """As `random_tensor`, but on the device and made of bytes: rare dtypes lack operations."""
    stored = as_bytes(random_tensor(name, shape, seed))
    flat = torch.empty(stored.size, dtype=torch.uint8, device=device)
    flat.copy_(torch.from_numpy(stored.copy()))
    return flat.view(getattr(torch, name)).view(shape)


def raw(value):
    return as_bytes(value).tobytes()


def is_own(buffer, tensor):
    """Whether a buffer is a tensor's memory."""
    assert (buffer.dtype, buffer.device) == (torch.uint8, tensor.device)
    assert (buffer.is_contiguous(), buffer.requires_grad) == (True, False)
    return buffer.data_ptr() == tensor.data_ptr()


def tensors_of_every_kind():
    return {f"{name}{shape}": random_tensor(name, shape) for name in DTYPES for shape in SHAPES}


def contiguous_targets(device):
    state = tensors_of_every_kind()
    into = {key: noise(str(value.dtype)[6:], value.shape, device) for key, value in state.items()}
    into["leaf"] = torch.zeros(3, device=device, requires_grad=True)
    into["parameter"] = nn.Parameter(torch.zeros(3, device=device))
    state |= {"leaf": torch.ones(3), "parameter": torch.ones(3) * 2}
    held = dict(into)
    saved = Saved(state)
    saved.restore(into=into, on_device=ours(device))
    for buffer, key in zip(saved.buffers, state, strict=True):
        assert into[key] is held[key]
        assert is_own(buffer, into[key])
        assert raw(into[key]) == raw(state[key])
    assert into["leaf"].is_leaf
    assert into["leaf"].requires_grad
    assert into["leaf"].grad is None
    (into["leaf"] * into["parameter"]).sum().backward()
    assert into["leaf"].grad.tolist() == [2, 2, 2]


def strided_targets(device):
    for name in DTYPES:
        base, before = noise(name, (6, 8), device), raw(noise(name, (6, 8), device))
        for view in (base.t(), base[::2, 1::3], base[:, None, :].permute(2, 1, 0), base[3:5, 2]):
            stored = random_tensor(name, tuple(view.shape))
            saved = Saved({"t": stored})
            saved.restore(into={"t": view}, on_device=ours(device))
            assert not is_own(saved.buffers[0], view)
            assert raw(view) == raw(stored)
            saved = Saved({"t": noise(name, tuple(base.shape), "cpu")})
            saved.restore(into={"t": base}, on_device=ours(device))
            assert raw(base) == before
    base = torch.zeros(2, 6, device=device)
    again([torch.ones(3, 2)], into=[base.t()[::2]], on_device=ours(device))
    assert base.tolist() == [[1, 0, 1, 0, 1, 0]] * 2


def conjugated_and_negated_targets(device):
    value = torch.tensor([1 + 2j, 3 - 4j])
    into = {"c": torch.zeros(2, dtype=torch.complex64, device=device).conj()}
    into["n"] = torch.zeros(2, dtype=torch.complex64, device=device).conj().imag
    again({"c": value, "n": value.imag}, into=into, on_device=ours(device))
    assert torch.equal(into["c"].cpu(), value)
    assert torch.equal(into["n"].cpu(), value.imag)


def ties(device):
    weight = random_tensor("float32", (4, 3))
    state = {"a": [weight], "b": {"w": weight, "v": weight}, "top": weight}
    wide = noise("float32", (3, 8), device)
    into = {
        "a": [wide.t()[::2]],
        "b": {"w": noise("float32", (4, 3), device), "v": noise("float32", (4, 3), device)},
        "top": wide.t()[1::2].clone(memory_format=torch.preserve_format),
    }
    saved = Saved(state)
    saved.restore(into=into, on_device=ours(device))
    assert len(saved.buffers) == 1
    assert is_own(saved.buffers[0], into["b"]["w"])
    for value in (into["a"][0], *into["b"].values(), into["top"]):
        assert raw(value) == raw(weight)
    tied = {"a": [into["b"]["w"]], "b": {"w": into["b"]["w"], "v": into["b"]["w"]}, "top": into["b"]["w"]}
    again(state, into=tied, on_device=ours(device))
    assert raw(tied["top"]) == raw(weight)


def overlapping_targets(device):
    flat = random_tensor("float32", (6,))
    state = {"flat": flat, "head": flat[:4], "tail": flat[2:], "own": flat[:4]}
    memory, own = noise("float32", (6,), device), noise("float32", (4,), device)
    saved = Saved(state)
    saved.restore(into={"flat": memory, "head": memory[:4], "tail": memory[2:], "own": own}, on_device=ours(device))
    assert raw(memory) == raw(flat)
    assert raw(own) == raw(flat[:4])
    assert [type(buffer) for buffer in saved.buffers].count(torch.Tensor) == 1  # `own` is tied to `head`
    into = {"a": memory[:2], "b": memory[1:3]}
    with pytest.raises(InvalidInputError, match="shares memory with another array"):
        again({"a": torch.ones(2), "b": torch.zeros(2)}, into=into, on_device=ours(device))


def overlapping_targets_of_a_tied_array(device):
    """Its bytes stay in device memory until the overlapping place is filled and compared."""
    one = random_tensor("float32", (4,), 1)
    memory = noise("float32", (4,), device)
    for own in (noise("float32", (4,), device), noise("float32", (8,), device)[::2]):
        saved = Saved({"own": one, "a": one, "b": one[1:]})
        saved.restore(into={"own": own, "a": memory, "b": memory[1:]}, on_device=ours(device))
        assert isinstance(saved.buffers[0], torch.Tensor)
        assert raw(memory) == raw(own) == raw(one)
        with pytest.raises(InvalidInputError, match="shares memory with another array"):
            again({"own": one, "a": one, "b": -one[1:]}, into={"own": own, "a": memory, "b": memory[1:]})


def new_tensors(device):
    state = tensors_of_every_kind()
    state["parameter"] = state["again"] = nn.Parameter(torch.ones(3))
    saved = Saved(state)
    restored = saved.restore(device=device, on_device=ours(device))
    assert list(restored) == list(state)
    for buffer, key in zip(saved.buffers, [key for key in state if key != "again"], strict=True):
        value = restored[key]
        assert value.device.type == torch.device(device).type
        assert is_own(buffer, value.detach())
        assert (value.is_leaf, value.is_contiguous(), value._is_view()) == (True, True, False)
        same(value, state[key])
    assert restored["parameter"] is restored["again"]


def arrays_and_bytes_stay_on_the_host(device):
    state = {"n": np.arange(6, dtype=">i4").reshape(2, 3), "b": b"x" * 5000, "a": bytearray(b"y" * 5000)}
    saved = Saved(state)
    same(saved.restore(device=device, on_device=everywhere), state)
    into = {"n": np.zeros((3, 2), ">i4").T, "b": b"", "a": None}
    same(saved.restore(into=into, on_device=everywhere), state)
    assert [type(buffer) for buffer in saved.buffers] == [np.ndarray] * 3


def objects(device):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    for steps in (0, 1):
        other = net().to(device)
        into = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
        for parameter in other.parameters() if steps else ():
            parameter.grad = torch.ones_like(parameter)
        if steps:
            into["optimizer"].step()
        again({"model": model, "optimizer": optimizer}, into=into, on_device=ours(device))
        for left, right in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
            assert left.device.type == torch.device(device).type
            assert raw(left) == raw(right)
        states = zip(into["optimizer"].state.values(), optimizer.state.values(), strict=True)
        assert all(raw(left[key]) == raw(right[key]) for left, right in states for key in right)


def tensors_that_autograd_watches(device):
    with torch.inference_mode():
        frozen = torch.zeros(2, device=device)
    leaf = torch.zeros(2, device=device, requires_grad=True)
    branch = leaf * 3
    again([torch.ones(2), torch.ones(2) * 2, torch.ones(2) * 3], into=[frozen, leaf, branch], on_device=ours(device))
    assert [frozen.tolist(), leaf.tolist(), branch.tolist()] == [[1, 1], [2, 2], [3, 3]]
    assert branch.grad_fn is not None
    branch.sum().backward()
    assert leaf.grad.tolist() == [3, 3]


def saved_memory(device):
    for name in DTYPES:
        for shape in SHAPES:
            value = noise(name, shape, device)
            assert is_own(as_memory(value, ours(device)), value)
            assert raw(as_memory(value, ours(device))) == raw(value)
        base = noise(name, (6, 8), device)
        for view in (base.t(), base[::2, 1::3], base[:1].expand(4, 8)):
            memory = as_memory(view, ours(device))
            assert not is_own(memory, view)
            assert raw(memory) == raw(view)
    value = torch.tensor([1 + 2j, 3 - 4j], device=device)
    for view in (value.conj(), value.conj().imag):
        assert raw(as_memory(view, ours(device))) == raw(view.resolve_conj().resolve_neg())
    parameter = nn.Parameter(torch.zeros(3, device=device))
    assert is_own(as_memory(parameter, ours(device)), parameter)


CHECKS = [
    contiguous_targets,
    strided_targets,
    conjugated_and_negated_targets,
    ties,
    overlapping_targets,
    overlapping_targets_of_a_tied_array,
    new_tensors,
    arrays_and_bytes_stay_on_the_host,
    objects,
    tensors_that_autograd_watches,
    saved_memory,
]


# any places: (dtype, shape, seed, [(layout, device) of every place that the array is tied to])


def sources(devices):
    layouts = st.sampled_from(["contiguous", "transposed", "stepped", "parameter"])
    place = st.tuples(layouts, st.sampled_from(devices))
    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    source = st.tuples(st.sampled_from(sorted(DTYPES)), shapes, st.integers(0, 99), st.lists(place, min_size=1))
    return st.lists(source, min_size=1, max_size=4)


def laid_out(name, shape, layout, device):
    if layout == "transposed":
        return noise(name, shape[::-1], device).permute(tuple(range(len(shape)))[::-1])
    if layout == "stepped":
        steps = tuple(slice(1, None, 2) for _ in shape)
        return noise(name, tuple(2 * n for n in shape), device)[steps] if shape else noise(name, (3,), device)[1]
    return nn.Parameter(noise(name, shape, device), False) if layout == "parameter" else noise(name, shape, device)


def check_any_places(drawn, on_device):
    """Each array reaches all of its places, and its bytes arrive in memory of the first that can take them."""
    state, into = {}, {}
    for i, (name, shape, seed, wanted) in enumerate(drawn):
        value = random_tensor(name, shape, seed)
        state[f"s{i}"] = [value] * len(wanted)
        into[f"s{i}"] = [laid_out(name, shape, *place) for place in wanted]
    saved = Saved(state)
    saved.restore(into=into, on_device=on_device)
    for key, values in into.items():
        assert all(raw(value) == raw(state[key][0]) for value in values)
    buffers = iter(saved.buffers)
    for targets in into.values():
        if not math.prod(targets[0].shape):
            for _ in targets:  # empty arrays are not tied: each has a buffer of its own
                next(buffers)
            continue
        direct = [target for target in targets if on_device(target.device)]
        reached = [target for target in targets if target.device.type == "cpu" or on_device(target.device)]
        whole = [target for target in reached if target.is_contiguous()]
        home = (whole or direct or targets)[0]
        buffer = next(buffers)
        assert isinstance(buffer, torch.Tensor) == on_device(home.device)
        address = buffer.data_ptr() if isinstance(buffer, torch.Tensor) else buffer.ctypes.data
        assert (address == home.data_ptr()) == bool(whole)

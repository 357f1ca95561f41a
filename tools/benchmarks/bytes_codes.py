"""`tools/bench bytes --codes`: XOR beside integer differences, for elements without a sign and an exponent.

The elements come from two states of a real training run, gpu_train's GPT: the codes of 8-bit Adam (Dettmers et al.
2022, blocks of 256, dynamic maps), weights as codes of 8 and 4 bits, masks of the largest weights, states of random
generators, counts of tokens, a buffer of samples of which some are replaced. All are cut into chunks, and each chunk is
stored in the smallest form that the CPU engine has: full, a difference in planes, a sparse delta; and as XOR planes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks import bytes as bench
from benchmarks import gpu_train
from snapstore.engine.batches import EncodeJob
from snapstore.engine.reference import encode_chunk
from snapstore.format.blobs import blob, planes

Elements = npt.NDArray[Any]
BLOCK = 256


def dynamic_map(*, signed: bool) -> Tensor:
    """Return the 256 values of 8-bit Adam's dynamic map, ascending, (256,) float32: 7 decades of finer steps."""
    values, bits = [0.0, 1.0], 7
    for i in range(bits):
        count = 2 ** (i + (0 if signed else 1)) + 1
        edges = torch.linspace(0.1, 1, count)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - bits + 1)
        values += [*means.tolist(), *((-means).tolist() if signed else [])]
    found = torch.tensor(sorted(values)[:256])
    return torch.cat([found, found[-1:].expand(256 - len(found))])


def adam_codes(moment: Tensor, *, signed: bool) -> Elements:
    """Return the codes of a moment, (n,) uint8: the nearest value of the map, each block scaled to its largest."""
    table, flat = dynamic_map(signed=signed), moment.detach().float().flatten()
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scaled = flat / flat.abs().amax(1, keepdim=True).clamp_min(1e-38)
    right = torch.searchsorted(table, scaled.contiguous()).clamp(1, 255)
    is_left = (scaled - table[right - 1]) < (table[right] - scaled)
    return (right - is_left.long()).to(torch.uint8).numpy().ravel()


def weight_codes(weight: Tensor, bits: int, group: int) -> Elements:
    """Return round-to-nearest codes of a weight, (n,) uint8; of 4 bits, two in a byte."""
    flat = weight.detach().float().flatten()
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % group)).view(-1, group)
    top = 2 ** (bits - 1) - 1
    codes = (flat / flat.abs().amax(1, keepdim=True).clamp_min(1e-38) * top).round().clamp(-top, top)
    found = (codes.to(torch.int16) + (top + 1 if bits == 4 else 0)).numpy().ravel().astype(np.int8).view(np.uint8)
    pairs: Elements = found if bits == 8 else found[::2] | found[1::2] << 4
    return pairs


def mask(weight: Tensor) -> Elements:
    """Return which half of the weights is largest, (n,) bool as uint8."""
    size = weight.detach().abs().flatten()
    return (size >= size.median()).numpy().view(np.uint8)


def codes_of(state: gpu_train.State) -> Iterator[tuple[str, Elements]]:
    """Yield (kind, elements) of each tensor of a state."""
    for name in state["p"]:
        p, m, v = (state[kind][name] for kind in "pmv")
        yield "8-bit Adam, m", adam_codes(m, signed=True)
        yield "8-bit Adam, v", adam_codes(v, signed=False)
        yield "int8 weights", weight_codes(p, 8, 64)
        yield "int4 pairs of weights", weight_codes(p, 4, 64)
        yield "mask of the largest half", mask(p)


def _words(generator: np.random.RandomState) -> Elements:
    """Return the words of a Mersenne Twister, (624,) uint32."""
    state: Any = generator.get_state(legacy=False)
    return np.array(state["state"]["key"])


def counters(steps: int) -> Iterator[tuple[str, Elements, Elements]]:
    """Yield (kind, before, after) of integers that a loop keeps beside its model."""
    generator, numpy_generator = torch.Generator().manual_seed(1), np.random.RandomState(1)
    before = generator.get_state().numpy().copy(), _words(numpy_generator)
    torch.rand(100_003, generator=generator)
    numpy_generator.random_sample(100_003)
    yield "torch's random state", before[0], generator.get_state().numpy()
    yield "NumPy's random state", before[1], _words(numpy_generator)
    tokens = gpu_train.read_tokens(4096, gpu_train.TEXT_BYTES // 12).numpy().astype(np.int64)
    half, more = len(tokens) // 2, 512 * steps
    counts = np.bincount(tokens[:half], minlength=65_536)
    yield "counts of tokens, int64", counts, counts + np.bincount(tokens[half : half + more], minlength=65_536)
    buffer = tokens[:half].copy()
    changed = buffer.copy()
    changed[1000 : 1000 + half // 20] = tokens[half : half + half // 20]
    yield "buffer of tokens, 5 % replaced", buffer, changed


def sizes(base: Elements, chunk: Elements) -> tuple[int, int, int]:
    """Return the stored bytes of a chunk: full; as the engine chooses today; as XOR planes."""
    a, b = (np.ascontiguousarray(x).view(np.uint8) for x in (base, chunk))
    size, out = base.itemsize, np.empty(blob.bound(base.nbytes, base.itemsize) + 64, np.uint8)
    full = len(encode_chunk(EncodeJob(b, bytes(16), size, planes.BYTES), out).data)
    limit = 2 * b.size
    today = len(encode_chunk(EncodeJob(b, bytes(16), size, planes.BYTES, a, bytes([1] * 16), limit), out).data)
    xor = a ^ b
    statistics = planes.statistics(planes.histograms(planes.sample(xor, size)))
    as_xor = len(blob.encode(xor, size, planes.BYTES, statistics, (bytes(16), bytes([1] * 16)), out, xor=True))
    return full, min(full, today), as_xor


def report() -> None:
    """Train, and print the table."""
    total: dict[tuple[str, str], list[int]] = {}

    def add(series: str, kind: str, before: Elements, after: Elements) -> None:
        row = total.setdefault((series, kind), [0, 0, 0, 0, 0])
        for base, chunk in bench.chunks([before], [after]):
            full, today, as_xor = sizes(base, chunk)
            for i, value in enumerate((chunk.nbytes, full, today, as_xor, min(today, as_xor))):
                row[i] += value

    for series, gap, before, after in bench.pairs("gpt", bench.PRETRAIN_STEPS):
        if series == "pretrain":
            for (kind, a), (_, b) in zip(codes_of(before), codes_of(after), strict=True):
                add(f"{gap} steps", kind, a, b)
    for kind, a, b in counters(10):
        add("10 steps", kind, a, b)
    print("| elements | gap | full | as today | XOR planes | the smaller of both | XOR wins |")
    print("|---" * 7 + "|")
    for (series, kind), (plain, *found) in sorted(total.items(), key=lambda item: item[0][1]):
        shares = " | ".join(f"{100 * value / plain:.4g}" for value in found)
        print(f"| {kind} | {series} | {shares} | {100 * (1 - found[3] / found[1]):.2f} % |")

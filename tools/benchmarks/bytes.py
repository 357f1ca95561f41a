"""`tools/bench bytes`: stored bytes of deltas beside their entropy, other codings and other tools.

It measures runs of snapshots on a GPU, or small ones on a CPU (bytes_runs.py), and writes docs/benchmarks/bytes.json.
With --codings it prints tables of single steps. Two models are then trained on the CPU on Python's sources: gpu_train's
GPT and a Llama. `rl` is the bf16 weights at a learning rate of 1e-6 (fp32 masters, AdamW). `pretrain` is the fp32 state
p, m, v of pretraining. Every figure is a share of the plain bytes of the later state. `snapstore` counts the packs and
manifests that its public API stores for the later state, without the snapshot's record. The other figures do not count
the names and places of tensors.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import caller
import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor, nn

from benchmarks import gpu_train
from snapstore import Repository, SaveOptions
from snapstore.format.blobs import codecs, planes
from snapstore.format.blobs.codecs import deflate, zstd
from snapstore.format.chunking import DEFAULT_CHUNK_BYTES
from snapstore.storage.memory import MemoryStore

#: 4.2 M parameters in 27 tensors as a GPT, 5.0 M in 39 as a Llama.
SIZE = gpu_train.Size(width=256, layers=4, heads=4, vocabulary=4096, context=64, batch=8)
PRETRAIN_STEPS, PRETRAIN_GAPS = 200, (50, 10)
RL_GAPS = (16, 5, 1)
MODELS = ("gpt", "llama")
ROOT = Path(__file__).resolve().parents[2]

Elements = npt.NDArray[np.unsignedinteger]
Arrays = list[Elements]


class Model(nn.Module):
    """Tokens in, logits of the next token out, by a causal language model of transformers: "Llama" or "Mixtral"."""

    def __init__(self, kind: str, size: gpu_train.Size) -> None:
        super().__init__()
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            hidden_size=size.width, intermediate_size=11 * size.width // 4, num_hidden_layers=size.layers,
            vocab_size=size.vocabulary, num_attention_heads=size.heads, num_key_value_heads=max(1, size.heads // 2),
            max_position_embeddings=size.context,
        )  # fmt: skip
        self.inner = getattr(transformers, f"{kind}ForCausalLM")(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, context) int64 to logits (batch, context, vocabulary)."""
        logits: Tensor = self.inner(tokens).logits
        return logits


def trainer_of(model: str, size: gpu_train.Size, device: torch.device, steps: int) -> gpu_train.Trainer:
    """Return the training run of a model, on Python's sources: the "gpt", a "llama", or a mixture of experts, "moe"."""
    trainer = gpu_train.Trainer(size, device, steps)
    if model != "gpt":
        torch.manual_seed(0)
        trainer.model = Model({"llama": "Llama", "moe": "Mixtral"}[model], size).to(device)  # type: ignore[assignment]
        trainer.optimizer = torch.optim.AdamW(
            trainer.model.parameters(), lr=gpu_train.PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1,
            fused=device.type == "cuda",
        )  # fmt: skip
    return trainer


# -- states


def pairs(model: str, steps: int) -> Iterator[tuple[str, int, gpu_train.State, gpu_train.State]]:
    """Train, and yield (series, gap, state, state after as many more steps)."""
    size = SIZE if steps >= PRETRAIN_STEPS else gpu_train.TINY
    trainer = trainer_of(model, size, torch.device("cpu"), steps)
    for series, gaps, lr, keep in (
        ("pretrain", PRETRAIN_GAPS, None, gpu_train.clone),
        ("rl", RL_GAPS, gpu_train.RL_LR, gpu_train.weights_only),
    ):
        lead = steps - gaps[0] if series == "pretrain" else gpu_train.SETTLE_STEPS
        states = {}
        for gap, more in zip(gaps, (lead, *(a - b for a, b in pairwise(gaps))), strict=True):
            trainer.train(max(1, more), lr)
            states[gap] = keep(trainer.state())
        trainer.train(gaps[-1], lr)
        after = keep(trainer.state())
        for gap, before in states.items():
            yield series, gap, before, after


def elements_of(state: gpu_train.State, kind: str) -> Arrays:
    """The tensors of one kind as unsigned integers."""
    whole = {2: torch.uint16, 4: torch.uint32}
    return [t.contiguous().view(whole[t.element_size()]).numpy().ravel() for t in state[kind].values()]


def chunks(before: Arrays, after: Arrays) -> Iterator[tuple[Elements, Elements]]:
    """Chunks as snapstore cuts them: (base, chunk)."""
    for a, b in zip(before, after, strict=True):
        count = DEFAULT_CHUNK_BYTES // a.itemsize
        for i in range(0, a.size, count):
            yield a[i : i + count], b[i : i + count]


# -- differences


def zigzag(base: Elements, chunk: Elements) -> Elements:
    """Differences as snapstore stores them."""
    found, after = np.empty_like(base), np.ascontiguousarray(chunk)
    planes.difference(after.view(np.uint8), base.view(np.uint8), base.itemsize, found.view(np.uint8))
    return found


def in_order(base: Elements, chunk: Elements) -> Elements:
    """Differences of integers in the order of their floats: the integers of negative floats are inverted."""
    signed = np.dtype(f"i{base.itemsize}")
    top, low = 8 * base.itemsize - 1, np.iinfo(signed).max
    a, b = ((x.view(signed) ^ ((x.view(signed) >> top) & low)).view(base.dtype) for x in (base, chunk))
    return zigzag(a, b)


def exponents(base: Elements) -> npt.NDArray[np.uint8]:
    """The exponent of every bf16 or fp32 element."""
    return (base >> (8 * base.itemsize - 9)).astype(np.uint8)


def entropy(symbols: npt.NDArray[Any]) -> float:
    """Order-0 entropy in bytes, with Miller's and Madow's correction for small samples."""
    counts = np.unique(symbols, return_counts=True)[1]
    if not len(counts):
        return 0.0
    bits = (counts * np.log2(counts.sum() / counts)).sum() + (len(counts) - 1) / (2 * np.log(2))
    return float(bits / 8)


def given_exponent(base: Elements, symbols: npt.NDArray[Any]) -> float:
    """Entropy of symbols in bytes, for each exponent of the base by itself."""
    keys = exponents(base)
    return sum(entropy(symbols[keys == key]) for key in np.unique(keys))


# -- codings: (base, chunk) -> bytes


def literals(stream: npt.NDArray[Any], level: int | None = None) -> int:
    """Bytes of one byte stream as zstd frames; without a level, of Huffman-coded literals."""
    plain = np.ascontiguousarray(stream, np.uint8)
    if level is None:
        return sum(map(len, zstd.encode_entropy(plain, codecs.BLOCK_BYTES)))
    return len(zstandard.ZstdCompressor(level=level).compress(plain.tobytes()))


def coded_planes(source: Elements, layout: int) -> int:
    """Bytes of planes, each in the smallest of the codecs that snapstore uses."""
    total = 0
    for plane in planes.split(source.view(np.uint8), source.itemsize, layout):
        streams = (zstd.encode_entropy, deflate.encode_runs)
        total += min(plane.size, *(sum(len(b) + 4 for b in f(plane, codecs.BLOCK_BYTES)) for f in streams))
    return total


def continued(gaps: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Gaps as bytes: 255 means 255 more."""
    repeats = gaps // 255 + 1
    out = np.full(int(repeats.sum()), 255, np.uint8)
    out[np.cumsum(repeats) - 1] = gaps % 255
    return out


def escaped(values: Elements) -> tuple[npt.NDArray[np.uint8], int]:
    """Values as bytes, and the bytes of the ones that do not fit into one."""
    return np.minimum(values, 255).astype(np.uint8), int((values >= 255).sum()) * values.itemsize


def gaps_and_values(base: Elements, chunk: Elements, level: int | None = None) -> int:
    """Gaps between changed elements, and their integer differences, two streams a chunk."""
    difference = zigzag(base, chunk)
    at = np.flatnonzero(difference)
    values, more = escaped(difference[at] - difference.dtype.type(1))
    return literals(continued(np.diff(at, prepend=-1) - 1), level) + literals(values, level) + more


def gaps_and_xors(base: Elements, chunk: Elements) -> int:
    """The same with XORs instead of differences; each byte of an XOR has a stream of its own."""
    xor = base ^ chunk
    at = np.flatnonzero(xor)
    found = [xor[at] >> xor.dtype.type(8 * k) for k in range(xor.itemsize)]
    return literals(continued(np.diff(at, prepend=-1) - 1)) + sum(literals(f & f.dtype.type(255)) for f in found)


def by_exponent(base: Elements, chunk: Elements) -> int:
    """Gaps and values within each exponent of the base, two streams for each with at least 64 changes."""
    order = np.argsort(exponents(base), kind="stable")
    keys, difference = exponents(base)[order], zigzag(base, chunk)[order]
    total, begin = 0, 0
    for end in [*np.flatnonzero(np.diff(keys)) + 1, keys.size]:
        at = np.flatnonzero(difference[begin:end])
        if len(at) < 64 and end < keys.size:
            continue
        values, more = escaped(difference[begin:end][at] - difference.dtype.type(1))
        total += literals(continued(np.diff(at, prepend=-1) - 1)) + literals(values) + more + 6
        begin = end
    return total


def smallest(coding: Callable[..., int], base: Elements, chunk: Elements) -> int:
    """The smallest of zstd's levels 1, 3, 9 and 19."""
    return min(coding(base, chunk, level) for level in (1, 3, 9, 19))


RL_CODINGS: dict[str, Callable[[Elements, Elements], float]] = {
    "entropy: XOR": lambda a, b: entropy(a ^ b),
    "entropy: integer difference": lambda a, b: entropy(zigzag(a, b)),
    "entropy: which changed, given the exponent": lambda a, b: given_exponent(a, a != b),
    "entropy: integer difference, given the exponent": lambda a, b: given_exponent(a, zigzag(a, b)),
    "XOR planes, best codec a plane": lambda a, b: coded_planes(a ^ b, planes.ROTATED),
    "integer difference, planes": lambda a, b: coded_planes(zigzag(a, b), planes.BYTES),
    "gaps and XORs, zstd literals": gaps_and_xors,
    "gaps and differences, zstd literals": gaps_and_values,
    "gaps and differences, best zstd level": lambda a, b: smallest(gaps_and_values, a, b),
    "gaps and differences, streams by exponent": by_exponent,
}
PRETRAIN_CODINGS: dict[str, Callable[[Elements, Elements], float]] = {
    "full, planes": lambda a, b: coded_planes(b, planes.ROTATED),
    "XOR planes": lambda a, b: coded_planes(a ^ b, planes.ROTATED),
    "integer difference, planes": lambda a, b: coded_planes(zigzag(a, b), planes.BYTES),
    "the same in the order of the floats": lambda a, b: coded_planes(in_order(a, b), planes.BYTES),
    "entropy of XOR, given the exponent: by plane": lambda a, b: plane_entropy(a, a ^ b, planes.ROTATED),
    "entropy of the difference, given the exponent: by plane": lambda a, b: plane_entropy(
        a, zigzag(a, b), planes.BYTES
    ),
}


def plane_entropy(base: Elements, source: Elements, layout: int) -> float:
    """Entropy of each plane of a difference in bytes, for each exponent of the base by itself."""
    return sum(given_exponent(base, p) for p in planes.split(source.view(np.uint8), source.itemsize, layout))


# -- snapstore and others: whole states


def snapstore(before: gpu_train.State, after: gpu_train.State, restore_cost: float) -> int:
    """Bytes of packs and manifests that the second save adds."""
    with Repository.create(MemoryStore(), options=SaveOptions(restore_cost=restore_cost)) as repository:
        repository.save(before, run="r", step=0)
        return int(repository.save(after, run="r", step=1).stored_bytes)


def positions_and_values(before: Arrays, after: Arrays) -> int:
    """PULSE's and NeMo's scheme: positions and new values of changed elements, zstd at its best level of five."""
    streams = []
    for a, b in zip(before, after, strict=True):
        at = np.flatnonzero(a != b)
        streams += [np.diff(at, prepend=0).astype(np.uint32).tobytes(), b[at].tobytes()]
    positions, values = b"".join(streams[::2]), b"".join(streams[1::2])
    sizes = []
    for level in (1, 3, 9, 15, 19):
        coder = zstandard.ZstdCompressor(level=level)
        sizes.append(len(coder.compress(positions)) + len(coder.compress(values)))
    return min(sizes)


def patch(before: Arrays, after: Arrays) -> int:
    """Do what `zstd -19 --long=27 --patch-from` does, with the library: same window, same long-distance matches."""
    base, data = (b"".join(a.tobytes() for a in arrays) for arrays in (before, after))
    prefix = zstandard.ZstdCompressionDict(base, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    options = zstandard.ZstdCompressionParameters.from_level(
        19, window_log=27, enable_ldm=True, dict_size=len(base), source_size=len(data)
    )
    return len(zstandard.ZstdCompressor(dict_data=prefix, compression_params=options).compress(data))


def xdelta(before: Arrays, after: Arrays) -> int:
    """xdelta3 -9, on the two states as files."""
    with tempfile.TemporaryDirectory() as folder:
        for file, arrays in (("before", before), ("after", after)):
            (Path(folder) / file).write_bytes(b"".join(a.tobytes() for a in arrays))
        command = "xdelta3 -e -9 -S djw -B 67108864 -s before after out"
        subprocess.run(command.split(), cwd=folder, check=True)
        return (Path(folder) / "out").stat().st_size


def by_tool(before: Arrays, after: Arrays) -> dict[str, int]:
    """Bytes of the second state by tools for files that know the first one."""
    found = {"zstd -19 --patch-from": patch(before, after)}
    return found if missing_tools() else found | {"xdelta3 -9": xdelta(before, after)}


def missing_tools() -> dict[str, str]:
    """Return the tools that `by_tool` leaves out on this machine, and why."""
    return {} if shutil.which("xdelta3") else {"xdelta3 -9": "xdelta3 is not on the PATH"}


# -- figures


def measure(series: str, before: gpu_train.State, after: gpu_train.State) -> dict[str, float]:
    """Return the figures of two states as shares of the plain bytes; a coding of one kind of tensor, of that kind's."""
    whole = gpu_train.nbytes(after)
    found = {
        "snapstore": snapstore(before, after, 3) / whole,
    }
    for kind in after:
        a, b = elements_of(before, kind), elements_of(after, kind)
        plain = sum(x.nbytes for x in b)
        found[f"{kind}: changed elements"] = sum(int((x != y).sum()) for x, y in zip(a, b, strict=True)) * (
            b[0].itemsize / plain
        )
        for name, coding in (RL_CODINGS if series == "rl" else PRETRAIN_CODINGS).items():
            found[f"{kind}: {name}"] = sum(coding(x, y) for x, y in chunks(a, b)) / plain
        if series == "rl":
            found[f"{kind}: positions and values, best zstd level"] = positions_and_values(a, b) / plain
            found |= {f"{kind}: {name}": size / plain for name, size in by_tool(a, b).items()}
    return found


def table(series: str, found: dict[str, dict[str, float]]) -> str:
    """The figures of one series as a table of Markdown, in percent."""
    columns = {name: figures for name, figures in found.items() if f" {series} " in name}
    lines = [f"| {series}, % of the plain bytes | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in next(iter(columns.values()), {}):
        lines.append(f"| {row} | {' | '.join(f'{100 * c[row]:.3g}' for c in columns.values())} |")
    return "\n".join(lines)


def report(args: argparse.Namespace) -> None:
    """Measure runs of snapshots, and write the record after each section."""
    from benchmarks import bytes_runs, gpu

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scale = bytes_runs.GPU if device.type == "cuda" else bytes_runs.WIDE if args.wide else bytes_runs.CPU
    scale = replace(bytes_runs.QUICK if args.quick else scale, chunk_bytes=args.chunk_bytes)
    if args.only:
        scale = replace(scale, models={args.only: scale.models.get(args.only, scale.models["gpt"])})
    is_record = not (args.quick or args.only or args.wide or args.chunk_bytes != DEFAULT_CHUNK_BYTES)
    out = args.out or (None if not is_record else ROOT / "docs" / "benchmarks" / "bytes.json")
    command = shlex.join(["tools/bench", "bytes", *sys.argv[1:]])
    sections: dict[str, Any] = {}

    def note(name: str, found: dict[str, Any]) -> None:
        sections[name] = found
        body = gpu.head(device) | {"command": command, "sections": sections, "figures": bytes_runs.figures_of(sections)}
        if out:
            out.write_text(json.dumps(body, indent=1) + "\n")
        print(json.dumps(body["figures"], indent=1), flush=True)

    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="snapstore-bench-", dir=args.folder) as folder:
        bytes_runs.measure(scale, Path(folder), note, lambda text: print(text, flush=True))


def main() -> None:
    """Train, measure, write the record or print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="little models, few steps; writes no record")
    parser.add_argument("--only", choices=(*MODELS, "moe"), help="this model alone; writes no record without --out")
    parser.add_argument("--out", type=caller.path, metavar="FILE", help="write the figures as JSON here")
    parser.add_argument(
        "--wide", action="store_true", help="on a CPU: only a GPT of 67 M parameters; no record without --out"
    )
    parser.add_argument(
        "--chunk-bytes",
        type=int,
        default=DEFAULT_CHUNK_BYTES,
        metavar="N",
        help="of the repositories, instead of 1 MiB",
    )
    parser.add_argument(
        "--folder", type=caller.path, help="where repositories lie, by default the folder for temporary files"
    )
    parser.add_argument("--codings", action="store_true", help="tables of codings of single steps, on the CPU")
    parser.add_argument("--history", action="store_true", help="entropies given earlier changes, on the CPU")
    parser.add_argument("--codes", action="store_true", help="XOR beside differences of integers, on the CPU")
    args = parser.parse_args()
    if args.codes:
        from benchmarks import bytes_codes

        bytes_codes.report()
        return
    if args.history:
        from benchmarks import bytes_history

        bytes_history.report()
        return
    if not args.codings:
        report(args)
        return
    found: dict[str, dict[str, float]] = {}
    for model in MODELS if not args.only else (args.only,):
        for series, gap, before, after in pairs(model, 60 if args.quick else PRETRAIN_STEPS):
            found[f"{model} {series} {gap}"] = measure(series, before, after)
            print(f"{model} {series} gap {gap}: {gpu_train.nbytes(after):,} bytes", flush=True)
    for series in ("rl", "pretrain"):
        print("\n" + table(series, found))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

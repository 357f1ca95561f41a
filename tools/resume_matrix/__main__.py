"""The command line of tools/resume-matrix; its script explains the options."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from fnmatch import fnmatchcase

#: torchao compiles its step for each shape, which takes minutes.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import caller
import torch

from . import optimizers, record, workers
from .paths import PATHS, missing
from .record import Pair, kind
from .training import DTYPES, LAYOUTS, Case

SHOWN, SLOW_S = 40, 10


def main() -> int:
    """Run the pairs that the command line chooses; return 1 if one fails."""
    options = _options()
    began, pairs, asked = time.monotonic(), list[Pair](), _asked(options)
    cases = workers.spread(asked)
    absent = sorted({name for name, there in optimizers.packages().items() if not there} | set(missing().values()))
    for name in absent:
        print(f"{name}: not installed; its pairs are left out")
    print(f"{len(asked)} pairs of {len(cases)} cases in {options.workers} processes, seed {options.seed}", flush=True)
    for number, (case, found, seconds) in enumerate(workers.run(cases, options.workers, options.device), 1):
        pairs += [Pair(case, path, outcome) for path, outcome in found.items()]
        if seconds > SLOW_S:
            print(f"{', '.join(case)}: took {seconds:.0f} s", flush=True)
        if number % max(1, len(cases) // 20) == 0:
            print(f"{number} of {len(cases)} cases, {time.monotonic() - began:.0f} s", flush=True)
    assert len(pairs) == len(asked)
    known = record.causes()
    failed = record.failures(pairs, known)
    if options.is_whole and options.device == "cpu":
        failed += record.unused(pairs, known)
    made = record.record(pairs, absent, time.monotonic() - began, options.device)
    if options.out:
        options.out.write_text(record.packed(made))
    elif options.is_whole:
        record.publish(made, "resume" if options.device == "cpu" else "resume-gpu")
    tally = Counter(f"{kind(one.outcome.snapstore)} (torch.save: {kind(one.outcome.torch_save)})" for one in pairs)
    print(*(f"{count:6} {text}" for text, count in sorted(tally.items())), sep="\n")
    print(*failed[:SHOWN], *([f"and {len(failed) - SHOWN} more"] if len(failed) > SHOWN else []), sep="\n")
    print(f"{len(failed)} failed" if failed else "no pair failed")
    return 1 if failed else 0


def _asked(options: argparse.Namespace) -> list[tuple[Case, str]]:
    """Return the pairs to run: all that the patterns choose, or a sample of them."""

    def chosen(names: object, patterns: str) -> list[str]:
        return [one for one in names if any(fnmatchcase(one, pattern) for pattern in patterns.split(","))]  # type: ignore[attr-defined]

    paths = [path for path in chosen(PATHS, options.paths) if path not in missing()]
    every = [
        (Case(optimizer, layout, dtype), path)
        for optimizer in optimizers.chosen(options.only.split(","))
        for layout in chosen(LAYOUTS, options.layouts)
        for dtype in chosen(DTYPES, options.dtypes)
        for path in paths
    ]
    if not every:
        sys.exit("resume-matrix: no pair has these names; see tools/resume-matrix --help")
    if options.sample is None or options.sample >= len(every):
        return every
    return sorted(random.Random(options.seed).sample(every, options.sample))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/resume-matrix")
    parser.add_argument("--sample", type=int, help="run so many pairs, drawn by --seed")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="which pairs are drawn")
    parser.add_argument("--only", help="patterns of optimizers, such as 'torch.Adam*,schedulefree.*'")
    parser.add_argument("--layouts", default="*", help=f"patterns: {', '.join(LAYOUTS)}")
    parser.add_argument("--dtypes", default="*", help=f"patterns: {', '.join(DTYPES)}")
    parser.add_argument("--paths", default="*", help=f"patterns: {', '.join(PATHS)}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: the fused optimizers")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8), help="processes")
    parser.add_argument("--out", type=caller.path, help="write the record there, and nothing to docs/")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    narrowed = options.only or options.sample or {options.layouts, options.dtypes, options.paths} != {"*"}
    options.is_whole = not narrowed
    options.only = options.only or ("*" if options.device == "cpu" else "torch.* fused")
    return options


if __name__ == "__main__":
    sys.exit(main())

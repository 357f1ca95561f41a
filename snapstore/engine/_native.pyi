"""The extension in C, from the sources in native/."""

from collections.abc import Callable
from typing import Any

from ..arrays import Bytes, Column
from .spans import Place

#: A frame may take this many bytes more than its block.
FRAME_SLACK: int

#: What `serve` returns if the job has ended.
ENDED: int

#: A job, the bytes of scratch memory that it needs, and its number from 1 on. Arguments of all jobs:
#:     seed: of digests.
#:     firsts: (k + 1,) int64, the first chunk of each span, then the number of chunks.
#:     gate: `Gate.flags`, (2,) int64: once the first is not 0, no further span is done; the second counts the threads
#:         that are doing one. None: there is no gate.
_Job = tuple[Any, int, int]

def copy_job(
    chunks: Place, copies: Place | None, seed: int, digests: Bytes | None, firsts: Column, gate: Column | None
) -> _Job:
    """Return a job that fills `digests`, (n, 16), and copies chunks to memories that do not overlap with them.

    Args:
        copies: may be longer than the chunks; then they are filled up with zeros.
    """

def encode_job(
    chunks: Place,
    bases: Place,
    copies: Place | None,
    sizes: Bytes,
    layouts: Bytes,
    mode: int,
    terms: Column,
    limits: Column,
    digests: Bytes,
    base_digests: Bytes,
    copied: Column | None,
    wanted: Column | None,
    entries: Bytes,
    starts: Column,
    places: Column,
    out: Bytes,
    seed: int,
    firsts: Column,
    gate: Column | None,
) -> _Job:
    """Return a job that encodes chunks; or that examines them, and encodes those that differ from their bases.

    If they are not examined, it reports spans with chunks that have no blob.

    Args:
        copies: the chunks may change meanwhile: what is hashed and encoded are private copies, and those that were not
            encoded are copied there.
        sizes, layouts: (n,) of elements.
        mode: of deltas, 1: differences, 2: XORs.
        terms: planes.ENTROPY_TERMS.
        limits: (n,) int64, the most bytes of a delta; -1: no delta is wanted.
        digests, base_digests: (n, 16); filled if chunks are examined, but not for a missing base.
        copied: (n,) filled: 1 if a chunk was copied. None: the chunks are not examined.
        wanted: (n,) uint8, the chunks to encode; 0 is written for chunks that equal their bases. None: all.
        entries: (n,) blob.ENTRY, filled; length 0: there is no blob.
        starts: (n,) int64, filled: where each blob begins in `out`.
        places: (k + 1,) int64, where the blobs of each span may begin in `out`, and where the last ones must end.
    """

def decode_job(
    stored: Bytes,
    offsets: Column,
    lengths: Column,
    counts: Column,
    digests: Bytes,
    each: Bytes | None,
    outs: Place,
    bases: Place,
    seed: int,
    done: Column,
    reports_all: bool,
    firsts: Column,
    gate: Column | None,
) -> _Job:
    """Return a job that rebuilds chunks from their chains; see DecodeBatch. It reports spans with other chunks.

    Args:
        each: (m, 16) digests of the chunks of all blobs, which are verified too; None: only those of `digests` are.
        done: (n,), filled: 1 if a chunk is rebuilt and verified.
        reports_all: report all spans.
    """

def spans_left(job: Any) -> int:
    """Return how many spans no thread has taken yet."""

def spans_undone(job: Any) -> int:
    """Return how many spans are not done yet: nobody has taken them, or a thread or Python is at work on them."""

def run(job: Any, scratch: Bytes, look: Callable[[int], object]) -> bool:
    """Do spans of a job until none is left, or Python has looked at one; return whether the job has ended.

    Any number of threads may call it at the same time, each with scratch memory of its own.

    Args:
        look: called with the number of a span that Python must look at, while the gate counts this thread. An exception
            of it is raised; even then the span is done.
    """

def done(job: Any) -> bool:
    """Note that Python has looked at a span that `serve` has returned; return whether the job has ended."""

def queue() -> Any:
    """Return an empty queue of jobs."""

def push(queue: Any, job: Any, urgent: bool) -> bool:
    """Add a job that has not begun, which must live until it has ended; return False if the queue is full.

    Args:
        urgent: before the jobs that are not.
    """

def withdraw(job: Any) -> bool:
    """Take a job out of its queue, if it is there; return whether nobody is at work on a span of it."""

def queued(queue: Any) -> int:
    """Return how many jobs in the queue have spans that no thread has taken."""

def serve(queue: Any, scratch: Bytes) -> tuple[int, int]:
    """Do spans of the jobs of a queue, the first one first.

    Returns:
        The number of a job, and that of a span that Python must look at, or ENDED. If no span is left: (0, -1).
        If the first job needs more scratch memory: (0, how many bytes).
    """

def choose(
    chunk: Bytes, base: Bytes | None, size: int, layout: int, mode: int, limit: int, terms: Column
) -> tuple[bool, bool, bool, int, bytes]:
    """Return how to store a chunk: sparse, delta, left to the reference, most bytes of a sparse delta, kinds of planes.

    Planes that do not exist have kind NOISE.
    """

def checksum(data: Bytes) -> int:
    """Return the XXH3-64."""

def split(source: Bytes, base: Bytes | None, size: int, layout: int, mode: int, out: Bytes) -> None:
    """Split elements into planes; mode 0: without a base, 1: their differences from it, 2: exclusive or."""

def merge(planes: Bytes, base: Bytes | None, size: int, layout: int, mode: int, out: Bytes) -> None:
    """Merge planes; the inverse of `split`."""

def encode_frame(block: Bytes, out: Bytes) -> int:
    """Write a block as a zstd frame; return its length."""

def decode_frame(frame: Bytes, out: Bytes) -> bool:
    """Fill `out` from a frame; return False if the reference must decode it."""

def encode_runs(block: Bytes, out: Bytes) -> int:
    """Write a block as a deflate stream; return its length, 0 if it would not shrink."""

def decode_runs(stream: Bytes, out: Bytes) -> bool:
    """Fill `out` from a deflate stream; return False if the reference must decode it."""

def use_avx2(wanted: bool) -> bool:
    """Use AVX2 or not, in this process; return whether it is used."""

def uses_avx2() -> bool:
    """Return whether AVX2 is used."""

"""Options: how the saves of an open repository are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .checks import check_choice
from .errors import InvalidInputError
from .format.blobs.codecs import CODECS
from .format.blobs.pack import DEFAULT_PACK_BYTES, LARGE_PACK_BYTES, MANY_PACKS
from .format.manifests.delta_choice import DEFAULT_RESTORE_COST
from .text import quoted

#: At this cost a chain has about a hundred deltas that are almost as large as the full chunk. `delta_choice.MAX_LINKS`
#: also limits a chain.
MAX_RESTORE_COST = 100.0


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How saves are stored. Every default was measured (docs/design/).

    Attributes:
        restore_cost: the most that a restore of a chunk may cost, in bytes read and decoding time, as a multiple of
            what it costs if the chunk is stored full: 1.0 to 100.0. Up to about 10, larger values store fewer bytes;
            restores are slower. 1.0: no new deltas. A chunk that does not change keeps its chain (`full=True` ends it).
        pack_bytes: a pack is closed at this size, 4 KiB to 1 GiB [bytes]. The default is for states of up to 512 GiB:
            see `pack_bytes_of`.
        threads: the number of threads of the CPU engine, 1 to 1024; None: SNAPSTORE_THREADS, else every core.
        codec: "portable": zstd and deflate, which every machine reads. "ans": nvCOMP's own format for CUDA tensors. It
            is faster, but only a GPU with the same major release of nvCOMP reads it; `recode` converts it. "auto":
            "portable", but chunks in host memory are stored as they are if the store takes bytes faster than the CPU
            engine encodes them: the first save measures both, in about a second (docs/guides/planning.md).
        verify_writes: "off", "sample" (one new chunk in 64) or "full": decode new chunks before the commit.
            "full" also asks the store for every new pack and manifest by name and size.
        delta: how a chunk is stored as a delta to the one before. "difference": the integer difference of its elements,
            in planes or, if few changed, as these. "xor": the XOR of its bytes, in planes. "auto": the one that stores
            fewer bytes in our measurements, which is "difference" for every dtype (docs/design/sparse-deltas.md).
            "none": new chunks are stored full; chunks that do not change are still stored once.
        share_runs: whether the first save of a run without a parent looks for its chunks in the newest snapshots of
            other runs. False: if other writers of the repository are not trusted (docs/s3.md).
    """

    restore_cost: float = DEFAULT_RESTORE_COST
    pack_bytes: int = DEFAULT_PACK_BYTES
    threads: int | None = None
    codec: Literal["portable", "ans", "auto"] = "portable"
    verify_writes: Literal["off", "sample", "full"] = "sample"
    delta: Literal["auto", "difference", "xor", "none"] = "auto"
    share_runs: bool = True

    def __post_init__(self) -> None:
        for name, value in (("pack_bytes", self.pack_bytes), ("threads", self.threads)):
            if type(value) is not int and not (name == "threads" and value is None):
                raise InvalidInputError(f"{name} {quoted(value)}: expected an int, got {type(value).__name__}")
        if type(self.restore_cost) not in (int, float) or not 1 <= self.restore_cost <= MAX_RESTORE_COST:
            raise InvalidInputError(f"restore_cost {quoted(self.restore_cost)}: expected 1.0 to {MAX_RESTORE_COST}")
        if not 4096 <= self.pack_bytes <= 1024**3:
            raise InvalidInputError(f"pack_bytes {quoted(self.pack_bytes)}: expected 4 KiB to 1 GiB")
        if type(self.share_runs) is not bool:
            raise InvalidInputError(f"share_runs {quoted(self.share_runs)}: expected a bool")
        check_choice("codec", self.codec, (*CODECS, "auto"))
        check_choice("delta", self.delta, ("auto", "difference", "xor", "none"))
        check_choice("verify_writes", self.verify_writes, ("off", "sample", "full"))
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise InvalidInputError(f"threads {quoted(self.threads)}: expected 1 to 1024")

    @classmethod
    def of(cls, options: SaveOptions | None) -> SaveOptions:
        """Return `options`, or the defaults for None.

        Raises:
            InvalidInputError: it is of another type, such as a dict.
        """
        if options is not None and not isinstance(options, cls):
            raise InvalidInputError(f"options: expected SaveOptions(...), got {type(options).__name__}")
        return cls() if options is None else options

    def pack_bytes_of(self, state_bytes: int) -> int:
        """Return the size at which a save closes its packs [bytes]: `pack_bytes`.

        If that is the default, and a state of `state_bytes` on all ranks together would fill more than 16,384 packs,
        return 128 MiB.
        """
        is_large = state_bytes > MANY_PACKS * DEFAULT_PACK_BYTES
        return LARGE_PACK_BYTES if is_large and self.pack_bytes == DEFAULT_PACK_BYTES else self.pack_bytes

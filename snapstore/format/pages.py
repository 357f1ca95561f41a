"""Pages: the ruling records of many snapshots of a run, joined into one object; and volumes, copies of pages.

In: records, as loose objects have them. Out: bytes, and back (docs/format.md, "Pages"). A page keeps committed and
forgotten records whole. Of a swept or aborted one it keeps a grave: id, step, seq, revision and state; and apart from
these, so that nobody reads it who needs the history alone, its past: date, reason and metrics.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from ..errors import DAMAGE, IntegrityError, UnknownFormatError
from ..text import log
from ..threads import msgpack_decoder
from . import records
from .keys import MAX_PAGES, page_key, parse_record_key, records_prefix, volume_key
from .records import ABORTED, SWEPT, Id, RunName, Snapshot

#: Kinds in the envelope.
PAGE, VOLUME = 11, 12
#: The most snapshots of a page; and the most bytes of its whole records, and of the pages of a volume [bytes].
MAX_SNAPSHOTS, MAX_LIVE_BYTES, MAX_VOLUME_BYTES = 1024, 32 * 1024 * 1024, 1024 * 1024 * 1024
#: One grave, in order of the ids.
GRAVE = np.dtype([("id", "S16"), ("step", "<u8"), ("seq", "<u8"), ("revision", "<u4"), ("state", "u1")])
#: The states of a grave, by their number there.
STATES = (SWEPT, ABORTED)
_LENGTH = struct.Struct("<Q")

Graves = npt.NDArray[np.void]
T = TypeVar("T", bound=msgspec.Struct)
PageNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PAGES)]


class Past(NamedTuple):
    """What `log --all` shows of a snapshot in a grave, beside what the grave has.

    Its parent is an id; or, as that is much shorter, the seq of the one snapshot of the same page that has it.
    """

    parent: str | int | None
    created: float
    policy: str
    reason: str
    metrics: dict[str, float]


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A page as it is packed.

    Attributes:
        live: zstd frame of the packed (name below the run, object) of each whole record.
        graves: rows of `GRAVE`.
        past: zstd frame of the packed `Past` of each grave.
        mends: the numbers of damaged pages whose facts this one has.
    """

    run: RunName
    number: PageNumber
    write_id: Id
    live: bytes
    graves: bytes
    past: bytes
    mends: list[PageNumber] = []


class _StoredVolume(msgspec.Struct, frozen=True, kw_only=True):
    """A volume as it is packed; `pages` is the zstd frame of its pages' objects, each after its length (u64)."""

    run: RunName
    first: PageNumber
    last: PageNumber
    id: Id
    pages: memoryview


_LIVE = msgpack_decoder(list[tuple[str, bytes]])
_PAST = msgpack_decoder(list[Past])
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, eq=False)
class RecordPage:
    """A page. Its records are decoded when they are asked for.

    Attributes:
        number: its place among the pages of its run, from 0 on.
        write_id: of the PUT that made it.
        whole: id -> (key, bytes) of each committed or forgotten record.
        graves: the others, rows of `GRAVE` in order of their ids.
        packed_past: their pasts, for `unpack_pasts`.
        mends: the numbers of damaged pages whose facts this one has.
        data: its bytes, as stored.
    """

    run: str
    number: int
    write_id: str
    whole: dict[str, tuple[str, bytes]]
    graves: Graves
    packed_past: bytes
    mends: list[int]
    data: bytes

    @property
    def key(self) -> str:
        """Return its key in the store."""
        return page_key(self.run, self.number)

    def record(self, snapshot_id: str) -> Snapshot:
        """Return the whole record of a snapshot.

        Raises:
            KeyError: it has none.
            FormatError, IntegrityError: this release cannot decode it.
        """
        key, data = self.whole[snapshot_id]
        return records.decode(data, Snapshot, key)

    @cached_property
    def live(self) -> list[Snapshot]:
        """The committed and forgotten records."""
        return [record for record in self._decoded if isinstance(record, Snapshot)]

    @cached_property
    def unknown(self) -> dict[str, str]:
        """Key -> why, of whole records that this release cannot decode."""
        both = zip(self.whole.values(), self._decoded, strict=True)
        return {key: record for (key, _), record in both if isinstance(record, str)}

    @cached_property
    def _decoded(self) -> list[Snapshot | str]:
        def decoded(snapshot_id: str) -> Snapshot | str:
            try:
                return self.record(snapshot_id)
            except DAMAGE as error:
                return str(error)

        return [decoded(snapshot_id) for snapshot_id in self.whole]

    def grave_records(self) -> list[Snapshot]:
        """Return what is left of the record of each grave, in their order."""
        pasts = self._pasts
        return [self._left(row, pasts[at] if at < len(pasts) else None) for at, row in enumerate(self.graves)]

    def grave_record(self, snapshot_id: str) -> Snapshot | None:
        """Return what is left of a snapshot's record; None: it has no grave here."""
        name = np.array([bytes.fromhex(snapshot_id)], "S16")[0]
        at = int(np.searchsorted(self.graves["id"], name))
        if at == len(self.graves) or self.graves["id"][at] != name:
            return None
        return self._left(self.graves[at], self._pasts[at] if at < len(self._pasts) else None)

    @cached_property
    def _pasts(self) -> list[Past]:
        return unpack_pasts(self.packed_past, self.key)

    @cached_property
    def _parents(self) -> dict[int, str | None]:
        """Seq -> id of the snapshots here; None: several have it."""
        both = [(int(row["seq"]), row.tobytes()[:16].hex()) for row in self.graves]
        found: dict[int, str | None] = {}
        for seq, name in (*both, *((record.seq, record.id) for record in self.live)):
            found[seq] = None if seq in found else name
        return found

    def _left(self, row: np.void, past: Past | None) -> Snapshot:
        if past is not None and isinstance(past.parent, int):
            past = past._replace(parent=self._parents.get(past.parent))
        return grave_record(self.run, row, past)


def unpack_pasts(packed: bytes, where: str) -> list[Past]:
    """Return the past of each grave of a page; empty if they do not decode: they decide nothing."""
    try:
        return _PAST.decode(_decompressed(packed, MAX_LIVE_BYTES, where))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UnknownFormatError) as error:
        log.warning("%s: the dates and metrics of swept snapshots do not decode: %s", where, error)
        return []


def is_grave(record: Snapshot) -> bool:
    """Return whether a page keeps only a grave of a record.

    An aborted record with a number stays whole: it may announce a copy, which takes its number from it.
    """
    return record.state == SWEPT or (record.state == ABORTED and not record.seq)


def make_page(run: str, number: int, chosen: Iterable[tuple[Snapshot, bytes]], mends: Sequence[int] = ()) -> bytes:
    """Return the bytes of a page.

    Args:
        chosen: the ruling record of each snapshot, and its bytes as stored.
    """
    live: list[tuple[str, bytes]] = []
    dead: list[Snapshot] = []
    chosen = sorted(chosen, key=lambda one: one[0].id)
    counts = Counter(record.seq for record, _ in chosen)
    seqs = {record.id: record.seq for record, _ in chosen if counts[record.seq] == 1}
    for record, data in chosen:
        if is_grave(record):
            dead.append(record)
        else:
            live.append((record.key.removeprefix(records_prefix(run)), data))
    graves = np.empty(len(dead), GRAVE)
    for row, record in zip(graves, dead, strict=True):
        row["id"], row["step"], row["seq"] = bytes.fromhex(record.id), record.step, record.seq
        row["revision"], row["state"] = record.revision, STATES.index(record.state)
    pasts = [
        Past(seqs.get(record.parent or "", record.parent), record.created, record.policy, record.reason, record.metrics)
        for record in dead
    ]
    stored = _Stored(
        run=run,
        number=number,
        write_id=records.new_id(),
        live=_compressed(_ENCODER.encode(live)),
        graves=graves.tobytes(),
        past=_compressed(_ENCODER.encode(pasts)),
        mends=[*mends],
    )
    return records.enveloped(PAGE, _ENCODER.encode(stored))


def read_page(data: bytes, key: str) -> RecordPage:
    """Return the page that lies under a key.

    Raises:
        IntegrityError: it is damaged, or the page of another key.
        FormatError, UnknownFormatError: it is no page, or of a later release.
    """
    stored = _decoded(data, PAGE, _Stored, key)
    if page_key(stored.run, stored.number) != key:
        raise IntegrityError(f"{key}: holds {page_key(stored.run, stored.number)}; it was moved or altered")
    graves = _graves(stored.graves, key)
    try:
        packed = _LIVE.decode(_decompressed(stored.live, MAX_LIVE_BYTES, key))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnknownFormatError(f"{key}: its records do not decode: {error}") from error
    ids = {row.tobytes()[:16].hex() for row in graves}
    whole: dict[str, tuple[str, bytes]] = {}
    for name, record in packed:
        of = records_prefix(stored.run) + name
        parsed = parse_record_key(of)
        if parsed is None or parsed[2] in ids or parsed[2] in whole:
            raise UnknownFormatError(f"{key}: has {name!r} twice, or it names no record")
        whole[parsed[2]] = of, record
    if len(ids) + len(whole) > MAX_SNAPSHOTS:
        raise UnknownFormatError(f"{key}: {len(ids) + len(whole)} snapshots, expected at most {MAX_SNAPSHOTS}")
    return RecordPage(
        run=stored.run,
        number=stored.number,
        write_id=stored.write_id,
        whole=whole,
        graves=graves,
        packed_past=stored.past,
        mends=stored.mends,
        data=data,
    )


def grave_record(run: str, row: np.void, past: Past | None) -> Snapshot:
    """Return a grave as the record that it is left of, without what only a whole one has."""
    parent, created, policy, reason, metrics = past or Past(None, 0.0, "", "", {})
    return Snapshot(
        id=row.tobytes()[:16].hex(),
        run=run,
        step=int(row["step"]),
        seq=int(row["seq"]),
        state=STATES[row["state"]],
        write_id="",
        revision=int(row["revision"]),
        parent=parent if isinstance(parent, str) else None,
        created=created,
        policy=policy,
        reason=reason,
        metrics=metrics,
    )


def make_volume(run: str, first: int, pages: Sequence[bytes]) -> tuple[str, bytes]:
    """Return the key and the bytes of a volume of pages, given as stored, from number `first` on."""
    name, last = records.new_id(), first + len(pages) - 1
    packed = _compressed(b"".join(part for page in pages for part in (_LENGTH.pack(len(page)), page)))
    stored = _StoredVolume(run=run, first=first, last=last, id=name, pages=memoryview(packed))
    return volume_key(run, first, last, name), records.enveloped(VOLUME, _ENCODER.encode(stored))


def read_volume(data: bytes, key: str) -> Iterator[bytes]:
    """Yield the pages of a volume, as stored.

    Raises:
        See `read_page`, for the volume alone; the pages are not looked at.
    """
    stored = _decoded(data, VOLUME, _StoredVolume, key)
    if volume_key(stored.run, stored.first, stored.last, stored.id) != key:
        raise IntegrityError(f"{key}: holds another volume; it was moved or altered")
    _content_bytes(stored.pages, MAX_VOLUME_BYTES, key)
    left = stored.last - stored.first + 1
    try:
        with zstandard.ZstdDecompressor().stream_reader(stored.pages) as stream:  # it may be large
            while head := stream.read(_LENGTH.size):
                (size,) = _LENGTH.unpack(head.ljust(_LENGTH.size, b"\xff"))
                page, left = stream.read(size) if size <= 2 * MAX_LIVE_BYTES else b"", left - 1
                if len(page) != size or left < 0:
                    break
                yield page
            else:
                if not left:
                    return
    except zstandard.ZstdError as error:
        raise UnknownFormatError(f"{key}: does not decompress: {error}") from error
    raise UnknownFormatError(f"{key}: has not {stored.last - stored.first + 1} pages, each whole")


def _decoded(data: bytes, kind: int, of: type[T], key: str) -> T:
    name = "page" if kind == PAGE else "volume"
    try:
        return msgpack_decoder(of).decode(records.payload_of(data, kind, name, key))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnknownFormatError(f"{key}: this {name} does not decode: {error}") from error


def _graves(packed: bytes, key: str) -> Graves:
    if len(packed) % GRAVE.itemsize:
        raise UnknownFormatError(f"{key}: graves of {len(packed)} bytes, expected a multiple of {GRAVE.itemsize}")
    graves = np.frombuffer(packed, GRAVE)
    ids = [row.tobytes()[:16] for row in graves]
    if sorted(set(ids)) != ids or (graves["state"] >= len(STATES)).any():
        raise UnknownFormatError(f"{key}: graves are not in order of their ids, or have unknown states")
    if (graves["step"] > records.MAX_STEP).any() or (graves["revision"] > records.MAX_REVISION).any():
        raise UnknownFormatError(f"{key}: a grave has a step or a revision out of range")
    return graves


def _compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_content_size=True).compress(data)


def _content_bytes(frame: bytes | memoryview, limit_bytes: int, key: str) -> int:
    """Return the size of what a zstd frame holds.

    Raises:
        UnknownFormatError: it is no frame, or its content is larger than the limit, or does not tell its size.
    """
    try:
        size = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise UnknownFormatError(f"{key}: does not decompress: {error}") from error
    if not 0 <= size <= limit_bytes:
        raise UnknownFormatError(f"{key}: holds {size} bytes, expected at most {limit_bytes}")
    return size


def _decompressed(frame: bytes, limit_bytes: int, key: str) -> bytes:
    """Return the content of a zstd frame. Raises as `_content_bytes` does."""
    size = _content_bytes(frame, limit_bytes, key)
    try:
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=max(size, 1))
    except zstandard.ZstdError as error:
        raise UnknownFormatError(f"{key}: does not decompress: {error}") from error

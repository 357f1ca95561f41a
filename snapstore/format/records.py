"""The small objects: config, snapshot records, sessions, policies, gc marks; their envelope and their keys.

In: typed structs. Out: checksummed bytes, and back (docs/format.md, "Envelope"). Nothing here touches a store.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import xxhash

from ..errors import FormatError, IntegrityError, InvalidInputError, UnknownFormatError
from ..state.tree_decode import decode_plain, unpack_nodes
from ..state.tree_encode import encode_plain
from .keys import NAME, manifest_key, pack_key, record_key, sha256_names

VERSION = "0.1.0"
FORMAT_VERSION = 1
MAX_OBJECT_BYTES = 64 * 1024 * 1024
#: Of a record's metadata, its metrics and its tags, each: every listing reads every record once, and a revision must
#: never become one that readers refuse.
MAX_FIELD_BYTES = 1024 * 1024
MAX_STEP = 10**12 - 1
ENVELOPE = struct.Struct("<4sBBHQQ")  # magic, kind, version, zero, payload length, XXH3-64

#: Names that become parts of keys and paths: a forged one is refused before anything is made of it.
Id = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seed = Count  # a u64: msgpack has no larger integers
#: What is counted on from: the number after it must be readable as well.
MAX_COUNTED = 2**53
Counted = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNTED)]
MAX_REVISION = 10**9 - 1
Argument = bool | int | float | str | None

#: The reason of a record that nothing told of.
MADE_UP = "made up from its manifests by a repair"
COMMITTED, ABORTED, FORGOTTEN, SWEPT = "committed", "aborted", "forgotten", "swept"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a folder or bucket prefix a repository.

    Attributes:
        digest_seed: of the digests of all chunks, 64 random bits; every manifest repeats it.
    """

    uuid: Id
    version: int
    chunk_bytes: int
    digest_seed: Seed
    features: list[str]
    created: float
    writer: str


class MadeFor(NamedTuple):
    """The record that a pack or manifest was written for: a revision as high explains why it lies there."""

    snapshot: bytes  # (16,) its id
    revision: int


class ManifestRef(msgspec.Struct, frozen=True, kw_only=True):
    """One manifest of a snapshot: that of one writing rank and part.

    Attributes:
        header_sha256: SHA-256 of its bytes up to the end of its header, so that a header alone can be proven.
    """

    part: str
    rank: int
    sha256: Sha256
    header_sha256: Sha256
    size_bytes: Count
    logical_bytes: Count

    @property
    def key(self) -> str:
        """The manifest's key in the store."""
        return manifest_key(self.sha256)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot: the record that commits it, with the ruling revision's state, tags and reason.

    Attributes:
        id: 32 hex digits, random.
        run, step: the lineage it belongs to and its place there.
        seq: order of snapshots within the run (clocks lie).
        state: "committed", "aborted", "forgotten" or "swept".
        parent: id of the snapshot that this process restored or last committed, in any run.
        bases: ids of the snapshots whose packs this one uses.
        created: seconds since the epoch, by the writer's clock.
        generation: 0, or one more than the first base's.
        depth: length of the longest delta chain.
        logical_bytes: bytes of all tensors.
        stored_bytes: pack and manifest bytes that this save added to the repository.
        stall_s: seconds that the caller of `save` waited until the state was safe to change.
        total_s: seconds until the commit.
    """

    id: str
    run: str
    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
    seq: Counted
    state: str
    write_id: str
    revision: Annotated[int, msgspec.Meta(ge=0, le=MAX_REVISION)] = 0
    parent: str | None = None
    bases: list[str] = []
    manifests: list[ManifestRef] = []
    tags: list[str] = []
    metrics: dict[str, float] = {}
    metadata_node: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"\xc0"), name="metadata")  # read when asked for
    created: float = 0.0
    generation: Counted = 0
    depth: int = 0
    chunks: int = 0
    new_chunks: int = 0
    logical_bytes: int = 0
    stored_bytes: int = 0
    stall_s: float = 0.0
    total_s: float = 0.0
    policy: str = ""
    reason: str = ""

    @property
    def key(self) -> str:
        """The key of this revision in the store."""
        return record_key(self.run, self.step, self.id, self.revision)

    @property
    def metadata(self) -> Any:
        """What the caller of `save` wanted kept beside it.

        Raises:
            FormatError: the record holds no plain value there.
        """
        packed = bytes(self.metadata_node)
        if len(packed) > MAX_FIELD_BYTES:
            raise FormatError(f"{self.key}: metadata of {len(packed)} bytes, expected at most {MAX_FIELD_BYTES}")
        return decode_plain(unpack_nodes(packed))

    @property
    def ref(self) -> str:
        """How people name it: `run@step`."""
        return f"{self.run}@{self.step}"

    @property
    def is_made_up(self) -> bool:
        """Whether a repair had only manifests to make this record of: `created` and what saving took are guesses."""
        return self.reason == MADE_UP

    @property
    def ratio(self) -> float:
        """Logical over stored bytes of this save."""
        return self.logical_bytes / self.stored_bytes if self.stored_bytes else 0.0

    def revised(self, **changes: Any) -> Snapshot:
        """The next revision with `changes`, under a new write id.

        Raises:
            InvalidInputError: there is none; no snapstore has revised a record so often.
        """
        if self.revision >= MAX_REVISION:
            raise InvalidInputError(f"{self.key}: is the last revision that there can be; it stays as it is")
        return msgspec.structs.replace(self, revision=self.revision + 1, write_id=new_id(), **changes)


class SaveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The checked arguments of one save; never stored as such."""

    run: str
    step: int
    parent: str | None
    bases: list[str]
    metrics: dict[str, float]
    metadata_node: msgspec.Raw  # a node of docs/format.md, "Tree"
    tags: list[str]
    full: bool


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A save in flight, as gc sees it."""

    id: str
    key: str
    host: str
    boot_id: str
    pid: int
    started: float


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The retention policies of a run."""

    run: str
    revision: Count
    policies: list[dict[str, Argument | list[Argument]]]  # no Any: a map's keys might be arrays of one hash


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What a gc means to delete: SHA-256 of packs and manifests, 32 bytes each, one after the other."""

    id: str
    started: float
    packs: bytes
    manifests: bytes

    def keys(self) -> set[str]:
        """The candidates' keys in the store."""
        return {pack_key(name) for name in sha256_names(self.packs)} | {
            manifest_key(name) for name in sha256_names(self.manifests)
        }


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions that a sweep must outlive."""

    id: str
    sessions: list[str]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A finished gc."""

    id: str
    deleted_objects: int
    deleted_bytes: int


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """A pack that a repair has found damaged. Its key says what counts for saves and gcs.

    Attributes:
        found: when [s since the epoch].
        reason: what is wrong with it, for people.
        blobs: offsets of blobs that are as they were written and do not give their chunks.
        id: of a note that takes the place of others; empty: it is the first.
    """

    pack: Sha256
    found: float
    reason: str
    blobs: list[Count] = []
    id: Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]{32})?\Z")] = ""

    @property
    def key(self) -> str:
        """The note's key in the store."""
        return f"gc/{self.pack}{'.' * bool(self.id)}{self.id}.quarantine"


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that a repair has found to lack a manifest. Its key says what counts for policies.

    Attributes:
        found: when [s since the epoch].
        reason: what is wrong with it, for people.
    """

    id: Id
    found: float
    reason: str

    @property
    def key(self) -> str:
        """The note's key in the store."""
        return f"gc/{self.id}.lost"


_KINDS: dict[type, int] = {
    Config: 1, Snapshot: 2, Session: 3, Policy: 4, Mark: 5, Wait: 6, Done: 7, Quarantine: 8, Lost: 9,
}  # fmt: skip
_ENCODER = msgspec.msgpack.Encoder()
V = TypeVar("V")
T = TypeVar("T", Config, Snapshot, Session, Policy, Mark, Wait, Done, Quarantine, Lost)
SmallObject = Config | Snapshot | Session | Policy | Mark | Wait | Done | Quarantine | Lost


def key_of(value: SmallObject) -> str:
    """The key in the store under which alone an object may lie."""
    if isinstance(value, Config):
        return "config"
    if isinstance(value, Session):
        return f"sessions/{value.id}"
    if isinstance(value, Policy):
        return f"policies/{value.run}.{value.revision}"
    if isinstance(value, Mark | Wait | Done):
        return f"gc/{value.id}.{type(value).__name__.lower()}"
    return value.key


def encode(value: SmallObject) -> bytes:
    """The object's bytes as stored."""
    payload = _ENCODER.encode(value)
    head = ENVELOPE.pack(b"SNAP", _KINDS[type(value)], FORMAT_VERSION, 0, len(payload), 0)[:16]
    return head + xxhash.xxh3_64_intdigest(head + payload).to_bytes(8, "little") + payload


def decode(data: bytes, kind: type[T], key: str) -> T:
    """The object that lies under a key.

    Raises:
        IntegrityError: cut short or altered; or it is the object of another key.
        FormatError, UnknownFormatError: see `unpack`.
    """
    value = unpack(data, kind, key)
    if key_of(value) != key:
        raise IntegrityError(f"{key}: holds the object of {key_of(value)}; it was moved or altered")
    return value


def unpack(data: bytes, kind: type[T], key: str) -> T:
    """The inverse of `encode`, whatever key the object belongs to.

    Raises:
        FormatError: not this kind of object.
        UnknownFormatError: of another format version; its checksum holds.
        IntegrityError: cut short or altered.
    """
    if len(data) < ENVELOPE.size:
        raise IntegrityError(f"{key}: {len(data)} bytes, expected at least {ENVELOPE.size}: the object is cut short")
    magic, got_kind, version, _, length, checksum = ENVELOPE.unpack_from(data)
    if magic != b"SNAP":
        raise FormatError(f"{key}: not a snapstore object: magic {magic!r}, expected b'SNAP'")
    if version != FORMAT_VERSION and not is_damaged(data):
        raise UnknownFormatError(
            f"{key}: format version {version}, this snapstore ({VERSION}) reads version {FORMAT_VERSION}; "
            f"use the release of snapstore that writes version {version}, or a newer one"
        )
    payload = data[ENVELOPE.size :]
    if len(payload) != length:
        raise IntegrityError(f"{key}: payload of {len(payload)} bytes, expected {length}: the object is cut short")
    got = xxhash.xxh3_64_intdigest(data[:16] + payload)
    if got != checksum:
        raise IntegrityError(
            f"{key}: checksum mismatch: expected {checksum:016x}, got {got:016x}: the object is damaged; "
            "run 'snapstore check'"
        )
    if got_kind != _KINDS[kind]:
        raise FormatError(f"{key}: object kind {got_kind}, expected {_KINDS[kind]} ({kind.__name__})")
    try:
        found = msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnknownFormatError(f"{key}: {kind.__name__} does not decode: {error}") from error
    if isinstance(found, Snapshot):
        _check_sizes(found, key)
        found = msgspec.structs.replace(found, metadata_node=found.metadata_node.copy())  # or it keeps all of the bytes
    return found


def _check_sizes(snapshot: Snapshot, key: str) -> None:
    """Raise UnknownFormatError unless a record names each manifest once, and says how much all of them hold."""
    held = sum(ref.logical_bytes for ref in snapshot.manifests)
    if held != snapshot.logical_bytes:
        raise UnknownFormatError(f"{key}: {snapshot.logical_bytes} bytes, its manifests are said to hold {held}")
    if len({(ref.part, ref.rank) for ref in snapshot.manifests}) < len(snapshot.manifests):
        raise UnknownFormatError(f"{key}: two manifests of one part and rank")


def is_damaged(data: bytes) -> bool:
    """Whether what cannot be decoded is damage, rather than of a version that this release does not know."""
    ours = data[:5] + bytes([FORMAT_VERSION]) + data[6:16]
    holds = xxhash.xxh3_64_digest(ours + data[ENVELOPE.size :])[::-1] == data[16 : ENVELOPE.size]
    if data[:4] == b"SNAP" and data[5:6] != ours[5:6]:
        return holds  # but for that byte all is as this version has it; who knows how others check theirs
    return not holds


def new_id() -> str:
    """32 random hex digits."""
    return secrets.token_hex(16)


def this_session(save_id: str, key: str) -> Session:
    """A session of this process."""
    return Session(
        id=save_id, key=key, host=socket.gethostname(), boot_id=boot_id(), pid=os.getpid(), started=time.time()
    )


def boot_id() -> str:
    """Names this boot of this kernel, so that a lock that is free proves a process dead; empty where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def check_name(what: str, name: object) -> str:
    """`name` if it can name a run or a tag, else InvalidInputError."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        shown = repr(name) if len(repr(name)) <= 80 else repr(name)[:77] + "..."
        raise InvalidInputError(
            f"{what} {shown}: expected 1 to 128 characters of A-Z a-z 0-9 . _ - that start with a letter or digit"
        )
    return name


def check_step(step: object) -> int:
    """`step` if it is a step number, else InvalidInputError."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise InvalidInputError(f"step {step!r}: expected an integer from 0 to {MAX_STEP}, got {type(step).__name__}")
    number = int(step.__index__())
    if not 0 <= number <= MAX_STEP:
        raise InvalidInputError(f"step {number}: expected 0 to {MAX_STEP}")
    return number


def check_tag(name: str) -> str:
    """`name` if a tag may be called that, else InvalidInputError."""
    check_name("tag", name)
    if name == "latest" or name.isdecimal():
        raise InvalidInputError(f"tag {name!r}: a reference could not tell it from a step number or 'latest'")
    return name


def check_tags(names: Iterable[str]) -> list[str]:
    """`names`, sorted and each once, if a record can have them as its tags, else InvalidInputError."""
    return _bounded("tags", sorted({check_tag(name) for name in names}), "take some off, or put them into the metadata")


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` as str -> float, else InvalidInputError."""
    if not isinstance(metrics, Mapping):
        raise InvalidInputError(f"metrics: expected a mapping of names to numbers, got {type(metrics).__name__}")
    checked = {}
    for name, value in metrics.items():
        try:
            checked[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidInputError(f"metric {name!r}: expected a number, got {type(value).__name__}") from error
    return _bounded("metrics", checked, "keep those that policies or people choose by, the others as part of the state")


def encode_metadata(metadata: Any) -> msgspec.Raw:
    """The packed node of plain values to be kept in a record, else InvalidInputError."""
    return msgspec.Raw(_ENCODER.encode(_bounded("metadata", encode_plain(metadata), "put large values into the state")))


def _bounded(what: str, value: V, instead: str) -> V:
    """A field of a record that is to be, if it is small enough, else InvalidInputError."""
    try:
        size_bytes = len(_ENCODER.encode(value))
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{what}: {error.object!r}: expected names in Unicode, got a lone surrogate") from error
    if size_bytes > MAX_FIELD_BYTES:
        raise InvalidInputError(f"{what}: {size_bytes} bytes, expected at most {MAX_FIELD_BYTES}; {instead}")
    return value

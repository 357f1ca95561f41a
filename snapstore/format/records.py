"""Records: the small objects (config, snapshot records, sessions, policies, gc's notes) and their envelope.

In: typed structs. Out: checksummed bytes, and back (docs/format.md, "Envelope"). Nothing here touches a store.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import xxhash

from ..errors import FormatError, IntegrityError, InvalidInputError, UnknownFormatError
from ..retention import utc
from ..state.tree.decode import decode_plain, unpack_nodes
from ..text import html_table, human_bytes, some
from ..threads import msgpack_decoder
from . import open_maps
from .keys import NAME, manifest_key, pack_key, record_key, sha256_names
from .open_maps import NONE_UNKNOWN, UnknownKeys

VERSION = "0.1.0"
FORMAT_VERSION = 1
MAX_OBJECT_BYTES = 64 * 1024 * 1024
#: The limit for each of a record's metadata, metrics and tags: every listing reads every record once, and no revision
#: may grow into a record that readers refuse.
MAX_FIELD_BYTES = 1024 * 1024
MAX_STEP = 10**12 - 1
MAGIC = b"SNAP"
ENVELOPE = struct.Struct("<4sBBHQQ")  # magic, kind, version, zero, payload length, XXH3-64

#: Names that become parts of keys and paths: decoding refuses a forged name before any use.
Id = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
RunName = Annotated[str, msgspec.Meta(pattern=rf"\A{NAME.pattern}\Z")]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0)]
Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
Seed = Count  # a u64: msgpack has no larger integers
#: The limit of numbers from which the next snapshot counts: the next number must be readable too.
MAX_COUNTED = 2**53
#: The most by which a writer raises a sequence number at once; see `highest_seq`.
MAX_SEQ_STEP = 2**40
Counted = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNTED)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]  # a u32 in packs
MAX_REVISION = 10**9 - 1
Argument = bool | int | float | str | None
#: Features: of several ranks (of records too); of dimension orders; of the forms of an optimizer's parameters.
RANKS, STRIDES, PARAMETER_SHAPES, XOR = "ranks", "strides", "parameter_shapes", "xor"
#: The features of records and manifests that this release knows.
KNOWN_FEATURES = frozenset({RANKS, STRIDES, PARAMETER_SHAPES, XOR})

#: The feature of a config: records may be joined into pages (pages.py).
PAGES = "pages"
#: The reason in a record that a repair reconstructed from manifests alone; these words are part of the format.
#: Metrics in the repr of a snapshot.
METRICS_SHOWN = 5
RECONSTRUCTED = "made up from its manifests by a repair"
COMMITTED, ABORTED, FORGOTTEN, SWEPT = "committed", "aborted", "forgotten", "swept"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The object that makes a folder or bucket prefix a repository.

    Attributes:
        digest_seed: 64 random bits, the seed of all chunks' digests; every manifest repeats it.
    """

    uuid: Id
    version: int
    chunk_bytes: int
    digest_seed: Seed
    features: list[str]
    created: float
    writer: str

    @property
    def has_pages(self) -> bool:
        """Return whether records may be joined into pages."""
        return PAGES in self.features


class MadeFor(NamedTuple):
    """The record that a pack or manifest was written for: a revision at least as high explains why it exists."""

    snapshot: bytes  # (16,) its id
    revision: int
    run: str | msgspec.UnsetType = msgspec.UNSET  # of the snapshot, and its step; a pack does not tell them
    step: int | msgspec.UnsetType = msgspec.UNSET


class ManifestRef(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot's reference to one manifest, written by one rank for one part.

    Attributes:
        header_sha256: SHA-256 of its bytes up to the end of its header, so that a header can be proven alone.
        unknown: the keys that this release does not know; see open_maps.py.
    """

    part: str
    rank: Rank
    sha256: Sha256
    header_sha256: Sha256
    size_bytes: Count
    logical_bytes: Count
    unknown: UnknownKeys = NONE_UNKNOWN

    @property
    def key(self) -> str:
        """Return the manifest's key in the store."""
        return manifest_key(self.sha256)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot: the record that commits it, with the state, tags and reason of its highest revision.

    Attributes:
        id: 32 hex digits, random.
        run, step: its lineage, and its position there.
        seq: order of snapshots within the run, since clocks can be wrong; see `highest_seq`.
        state: "committed", "aborted", "forgotten" or "swept".
        parent: id of the snapshot from which this one continues; its run may be another.
        bases: ids of the snapshots whose packs this one uses.
        manifest_list: SHA-256 of its `ManifestList`; unset: all manifests were written for this snapshot.
        unproven: uuid of the repository from which its chunks were copied unverified; unset: their digests were proven.
        created: seconds since the epoch, by the writer's clock; of an import, the date of its newest file.
        generation: 0, or the first base's generation plus one.
        depth: the most deltas in the chain of a chunk.
        logical_bytes: bytes of all tensors.
        stored_bytes: pack and manifest bytes that this save added to the repository.
        stall_s: seconds that the caller of `save` waited until the state was safe to change.
        total_s: seconds until the commit.
        features: features that a reader of the snapshot must know beyond format 1.
        unknown: the keys that this release does not know; see open_maps.py.
    """

    id: str
    run: str
    step: Step
    seq: Count
    state: str
    write_id: str
    revision: Annotated[int, msgspec.Meta(ge=0, le=MAX_REVISION)] = 0
    parent: str | None = None
    bases: list[str] = []
    manifests: list[ManifestRef] = []
    manifest_list: Sha256 | msgspec.UnsetType = msgspec.UNSET
    unproven: Id | msgspec.UnsetType = msgspec.UNSET
    tags: list[str] = []
    metrics: dict[str, float] = {}
    metadata_node: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"\xc0"), name="metadata")  # decoded when asked for
    created: float = 0.0
    generation: Counted = 0
    depth: Count = 0
    chunks: Count = 0
    new_chunks: Count = 0
    logical_bytes: Count = 0
    stored_bytes: Count = 0
    stall_s: float = 0.0
    total_s: float = 0.0
    policy: str = ""
    reason: str = ""
    features: list[str] = []
    unknown: UnknownKeys = NONE_UNKNOWN

    def __repr__(self) -> str:
        metrics = [f"{name}={value:.4g}" for name, value in self.metrics.items()]
        facts = {"id": self.id[:12], "state": self.state, "created": f"{utc(self.created):%Y-%m-%d %H:%M:%S}Z"}
        facts |= {"size": human_bytes(self.logical_bytes), "metrics": some(metrics, METRICS_SHOWN)}
        return f"Snapshot({self.ref!r}, {', '.join(f'{name}={text!r}' for name, text in facts.items())})"

    def _repr_html_(self) -> str:
        rows = [("id", self.id), ("state", self.state), ("created", f"{utc(self.created):%Y-%m-%d %H:%M:%S} UTC")]
        rows += [("size", human_bytes(self.logical_bytes)), ("stored", human_bytes(self.stored_bytes))]
        rows += [("parent", self.parent or "none"), ("tags", ", ".join(self.tags))]
        return html_table(self.ref, ["", ""], rows + [(name, f"{value:.6g}") for name, value in self.metrics.items()])

    @property
    def key(self) -> str:
        """Return the key of this revision in the store."""
        return record_key(self.run, self.step, self.id, self.revision)

    @property
    def named_keys(self) -> list[str]:
        """Return the keys of the objects that the record names: its manifests, and their list if it has one."""
        keys = [ref.key for ref in self.manifests]
        return [*keys, manifest_key(self.manifest_list)] if self.manifest_list else keys

    @property
    def metadata(self) -> Any:
        """Return the metadata that the caller of `save` gave.

        Raises:
            FormatError: the metadata are too large, or are not a plain value.
        """
        packed = bytes(self.metadata_node)
        if len(packed) > MAX_FIELD_BYTES:
            raise FormatError(f"{self.key}: metadata of {len(packed)} bytes, expected at most {MAX_FIELD_BYTES}")
        return decode_plain(unpack_nodes(packed))

    @property
    def ref(self) -> str:
        """Return the name that people use: `run@step`."""
        return f"{self.run}@{self.step}"

    @property
    def is_reconstructed(self) -> bool:
        """Return whether a repair made this record from manifests: then `created`, times and sizes are guesses."""
        return self.reason == RECONSTRUCTED

    @property
    def ratio(self) -> float:
        """Return logical / stored bytes of this save."""
        return self.logical_bytes / self.stored_bytes if self.stored_bytes else 0.0

    def revised(self, **changes: Any) -> Snapshot:
        """Return the next revision with `changes`, under a new write id.

        Raises:
            InvalidInputError: this is the last possible revision; no snapstore makes so many.
        """
        if self.revision >= MAX_REVISION:
            raise InvalidInputError(
                f"{self.key}: this is the last possible revision; the record cannot change any more"
            )
        return msgspec.structs.replace(self, revision=self.revision + 1, write_id=new_id(), **changes)


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A save in progress, as gc sees it."""

    id: str
    key: str
    host: str
    boot_id: str
    pid: int
    started: float


class RunPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """The retention policies of a run."""

    run: str
    revision: Count
    policies: list[dict[str, Argument | list[Argument]]]  # not Any: forged keys could be arrays with equal hashes


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates of a gc: SHA-256 of packs and manifests, 32 bytes each, one after the other."""

    id: str
    started: float
    packs: bytes
    manifests: bytes

    def keys(self) -> set[str]:
        """Return the candidates' keys in the store."""
        return {pack_key(name) for name in sha256_names(self.packs)} | {
            manifest_key(name) for name in sha256_names(self.manifests)
        }


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions that must end before a sweep."""

    id: str
    sessions: list[str]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A finished gc."""

    id: str
    deleted_objects: int
    deleted_bytes: int


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """A repair's note about a damaged pack. Saves and gcs need only its key.

    Attributes:
        found: time of the repair [s since the epoch].
        reason: the damage, in words.
        blobs: offsets of blobs that do not decode to their chunks, although their bytes are as written.
        id: 32 hex digits if this note replaces others; "" for the first.
    """

    pack: Sha256
    found: float
    reason: str
    blobs: list[Count] = []
    id: Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]{32})?\Z")] = ""

    @property
    def key(self) -> str:
        """Return the note's key in the store."""
        return f"gc/{self.pack}.{self.id}.quarantine" if self.id else f"gc/{self.pack}.quarantine"


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A repair's note about a snapshot that lacks a manifest. Policies need only its key.

    Attributes:
        found: time of the repair [s since the epoch].
        reason: the damage, in words.
    """

    id: Id
    found: float
    reason: str

    @property
    def key(self) -> str:
        """Return the note's key in the store."""
        return f"gc/{self.id}.lost"


class ManifestList(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a snapshot's manifests, if some were written for other snapshots. The list is its own object.

    Without it, a gc could not notice that its listings lack the record of a snapshot that stored no other object.

    Attributes:
        save_id: id of the session.
        snapshot, revision, run, step: the record that it was written for.
        manifests: SHA-256 of the manifests that the record names, in its order.
    """

    save_id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    snapshot: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    revision: Count
    manifests: bytes
    run: RunName | msgspec.UnsetType = msgspec.UNSET
    step: Step | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, save_id: str, made_for: MadeFor, refs: Iterable[ManifestRef]) -> ManifestList:
        """Return the list of some manifests, written by the session `save_id`."""
        names = bytes.fromhex("".join(ref.sha256 for ref in refs))
        return cls(save_id=bytes.fromhex(save_id), manifests=names, **made_for._asdict())

    @property
    def sha256s(self) -> list[str]:
        """Return the names of the manifests."""
        return sha256_names(self.manifests)

    @property
    def made_for(self) -> MadeFor:
        """Return the record that it was written for."""
        return MadeFor(self.snapshot, self.revision, self.run, self.step)

    @property
    def sha256(self) -> str:
        """Return its name among the manifests: its hex SHA-256."""
        return hashlib.sha256(encode(self)).hexdigest()

    @property
    def key(self) -> str:
        """Return the list's key in the store."""
        return manifest_key(self.sha256)


_KINDS: dict[type, int] = {
    Config: 1,
    Snapshot: 2,
    Session: 3,
    RunPolicies: 4,
    Mark: 5,
    Wait: 6,
    Done: 7,
    Quarantine: 8,
    Lost: 9,
    ManifestList: 10,
}
_ENCODER = msgspec.msgpack.Encoder()
Small = TypeVar("Small", Config, Snapshot, Session, RunPolicies, Mark, Wait, Done, Quarantine, Lost, ManifestList)
SmallObject = Config | Snapshot | Session | RunPolicies | Mark | Wait | Done | Quarantine | Lost | ManifestList


def key_of(value: SmallObject) -> str:
    """Return the one key under which an object may be stored."""
    if isinstance(value, Config):
        return "config"
    if isinstance(value, Session):
        return f"sessions/{value.id}"
    if isinstance(value, RunPolicies):
        return f"policies/{value.run}.{value.revision}"
    if isinstance(value, Mark | Wait | Done):
        return f"gc/{value.id}.{type(value).__name__.lower()}"
    return value.key


def encode(value: SmallObject) -> bytes:
    """Return the object's bytes as stored."""
    payload = open_maps.encode(value, "manifests") if isinstance(value, Snapshot) else _ENCODER.encode(value)
    return enveloped(_KINDS[type(value)], payload)


def enveloped(kind: int, payload: bytes) -> bytes:
    """Return the bytes of an object of a kind (docs/format.md, "Envelope")."""
    head = ENVELOPE.pack(MAGIC, kind, FORMAT_VERSION, 0, len(payload), 0)[:16]
    return head + xxhash.xxh3_64_intdigest(head + payload).to_bytes(8, "little") + payload


def decode(data: bytes, kind: type[Small], key: str) -> Small:
    """Return the object that lies under a key.

    Raises:
        IntegrityError: it is cut short, altered, or the object of another key.
        FormatError, UnknownFormatError: see `unpack`.
    """
    value = unpack(data, kind, key)
    # the name of a list covers all of its bytes, also keys that this release does not know
    own_key = manifest_key(hashlib.sha256(data).hexdigest()) if isinstance(value, ManifestList) else key_of(value)
    if own_key != key:
        raise IntegrityError(f"{key}: holds the object of {own_key}; it was moved or altered")
    return value


def unpack(data: bytes, kind: type[Small], key: str) -> Small:
    """Decode an object of any key, the inverse of `encode`.

    Raises:
        FormatError: it is not an object of this kind.
        UnknownFormatError: its checksum holds, but it has another format version or feature, or does not decode.
        IntegrityError: it is cut short or altered.
    """
    payload = payload_of(data, _KINDS[kind], kind.__name__, key)
    try:
        if kind is Snapshot:
            require_known_features(payload, key)
        found = msgpack_decoder(kind).decode(payload)
        if isinstance(found, Snapshot):
            found = open_maps.with_unknown(found, payload, "manifests")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnknownFormatError(f"{key}: {kind.__name__} does not decode: {error}") from error
    if isinstance(found, Snapshot):
        _check_sizes(found, key)
        found = msgspec.structs.replace(found, metadata_node=found.metadata_node.copy())  # else it keeps all the bytes
    return found


def payload_of(data: bytes, kind: int, name: str, key: str) -> bytes:
    """Return the payload of an object of a kind, whose name is for the error; raises as `unpack` does."""
    if len(data) < ENVELOPE.size:
        raise IntegrityError(f"{key}: {len(data)} bytes, expected at least {ENVELOPE.size}: the object is cut short")
    magic, got_kind, version, _, length, checksum = ENVELOPE.unpack_from(data)
    if magic != MAGIC:
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
    if got_kind != kind:
        raise FormatError(f"{key}: object kind {got_kind}, expected {kind} ({name})")
    return payload


def wrong_version(
    where: str, kind: str, found: tuple[bytes, int], expected: tuple[bytes, int], hint: str = ""
) -> FormatError:
    """Return the error of a blob, pack or manifest with another magic or version than the expected ones.

    Args:
        where: its name, in the error.
        found, expected: (magic, version).
        hint: the end of the message.
    """
    if found[0] != expected[0]:
        return FormatError(f"{where}: not a {kind}: magic {found[0]!r}, expected {expected[0]!r}{hint}")
    return UnknownFormatError(
        f"{where}: {kind} version {found[1]}, this snapstore reads {expected[1]}; use the release that writes it, or a "
        f"newer one{hint}"
    )


class _Features(msgspec.Struct):
    """The one key of a record or header that must be read first: the others may depend on it."""

    features: list[str] = []


_FEATURES = msgpack_decoder(_Features)


def require_known_features(packed: bytes | memoryview, where: str) -> None:
    """Check the features of a packed record or header of a manifest.

    Raises:
        UnknownFormatError: it needs a feature that this release does not know.
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: it does not decode.
    """
    if unknown := sorted(set(_FEATURES.decode(packed).features) - KNOWN_FEATURES):
        raise UnknownFormatError(
            f"{where}: needs {', '.join(map(repr, unknown))}, which this snapstore ({VERSION}) does not know; use the "
            "release that wrote it, or a newer one"
        )


def _check_sizes(snapshot: Snapshot, key: str) -> None:
    """Check a record's manifests: named once each, sizes add up, ranks fit; else raise UnknownFormatError."""
    held = sum(ref.logical_bytes for ref in snapshot.manifests)
    if held != snapshot.logical_bytes:
        raise UnknownFormatError(f"{key}: {snapshot.logical_bytes} bytes, the sum over its manifests is {held}")
    if len({(ref.part, ref.rank) for ref in snapshot.manifests}) < len(snapshot.manifests):
        raise UnknownFormatError(f"{key}: two manifests of one part and rank")
    if RANKS in snapshot.features and any(ref.rank for ref in snapshot.manifests):
        raise UnknownFormatError(f"{key}: of several ranks, and names a manifest of another rank than 0")


def is_list(data: bytes | memoryview) -> bool:
    """Return whether an object among the manifests is a `ManifestList`, by its first bytes."""
    return bytes(data[:5]) == MAGIC + bytes([_KINDS[ManifestList]])


def highest_seq(seqs: Iterable[int]) -> int:
    """Return the highest sequence number of a run that writers can have reached; -1: there is none.

    A record with a higher number is damaged or forged. If writers counted on from it, numbers would soon run out.
    """
    last = -1
    for seq in sorted(seqs):
        if seq > min(last + MAX_SEQ_STEP, MAX_COUNTED):
            break
        last = seq
    return last


def is_damaged(data: bytes) -> bool:
    """Return whether bytes that do not decode are damaged; else another release wrote them."""
    ours = data[:5] + bytes([FORMAT_VERSION]) + data[6:16]
    holds = xxhash.xxh3_64_digest(ours + data[ENVELOPE.size :])[::-1] == data[16 : ENVELOPE.size]
    if data[:4] == MAGIC and data[5:6] != ours[5:6]:
        return holds  # only the version byte is wrong; another version may have another checksum
    return not holds


def new_id() -> str:
    """Return 32 random hex digits."""
    return secrets.token_hex(16)

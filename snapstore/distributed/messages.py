"""Messages: the messages between the ranks of a job. The messages of an ordinary save do not grow with the state.

    begin     rank 0 to all       the snapshot's id and step, and the records that may be built on
    report    each rank to 0      its child manifests, counts, and digests of values that must be equal on all ranks
    failed    any rank to all     the first error
    ask       rank 0 to some      the ranks whose trees it needs: for each digest that is new to it, one rank
    tree      some ranks to 0     the trees that were asked for
    replicas  some ranks to 0     the digests of their replicas one by one, if they differ
    changed   some ranks to 0     the names of their plain tensors, if they have changed
    holders   rank 0 to all       the ranks that hold plain tensors, after an exchange (save/ranks/holders.py)
    outcome   rank 0 to all       committed, failed, or unclear
    answer    rank 0 to all       the answer to a question that all ranks ask, such as whether a save is skipped
    asked     each rank to 0      it has read so many answers
    vote      each rank to 0      whether it finds a snapshot whole, before any rank restores it
    asks      rank 0 to all       it waits until all ranks have asked this question, and so begins no save
    record    rank 0 to all       a large committed record, for ranks whose store goes away before they can read it
    go        rank 0 to all       another attempt of the save begins, after one that has failed
    open      each rank to 0      its store has answered, after a failed attempt
    hurry     any rank to 0       somebody waits there for the save: its next attempt is the last one
    left      any rank to all     it takes part in no further attempt of the save, and why

In: typed structs. Out: msgpack, and back. The key of a message of a save has the numbers of the save and of its
attempt, so no message is read for another one. What ranks tell of their states holds for all attempts of a save
(OF_ALL_ATTEMPTS).
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from .. import errors
from ..errors import RanksError, SnapstoreError
from ..format.records import Id, ManifestRef
from ..threads import msgpack_decoder

#: The texts of errors are cut to this many characters.
MAX_TEXT = 900
#: More manifests than this travel in a message of their own, so a report stays below 2 KiB.
MAX_REPORTED_MANIFESTS = 8
#: The names of the keys, which come after the number of the save.
POSTED_BY_0 = ("begin", "ask", "asks", "outcome", "ask-replicas", "ask-trees", "holders", "digest/0", "go", "record")
POSTED_BY_OTHERS = (
    *("report/{rank}", "manifests/{rank}", "tree/{rank}", "replicas/{rank}", "failed", "open/{rank}"),
    *("digest/{rank}", "trees/{rank}", "changed/{rank}", "changed", "left", "hurry"),
)
#: Names, up to the first slash, of the messages that hold for all attempts of a save.
OF_ALL_ATTEMPTS = {"digest", "ask-trees", "trees", "holders", "changed", "asks", "left", "hurry"}
CUT = " ... (cut)"
COMMITTED, FAILED, UNCLEAR, REPLACED = "committed", "failed", "unclear", "replaced"
#: A larger record is not sent with the outcome [bytes].
MAX_RECORD_BYTES = 900
#: The fields of a request that must be equal on all ranks, in the order of `Report.request`.
REQUEST_FIELDS = ("run", "step", "metrics", "metadata", "tags")
DIGEST_BYTES = 8


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0 has opened a session.

    Attributes:
        id: of the snapshot.
        bases: keys of the records that may be built on, best first.
        full: store no chains of deltas.
        quarantine: whether packs are in quarantine; then each rank lists them itself.
        is_suspect: whether an attempt has failed since the last commit: then each rank posts `open`.
        others: how many of the last bases are snapshots of other runs, which give equal chunks alone.
    """

    id: Id
    step: int
    bases: list[str]
    full: bool
    quarantine: bool
    is_suspect: bool = False
    others: int = 0


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """A `ManifestRef` in half its bytes; the rank is the sender's."""

    part: str
    sha256: bytes
    header_sha256: bytes
    size_bytes: int
    logical_bytes: int

    @classmethod
    def of(cls, ref: ManifestRef) -> Ref:
        """Return the short form of a reference."""
        names = bytes.fromhex(ref.sha256), bytes.fromhex(ref.header_sha256)
        return cls(ref.part, *names, ref.size_bytes, ref.logical_bytes)

    def whole(self, rank: int) -> ManifestRef:
        """Return the reference."""
        return ManifestRef(
            part=self.part,
            rank=rank,
            sha256=self.sha256.hex(),
            header_sha256=self.header_sha256.hex(),
            size_bytes=self.size_bytes,
            logical_bytes=self.logical_bytes,
        )


class Report(msgspec.Struct, frozen=True, array_like=True):
    """A rank's packs and child manifests are durable.

    Attributes:
        manifests: its child manifests; None: they are in a message of their own.
        request: digests of the request's fields, 8 bytes each, one after the other (REQUEST_FIELDS).
        trees: digest of its parts' trees and of the tensors' whole shapes.
        replicas: by group of ranks, the digest of the tensors of which these ranks hold replicas.
        held_bytes: how many bytes of the job's tensors it has stored, without values of its own.
        bases: positions in `Begin.bases` of the bases that it has used.
        asked: how many answers of rank 0 it has read: it looks none of these up again.
    """

    step: int
    manifests: list[Ref] | None
    request: bytes
    trees: bytes
    replicas: dict[str, bytes] = {}
    held_bytes: int = 0
    bases: list[int] = []
    chunks: int = 0
    new_chunks: int = 0
    stored_bytes: int = 0
    depth: int = 0
    asked: int = 0


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """An error of one rank, as a message.

    Attributes:
        kind: the name of its class in errors.py.
        text: its message, at most MAX_TEXT characters.
        rank: the rank that raised it.
        ranks: the ranks that it is about, at most 16.
        not_begun, retryable: see SnapstoreError.
    """

    kind: str
    text: str
    rank: int
    ranks: list[int] = []
    not_begun: bool = False
    retryable: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failed:
        """Return an error as a message for the other ranks."""
        if isinstance(error, RelayedError):
            return error.failed
        kind = next((c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c), "")
        text = str(error) if kind else f"{type(error).__name__}: {error}"
        text = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - len(CUT)]}{CUT}"
        about, flags = list(getattr(error, "ranks", ()))[:16], ("not_begun", "retryable")
        return cls(kind or "RanksError", text, rank, about, *(getattr(error, name, False) for name in flags))


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0 needs the trees of these ranks, or the digests of the tensors of which a group of ranks holds copies."""

    ranks: list[int]
    group: str = ""


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The end of an attempt of a save: COMMITTED, FAILED, UNCLEAR: the record decides, or REPLACED by a newer save.

    Attributes:
        failed: why; if REPLACED, its text is the run@step of the newer save.
        record: the committed record, if it is small; else each rank reads it.
        is_stale: whether the ranks exchange holders in the next save.
        again: whether another attempt follows, or a message that none does: the ranks keep their inputs.
    """

    state: str
    failed: Failed | None = None
    record: bytes = b""
    is_stale: bool = False
    again: bool = False


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's answer to a question that all ranks ask, such as which snapshot is the newest.

    Attributes:
        question: the question that rank 0 was asked.
        value: the answer, a plain value; None if `failed` is set, or if the answer is None.
        saves: the lowest and the highest number of saves that rank 0 may have begun; see `Questions`.
        meets: whether rank 0 waits until all ranks have the answer.
    """

    question: str
    value: Any = None
    failed: Failed | None = None
    saves: tuple[int, int] = (0, 0)
    meets: bool = False


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """A rank's vote on the snapshot that rank 0 has chosen to restore; whole if both fields are empty.

    Attributes:
        why: the damage that this rank has found.
        failed: its error, which is no damage and ends the restore.
    """

    why: str = ""
    failed: Failed | None = None


class RelayedError(Exception):
    """Another rank's error, on its way to be raised here."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.text)
        self.failed = failed


M = TypeVar("M")


def encode(message: Any) -> bytes:
    """Return the bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode(data: Any, kind: type[M]) -> M:
    """Return a message from its bytes.

    Raises:
        RanksError: it is no message of this kind, for example because the ranks run different releases of snapstore.
    """
    try:
        return msgpack_decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
        raise RanksError(
            f"a message is no {kind.__name__} ({error}); install one release of snapstore on all ranks, and pass a "
            "SnapstoreWriter on all of them"
        ) from error


def raised(failed: Failed, own_rank: int) -> SnapstoreError:
    """Return another rank's error as this rank raises it: of the same class, and naming that rank."""
    kind = getattr(errors, failed.kind, RanksError)
    if not (isinstance(kind, type) and issubclass(kind, SnapstoreError)):
        kind = RanksError
    text = failed.text if failed.rank == own_rank else f"rank {failed.rank}: {failed.text}"
    error = kind(*text.split("\n"))
    error.not_begun, error.retryable = failed.not_begun, failed.retryable
    if isinstance(error, RanksError):
        error.ranks = tuple(failed.ranks) or (failed.rank,)
    return error

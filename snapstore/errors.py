"""The errors of snapstore, grouped by how a caller would handle them.

SnapstoreError                    all errors below; a message names the thing, what was expected and found, and a remedy
├── NotFoundError (KeyError)      a snapshot, run, tag or object is missing
├── AlreadyExistsError            a create-only object or a repository exists already
├── ConflictError                 another writer won: the save was fenced, or a revision was taken; try again
├── InvalidInputError (ValueError)  an argument, name, policy or target cannot be used; nothing was written
│   └── UnsupportedLeafError      a value in the state has no stored form; the error says its path
├── StorageError                  the store failed: unreachable, refused, read-only; nothing was committed
│   ├── StorageFullError          no space or quota is left; committed snapshots stay
│   └── UnreadObjectError         an object of one snapshot could not be read, though the store answers
│       └── UnreadRecordError     it is its record
├── FormatError                   bytes are not of this format, or of a version that this release does not read
├── IntegrityError                bytes of this format are damaged or missing; see `snapstore check`
├── RanksError                    another rank of the job failed, does not answer, or made another call
└── CapabilityError               this machine, store or installation lacks a capability
    └── UnknownFormatError        also a FormatError: intact bytes that another release of snapstore reads
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from .text import printable

E = TypeVar("E", bound="SnapstoreError")


class SnapstoreError(Exception):
    """The base of every error that snapstore raises on purpose.

    Args:
        lines: the lines of the message; most messages have one. Control characters are escaped, so a name in a line
            cannot add a line.

    Attributes:
        not_begun: whether the next save begins all the same: another rank has raised this error to its caller at once,
            and so has not begun this save; or the next save does better by itself.
        retryable: whether the same save may succeed later, with nothing changed but the store: it does not answer, or
            its volume is not mounted. It is set where the error is made; `on_error="warn"` retries by it.
    """

    not_begun = False
    retryable = False

    def __init__(self, *lines: object) -> None:
        super().__init__(*(printable(str(line)) for line in lines))

    def __str__(self) -> str:
        return "\n".join(self.args)


class NotFoundError(SnapstoreError, KeyError):
    """A snapshot, run, tag or object does not exist."""


class AlreadyExistsError(SnapstoreError):
    """A create-only object, or a repository, exists already."""


class ConflictError(SnapstoreError):
    """Another writer won a race: this save was fenced, or a revision was taken."""

    retryable = True


class InvalidInputError(SnapstoreError, ValueError):
    """An argument, a name, a policy or a restore target cannot be used."""


class UnsupportedLeafError(InvalidInputError):
    """A leaf of the state has a type without a stored form."""


class StorageError(SnapstoreError):
    """The object store failed or refused."""

    retryable = True


class StorageFullError(StorageError):
    """The object store has no room left."""

    retryable = False


class UnreadObjectError(StorageError):
    """An object of a snapshot could not be read, though its store answers; it may be whole."""


class UnreadRecordError(UnreadObjectError):
    """The record of a snapshot could not be read, though its store answers; a later read may succeed."""


class OutputError(StorageError):
    """A file or folder outside the repository cannot be written."""

    retryable = False


class FormatError(SnapstoreError):
    """Bytes are not of this format, or of an unknown version of it."""


class IntegrityError(SnapstoreError):
    """Bytes are damaged, short or missing."""


class CapabilityError(SnapstoreError):
    """This machine, store or installation lacks a capability that the call needs."""


class RanksError(SnapstoreError):
    """Another rank of the job failed or does not answer, or the ranks do not make the same calls.

    Attributes:
        ranks: the ranks that the error is about.
    """

    def __init__(self, *lines: object, ranks: Sequence[int] = ()) -> None:
        super().__init__(*lines)
        self.ranks = tuple(ranks)


class UnknownFormatError(FormatError, CapabilityError):
    """Intact bytes of a format that this release does not know; not damage, although DAMAGE includes FormatError."""


def lasting(error: E) -> E:
    """Return an error after marking it as one that lasts: the same save fails again, so it is not retried."""
    error.retryable = False
    return error


def add_line(error: Exception, line: str) -> None:
    """Add a line to the message of an error, or a note to one of another library, unless it has this line."""
    if not isinstance(error, SnapstoreError):
        if line not in getattr(error, "__notes__", ()):
            error.add_note(line)
    elif line not in error.args:
        error.args = (*error.args, line)


#: The errors of reading a damaged repository.
DAMAGE = (IntegrityError, FormatError, NotFoundError)


@contextmanager
def needs(package: str, command: str) -> Iterator[None]:
    """Raise CapabilityError if the block cannot import an optional package; the error names the command to install it.

    Args:
        package: its name, in the error.
    """
    try:
        yield
    except ImportError as error:
        raise CapabilityError(
            f"{package}: not installed here, or of an unknown release ({error}); install it with '{command}'"
        ) from error


@contextmanager
def out_of_memory(verb: str, advice: str) -> Iterator[None]:
    """Raise CapabilityError if NumPy, torch or Python finds no host memory: "<verb>: out of memory; <advice>"."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # torch's, of its CPU allocator
            raise
        why = str(error).strip().partition("\n")[0][:200]
        raise CapabilityError(f"{verb}: out of memory ({why or 'no details'}); {advice}") from error

"""Every error snapstore raises, sorted by what a handler would do.

SnapstoreError                    anything below; the message names the thing, says expected and got, and what to do
├── NotFoundError (KeyError)      a snapshot, run, tag or object that is not there
├── AlreadyExistsError            a create-only object or a repository that is there already
├── ConflictError                 another writer won: the save was fenced, or a revision was taken; try again
├── InvalidInputError (ValueError)  an argument, name, policy or target that cannot be used; nothing was written
│   └── UnsupportedLeafError      a value in the state that has no stored form, named by its path
├── StorageError                  the store failed: unreachable, refused, read-only; nothing was committed
│   └── StorageFullError          no space or quota left; what is committed stays
├── FormatError                   bytes that are not of this format, or of a version this release does not read
├── IntegrityError                bytes of this format that are damaged or missing; see `snapstore check`
└── CapabilityError               something this machine, store or installation cannot do
    └── UnknownFormatError        also a FormatError: intact bytes that another release of snapstore reads
"""


class SnapstoreError(Exception):
    """Base of every error that snapstore raises on purpose."""


class NotFoundError(SnapstoreError, KeyError):
    """A reference, run, tag or object names nothing that exists."""

    def __str__(self) -> str:  # KeyError's own str() is a repr: quotes and escapes in the user's face
        return Exception.__str__(self)


class AlreadyExistsError(SnapstoreError):
    """A create-only object, or a repository, exists already."""


class ConflictError(SnapstoreError):
    """Another writer won a race: this save was fenced, or a revision was taken."""


class InvalidInputError(SnapstoreError, ValueError):
    """An argument, a name, a policy or a restore target cannot be used."""


class UnsupportedLeafError(InvalidInputError):
    """A leaf of the state has a type without a stored form."""


class StorageError(SnapstoreError):
    """The object store failed or refused."""


class StorageFullError(StorageError):
    """The object store has no room left."""


class FormatError(SnapstoreError):
    """Bytes are not of this format or of an unknown version of it."""


class IntegrityError(SnapstoreError):
    """Bytes are damaged, short or missing."""


class CapabilityError(SnapstoreError):
    """This machine, store or installation lacks what was asked for."""


class UnknownFormatError(FormatError, CapabilityError):
    """Bytes are as they were written, and this release does not know how: no damage, whatever else is in DAMAGE."""


#: What reading a damaged repository raises.
DAMAGE = (IntegrityError, FormatError, NotFoundError)

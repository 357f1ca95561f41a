"""Config: read and check the config of a repository, or reconstruct one from its manifests.

In: a store. Out: its Config. Only `check` and `repair` reconstruct a config that is damaged, missing or of another
repository: with the digest seed of the manifests, every digest can be verified as before.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import msgspec

from ..errors import FormatError, IntegrityError, NotFoundError, StorageError, UnknownFormatError
from ..format import records
from ..format.chunking import DEFAULT_CHUNK_BYTES, MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from ..format.hashing import new_seed
from ..format.manifests import manifest
from ..format.manifests.manifest import ManifestHeader
from ..format.records import Config, ManifestList
from ..storage.base import ObjectStore
from ..storage.os_errors import is_withheld
from ..text import strip_hint
from .read_twice import tried

#: Features that a config may require and that this release knows.
KNOWN_FEATURES = frozenset({records.PAGES})
#: The feature of a repository whose packs and manifests are encrypted: reserved, and not built.
ENCRYPTED = "encrypted"
#: The features of a new repository.
NEW_FEATURES = (records.PAGES,)


def new_config(chunk_bytes: int, digest_seed: int) -> Config:
    """Return the config of a new repository."""
    return Config(
        uuid=records.new_id(),
        version=records.FORMAT_VERSION,
        chunk_bytes=chunk_bytes,
        digest_seed=digest_seed,
        features=[*NEW_FEATURES],
        created=time.time(),
        writer=f"snapstore {records.VERSION}",
    )


def read_config(store: ObjectStore) -> Config:
    """Return the config of a repository that this release can read.

    Raises:
        NotFoundError: there is no repository.
        FormatError: its format or one of its features is unknown to this release.
        IntegrityError: its config is damaged.
    """
    data = b""
    try:
        data = store.get("config", limit_bytes=records.MAX_OBJECT_BYTES)
        config = records.decode(data, Config, "config")
    except NotFoundError as error:
        raise NotFoundError(
            f"{store.url}: no snapstore repository here (no 'config'); make one with 'snapstore init' "
            "or Repository.create; if there was one, run 'snapstore repair'"
        ) from error
    except (FormatError, IntegrityError) as error:
        if not records.is_damaged(data):
            raise
        why = strip_hint(error)
        raise IntegrityError(f"{store.url}: config is damaged; run 'snapstore repair': {why}") from error
    unknown = sorted(set(config.features) - KNOWN_FEATURES)
    if ENCRYPTED in unknown:
        raise UnknownFormatError(
            f"{store.url}: this repository is encrypted, which this snapstore ({records.VERSION}) cannot read; use "
            f"{config.writer} or newer, and the key"
        )
    if config.version != records.FORMAT_VERSION or unknown:
        what = f"features {unknown} are" if unknown else f"format version {config.version} is"
        raise UnknownFormatError(
            f"{store.url}: {what} unknown to this snapstore ({records.VERSION}), which reads version "
            f"{records.FORMAT_VERSION}; use {config.writer} or newer"
        )
    if not re.fullmatch(r"[0-9a-f]{32}", config.uuid):  # it names a folder of the cache
        raise FormatError(f"{store.url}: config: uuid {config.uuid[:80]!r}, expected 32 hexadecimal digits")
    if config.chunk_bytes % 16 or not MIN_CHUNK_BYTES <= config.chunk_bytes <= MAX_CHUNK_BYTES:
        raise FormatError(f"{store.url}: config: chunk size {config.chunk_bytes}")
    return config


def read_or_reconstruct_config(store: ObjectStore) -> tuple[Config, str]:
    """Return (a config for check and repair, why the store's own config cannot be used); the text is empty if it can.

    Raises:
        NotFoundError, IntegrityError, StorageError: it cannot be read, and there is nothing to reconstruct it from.
        FormatError: its format or one of its features is unknown to this release.
    """
    try:
        config = read_config(store)
    except (NotFoundError, IntegrityError, StorageError) as error:
        if is_withheld(error):  # it may be whole
            raise
        reconstructed = _reconstruct(store)
        if reconstructed is None:
            raise
        return reconstructed, "config is missing" if isinstance(error, NotFoundError) else str(error)
    if is_foreign(store, config):
        problem = "config has another digest seed than the manifests: it belongs to another repository"
        return _reconstruct(store) or config, problem
    return config, ""


def is_foreign(store: ObjectStore, config: Config) -> bool:
    """Return whether a readable config belongs to another repository: more manifests have another seed than its own.

    It reads one header; only if that one has another seed, it reads all.
    """
    headers = _headers(store)
    first = next(headers, None)
    if first is None or first.digest_seed == config.digest_seed:
        return False
    seeds = Counter([first.digest_seed, *(header.digest_seed for header in headers)])
    return seeds[config.digest_seed] < max(seeds.values())


def _reconstruct(store: ObjectStore) -> Config | None:
    """Return a config made from the manifests; None if the store holds neither manifests nor records.

    The digest seed is the one that most manifests have. Without manifests there are no digests, so the seed is new.
    """
    seeds: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for header in _headers(store):
        seeds[header.digest_seed] += 1
        sizes[header.chunk_bytes] += 1
    has_pages = any(True for prefix in ("pages/", "volumes/") for _ in store.list(prefix))
    if not seeds and not has_pages and not any(True for _ in store.list("snapshots/")):
        return None
    config = new_config(
        chunk_bytes=sizes.most_common(1)[0][0] if sizes else DEFAULT_CHUNK_BYTES,
        digest_seed=seeds.most_common(1)[0][0] if seeds else new_seed(),
    )
    features = sorted({*config.features, records.PAGES}) if has_pages else config.features
    return msgspec.structs.replace(config, features=features)


def _headers(store: ObjectStore) -> Iterator[ManifestHeader]:
    """Yield the header of every manifest that can be read."""
    for info in store.list("manifests/"):
        header = tried(store, partial(read_unproven, store, info.key, info.size_bytes))
        if isinstance(header, ManifestHeader):
            yield header


def read_unproven(store: ObjectStore, key: str, size_bytes: int) -> ManifestHeader | ManifestList:
    """Return the header of a manifest, or a list of manifests; nothing compares it with the SHA-256 in a record.

    Raises:
        NotFoundError, IntegrityError, FormatError: it is missing or damaged.
        StorageError: it cannot be read.
    """
    first = bytes(store.get_range(key, 0, min(manifest.HEADER_READ_BYTES, size_bytes)))
    if records.is_list(first):
        data = first if len(first) == size_bytes else store.get(key, limit_bytes=records.MAX_OBJECT_BYTES)
        return records.decode(data, ManifestList, key)
    return manifest.decode_header(manifest.read_header(store, key, size_bytes, first), key)

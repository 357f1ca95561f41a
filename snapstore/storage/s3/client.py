"""The boto3 client: made from a URL and the standard AWS configuration, with our deadlines, checks and signer.

Credentials, region, endpoint and addressing style come from where every AWS tool takes them (environment, profiles,
instance roles), never from a URL. botocore's retries are off: its "standard" mode gives a client 500 tokens, 35 retries
for all threads together, which eight writers use up within a second of a server's restart. failures.py retries.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import boto3
import botocore.session
from botocore import auth
from botocore import exceptions as aws
from botocore.config import Config
from botocore.credentials import RefreshableCredentials

from ...errors import InvalidInputError
from ...threads import after_fork_in_child
from .deadline import run_with_timeout
from .failures import Failure, guarded
from .transport import HttpSession, InvalidAnswerError, close_body, hand_over_body

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PREFIX_COMPONENT = re.compile(r"[A-Za-z0-9._=+@-]{1,255}")
_STORAGE_CLASS = re.compile(r"[A-Z0-9_]{1,64}")
#: Classes whose objects must be restored, for hours, before they can be read.
_FROZEN = {"GLACIER", "DEEP_ARCHIVE"}

#: S3 allows names of 1,024 bytes. Our longest key (with run and step) takes 350.
_PREFIX_LIMIT = 512
#: The most open connections of a client; further callers wait for one.
CONNECTIONS = 64
#: The time to fetch credentials, which may come from a program or a server.
CREDENTIALS_TIMEOUT_S = 60.0
#: Credentials that expire sooner are not used; this is botocore's own limit [s].
CREDENTIALS_LEFT_S = 600
#: Places of credentials that are no profile, by botocore's name.
_PLACES = {
    "": "no place: there are none",
    "env": "its own environment, which no other process can change: start it again with valid ones, or use a profile",
    "container-role": "the role of its container",
    "iam-role": "the role of its instance",
}
#: boto3 is not safe to make clients in several threads. A fork does not wait for the lock, since its holder may wait
#: for credentials; a forked child gets a new one.
_CREATE_LOCK = threading.Lock()
after_fork_in_child(_CREATE_LOCK._at_fork_reinit)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class BucketUrl:
    """The parts of an `s3://` URL.

    Attributes:
        prefix: Empty, or ends in `/`.
        storage_class: The storage class of packs; None for the bucket's default.
    """

    bucket: str
    prefix: str
    storage_class: str | None

    @property
    def url(self) -> str:
        """The URL without options."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def parse_url(url: str) -> BucketUrl:
    """Parse `s3://bucket[/prefix][?storage_class=NAME]`.

    Raises:
        InvalidInputError: It is not such a URL, or objects of its class cannot be read at once. The error repeats
            nothing of a URL that may hold credentials.
    """
    try:
        parts = guarded(urlsplit, url)
    except Failure as failure:
        raise InvalidInputError("s3://: expected s3://bucket/prefix") from failure
    if not url.isprintable():  # urlsplit drops line ends and tabs, so that another bucket would be meant
        raise InvalidInputError("s3://: expected s3://bucket/prefix, got a URL with a line end or a control character")
    if "@" in parts.netloc or ":" in parts.netloc:
        raise InvalidInputError(
            "s3://: expected s3://bucket/prefix, with no user, key or port before the bucket; credentials and endpoint "
            "belong in the AWS configuration (AWS_PROFILE, AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL_S3)"
        )
    if not _BUCKET.fullmatch(parts.netloc):
        raise InvalidInputError(f"s3://{parts.netloc}: not the name of a bucket; expected s3://bucket/prefix")
    prefix = parts.path.strip("/")
    components = prefix.split("/") if prefix else []
    if parts.fragment or len(prefix) > _PREFIX_LIMIT or not all(map(_is_prefix_component, components)):
        raise InvalidInputError(
            f"s3://{parts.netloc}{parts.path}: expected a prefix of at most {_PREFIX_LIMIT} characters: names of "
            "letters, digits and '._=+@-', joined by '/'"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    name = options.pop("storage_class", None)
    if options:
        raise InvalidInputError(f"s3://{parts.netloc}: unknown options after '?'; expected storage_class only")
    if name is not None and (name in _FROZEN or not _STORAGE_CLASS.fullmatch(name)):
        raise InvalidInputError(
            f"storage_class {name!r}: expected a class whose objects can be read at once, such as STANDARD_IA, "
            "INTELLIGENT_TIERING or GLACIER_IR"
        )
    return BucketUrl(parts.netloc, f"{prefix}/" if prefix else "", name)


def _is_prefix_component(name: str) -> bool:
    return bool(_PREFIX_COMPONENT.fullmatch(name)) and name.strip(".") != ""


def make_client(connect_timeout_s: float, read_timeout_s: float) -> S3Client:
    """Return a client with the standard AWS configuration; safe to use from several threads, not across a fork.

    botocore's checksums (since 1.36) are off, because older servers refuse requests with them. Our puts carry their
    SHA-256, and our reads are verified by digests.

    Raises:
        InvalidInputError: The configuration cannot be used, such as a profile that does not exist.
    """
    config = Config(
        retries={"mode": "standard", "total_max_attempts": 1},  # failures.py retries
        connect_timeout=connect_timeout_s,
        read_timeout=read_timeout_s,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="snapstore",
    )

    def make() -> Any:
        with _CREATE_LOCK:
            return boto3.session.Session().client("s3", config=config)

    try:
        client: Any = guarded(run_with_timeout, make, CREDENTIALS_TIMEOUT_S)  # may run a program
    except Failure as failure:
        raise InvalidInputError(
            f"s3://: the AWS configuration cannot be used ({failure}); check AWS_PROFILE, AWS_DEFAULT_REGION, "
            "AWS_ENDPOINT_URL_S3 and ~/.aws/config"
        ) from failure
    endpoint = client._endpoint
    endpoint.http_session = HttpSession(endpoint.http_session, connect_timeout_s + read_timeout_s)
    client.meta.events.register("before-call.s3.HeadBucket", _follow_no_redirect)
    client.meta.events.register("before-sign.s3", _refresh_credentials)
    client.meta.events.register("choose-signer.s3.PutObject", _choose_signer)
    client.meta.events.register("before-parse.s3.ListObjectsV2", _keep_page)
    client.meta.events.register("after-call.s3", _check_answer)
    client.meta.events.register("after-call.s3", hand_over_body)
    client.meta.events.register("after-call-error.s3", close_body)
    made: S3Client = client
    return made


def credentials_of(client: Any) -> object:
    """Return the credentials with which a client signs."""
    return client._request_signer._credentials


def renew_credentials(client: Any) -> str:
    """Read the credentials from where a new process would take them; return that place, for errors.

    The client keeps its endpoint and connections: another server would not have the objects of this one.

    Raises:
        Failure: The configuration cannot be used.
    """

    def read() -> tuple[object, str]:
        session = botocore.session.Session()
        found = session.get_credentials()
        method = getattr(found, "method", "")
        file = {"shared-credentials-file": "credentials_file", "config-file": "config_file"}.get(method)
        of = f" of {session.get_config_variable(file)}" if file else f" ({method})"
        return found, _PLACES.get(method) or f"profile {session.profile or 'default'!r}{of}"

    place: str
    client._request_signer._credentials, place = guarded(_in_time, read)
    return place


def _in_time(fetch: Callable[[], T]) -> T:
    """Return credentials that a program or a server may tell, which may never answer.

    Raises:
        CredentialRetrievalError: It does not answer in time.
    """
    try:
        return run_with_timeout(fetch, CREDENTIALS_TIMEOUT_S)
    except TimeoutError:
        raise _no_answer() from None


def _no_answer() -> aws.CredentialRetrievalError:
    return aws.CredentialRetrievalError(provider="credentials", error_msg="no answer in time")


def _follow_no_redirect(context: dict[str, Any], **_: Any) -> None:
    """Follow no redirect of botocore's own HeadBucket: it is to find the region after one, and would call itself."""
    context["s3_redirect"]["redirected"] = True


def _refresh_credentials(request_signer: Any, **_: Any) -> None:
    """Refresh credentials that expire soon, in a thread: their program or server may never answer.

    Raises:
        CredentialRetrievalError: It does not answer in time, and the present credentials are about to expire.
    """
    present = request_signer._credentials
    if not isinstance(present, RefreshableCredentials) or not present.refresh_needed():
        return
    try:
        run_with_timeout(present.get_frozen_credentials, CREDENTIALS_TIMEOUT_S)
    except TimeoutError:
        if present.refresh_needed(CREDENTIALS_LEFT_S):
            raise _no_answer() from None


def _keep_page(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any) -> None:
    """Keep a page of a listing unparsed, for listing.py: botocore's parser accepts too much."""
    if response_dict["status_code"] == 200:
        customized_response_dict["Page"] = response_dict["body"]
        response_dict["body"] = b""


def _check_answer(http_response: Any, parsed: dict[str, Any], model: Any, **_: Any) -> None:
    """Refuse a successful answer that S3 does not give to such a request, such as a page of a proxy or portal."""
    status = http_response.status_code
    if status >= 300:
        return  # botocore raises it
    wanted, tag = 206 if "ContentRange" in parsed else 200, True
    if model.name in ("PutObject", "HeadObject", "GetObject"):
        tag = bool(parsed.get("ETag"))
    elif model.name == "CopyObject":
        tag = bool(parsed.get("CopyObjectResult", {}).get("ETag"))
    elif model.name == "DeleteObject" and status == 204:
        wanted = 204
    if status != wanted or not tag or (model.name in ("PutObject", "DeleteObject") and http_response.content):
        if "Body" in parsed:
            parsed["Body"].close()
        raise InvalidAnswerError(f"HTTP status {status}, which is not an answer of S3 to {model.name}")


#: http.client asks for 16 KiB at a time; larger pieces need fewer calls. Each piece has a deadline.
BODY_PIECE_BYTES = 256 * 1024


class RequestBody:
    """A buffer as a file object: botocore sends it once, without a copy.

    Attributes:
        sha256: Its SHA-256 in hex, for the signer.
    """

    def __init__(self, view: memoryview, sha256: str) -> None:
        self._view, self._at = view, 0
        self.sha256 = sha256

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int | None = -1) -> memoryview | bytes:
        """Return the next piece, up to BODY_PIECE_BYTES whatever `size` is; all the rest for a negative size."""
        if size is None or size < 0:
            return bytes(self._view[self._at :])
        piece = self._view[self._at :][:BODY_PIECE_BYTES]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position, as a file does."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at


class _SignerOfHashedBodies(auth.S3SigV4Auth):
    """botocore's signer for S3, except that it does not hash a `RequestBody` again, whose SHA-256 is known.

    Over plain HTTP the signature covers the body. If the hash were wrong, the server would refuse the request.
    """

    def payload(self, request: Any) -> str:
        known: str | None = getattr(request.body, "sha256", None)
        if known is not None and self._should_sha256_sign_payload(request):  # type: ignore[attr-defined]
            return known
        return str(super().payload(request))


_SIGNER = "snapstore-s3v4"
auth.AUTH_TYPE_MAPS[_SIGNER] = _SignerOfHashedBodies


def _choose_signer(signature_version: object, **_: Any) -> Any:
    return _SIGNER if signature_version in ("v4", "s3v4") else None  # None: botocore's own signer

"""The S3 client: from a URL and the standard AWS configuration to a boto3 client, and from its failures to our errors.

Credentials, region, endpoint and addressing style come from where every AWS tool takes them (environment, profiles,
instance roles), never from a URL. Errors of botocore, urllib3 and http.client end here (`guarded`): their texts, and
those of the errors behind them, may hold keys, tokens and passwords. A `Failure` takes their place in every chain.

Retries are ours alone (`send`, and s3_reading.py of bodies that break off): botocore's "standard" mode gives a client
500 tokens, 35 retries for all threads together, which eight writers spend within a second of a server's restart.
"""

from __future__ import annotations

import http.client
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import boto3
from botocore import auth
from botocore import exceptions as aws
from botocore.config import Config
from botocore.credentials import RefreshableCredentials
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError, LocationValueError

from ...errors import CapabilityError, InvalidInputError, SnapstoreError, StorageError, StorageFullError
from .deadline import in_time
from .transport import OddAnswerError, Session, UnsendableError, close_body, hand_over_body

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PREFIX_COMPONENT = re.compile(r"[A-Za-z0-9._=+@-]{1,255}")
_STORAGE_CLASS = re.compile(r"[A-Z0-9_]{1,64}")
#: Classes whose objects must be thawed, for hours, before they can be read.
_FROZEN = {"GLACIER", "DEEP_ARCHIVE"}

#: Keys are at most 1,024 bytes: of these the longest of ours (run and step) takes 350.
_PREFIX_LIMIT = 512
#: Credentials may come from a program, or from a server.
CREDENTIALS_TIMEOUT_S = 60.0
#: Those that expire sooner are used no more: botocore's own limit.
CREDENTIALS_LEFT_S = 600
_CREATE_LOCK = threading.Lock()  # boto3's default session is not safe to make clients from several threads


@dataclass(frozen=True, slots=True)
class Place:
    """What a URL names.

    Attributes:
        prefix: empty, or ends in `/`.
        storage_class: of packs; None: the bucket's default.
    """

    bucket: str
    prefix: str
    storage_class: str | None

    @property
    def url(self) -> str:
        """Without options."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def parse(url: str) -> Place:
    """The place that `s3://bucket[/prefix][?storage_class=NAME]` names.

    Raises:
        InvalidInputError: not such a URL. Of one that may hold credentials nothing is repeated.
    """
    try:
        parts = guarded(urlsplit, url)
    except Failure as failure:
        raise InvalidInputError("s3://: expected s3://bucket/prefix") from failure
    if "@" in parts.netloc or ":" in parts.netloc:
        raise InvalidInputError(
            "s3://: expected s3://bucket/prefix, with no user, key or port before the bucket; credentials and endpoint "
            "belong in the AWS configuration (AWS_PROFILE, AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL_S3)"
        )
    if not _BUCKET.fullmatch(parts.netloc):
        raise InvalidInputError(f"s3://{parts.netloc}: no name of a bucket; expected s3://bucket/prefix")
    prefix = parts.path.strip("/")
    components = prefix.split("/") if prefix else []
    if parts.fragment or len(prefix) > _PREFIX_LIMIT or not all(map(_is_prefix_component, components)):
        raise InvalidInputError(
            f"s3://{parts.netloc}{parts.path}: expected a prefix of '/'-joined names of letters, digits and '._=+@-', "
            f"{_PREFIX_LIMIT} at most in all"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    storage_class = options.pop("storage_class", None)
    if options:
        raise InvalidInputError(f"s3://{parts.netloc}: unknown options behind '?'; expected storage_class alone")
    return Place(parts.netloc, f"{prefix}/" if prefix else "", check_storage_class(storage_class))


def _is_prefix_component(name: str) -> bool:
    return bool(_PREFIX_COMPONENT.fullmatch(name)) and name.strip(".") != ""


def check_storage_class(name: str | None) -> str | None:
    """The name, if packs can lie in that class.

    Raises:
        InvalidInputError: they cannot.
    """
    if name is not None and (name in _FROZEN or not _STORAGE_CLASS.fullmatch(name)):
        raise InvalidInputError(
            f"storage_class {name!r}: expected a class whose objects can be read at once, such as STANDARD_IA, "
            "INTELLIGENT_TIERING or GLACIER_IR"
        )
    return name


def make_client(*, connections: int, connect_timeout_s: float, read_timeout_s: float) -> S3Client:
    """A client by the standard AWS configuration; safe to use from several threads, not across a fork.

    Checksums are off by default, because older servers refuse requests that carry botocore's (since 1.36): what we put
    carries its SHA-256, and what we read is checked against digests of our own.

    Raises:
        InvalidInputError: the configuration cannot be used, such as a profile that does not exist.
    """
    config = Config(
        retries={"mode": "standard", "total_max_attempts": 1},  # one: the retries are ours (`send`)
        connect_timeout=connect_timeout_s, read_timeout=read_timeout_s,
        max_pool_connections=connections, tcp_keepalive=True,
        request_checksum_calculation="when_required", response_checksum_validation="when_required",
        user_agent_extra="snapstore",
    )  # fmt: skip

    def make() -> Any:
        with _CREATE_LOCK:
            return boto3.session.Session().client("s3", config=config)

    try:
        client: Any = guarded(in_time, make, CREDENTIALS_TIMEOUT_S)  # may run a program that tells the credentials
    except Failure as failure:
        raise InvalidInputError(
            f"s3://: the AWS configuration cannot be used ({failure}); check AWS_PROFILE, AWS_DEFAULT_REGION, "
            "AWS_ENDPOINT_URL_S3 and ~/.aws/config"
        ) from failure
    endpoint = client._endpoint
    endpoint.http_session = Session(endpoint.http_session, connect_timeout_s + read_timeout_s)
    client.meta.events.register("before-sign.s3", _renew)
    client.meta.events.register("choose-signer.s3.PutObject", _choose_signer)
    client.meta.events.register("before-parse.s3.ListObjectsV2", _keep_page)
    client.meta.events.register("after-call.s3", _expect)
    client.meta.events.register("after-call.s3", hand_over_body)
    client.meta.events.register("after-call-error.s3", close_body)
    made: S3Client = client
    return made


def _renew(request_signer: Any, **_: Any) -> None:
    """Renew credentials that expire soon, in a thread: the program or server that tells them may never answer.

    Raises:
        CredentialRetrievalError: it does not in time, and those at hand are about to expire.
    """
    held = request_signer._credentials
    if not isinstance(held, RefreshableCredentials) or not held.refresh_needed():
        return
    try:
        in_time(held.get_frozen_credentials, CREDENTIALS_TIMEOUT_S)
    except TimeoutError:
        if held.refresh_needed(CREDENTIALS_LEFT_S):
            raise aws.CredentialRetrievalError(provider="credentials", error_msg="no answer in time") from None


def _keep_page(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any) -> None:
    """Leave a page of a listing as it is, for s3_listing.py: botocore would believe too much."""
    if response_dict["status_code"] == 200:
        customized_response_dict["Page"] = response_dict["body"]
        response_dict["body"] = b""


def _expect(http_response: Any, parsed: dict[str, Any], model: Any, **_: Any) -> None:
    """Refuse an answer without an error that S3 does not give to such a request: a proxy's, or a portal's page."""
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
        raise OddAnswerError(f"HTTP status {status}, which is no answer of S3's to {model.name}")


#: http.client asks for 16 KiB at a time; larger pieces cost fewer calls. Each must leave within the time to connect.
BODY_PIECE_BYTES = 256 * 1024


class Body:
    """A buffer as a file that botocore can send, once, without copying it."""

    def __init__(self, view: memoryview, sha256: str) -> None:
        self._view, self._at = view, 0
        self.sha256 = sha256  # in hex; for the signer

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int | None = -1) -> memoryview | bytes:
        """The next piece; larger than asked for, since http.client asks for 16 KiB at a time."""
        if size is None or size < 0:
            return bytes(self._view[self._at :])
        piece = self._view[self._at :][:BODY_PIECE_BYTES]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of a file."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        return self._at

    def tell(self) -> int:
        """As of a file."""
        return self._at


_SignerOfS3: Any = auth.S3SigV4Auth  # the stubs lack what is overridden


class _SignsKnownBodies(_SignerOfS3):  # type: ignore[misc]
    """botocore's signer for S3, that does not hash a body once more whose SHA-256 is known: `sha256`, in hex.

    Over plain HTTP the signature covers the body. Were the hash wrong, the server would refuse the request.
    """

    def payload(self, request: Any) -> str:
        known: str | None = getattr(request.body, "sha256", None)
        if known is not None and self._should_sha256_sign_payload(request):
            return known
        return str(super().payload(request))


_SIGNER = "snapstore-s3v4"
auth.AUTH_TYPE_MAPS[_SIGNER] = _SignsKnownBodies


def _choose_signer(signature_version: object, **_: Any) -> Any:
    return _SIGNER if signature_version in ("v4", "s3v4") else None  # others are for other kinds of buckets and keys


#: What breaks while a body is being read; botocore lets some of urllib3's errors through.
_BROKEN = (aws.IncompleteReadError, aws.HTTPClientError, HTTPError, OSError)
#: Answers that say nothing for good, and the words of such among the refusals. S3 redirects by 301 and 307 alone.
_PASSING_STATUS = {302, 303, 408, 409, 425, 429, 500, 502, 503, 504}
_PASSING_CODES = {"RequestTimeout", "InternalError", "SlowDown", "ServiceUnavailable", "Throttling", "OperationAborted"}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 20.0
_CODE = re.compile(r"[A-Za-z]{1,50}|[0-9]{3}")


class Failure(Exception):  # noqa: N818 - no error for users: the cause of one
    """Why a request failed, in words of ours.

    Attributes:
        status: of the server's refusal, or 0.
        code: the server's word for it: `NoSuchKey`, or the status where there is no body (answers to HEAD).
        passing: whether the same request may succeed later.
    """

    def __init__(self, name: str, advice: str, *, status: int = 0, code: str = "", passing: bool = False) -> None:
        super().__init__(name, advice)
        self.name, self.advice, self.status, self.code, self.passing = name, advice, status, code, passing

    def __str__(self) -> str:
        return f"{self.name}, HTTP status {self.status}: {self.code}" if self.status else self.name

    @property
    def is_missing(self) -> bool:
        """Whether the server says that the object is not there: any other 404 is somebody else's, such as a proxy's."""
        return self.status == 404 and self.code == "NoSuchKey"

    def under(self, what: str) -> SnapstoreError:
        """The error of ours; `what` names the thing and the verb."""
        if self.status:
            return refused(what, self.code, self.status)
        return StorageError(f"{what}: {self.advice}")


def guarded(call: Callable[..., T], *args: Any, **options: Any) -> T:
    """The result of a call into botocore.

    Raises:
        Failure: for whatever it raises; nothing of that is left in the chain, since it may hold secrets.
    """
    try:
        return call(*args, **options)
    except (SnapstoreError, Failure):
        raise
    except Exception as error:  # noqa: BLE001 - a damaged answer makes botocore raise KeyError, ValueError and others
        failure = failure_of(error)
    raise failure


def send(call: Callable[..., Any], options: Mapping[str, Any], attempts: int) -> Any:
    """The answer to a request, which is sent again, after a growing pause, while that may help.

    Raises:
        Failure: of the last attempt.
    """
    for attempt in range(1, attempts + 1):
        try:
            return guarded(call, **options)
        except Failure as failure:
            if attempt == attempts or not failure.passing:
                raise
        pause(attempt)
    raise AssertionError("unreachable")


def pause(attempt: int) -> None:
    """Between two tries; the first attempt is 1."""
    time.sleep(random.uniform(0.5, 1) * min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1)))


_DENIED = "no permission; docs/s3.md lists what the policy must allow"
_UNKNOWN_KEY = "unknown or wrong credentials; check AWS_PROFILE or AWS_ACCESS_KEY_ID and the secret"
_EXPIRED = "the credentials have expired; renew them"
_FULL = "no quota or space left; free some, or run 'snapstore gc'"
_REGION = "the bucket is in another region, or not on this endpoint; set AWS_DEFAULT_REGION or AWS_ENDPOINT_URL_S3"
_ADVICE = {
    "AccessDenied": _DENIED, "403": _DENIED, "AllAccessDisabled": _DENIED, "MethodNotAllowed": _DENIED,
    "InvalidAccessKeyId": _UNKNOWN_KEY, "SignatureDoesNotMatch": _UNKNOWN_KEY, "InvalidToken": _UNKNOWN_KEY,
    "ExpiredToken": _EXPIRED, "ExpiredTokenException": _EXPIRED, "TokenRefreshRequired": _EXPIRED,
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
    "NoSuchBucket": "the bucket does not exist; make it, or check its name and AWS_ENDPOINT_URL_S3",
    "PermanentRedirect": _REGION, "AuthorizationHeaderMalformed": _REGION, "301": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "InvalidObjectState": "the object was moved to an archive; restore it there, and end the lifecycle rule",
    "InvalidStorageClass": "the server has no such storage class; choose another",
    "SlowDown": "the server asks for fewer requests, still after all retries; try again later",
    "BadDigest": "the bytes were damaged on the way; test this machine's memory and network",
    "XAmzContentSHA256Mismatch": "the bytes were damaged on the way; test this machine's memory and network",
    "XAmzContentChecksumMismatch": "the bytes were damaged on the way; test this machine's memory and network",
}  # fmt: skip
_FULL_CODES = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "507"}


def status_of(error: SnapstoreError) -> int:
    """The HTTP status by which a server refused the request that failed with this, or 0."""
    return error.__cause__.status if isinstance(error.__cause__, Failure) else 0


def safe_code(code: object) -> str:
    """A server's word for an error, if it is one: whatever else stands in its place may repeat what it was sent."""
    return code if isinstance(code, str) and _CODE.fullmatch(code) else ""


def refused(what: str, code: str, status: int) -> SnapstoreError:
    """The error of ours for a server's refusal; `what` names the thing and the verb."""
    if code in _FULL_CODES or status == 507:
        return StorageFullError(f"{what}: {_FULL} ({code})")
    if code == "NotImplemented" or status == 501:
        return CapabilityError(f"{what}: the server does not know this request ({code}); see docs/s3.md for others")
    advice = _ADVICE.get(code) or (_DENIED if status == 403 else "try again; if it stays, ask who runs the server")
    return StorageError(f"{what}: {advice} ({code}, HTTP status {status})")


_UNSENDABLE = (
    "a credential, the endpoint or a proxy holds characters that no request can carry, such as the end of a line; "
    "check AWS_ACCESS_KEY_ID, AWS_SESSION_TOKEN, AWS_ENDPOINT_URL_S3 and HTTPS_PROXY"
)


def failure_of(error: Exception) -> Failure:
    """What an error of botocore's, or of what lies below it, means; without its texts."""
    name = type(error).__name__
    if isinstance(error, aws.ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = safe_code(error.response.get("Error", {}).get("Code")) or str(status)
        passing = status in _PASSING_STATUS or code in _PASSING_CODES
        return Failure("ClientError", "", status=status, code=code, passing=passing)
    if isinstance(error, OddAnswerError):
        return Failure(name, f"{error.why}; check AWS_ENDPOINT_URL_S3 and proxies, then try again", passing=True)
    if isinstance(error, UnsendableError) or _is_unsendable(error):
        return Failure(name, _UNSENDABLE)
    if isinstance(error, aws.NoCredentialsError | aws.PartialCredentialsError):
        return Failure(name, "no credentials found; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret")
    if isinstance(error, aws.CredentialRetrievalError | aws.TokenRetrievalError | aws.SSOError):
        return Failure(name, f"the credentials could not be fetched ({name}); log in again")
    if isinstance(error, aws.ReadTimeoutError | aws.ConnectTimeoutError):
        return Failure(name, "no answer in time; check the network and the server, then try again", passing=True)
    if isinstance(error, FileNotFoundError | PermissionError):
        return Failure(name, f"a file or program of the AWS configuration cannot be used ({name}); check ~/.aws/config")
    if isinstance(error, (*_BROKEN, aws.ConnectionError)):
        return Failure(name, f"the connection failed or broke off ({name}); check the network, AWS_ENDPOINT_URL_S3 and "
                       "the server, then try again", passing=True)  # fmt: skip
    if isinstance(error, aws.BotoCoreError) and not isinstance(error, ResponseParserError):
        return Failure(name, f"the client failed ({name}); check the AWS configuration")
    return Failure(name, f"the answer is damaged or no S3's ({name}); check AWS_ENDPOINT_URL_S3, then try again",
                   passing=True)  # fmt: skip


def _is_unsendable(error: Exception) -> bool:
    """Whether http.client, or a codec, refuses to write the request."""
    inner = getattr(error, "kwargs", {}).get("error") if isinstance(error, aws.HTTPClientError) else None
    return isinstance(inner, UnicodeError | http.client.InvalidURL | LocationValueError)

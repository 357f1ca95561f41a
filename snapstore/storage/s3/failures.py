"""Failures of requests: botocore's errors as errors of snapstore, and which of them a retry may help.

Errors of botocore, urllib3 and http.client end here (`guarded`). Their texts, and those of the errors behind them, may
hold keys, tokens and passwords, so a `Failure` takes their place in every chain, with texts of our own.

Retries are ours alone: retry.py, and reader.py for bodies that break off.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable
from typing import Any, TypeVar

from botocore import exceptions as aws
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError, LocationValueError

from ...errors import CapabilityError, SnapstoreError, StorageError, StorageFullError, lasting
from ..os_errors import is_too_many_files
from .transport import InvalidAnswerError, UnsendableError

T = TypeVar("T")

#: Errors of a body that breaks off; botocore passes some errors of urllib3 on.
_BROKEN = (aws.IncompleteReadError, aws.HTTPClientError, HTTPError, OSError)
#: HTTP statuses and error codes after which the same request may succeed. S3 redirects only by 301 and 307.
_RETRYABLE_STATUS = {302, 303, 408, 409, 425, 429, 500, 502, 503, 504}
_RETRYABLE_CODES = {
    "RequestTimeout",
    "InternalError",
    "SlowDown",
    "ServiceUnavailable",
    "Throttling",
    "OperationAborted",
    "BadDigest",  # the bytes were damaged on the way; here they are whole
    "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch",
}
#: A server without its disks may say this; no request is sent again for it, but `on_error="warn"` saves again.
_AWAY_CODES = {"NoSuchBucket"}
_CODE = re.compile(r"[A-Za-z]{1,50}|[0-9]{3}")
#: Error codes with digits. Other text with digits may be a key.
_CODES_WITH_DIGITS = {"XAmzContentSHA256Mismatch", "MissingContentMD5"}


class Failure(Exception):  # noqa: N818 - never raised to users: it is the cause of an error
    """Why a request failed, in our own words.

    Attributes:
        name: The name of the error.
        advice: The next step for the user.
        status: The HTTP status of the server's refusal, or 0.
        code: The server's error code, such as `NoSuchKey`; the status if the answer has no body (HEAD).
        retryable: Whether the same request may succeed later.
        place: Where this process has read the credentials once more; "" if it has not.
    """

    place = ""

    def __init__(self, name: str, advice: str, *, status: int = 0, code: str = "", retryable: bool = False) -> None:
        super().__init__(name, advice)
        self.name, self.advice, self.status, self.code, self.retryable = name, advice, status, code, retryable

    @property
    def is_of_credentials(self) -> bool:
        """Return whether other credentials may help: these have expired, are unknown, or cannot be fetched."""
        return self.code in CREDENTIAL_CODES or any(word in self.name for word in ("Credential", "Token", "SSO"))

    @property
    def is_withheld(self) -> bool:
        """Return whether the object may be whole; not if it is too short for the range that was asked for."""
        return self.status != 416

    def __str__(self) -> str:
        return f"{self.name}, HTTP status {self.status}: {self.code}" if self.status else self.name

    def as_error(self, what: str) -> SnapstoreError:
        """Return the error to raise; `what` names the thing and the action."""
        if self.status:
            return refused(what, self.code, self.status, self.place)
        error = StorageError(f"{what}: {self.advice}{_read_from(self.place)}")
        return error if self.retryable else lasting(error)


def guarded(call: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call botocore and return the result.

    Raises:
        Failure: botocore raised. Its own error is not in the chain, since it may hold secrets.
    """
    try:
        return call(*args, **options)
    except (SnapstoreError, Failure):
        raise
    except Exception as error:  # noqa: BLE001 - a damaged answer makes botocore raise KeyError, ValueError and others
        failure = failure_of(error)
    raise failure


_DENIED = "no permission; docs/s3.md lists what the policy must allow"
_UNKNOWN_KEY = "unknown or wrong credentials; check AWS_PROFILE or AWS_ACCESS_KEY_ID and the secret"
_EXPIRED = "the credentials have expired; renew them"
_UNKNOWN_KEY_CODES = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidTokenId", "Unauthorized")
_EXPIRED_CODES = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")
CREDENTIAL_CODES = {*_UNKNOWN_KEY_CODES, *_EXPIRED_CODES}
_FULL = "no quota or space left; free some, or run 'snapstore gc'"
_REGION = "the bucket is in another region, or not on this endpoint; set AWS_DEFAULT_REGION or AWS_ENDPOINT_URL_S3"
_DAMAGED = "the bytes were damaged on the way; test this machine's memory and network"
_ADVICE = {
    **dict.fromkeys(("AccessDenied", "403", "AllAccessDisabled", "MethodNotAllowed"), _DENIED),
    **dict.fromkeys(_UNKNOWN_KEY_CODES, _UNKNOWN_KEY),
    **dict.fromkeys(_EXPIRED_CODES, _EXPIRED),
    **dict.fromkeys(("PermanentRedirect", "AuthorizationHeaderMalformed", "301"), _REGION),
    "IllegalLocationConstraintException": _REGION,
    **dict.fromkeys(("BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"), _DAMAGED),
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
    "NoSuchBucket": "the bucket does not exist; make it, or check its name and AWS_ENDPOINT_URL_S3",
    "InvalidObjectState": "the object was moved to an archive; restore it there, and end the lifecycle rule",
    "InvalidStorageClass": "the server has no such storage class; choose another",
    "SlowDown": "the server asks for fewer requests, still after all retries; try again later",
}
_FULL_CODES = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "507"}


def status_of(error: SnapstoreError) -> int:
    """Return the HTTP status of the refusal that caused an error, or 0."""
    return error.__cause__.status if isinstance(error.__cause__, Failure) else 0


def code_of(error: SnapstoreError) -> str:
    """Return the server's error code of the refusal that caused an error, or ""."""
    return error.__cause__.code if isinstance(error.__cause__, Failure) else ""


def safe_code(code: object) -> str:
    """Return a server's error code if it looks like one, else "": any other text may repeat a secret."""
    return code if isinstance(code, str) and (_CODE.fullmatch(code) or code in _CODES_WITH_DIGITS) else ""


def _read_from(place: str) -> str:
    return f"; this process has read them once more, from {place}" if place else ""


def refused(what: str, code: str, status: int, place: str = "") -> SnapstoreError:
    """Return the error to raise for a server's refusal.

    Args:
        what: The thing and the action.
        place: See `Failure`.
    """
    if code in _FULL_CODES or status == 507:
        return StorageFullError(f"{what}: {_FULL} ({code})")
    if code == "NotImplemented" or status == 501:
        return CapabilityError(
            f"{what}: the server does not know this request ({code}); docs/s3.md lists servers that do"
        )
    advice = _ADVICE.get(code) or (
        _DENIED if status == 403 else "try again; if it fails again, ask the server's administrator"
    )
    error = StorageError(f"{what}: {advice}{_read_from(place)} ({code}, HTTP status {status})")
    is_away = status >= 500 or status in _RETRYABLE_STATUS or code in _RETRYABLE_CODES or code in _AWAY_CODES
    return error if is_away else lasting(error)


_UNSENDABLE = (
    "a credential, the endpoint or a proxy holds characters that no request can carry, such as the end of a line; "
    "check AWS_ACCESS_KEY_ID, AWS_SESSION_TOKEN, AWS_ENDPOINT_URL_S3 and HTTPS_PROXY"
)


def failure_of(error: Exception) -> Failure:
    """Return the Failure for an error of botocore or a library below it, without its text."""
    name = type(error).__name__
    if isinstance(error, aws.ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = safe_code(error.response.get("Error", {}).get("Code")) or str(status)
        retryable = status in _RETRYABLE_STATUS or code in _RETRYABLE_CODES
        return Failure("ClientError", "", status=status, code=code, retryable=retryable)
    if isinstance(error, InvalidAnswerError):
        return Failure(name, f"{error.why}; check AWS_ENDPOINT_URL_S3 and proxies, then try again", retryable=True)
    if _lacks_files(error):
        advice = "this process has too many open files; raise the limit (ulimit -n), then try again"
        return Failure(name, advice, retryable=True)
    if isinstance(error, UnsendableError) or _is_unsendable(error):
        return Failure(name, _UNSENDABLE)
    if isinstance(error, aws.NoCredentialsError | aws.PartialCredentialsError):
        return Failure(name, "no credentials found; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret")
    if isinstance(error, aws.CredentialRetrievalError | aws.TokenRetrievalError | aws.SSOError):
        # The server of an instance's role may be back for the next attempt; to log in takes a person.
        retryable = isinstance(error, aws.CredentialRetrievalError)
        return Failure(name, f"the credentials could not be fetched ({name}); log in again", retryable=retryable)
    if isinstance(error, aws.ReadTimeoutError | aws.ConnectTimeoutError):
        return Failure(name, "no answer in time; check the network and the server, then try again", retryable=True)
    if isinstance(error, FileNotFoundError | PermissionError):
        return Failure(name, f"a file or program of the AWS configuration cannot be used ({name}); check ~/.aws/config")
    if isinstance(error, (*_BROKEN, aws.ConnectionError)):
        advice = "check the network, AWS_ENDPOINT_URL_S3 and the server, then try again"
        return Failure(name, f"the connection failed or broke off ({name}); {advice}", retryable=True)
    if isinstance(error, aws.BotoCoreError) and not isinstance(error, ResponseParserError):
        return Failure(name, f"the client failed ({name}); check the AWS configuration")
    advice = "check AWS_ENDPOINT_URL_S3, then try again"
    return Failure(name, f"the answer is damaged or not from S3 ({name}); {advice}", retryable=True)


def _lacks_files(error: Any) -> bool:
    """Return whether an error comes from one that says that there are too many open files."""
    for _ in range(8):  # botocore and urllib3 wrap it four times
        if is_too_many_files(error):
            return True
        wrapped = getattr(error, "kwargs", {}).get("error")  # botocore's may be a text
        error = wrapped if isinstance(wrapped, BaseException) else error.__cause__ or error.__context__
        if error is None:
            break
    return False


def _is_unsendable(error: Exception) -> bool:
    """Return whether http.client, or a codec, refuses to write the request."""
    inner = getattr(error, "kwargs", {}).get("error") if isinstance(error, aws.HTTPClientError) else None
    return isinstance(inner, UnicodeError | http.client.InvalidURL | LocationValueError)

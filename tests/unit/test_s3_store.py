"""S3Store handles URLs, ranges, bodies and errors. No test needs a server: moto answers all requests."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil

import boto3
import pytest
from botocore import auth
from botocore import exceptions as aws
from hypothesis import given
from hypothesis import strategies as st
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from urllib3.exceptions import NewConnectionError

from kit.s3_stores import moto_bucket
from snapstore.catalog.index import folder_for
from snapstore.errors import CapabilityError, InvalidInputError, StorageError, StorageFullError
from snapstore.storage import sandbox_folders
from snapstore.storage.base import ObjectInfo
from snapstore.storage.cache_dir import cache_folder
from snapstore.storage.s3 import client
from snapstore.storage.s3.client import BODY_PIECE_BYTES, RequestBody, parse_url
from snapstore.storage.s3.failures import failure_of
from snapstore.storage.s3.reader import PIECE_BYTES, split_range
from snapstore.storage.s3.store import S3Store
from snapstore.storage.urls import open_store
from snapstore.threads import Threads


@pytest.mark.parametrize(
    ("url", "bucket", "prefix", "storage_class"),
    [
        ("s3://bucket", "bucket", "", None),
        ("s3://bucket/", "bucket", "", None),
        ("s3://my.bucket-1/a/b_c/", "my.bucket-1", "a/b_c/", None),
        ("s3://bucket/team=ml/x?storage_class=STANDARD_IA", "bucket", "team=ml/x/", "STANDARD_IA"),
    ],
)
def test_urls(url, bucket, prefix, storage_class):
    place = parse_url(url)
    assert (place.bucket, place.prefix, place.storage_class) == (bucket, prefix, storage_class)
    assert place.url == url.partition("?")[0].rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        "s3://", "s3:///x", "s3://b", "s3://bucket/../x", "s3://bucket/a//b", "s3://bucket/a b", "s3://bucket/a/./b",
        "s3://bucket/x#y", "s3://bucket/x?storage=1", "s3://bucket/x?storage_class=GLACIER", "s3://bucket/\0",
        "s3://bucket/x?storage_class=standard ia", "s3://bucket/" + "x" * 600, "s3://[::1/x", "s3://bu cket/x",
        "s3://buc\nket/x", "s3://bucket/x\r", "s3://bucket/\tx",
    ],
)  # fmt: skip
def test_invalid_urls_are_refused(url):
    with pytest.raises(InvalidInputError, match=r"^(s3://|storage_class)"):
        open_store(url)


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/x", "s3://secret@bucket", "s3://bucket:secret/x"])
def test_nothing_is_repeated_of_a_url_with_credentials(url):
    with pytest.raises(InvalidInputError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value).replace("the secret", "")


def test_a_url_that_went_through_pathlib():
    with pytest.raises(InvalidInputError, match="pathlib"):
        open_store("s3:/bucket/prefix")


def test_without_boto3(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "snapstore.storage.s3.store", None)
    with pytest.raises(ModuleNotFoundError):
        open_store("s3://bucket/x")
    monkeypatch.delitem(__import__("sys").modules, "snapstore.storage.s3.store")
    monkeypatch.delitem(__import__("sys").modules, "snapstore.storage.s3.client")
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(CapabilityError, match=r"pip install 'snapstore\[s3\]'"):
        open_store("s3://bucket/x")


def test_a_profile_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(InvalidInputError, match="AWS_PROFILE"):
        S3Store("s3://bucket")


@given(st.one_of(st.integers(0, 9), st.integers(0, 9 * PIECE_BYTES)))
def test_every_byte_of_a_range_has_a_piece(length):
    """The pieces of a range cover it without gaps, in order, and there are as few as possible."""
    pieces, end = split_range(length), 0
    for start, size in pieces:
        assert start == end
        assert 0 < size <= PIECE_BYTES
        end = start + size
    assert end == length
    assert len(pieces) == -(-length // PIECE_BYTES)


@given(st.binary(max_size=3 * 1024), st.lists(st.sampled_from(["read", "all", "rewind", "end"]), max_size=9))
def test_a_body_is_a_file(data, calls):
    body, at = RequestBody(memoryview(data), ""), 0
    assert len(body) == len(data)
    for call in calls:
        if call == "read":
            piece = bytes(body.read(16))
            assert piece == data[at:][: max(len(piece), 1)]
            assert len(piece) == min(len(data) - at, BODY_PIECE_BYTES)
            at += len(piece)
        elif call == "all":
            assert body.read() == data[at:]
        else:
            at = body.seek(0, os.SEEK_SET if call == "rewind" else os.SEEK_END)
        assert body.tell() == at


def client_error(code: str, status: int) -> aws.ClientError:
    answer = {"Error": {"Code": code, "Message": "AKIASECRET"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return aws.ClientError(answer, "PutObject")


def without_files(kind: type[aws.BotoCoreError]) -> aws.BotoCoreError:
    """Return the error of botocore for a process that has too many open files."""
    inner = NewConnectionError(None, "AKIASECRET")
    inner.__cause__ = OSError(errno.EMFILE, "AKIASECRET")
    return kind(endpoint_url="AKIASECRET", error=inner)


@pytest.mark.parametrize(
    ("error", "kind", "word"),
    [
        (client_error("AccessDenied", 403), StorageError, "no permission"),
        (without_files(aws.EndpointConnectionError), StorageError, "ulimit -n"),
        (without_files(aws.ConnectionClosedError), StorageError, "ulimit -n"),
        (client_error("403", 403), StorageError, "no permission"),
        (client_error("Unheard", 403), StorageError, "no permission"),
        (client_error("ExpiredToken", 400), StorageError, "expired; renew"),
        (client_error("SignatureDoesNotMatch", 403), StorageError, "wrong credentials"),
        (client_error("QuotaExceeded", 403), StorageFullError, "quota"),
        (client_error("XMinioStorageFull", 507), StorageFullError, "space"),
        (client_error("NotImplemented", 501), CapabilityError, "does not know"),
        (client_error("NoSuchBucket", 404), StorageError, "bucket does not exist"),
        (client_error("InvalidObjectState", 403), StorageError, "archive"),
        (client_error("PermanentRedirect", 301), StorageError, "region"),
        (client_error("SlowDown", 503), StorageError, "fewer requests"),
        (client_error("Whatever", 500), StorageError, "try again"),
        (client_error("XAmzContentSHA256Mismatch", 400), StorageError, "damaged on the way"),
        (client_error("AKIASECRET123", 400), StorageError, "try again"),
        (aws.NoCredentialsError(), StorageError, "no credentials found"),
        (aws.CredentialRetrievalError(provider="p", error_msg="AKIASECRET"), StorageError, "log in again"),
        (aws.ReadTimeoutError(endpoint_url="http://AKIASECRET@h"), StorageError, "no answer in time"),
        (aws.EndpointConnectionError(endpoint_url="http://AKIASECRET@h"), StorageError, "AWS_ENDPOINT_URL_S3"),
        (aws.IncompleteReadError(actual_bytes=1, expected_bytes=2), StorageError, "broke off"),
        (aws.SSLError(endpoint_url="http://AKIASECRET@h", error="AKIASECRET"), StorageError, "connection failed"),
        (aws.ParamValidationError(report="AKIASECRET"), StorageError, "AWS configuration"),
    ],
)
def test_errors_say_what_to_do_and_repeat_nothing(error, kind, word):
    ours = failure_of(error).as_error("packs/x in s3://b: cannot write")
    assert type(ours) is kind
    assert str(ours).startswith("packs/x in s3://b: cannot write: ")
    assert word in str(ours)
    assert "AKIASECRET" not in str(ours)


@pytest.mark.parametrize("code", ["BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"])
def test_bytes_that_were_damaged_on_the_way_are_sent_again(code):
    assert failure_of(client_error(code, 400)).retryable


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    with moto_bucket(monkeypatch) as url:
        yield S3Store(f"{url}/p")


def test_the_storage_class_applies_to_packs_only(store):
    wanted = S3Store(f"{store.url}?storage_class=STANDARD_IA")
    for key in ("packs/00/aa", "manifests/00/aa"):
        wanted.put(key, b"x")
    entries = boto3.client("s3").list_objects_v2(Bucket="moto")["Contents"]
    classes = {entry["Key"]: entry["StorageClass"] for entry in entries}
    assert classes == {"p/packs/00/aa": "STANDARD_IA", "p/manifests/00/aa": "STANDARD"}
    assert wanted.url == store.url


def test_names_that_are_no_keys_belong_to_others(store):
    for name in ("p/", "p/folder/", "p/.hidden", "p/a b", "p/index/x", "p2/x", "x"):
        store._client.put_object(Bucket="moto", Key=name, Body=b"")
    store.put("ours", b"x")
    assert [info.key for info in store.list("")] == ["ours"]
    with pytest.raises(InvalidInputError, match="not empty"):
        store.prepare()


def test_more_keys_than_one_request_holds(store):
    keys = [f"packs/{n:04}" for n in range(2100)]
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    for key in keys:
        backend.put_object("moto", f"p/{key}", b"")  # without a request, which takes milliseconds
    assert sorted(info.key for info in store.list("packs/")) == keys
    store.delete(keys)
    assert list(store.list("")) == []


def test_a_batch_that_is_partly_refused(store, monkeypatch):
    """A transient error is tried again; a refusal names the first object and counts the others."""
    answers = [
        {"Errors": [{"Key": "p/a", "Code": "SlowDown"}, {"Key": "p/b", "Code": "NoSuchKey"}]},
        {},  # botocore also returns this for an answer without a body
        {"Deleted": [{"Key": "p/a"}]},
        {"Errors": [{"Key": "p/a", "Code": "AccessDenied"}, {"Key": "p/b", "Code": "InternalError"}]},
    ]
    asked = []

    def delete_objects(**request):
        asked.append([entry["Key"] for entry in request["Delete"]["Objects"]])
        return answers.pop(0)

    monkeypatch.setattr(store._client, "delete_objects", delete_objects, raising=False)
    store.delete(["a", "b"])
    assert asked == [["p/a", "p/b"], ["p/a"], ["p/a"]]
    with pytest.raises(StorageError, match=r"^a in .* and 1 more: no permission"):
        store.delete(["a", "b"])


@pytest.mark.parametrize("code", ["MissingContentMD5", "InvalidRequest"])
def test_a_server_that_wants_an_md5_gets_single_deletes(store, monkeypatch, code):
    def delete_objects(**_):
        raise client_error(code, 400)

    for key in ("a", "b", "c"):
        store.put(key, b"x")
    monkeypatch.setattr(store._client, "delete_objects", delete_objects, raising=False)
    store.delete(["a", "b"])
    assert [info.key for info in store.list("")] == ["c"]


def test_a_forked_child_does_not_wait_for_a_client_that_another_thread_makes(store):
    """The thread that has the lock may wait for credentials, and does not exist in the child."""
    with client._CREATE_LOCK:
        child = os.fork()
        if child == 0:
            os._exit(0 if client._CREATE_LOCK.acquire(timeout=1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_long_range_is_read_in_pieces(store, monkeypatch):
    monkeypatch.setattr("snapstore.storage.s3.reader.PIECE_BYTES", 1000)
    data, asked = os.urandom(9000), []
    store.put("a", data)
    store._client.meta.events.register("before-send.s3.GetObject", lambda request, **_: asked.append(request.headers))
    into = memoryview(bytearray(4500))
    with Threads(1) as store._threads:  # moto is not safe to use from several threads
        assert store.get_range("a", 4000, 4500, into) is into
    assert into == data[4000:8500]
    assert [headers["Range"] for headers in asked] == [
        b"bytes=%d-%d" % (start, start + 899) for start in (7600, 6700, 5800, 4900, 4000)
    ]


def test_one_retry_layer_with_time_outs(store):
    config = store._client.meta.config
    assert config.retries == {"mode": "standard", "total_max_attempts": 1}  # so that botocore retries nothing
    assert (config.connect_timeout, config.read_timeout) == (10, 30)


def test_a_named_body_is_not_hashed_again(store, monkeypatch):
    """The name of a pack is its SHA-256, so a put does not hash the pack again.

    The signature of a request over plain HTTP contains this hash.
    """
    data = os.urandom(200_000)
    name = hashlib.sha256(data).hexdigest()
    signed = []

    def sent(request, **_):
        signed.append(request.headers["X-Amz-Content-SHA256"])

    store._client.meta.events.register("before-send.s3.PutObject", sent)
    hashed = []
    original = auth.SigV4Auth.payload
    monkeypatch.setattr(auth.SigV4Auth, "payload", lambda self, request: hashed.append(1) or original(self, request))
    store.put(f"packs/{name[:2]}/{name}", data)
    assert hashed == []
    assert store.get(f"packs/{name[:2]}/{name}") == data
    store.put("other", data)
    assert hashed == [1]
    assert [sha.decode() for sha in signed] == [name, name]


def test_leftovers_of_a_sandbox_are_no_content(store):
    """A prefix that holds only a sandbox counts as empty. A killed `init`, or one that may not delete, leaves it."""
    store._client.put_object(Bucket="moto", Key=f"p/.trial-{'0' * 16}/twice", Body=b"x")
    store.prepare()
    store._client.put_object(Bucket="moto", Key="p/.trials", Body=b"x")
    with pytest.raises(InvalidInputError, match="not empty"):
        store.prepare()


def test_old_leftovers_of_a_sandbox_are_removed(store, monkeypatch):
    """A killed `doctor` leaves them. Those of the last hour may belong to one that runs."""
    left = [f"p/.trial-{digit * 16}/{name}" for digit in "01" for name in ("a/b", "twice")]
    others = ["p/.trials", "p/.trial-x/a", f".trial-{'0' * 16}/a"]
    for key in (*left, *others):
        store._client.put_object(Bucket="moto", Key=key, Body=b"x")

    def keys():
        return sorted(entry["Key"] for entry in boto3.client("s3").list_objects_v2(Bucket="moto")["Contents"])

    with store.sandbox() as sandbox:
        sandbox.put("a", b"x")
    assert keys() == sorted([*left, *others])
    monkeypatch.setattr(sandbox_folders, "OLD_S", -60.0)
    with store.sandbox():
        pass  # nothing was put, so the server's time is not known
    assert keys() == sorted([*left, *others])
    with store.sandbox() as sandbox:
        sandbox.put("a", b"x")
    assert keys() == sorted(others)


def test_the_mark_of_a_folder_is_no_content(monkeypatch):
    """A console makes a folder as an empty object whose name ends in a slash."""
    with moto_bucket(monkeypatch) as url:
        s3 = boto3.client("s3")
        bucket = url.removeprefix("s3://").split("/")[0]
        s3.put_object(Bucket=bucket, Key="folder/", Body=b"")
        S3Store(f"s3://{bucket}/folder").prepare()
        s3.put_object(Bucket=bucket, Key="folder/other", Body=b"x")
        with pytest.raises(InvalidInputError, match="is not empty"):
            S3Store(f"s3://{bucket}/folder").prepare()


def test_a_place_that_is_not_empty_is_not_listed_to_its_end(store, monkeypatch):
    def listed(prefix):
        yield from (ObjectInfo(f"data/{number}", 1, 0.0) for number in range(5000))
        pytest.fail("thousands of entries are enough")

    monkeypatch.setattr(store._requests, "listed", listed)
    with pytest.raises(InvalidInputError, match="is not empty"):
        store.prepare()


def test_another_endpoint_is_another_place(store, monkeypatch):
    """A mirror has the URL and the uuid of its original, but other records. So its index has another folder."""
    here = folder_for(store, "0" * 32)[0]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    mirror = S3Store(store.url)
    assert mirror.url == store.url
    assert folder_for(mirror, "0" * 32)[0] != here


def test_sizes_of_objects_in_a_long_folder(store, monkeypatch):
    """If a listing is too long, `sizes` stops reading it, and asks for the other sizes one by one."""
    monkeypatch.setattr("snapstore.storage.s3.store.LISTED_FOR_SIZES", 3)
    for i in range(8):
        store.put(f"packs/{i}/x", bytes(i))
    pages = []
    monkeypatch.setattr(
        store._requests,
        "_page",
        lambda page=store._requests._page, **options: pages.append(1) or page(**options),
    )
    assert store.sizes([f"packs/{i}/x" for i in (0, 1, 6, 7, 9)]) == {f"packs/{i}/x": i for i in (0, 1, 6, 7)}
    assert len(pages) <= 2  # the second page proves that the last object is missing


def test_a_session_that_cannot_be_removed_is_not_locked_any_more(store, monkeypatch):
    """A gc of another process on this machine can then see that the session has ended."""
    store.lock("sessions/a", b"x")
    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", lambda keys: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            store.release("sessions/a")
    assert store.is_locked("sessions/a") is False
    store.release("sessions/a")
    assert store.is_locked("sessions/a") is None


def test_a_copy_of_the_cache_knows_nothing_of_the_locks(store, monkeypatch, tmp_path):
    """A copied lock file proves nothing about a session: not in a copy of the cache, and not if it is moved back.

    No process locks a copy, so a live session would look dead.
    """
    store.lock("sessions/a", b"x")
    assert store.is_locked("sessions/a") is True
    cache, copy = cache_folder(), tmp_path / "copy"
    shutil.copytree(cache, copy)
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(copy))
    assert S3Store(store.url).is_locked("sessions/a") is None
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(cache))
    assert S3Store(store.url).is_locked("sessions/a") is True
    (held,) = (cache / "held").iterdir()
    shutil.copy2(held, tmp_path / "file")
    held.unlink()
    shutil.move(tmp_path / "file", held)
    assert store.is_locked("sessions/a") is None
    (cache / "held" / held.name).write_bytes(b"")  # as another program may leave it
    assert store.is_locked("sessions/a") is None
    store.release("sessions/a")

"""S3 for tests: moto in this process, and the real server of `tools/s3-server`, if the environment names it.

moto accepts wrong secrets and wrong checksums, and has the clock of this process. Only the real server tests those.
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import botocore.session
import pytest
from moto import mock_aws

from snapstore.storage.s3.store import S3Store

#: `s3://bucket` of the real server: eval "$(tools/s3-server start)"
SERVER = os.environ.get("SNAPSTORE_TEST_S3", "")
needs_server = pytest.mark.skipif(not SERVER, reason='no S3 server: eval "$(tools/s3-server start)"')

# Each client reads botocore's description of S3, megabytes of JSON; here the first client reads it for all.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)

_AWS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_SESSION_TOKEN")


def fresh_url() -> str:
    """Return the URL of a prefix on the real server that no test has used."""
    return f"{SERVER}/test-{uuid.uuid4().hex}"


def impatient(url: str, **options) -> S3Store:
    """Return a store that gives up soon."""
    return S3Store(url, **{"connect_timeout_s": 1.0, "read_timeout_s": 1.0, "attempts": 3} | options)


@contextmanager
def moto_bucket(monkeypatch: pytest.MonkeyPatch, name: str = "moto") -> Iterator[str]:
    """Yield the URL of an empty bucket of moto's; nothing leaves this process."""
    for variable in _AWS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        boto3.client("s3").create_bucket(Bucket=name)
        yield f"s3://{name}"

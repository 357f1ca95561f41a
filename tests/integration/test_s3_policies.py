"""The permissions that docs/s3.md lists are enough, and no verb needs more: tested on the real server."""

import json
import os
import re
import subprocess
import uuid
from pathlib import Path

import boto3
import pytest

from kit.objects import keys_of
from kit.repositories import OPTIONS, same, save, values
from kit.s3_stores import fresh_url, needs_server
from snapstore import Repository, StorageError
from snapstore.retention import KeepLast
from snapstore.storage.s3.store import S3Store

pytestmark = needs_server
ROOT = Path(__file__).parents[2]


@pytest.fixture
def limited(monkeypatch, tmp_path):
    """Lets a policy be set, and makes its user the one who asks."""
    user, key = f"limited-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex[:20].upper()
    admin = [ROOT / "tools" / "s3-server", "admin", "user"]
    create = [*admin, "create", f"--uid={user}", "--display-name=x", f"--access-key={key}", "--secret-key=secret"]
    subprocess.run(create, capture_output=True, check=True)
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    owner = boto3.client("s3")
    bucket = os.environ["SNAPSTORE_TEST_S3"].removeprefix("s3://").partition("/")[0]

    def become(policy):
        for statement in policy["Statement"]:
            statement["Principal"] = {"AWS": [f"arn:aws:iam:::user/{user}"]}
        owner.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    yield become
    owner.delete_bucket_policy(Bucket=bucket)
    subprocess.run([*admin, "rm", f"--uid={user}"], capture_output=True, check=True)


def documented(url, delete):
    """The least that a training job needs, word for word; as radosgw takes it (see there)."""
    (text,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "s3.md").read_text(), re.DOTALL)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    policy = json.loads(text.replace("BUCKET", bucket).replace("PREFIX", prefix))
    objects, listing = policy["Statement"]
    del listing["Condition"]
    if delete != "*":
        objects["Action"].remove("s3:DeleteObject")
        resource = objects["Resource"].removesuffix("*") + delete
        policy["Statement"].append({"Effect": "Allow", "Action": "s3:DeleteObject", "Resource": resource})
    return policy


def test_a_training_job(limited):
    url = fresh_url()
    limited(documented(url, "*"))
    with Repository.create(url, chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(3):
            save(repository, "a", step, step)
        assert same(repository.restore("a@1"), values("a", 1))
        repository.forget([KeepLast(1)], run="a", force=True)
        assert repository.gc().deleted_objects > 0
        assert same(repository.restore("a@2"), values("a", 2))


def test_an_append_only_writer(limited):
    """It saves, restores and forgets, and can destroy nothing."""
    url = fresh_url()
    owner = S3Store(url)
    limited(documented(url, "sessions/*"))
    with Repository.create(url, chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(3):
            save(repository, "a", step, step)
        before = keys_of(owner)
        assert not [key for key in before if key.startswith("sessions/")], "its sessions it may end"
        repository.forget([KeepLast(1)], run="a", force=True)
        with pytest.raises(StorageError, match="no permission"):
            repository.gc()
        assert set(keys_of(owner)) >= set(before)
        with pytest.raises(StorageError, match="no permission"):
            repository.store.delete([key for key in before if key.startswith("packs/")])
        assert same(repository.restore("a@2"), values("a", 2))

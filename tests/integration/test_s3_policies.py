"""The policies of docs/s3.md allow what their users call and no more, and limit a hostile writer as its table says.

Most tests use the real server. It does not know the condition `s3:if-none-match`, and it ignores the header
`If-None-Match` in versioned buckets, so tests of versions use moto.
"""

import ast
import dataclasses
import datetime
import functools
import hashlib
import json
import re
import subprocess
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import boto3
import botocore.client
import msgspec
import pytest
from botocore.exceptions import ClientError

from kit.forge import header_of, ref_of, reheader
from kit.objects import keys_of
from kit.repositories import OPTIONS, check_restores, opened, same, save, values
from kit.s3_stores import moto_bucket, needs_server
from kit.shell import invoke
from snapstore import (
    CapabilityError,
    ConflictError,
    IntegrityError,
    InvalidInputError,
    KeepLast,
    NotFoundError,
    Repository,
    SnapshotManager,
    StorageError,
)
from snapstore.errors import AlreadyExistsError
from snapstore.format import records
from snapstore.format.keys import manifest_key, pack_key, page_key
from snapstore.format.pages import make_page
from snapstore.format.records import MAX_REVISION, Mark, Quarantine, RunPolicies, Session, Wait
from snapstore.protocol import joining
from snapstore.save import pipeline
from snapstore.storage.memory import MemoryStore
from snapstore.storage.s3.store import S3Store

ROOT = Path(__file__).parents[2]
TRUSTED, ONE_RUN, LIFECYCLE, LOCK = range(4)  # the JSON documents of docs/s3.md, in its order

#: boto3's operations, and the permissions that each needs.
ACTIONS = {
    "PutObject": {"s3:PutObject"},
    "GetObject": {"s3:GetObject"},
    "HeadObject": {"s3:GetObject"},
    "CopyObject": {"s3:GetObject", "s3:PutObject"},
    "ListObjectsV2": {"s3:ListBucket"},
    "DeleteObject": {"s3:DeleteObject"},
    "DeleteObjects": {"s3:DeleteObject"},
}


def blocks(language):
    """Return the code blocks of a language in docs/s3.md, without the indentation of a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", (ROOT / "docs/s3.md").read_text(), re.DOTALL | re.MULTILINE)
    return ["".join(line.removeprefix(indent) for line in text.splitlines(keepends=True)) for indent, text in found]


def document(number, url, run="mine"):
    """Return a JSON document of docs/s3.md, word for word, for a repository."""
    text = blocks("json")[number]
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return json.loads(text.replace("BUCKET", bucket).replace("PREFIX", prefix).replace("RUN", run))


def for_radosgw(policy):
    """Remove the conditions of a policy: radosgw applies them differently or does not know them (docs/s3.md)."""
    for statement in policy["Statement"]:
        statement.pop("Condition", None)
    return policy


def every_key(url):
    """Return the policy of a writer that may create any key, and delete only sessions."""
    policy = for_radosgw(document(TRUSTED, url))
    objects = policy["Statement"][0]
    objects["Action"].remove("s3:DeleteObject")
    sessions = objects["Resource"].removesuffix("*") + "sessions/*"
    policy["Statement"].append({"Effect": "Allow", "Action": "s3:DeleteObject", "Resource": sessions})
    return policy


@pytest.fixture(scope="module")
def bucket():
    """A bucket of this process: a bucket has only one policy."""
    owner, name = boto3.client("s3"), f"policies-{uuid.uuid4().hex[:12]}"
    owner.create_bucket(Bucket=name)
    yield name
    for page in owner.get_paginator("list_objects_v2").paginate(Bucket=name):
        if found := page.get("Contents"):
            owner.delete_objects(Bucket=name, Delete={"Objects": [{"Key": one["Key"]} for one in found]})
    owner.delete_bucket(Bucket=name)


@pytest.fixture
def url(bucket):
    return f"s3://{bucket}/test-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def user():
    """The name and the access key of a user of this process, whom only policies allow anything."""
    name, key = f"limited-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex[:20].upper()
    admin = [ROOT / "tools" / "s3-server", "admin", "user"]
    create = [*admin, "create", f"--uid={name}", "--display-name=x", f"--access-key={key}", "--secret-key=secret"]
    subprocess.run(create, capture_output=True, check=True)
    yield name, key
    subprocess.run([*admin, "rm", f"--uid={name}"], capture_output=True, check=True)


@pytest.fixture
def limited(monkeypatch, tmp_path, bucket, user):
    """Return a function that sets the policy for the user; stores that are made after the call act as that user."""
    name, key = user
    monkeypatch.setenv("SNAPSTORE_CACHE_DIR", str(tmp_path / "cache"))
    owner = boto3.client("s3")

    def become(policy):
        for statement in policy["Statement"]:
            statement["Principal"] = {"AWS": [f"arn:aws:iam:::user/{name}"]}
        whole = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]  # an object belongs to the user who put it
        us = {"AWS": ["arn:aws:iam:::user/snapstore"]}
        policy["Statement"].append({"Effect": "Allow", "Action": "s3:*", "Resource": whole, "Principal": us})
        owner.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    yield become
    owner.delete_bucket_policy(Bucket=bucket)


@needs_server
def test_a_trusted_job(limited, url):
    limited(for_radosgw(document(TRUSTED, url)))
    with Repository.create(url, chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(3):
            save(repository, "a", step, step)
        assert same(repository.restore("a@1"), values("a", 1))
        repository.forget([KeepLast(1)], run="a", force=True)
        assert repository.gc().deleted_objects > 0
        assert same(repository.restore("a@2"), values("a", 2))


# --- hostile writers ---


@functools.cache
def saved():
    """A repository with three snapshots in the run `theirs`, saved once, since saves on the server take long."""
    store = MemoryStore()
    with Repository.create(store, chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(3):
            save(repository, "theirs", step, step)
    return store


class Scene:
    """A repository of an owner, with snapshots in the run `theirs`, and the store of a hostile writer."""

    def __init__(self, limited, monkeypatch, rights, url):
        self.monkeypatch = monkeypatch
        self.owner, stored = S3Store(url), saved()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: self.owner.put(key, stored.get(key)), keys_of(stored)))
        self.repository = Repository.open(self.owner, options=OPTIONS)
        limited(every_key(url) if rights == "every key" else for_radosgw(document(ONE_RUN, url)))
        self.writer = S3Store(url)

    def snapshot(self, ref="theirs@0"):
        return self.repository.snapshot(ref)

    def put(self, value):
        self.writer.put(records.key_of(value), records.encode(value))

    def reader(self):
        return opened(self.owner)

    def saving(self, meanwhile, **options):
        """The owner saves. The writer acts once all packs and manifests are stored, and before they are confirmed."""
        write, confirm = pipeline.write, pipeline.SaveSession.confirm

        def then_act(*args, **kwargs):
            written = write(*args, **kwargs)
            meanwhile()
            return written

        def act_first(*args, **kwargs):
            meanwhile()
            return confirm(*args, **kwargs)

        with self.monkeypatch.context() as patch:
            if options.get("verify_writes") == "full":
                patch.setattr(pipeline.SaveSession, "confirm", act_first)
            else:
                patch.setattr(pipeline, "write", then_act)
            with Repository.open(self.owner, options=dataclasses.replace(OPTIONS, **options)) as repository:
                return save(repository, "theirs", 7, 7)


@pytest.fixture(params=["every key", "one run"])
def rights(request):
    return request.param


@pytest.fixture
def scene(limited, monkeypatch, rights, url):
    scene = Scene(limited, monkeypatch, rights, url)
    yield scene
    scene.repository.close()


def refused(act):
    with pytest.raises(StorageError, match="no permission"):
        act()


@needs_server
def test_it_saves_and_restores(scene, rights):
    """A writer can do what is documented: it saves with tags, stores no policies, and ends its sessions."""
    with opened(scene.writer) as repository:
        for step in range(3):
            save(repository, "mine", step, step, tags=[f"t{step}"] if step else [])
        assert same(repository.restore("mine@1"), values("mine", 1))
        assert same(repository.restore("theirs@1"), values("theirs", 1))
        assert repository.check("restore").ok
        if rights == "one run":
            refused(lambda: repository.tag("mine@0", "x"))
            refused(lambda: repository.forget_snapshots(["mine@0"]))
            refused(lambda: repository.set_policies("mine", [KeepLast(1)]))
    with SnapshotManager(scene.writer, run="mine", save_interval_steps=1) as manager:
        manager.save(5, {"x": 1}).result()
    assert keys_of(scene.owner, "sessions/") == []
    assert scene.repository.snapshot("mine@t1").step == 1


@needs_server
def test_it_deletes_and_overwrites_nothing(scene):
    before = {key: scene.owner.get(key) for key in keys_of(scene.owner)}
    for key in before:
        refused(lambda key=key: scene.writer.delete([key]))
        with pytest.raises((AlreadyExistsError, StorageError)):
            scene.writer.put(key, b"other bytes")
    assert {key: scene.owner.get(key) for key in keys_of(scene.owner)} == before


@needs_server
def test_forgetting(scene, rights):
    forged = scene.snapshot().revised(state="forgotten")
    if rights == "one run":
        refused(lambda: scene.put(forged))
        return
    scene.put(forged)
    assert scene.repository.gc().deleted_objects > 0
    with pytest.raises(NotFoundError):
        scene.repository.unforget("theirs@0")


@needs_server
def test_other_manifests(scene, rights):
    other = scene.snapshot("theirs@1")
    forged = scene.snapshot().revised(manifests=other.manifests, depth=other.depth)
    if rights == "one run":
        refused(lambda: scene.put(forged))
        return
    scene.put(forged)
    with scene.reader() as repository:
        assert same(repository.restore("theirs@0"), values("theirs", 1))
        assert repository.check("restore").ok, "no check can tell"
        assert repository.gc().deleted_objects > 0
    scene.owner.delete([forged.key])
    with scene.reader() as repository, pytest.raises(IntegrityError):
        repository.restore("theirs@0")


@needs_server
@pytest.mark.parametrize("how", ["unreadable", "last"])
def test_burying(scene, rights, how):
    first = scene.snapshot()
    last = msgspec.structs.replace(first, revision=MAX_REVISION)
    key, data = (first.revised().key, b"junk") if how == "unreadable" else (last.key, records.encode(last))
    if rights == "one run":
        refused(lambda: scene.writer.put(key, data))
        return
    scene.writer.put(key, data)
    with scene.reader() as repository:
        if how == "unreadable":
            with pytest.raises(IntegrityError, match="cannot be read"):
                repository.restore("theirs@0")
        else:
            with pytest.raises(InvalidInputError, match="last possible revision"):
                repository.tag("theirs@0", "x")
    scene.owner.delete([key])  # before any gc, by hand
    with scene.reader() as repository:
        repository.rebuild_index()
        assert same(repository.restore("theirs@0"), values("theirs", 0))
        repository.gc()
        assert len(check_restores(repository)) == 3


@needs_server
def test_pages(scene, rights):
    """A page rules over the loose records of its snapshots."""
    forged = [(s.revised(state="forgotten"), b"") for s in scene.repository.snapshots("theirs")]
    data = make_page("theirs", 0, [(s, records.encode(s)) for s, _ in forged])
    if rights == "one run":
        refused(lambda: scene.writer.put(page_key("theirs", 0), data))
        refused(lambda: scene.writer.put(page_key("mine", 0), data))
        return
    scene.writer.put(page_key("theirs", 0), data)
    with scene.reader() as repository:
        assert repository.snapshots("theirs") == []
        assert repository.gc().deleted_objects > 0


@needs_server
def test_a_writer_that_may_not_join(scene, rights, monkeypatch, caplog):
    """It saves as before. The next gc of the owner joins its records."""
    monkeypatch.setattr(joining, "AT_LEAST", 4)
    with SnapshotManager(scene.writer, run="mine", async_save=False) as snapshots:
        for step in range(6):
            snapshots.save(step, values("mine", step), metadata=["mine", step])
    lines = [r.getMessage() for r in caplog.records if joining.STAY_LOOSE in r.getMessage()]
    assert len(lines) == 1
    assert "no permission" in lines[0]
    assert len(keys_of(scene.owner, "snapshots/mine/")) == 6
    assert keys_of(scene.owner, "pages/") == ([page_key("mine", 0)] if rights == "every key" else [])
    scene.repository.gc(fence_after_s=0)
    assert len(keys_of(scene.owner, "snapshots/mine/")) <= 2
    with scene.reader() as repository:
        assert [s.step for s in check_restores(repository) if s.run == "mine"] == [*range(6)]


@needs_server
def test_stored_policies(scene, rights):
    forged = RunPolicies(run="theirs", revision=0, policies=[{"kind": "KeepLast", "n": 1}])
    if rights == "one run":
        refused(lambda: scene.put(forged))
        return
    scene.put(forged)
    assert scene.repository.policies("theirs") == [KeepLast(1)]


@needs_server
def test_marks_and_wait_lists(scene, rights):
    """A gc completes the mark of another gc, and trusts its wait list."""
    name = records.new_id()
    if rights == "one run":
        refused(lambda: scene.put(Mark(id=name, started=0.0, packs=b"", manifests=b"")))
        refused(lambda: scene.put(Wait(id=name, sessions=[])))
        return

    def collect():
        packs, manifests = (
            b"".join(bytes.fromhex(key[-64:]) for key in keys_of(scene.writer, prefix))
            for prefix in ("packs/", "manifests/")
        )
        scene.put(Mark(id=name, started=0.0, packs=packs, manifests=manifests))
        scene.put(Wait(id=name, sessions=[]))
        assert scene.repository.gc().deleted_objects > 0

    saved = scene.saving(collect)
    with scene.reader() as repository:
        assert [s.ref for s in repository.check("restore").damaged] == [saved.ref]
        assert same(repository.restore("theirs@2"), values("theirs", 2)), "only what was not committed then"


@needs_server
def test_quarantine_notes(scene, rights):
    (pack, *_) = keys_of(scene.writer, "packs/")
    forged = Quarantine(pack=pack[-64:], found=0.0, reason="")
    if rights == "one run":
        refused(lambda: scene.put(forged))
        return
    scene.put(forged)
    with scene.reader() as repository:
        kept = repository.forget([KeepLast(1)], run="theirs", force=True).kept
        assert [reasons for _, reasons in kept if "damaged" in reasons[0]]
        repository.gc()
    assert pack in keys_of(scene.owner, "packs/")


@pytest.mark.sampled(1)
@needs_server
def test_other_runs(scene, rights):
    with opened(scene.writer) as repository:
        if rights == "one run":
            for run in ("theirs", "min", "mine2", "new"):
                refused(lambda run=run: save(repository, run, 9, 9))
        else:
            save(repository, "theirs", 9, 9)
    assert (scene.repository.snapshot("theirs@latest").step == 9) == (rights == "every key")
    scene.repository.gc(fence_after_s=0)
    assert [s.ref for s in check_restores(scene.repository)][:3] == ["theirs@0", "theirs@1", "theirs@2"]


@needs_server
def test_its_own_run(scene):
    """Its snapshots count there like those of any other writer."""
    save(scene.repository, "mine", 0, 0)
    with opened(scene.writer) as repository:
        hostile = save(repository, "mine", 1, 1)
    with scene.reader() as repository:
        assert repository.snapshot("mine@latest").id == hostile.id
        assert [s.step for s in repository.forget([KeepLast(1)], run="mine").forgotten] == [0]


@pytest.mark.sampled(2)
@needs_server
@pytest.mark.parametrize("run", ["mine", "theirs"])
def test_a_damaged_base(scene, rights, run):
    """The manifest of the base names chunks in packs that have the right size but not these chunks."""
    original = scene.snapshot("theirs@2")
    (first,) = [ref for ref in original.manifests if ref.part == "optimizer"]
    if run == "mine":
        with opened(scene.owner) as repository:
            repository.save(values("theirs", 2), run="mine", step=0, metadata=["theirs", 2])
    data = scene.owner.get(first.key)
    packs = dict.fromkeys(header_of(data).pack_names)
    for name in packs:
        packs[name] = uuid.uuid4().hex * 2
        damaged = bytearray(scene.owner.get(pack_key(name)))
        damaged[100:] = bytes(len(damaged) - 100)
        scene.writer.put(pack_key(packs[name]), bytes(damaged))
    forged = reheader(data, packs=b"".join(bytes.fromhex(name) for name in packs.values()))
    name = hashlib.sha256(forged).hexdigest()
    scene.writer.put(manifest_key(name), forged)
    hostile = msgspec.structs.replace(
        original, run=run, id=records.new_id(), seq=100, write_id=records.new_id(),
        manifests=[ref_of(name, forged)], logical_bytes=ref_of(name, forged).logical_bytes,
    )  # fmt: skip
    if rights == "one run" and run == "theirs":
        refused(lambda: scene.put(hostile))
        return
    scene.put(hostile)
    with opened(scene.owner) as repository:
        saved = repository.save(values("theirs", 2), run=run, step=8, parent=f"id:{hostile.id}")
        report = repository.check("restore")
        assert {s.id for s in report.damaged} == {saved.id, hostile.id}
        assert same(repository.restore(f"id:{original.id}"), values("theirs", 2))


@pytest.mark.sampled(1)
@needs_server
def test_the_id_of_another_snapshot(scene):
    forged = msgspec.structs.replace(
        scene.snapshot(), run="mine", state="aborted", manifests=[], logical_bytes=0, write_id=records.new_id()
    )
    time.sleep(1.1)  # S3 dates objects by whole seconds
    scene.put(forged)
    session = Session(id=forged.id, key=f"snapshots/z/{0:012d}-{forged.id}.0", host="", boot_id="", pid=1, started=0.0)
    scene.put(session)
    with scene.reader() as repository:
        with pytest.raises(IntegrityError, match=f"{forged.key}: repeats the id"):
            repository.gc(fence_after_s=0)
        assert [problem.key for problem in repository.check("restore").problems] == [forged.key]
        assert same(repository.restore("theirs@0"), values("theirs", 0))
        scene.owner.delete([forged.key])
        repository.rebuild_index()
        repository.gc(fence_after_s=0)
        assert len(check_restores(repository)) == 3


@pytest.mark.sampled(1)
@needs_server
def test_stopping_gc(scene):
    session = Session(id="5" * 32, key=f"snapshots/mine/{0:012d}-{'5' * 32}.0", host="", boot_id="", pid=1, started=0.0)
    scene.put(session)
    scene.repository.forget([KeepLast(1)], run="theirs", force=True)
    assert scene.repository.gc().waiting_for == [session.id]
    scene.writer.touch(f"sessions/{session.id}")
    scene.owner.delete([f"sessions/{session.id}"])
    junk = f"snapshots/mine/{0:012d}-{'6' * 32}.0"
    scene.writer.put(junk, b"junk")
    with pytest.raises(IntegrityError, match="nothing was deleted"):
        scene.repository.gc()
    scene.owner.delete([junk])
    assert scene.repository.gc().deleted_objects > 0
    assert len(check_restores(scene.repository)) == 1


@pytest.mark.sampled(2)
@needs_server
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_the_session_of_a_running_save(scene, how):
    def end():
        (key,) = keys_of(scene.writer, "sessions/")
        scene.writer.delete([key])
        if how == "replaced":
            scene.writer.put(key, b"junk")

    with pytest.raises(ConflictError):
        scene.saving(end)
    with scene.reader() as repository:
        assert len(check_restores(repository)) == 3


@pytest.mark.sampled(2)
@needs_server
@pytest.mark.parametrize("verify", ["sample", "full"])
def test_a_session_that_is_put_back(scene, verify):
    def collect():
        (key,) = keys_of(scene.writer, "sessions/")
        data = scene.writer.get(key)
        scene.writer.delete([key])
        explains = records.Snapshot(id=key[-32:], run="mine", step=0, seq=0, state="aborted", write_id=records.new_id())
        scene.put(explains)
        assert scene.repository.gc().deleted_objects > 0
        scene.writer.put(key, data)

    if verify == "full":
        with pytest.raises(StorageError, match="was put, but is not there"):
            scene.saving(collect, verify_writes="full")
    else:
        saved = scene.saving(collect)
        with scene.reader() as repository, pytest.raises((IntegrityError, NotFoundError)):
            repository.restore(f"id:{saved.id}")
    with scene.reader() as repository:
        for step in range(3):
            assert same(repository.restore(f"theirs@{step}"), values("theirs", step))


@needs_server
def test_versions_on_the_real_server():
    """It ignores If-None-Match in versioned buckets. If a later release does not, change docs/s3.md."""
    s3, bucket = boto3.client("s3"), f"versioned-{uuid.uuid4().hex[:12]}"
    s3.create_bucket(Bucket=bucket)
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    with pytest.raises(CapabilityError, match="ignores If-None-Match"):
        Repository.create(f"s3://{bucket}/r")


# --- what an operator can do, on moto ---


@pytest.fixture
def moto(monkeypatch):
    with moto_bucket(monkeypatch, f"moto-{uuid.uuid4().hex[:8]}") as url:
        yield f"{url}/runs"


def test_back_to_a_time_before_an_attack(moto):
    bucket = moto.split("/")[2]
    s3 = boto3.client("s3")
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=document(LIFECYCLE, moto))
    with Repository.create(moto, chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(3):
            save(repository, "a", step, step)
        repository.forget_snapshots(["a@0"])
        repository.gc()
    time.sleep(1.1)
    then = datetime.datetime.now(datetime.UTC)
    time.sleep(1.1)
    with opened(S3Store(moto)) as repository:
        repository.forget([KeepLast(1)], run="a", force=True)
        repository.gc()
        for key in keys_of(repository.store):
            s3.put_object(Bucket=bucket, Key=f"runs/{key}", Body=b"overwritten")
    (program,) = blocks("python")
    assert "2026, 11, 20" in program
    program = re.sub(r"THEN = .*", f"THEN = datetime.datetime.fromisoformat({then.isoformat()!r})", program)
    exec(program.replace("NEW-PREFIX", "new").replace("PREFIX", "runs").replace('"BUCKET"', repr(bucket)), {})
    with opened(S3Store(f"s3://{bucket}/new")) as repository:
        assert [s.ref for s in check_restores(repository)] == ["a@1", "a@2"]
        assert repository.gc().deleted_objects == 0
        save(repository, "a", 3, 3)


def test_object_lock_does_not_stop_gc(moto, monkeypatch):
    bucket, s3 = f"locked-{uuid.uuid4().hex[:8]}", boto3.client("s3")
    s3.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    s3.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=document(LOCK, moto))
    monkeypatch.setattr(S3Store, "prepare", lambda self: None)  # it copies an object, which moto refuses here
    with Repository.create(f"s3://{bucket}/r", chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(2):
            save(repository, "a", step, step)
        repository.forget([KeepLast(1)], run="a")
        assert repository.gc().deleted_objects > 0
        assert [s.ref for s in check_restores(repository)] == ["a@1"]
    packs = [v for v in s3.list_object_versions(Bucket=bucket)["Versions"] if "/packs/" in v["Key"]]
    assert packs
    for version in packs:
        with pytest.raises(ClientError, match="AccessDenied"):
            s3.delete_object(Bucket=bucket, Key=version["Key"], VersionId=version["VersionId"])


# --- the documents say what the code calls ---


def allows(policy, action, resource, *, overwrites, prefix=None):
    """Return whether a policy, which has only statements with the effect Allow, allows an action."""
    for statement in policy["Statement"]:
        assert statement["Effect"] == "Allow"
        actions, resources = (
            [names] if isinstance(names := statement[field], str) else names for field in ("Action", "Resource")
        )
        conditions = [
            (test, key, value) for test, keys in statement.get("Condition", {}).items() for key, value in keys.items()
        ]
        holds = True
        for test, key, value in conditions:
            assert (test, key) in {("StringLike", "s3:prefix"), ("Null", "s3:if-none-match")}
            holds &= any(fnmatchcase(prefix or "", p) for p in value) if test == "StringLike" else not overwrites
        if holds and action in actions and any(fnmatchcase(resource, pattern) for pattern in resources):
            return True
    return False


@pytest.fixture
def calls(monkeypatch):
    """Record the requests to S3: (action, resource, whether it may overwrite, prefix of a listing)."""
    made, call = [], botocore.client.BaseClient._make_api_call

    def recorded(self, operation, options):
        bucket = f"arn:aws:s3:::{options['Bucket']}"
        keys = (
            [options["Key"]] if "Key" in options else [o["Key"] for o in options.get("Delete", {}).get("Objects", [])]
        )
        for action in ACTIONS[operation]:
            overwrites = action == "s3:PutObject" and options.get("IfNoneMatch") != "*"
            for resource in [f"{bucket}/{key}" for key in keys] or [bucket]:
                made.append((action, resource, overwrites, options.get("Prefix")))
        return call(self, operation, options)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", recorded)
    return made


def denied(policy, calls):
    return [(a, r, o, p) for a, r, o, p in calls if not allows(policy, a, r, overwrites=o, prefix=p)]


def test_the_documents_and_the_calls(moto, calls, monkeypatch):
    """Each policy allows all calls of its user, and the user calls each of its actions."""
    monkeypatch.setattr("snapstore.cli.doctor.probes.RACERS", 1)  # moto may let several writers of one key win
    calls.clear()
    with Repository.create(moto, chunk_bytes=1024, options=OPTIONS) as repository:
        for step in range(3):
            save(repository, "a", step, step)
        assert joining.join(repository.context, "a", at_least=1).deleted == 2
        repository.store.lock("sessions/x", b"x")
        repository.store.touch("sessions/x")
        repository.store.release("sessions/x")
        repository.tag("a@0", "x")
        repository.set_policies("a", [KeepLast(1)])
        repository.forget([KeepLast(1)], run="a")
        repository.compact()
        repository.gc()
        repository.repair(apply=True)
    told = invoke(["doctor", moto])
    assert told.exit_code == 0, told.output
    trusted = document(TRUSTED, moto)
    assert not denied(trusted, calls)
    assert named(trusted) == {action for action, *_ in calls}
    calls.clear()
    with opened(S3Store(moto)) as repository:
        save(repository, "mine", 5, 5, tags=["t"])
        repository.restore("mine@t")
        repository.check("restore")
        repository.store.lock("sessions/x", b"x")
        repository.store.touch("sessions/x")
        repository.store.release("sessions/x")
    one_run = document(ONE_RUN, moto)
    assert not denied(one_run, calls)
    assert named(one_run) == {action for action, *_ in calls}
    assert not [action for action in named(trusted) | named(one_run) if "Version" in action or "Bypass" in action]


def named(policy):
    """Return the actions of a policy."""
    return {
        action
        for statement in policy["Statement"]
        for action in ([statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"])
    }


@pytest.mark.parametrize(
    ("action", "key", "overwrites"),
    [
        ("s3:PutObject", "config", False),
        ("s3:PutObject", f"snapshots/mine/{0:012d}-{'a' * 32}.1", False),
        ("s3:PutObject", f"snapshots/mine/{0:012d}-{'a' * 32}.10", False),
        ("s3:PutObject", f"snapshots/theirs/{0:012d}-{'a' * 32}.0", False),
        ("s3:PutObject", f"snapshots/mine2/{0:012d}-{'a' * 32}.0", False),
        ("s3:PutObject", "pages/mine/000000/000", False),
        ("s3:PutObject", f"volumes/mine/000000000-000000000.{'a' * 32}", False),
        ("s3:PutObject", "policies/mine.0", False),
        ("s3:PutObject", f"gc/{'a' * 32}.mark", False),
        ("s3:PutObject", f"packs/aa/{'a' * 64}", True),
        ("s3:DeleteObject", f"packs/aa/{'a' * 64}", False),
        ("s3:DeleteObject", f"snapshots/mine/{0:012d}-{'a' * 32}.0", False),
    ],
)
def test_one_run_allows_no_more(action, key, overwrites):
    policy = document(ONE_RUN, "s3://b/runs")
    assert not allows(policy, action, f"arn:aws:s3:::b/runs/{key}", overwrites=overwrites)
    assert allows(policy, "s3:PutObject", f"arn:aws:s3:::b/runs/snapshots/mine/{0:012d}-{'a' * 32}.0", overwrites=False)


def test_every_operation_of_the_store_is_known():
    """A new call of boto3 may need another permission: ACTIONS and docs/s3.md must then name it."""
    called = set()
    for path in (ROOT / "snapstore/storage/s3").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
                if owner in ("client", "_client") and node.attr.islower():
                    called.add(node.attr)
    assert called - {"meta", "_endpoint", "_request_signer"} == {botocore.xform_name(name) for name in ACTIONS}


def test_the_documents_parse():
    texts = [json.loads(text) for text in blocks("json")]
    assert len(texts) == len(blocks("json")) == 4
    assert [("Version" in text, "Rules" in text, "Rule" in text) for text in texts] == [
        (True, False, False), (True, False, False), (False, True, False), (False, False, True)
    ]  # fmt: skip

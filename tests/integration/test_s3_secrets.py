"""No secret of the configuration appears in a message, a chain of errors, a log or the shell's output.

A test puts a secret, well or badly formed, in one place of the configuration. Then it runs every verb of a store and
two of the shell, and searches for the secret in everything that they print, log or raise.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit import s3_stores  # noqa: F401 - its clients share what they load
from kit.hostile_s3 import HostileS3, answer, says
from kit.samples import SEED, THOROUGH
from kit.shell import invoke
from snapstore.errors import SnapstoreError
from snapstore.storage.s3.store import S3Store
from snapstore.storage.urls import open_store

SECRET = "hunter2XYZZY"
#: Forms of a secret; some are as in a badly copied file.
FORMS = {
    "plain": f"{SECRET}", "newline": f"{SECRET}\n", "newline within": f"a\n{SECRET}", "carriage return": f"{SECRET}\r",
    "space": f" {SECRET} x", "not latin-1": f"{SECRET}\u20ac\u4e2d", "tab": f"{SECRET}\t", "quotes": f"'{SECRET}\"",
    "percent": f"%{SECRET}%zz", "brackets": f"[{SECRET}", "at": f"x@{SECRET}@", "slash": f"/{SECRET}#?",
    "control": f"{SECRET}\x01\x7f",
}  # fmt: skip
URL = "s3://bucket/p"

Setting = Callable[[pytest.MonkeyPatch, Path, str, str], str]  # (..., the secret, the server's address) -> URL


def token(monkeypatch, folder, secret, server) -> str:
    monkeypatch.setenv("AWS_SESSION_TOKEN", secret)
    return URL


def secret_key(monkeypatch, folder, secret, server) -> str:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    return URL


def endpoint(monkeypatch, folder, secret, server) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.replace("://", f"://user:{secret}@"))
    return URL


def dead_endpoint(monkeypatch, folder, secret, server) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://user:{secret}@127.0.0.1:9")
    return URL


def proxy(monkeypatch, folder, secret, server) -> str:
    monkeypatch.setenv("http_proxy", server.replace("://", f"://user:{secret}@"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3.example.invalid")
    return URL


def proxy_of_https(monkeypatch, folder, secret, server) -> str:
    monkeypatch.setenv("https_proxy", server.replace("://", f"://user:{secret}@"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.example.invalid")
    return URL


def user_of_the_url(monkeypatch, folder, secret, server) -> str:
    return f"s3://key:{secret}@bucket/p"


def user_of_the_url_folded(monkeypatch, folder, secret, server) -> str:
    return f"s3://key:{secret}\uff20bucket/p"  # urlsplit's own error repeats it


def query(monkeypatch, folder, secret, server) -> str:
    return f"s3://bucket/p?aws_secret_access_key={secret}"


def bare_query(monkeypatch, folder, secret, server) -> str:
    return f"s3://bucket/p?{secret}"


def profile(monkeypatch, folder, text: str) -> str:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (folder / "config").write_text(text, encoding="utf-8")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    return URL


def profile_key(monkeypatch, folder, secret, server) -> str:
    return profile(monkeypatch, folder, f"[profile mine]\naws_access_key_id = A\naws_secret_access_key = {secret}\n")


def profile_token(monkeypatch, folder, secret, server) -> str:
    keys = "aws_access_key_id = A\naws_secret_access_key = b"
    return profile(monkeypatch, folder, f"[profile mine]\n{keys}\naws_session_token = {secret}\n")


def profile_without_section(monkeypatch, folder, secret, server) -> str:
    return profile(monkeypatch, folder, f"aws_secret_access_key = {secret}\n")


def profile_half_written(monkeypatch, folder, secret, server) -> str:
    return profile(monkeypatch, folder, f"[profile mine]\naws_access_key_id = A\n{secret}\n s3 =\n   {secret}\n")


def program(monkeypatch, folder, code: str) -> str:
    script = folder / "tell.py"
    script.write_text(code, encoding="utf-8")
    return profile(monkeypatch, folder, f"[profile mine]\ncredential_process = {sys.executable} {script}\n")


def program_that_tells(monkeypatch, folder, secret, server) -> str:
    keys = {"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "b", "SessionToken": secret}
    return program(monkeypatch, folder, f"print({json.dumps(keys)!r})")


def program_that_raves(monkeypatch, folder, secret, server) -> str:
    return program(monkeypatch, folder, f"print({secret!r}.encode('unicode_escape').decode())")


def program_that_fails(monkeypatch, folder, secret, server) -> str:
    return program(monkeypatch, folder, f"import sys; sys.exit({secret!r}.encode('unicode_escape').decode())")


def program_of_another_version(monkeypatch, folder, secret, server) -> str:
    return program(monkeypatch, folder, f"print({json.dumps({'Version': secret, 'SecretAccessKey': secret})!r})")


def web_identity(monkeypatch, folder, secret, server) -> str:
    (folder / "token").write_text(secret, encoding="utf-8")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server)
    role = f"role_arn = arn:aws:iam::123456789012:role/x\nweb_identity_token_file = {folder / 'token'}"
    return profile(monkeypatch, folder, f"[profile mine]\n{role}\n")


SETTINGS: list[Setting] = [
    token, secret_key, endpoint, dead_endpoint, proxy, proxy_of_https, user_of_the_url, user_of_the_url_folded, query,
    bare_query, profile_key, profile_token, profile_without_section, profile_half_written, program_that_tells,
    program_that_raves, program_that_fails, program_of_another_version, web_identity,
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    """A server that refuses every request, and repeats the secret in its answers: the worst case."""
    with HostileS3() as server:

        def echo(wire, honest):
            told = f"{wire.request.fields.get('x-amz-security-token', '')} {SECRET}"
            body = f"<Error><Code>Denied{told}</Code><Message>{told}</Message></Error>".encode("utf-8", "replace")
            return says(answer(403, body, SECRET, X_Secret=SECRET))(wire, honest)

        server.lie("", echo)
        yield server


@pytest.fixture
def quick(server, monkeypatch, tmp_path):
    """Remove the configuration from the environment, and make retries fast."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": server.url, "AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_MAX_ATTEMPTS": "1",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"), "AWS_EC2_METADATA_DISABLED": "true",
        "SNAPSTORE_CACHE_DIR": str(tmp_path / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("snapstore.storage.s3.retry._LONGEST_PAUSE_S", 0.001)


def said(call: Callable[[], Any]) -> list[str]:
    """Return the texts of a call's error and of every error in its chain; an error not of snapstore is not caught."""
    try:
        result = call()
    except SnapstoreError as error:
        words = ["".join(traceback.format_exception(error))]
        chain: list[BaseException] = [error]
        for one in chain:
            chain += [other for other in (one.__cause__, one.__context__) if other is not None and other not in chain]
            words += [str(one), repr(one), repr(one.args), repr(vars(one))]
        return words
    return [repr(result)]


def everything_said(url: str) -> list[str]:
    words = said(lambda: open_store(url))
    try:
        store = S3Store(url, attempts=2)
    except SnapstoreError:
        pass
    else:
        words += [repr(store), store.url, store.place]
        for call in (
            lambda: store.put("packs/a", b"x"), lambda: store.put("packs/a", bytes(100_000)), lambda: store.get("a"),
            lambda: store.get_range("a", 0, 1), lambda: store.stat("a"), lambda: list(store.list("")),
            lambda: store.delete(["a"]), lambda: store.delete(["a", "b"]), lambda: store.touch("a"), store.now_s,
            lambda: store.lock("sessions/a", b"x"), store.prepare, store.refuses_damage,
        ):  # fmt: skip
            words += said(call)
    for args in (["log", "-v"], ["init", "-v", "--json"]):
        result = invoke([*args, "--repo", url] if args[0] == "log" else [*args, url])
        words += [
            result.output,
            result.stderr,
            *(said(lambda r=result: raise_(r.exception)) if result.exception else []),
        ]
        assert "this is a bug" not in result.output + result.stderr
    return words


def raise_(error: BaseException) -> None:
    if not isinstance(error, SystemExit):
        raise error


@pytest.mark.sampled(6)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.__name__)
def test_no_secret_is_repeated(quick, server, monkeypatch, tmp_path, caplog, capfd, setting):
    for name in FORMS if THOROUGH else random.Random(f"{SEED} {setting.__name__}").sample(list(FORMS), 1):
        search(setting, name, server, monkeypatch, tmp_path, caplog, capfd)


@pytest.mark.parametrize(("setting", "name"), [(token, "newline"), (endpoint, "plain"), (query, "plain")])
def test_settings_that_once_leaked(quick, server, monkeypatch, tmp_path, caplog, capfd, setting, name):
    search(setting, name, server, monkeypatch, tmp_path, caplog, capfd)


def search(setting, name, server, monkeypatch, tmp_path, caplog, capfd) -> None:
    """Run everything in a setting, and search for the secret."""
    with monkeypatch.context() as patch:
        url = setting(patch, tmp_path, FORMS[name], server.url)
        with caplog.at_level(logging.DEBUG, "snapstore"):
            words = everything_said(url)
    words += [record.getMessage() for record in caplog.records if record.name.startswith("snapstore")]
    words += capfd.readouterr()
    found = [text for text in words if SECRET in text]
    assert not found, (name, found[0])


# --- configurations that cannot be used ---


@pytest.mark.parametrize(
    "text",
    ["credential_process = /no/such/program", "credential_process = true", "credential_process = '", "region = no one",
     "s3 =\n  addressing_style = sideways", "max_attempts = many", "retry_mode = never", "defaults_mode = x",
     "services = none", "source_profile = mine\nrole_arn = x", "web_identity_token_file = /no/such\nrole_arn = x",
     "sso_session = none\nsso_account_id = 1\nsso_role_name = x", "ca_bundle = /no/such", "endpoint_url = no url",
     "endpoint_url = http://[::1", "signature_version = x", "\udcff"],
)  # fmt: skip
def test_a_configuration_that_cannot_be_used(quick, monkeypatch, tmp_path, text):
    """It gives a clear error of snapstore, when the store is made or at its first request."""
    profile(monkeypatch, tmp_path, "")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    (tmp_path / "config").write_bytes(f"[profile mine]\n{text}\n".encode("utf-8", "surrogateescape"))
    if "endpoint_url" in text:
        monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    with pytest.raises(SnapstoreError) as caught:
        S3Store("s3://bucket/p", attempts=1).get("a")
    assert "bucket/p" in str(caught.value) or "~/.aws/config" in str(caught.value)

"""A real browser for one page: Chromium without a window, driven by its DevTools protocol over a pipe.

    with opened(file) as page:
        page.load(360)
        page.evaluate("document.title")

The page has no network, and `requests` lists what it asked for all the same. Where no Chromium is, the test is skipped.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: Names of the program, on Debian and elsewhere.
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: No name resolves; a container has neither the namespaces nor the shared memory of its sandbox.
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
OPTIONS += ("--host-resolver-rules=MAP * ~NOTFOUND", "--no-first-run", "--remote-debugging-pipe")


class Page:
    """A page in the browser.

    Attributes:
        problems: uncaught exceptions, and errors and warnings of the console.
        requests: URLs that the page asked for, the page itself left out.
    """

    def __init__(self, commands: int, answers: int, url: str) -> None:
        self._commands, self._answers, self._url = commands, answers, url
        self._buffer, self._number, self._session = b"", 0, ""
        self.problems: list[str] = []
        self.requests: list[str] = []

    def load(self, width: int, height: int = 900) -> None:
        """Load the page in a new window of this size, and wait until its scripts have run."""
        self._session, self.problems, self.requests = "", [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=self._url)
        while self.evaluate("document.readyState") != "complete":
            pass

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression, after the promise that it may be."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """Write a picture of the whole page, a PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def call(self, method: str, **params: Any) -> Any:
        """Send a command; return its answer, and note the events before it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while (answer := self._next()).get("id") != self._number:
            self._note(answer.get("method", ""), answer.get("params", {}))
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent" and params["request"]["url"] != self._url:
            self.requests.append(params["request"]["url"])


@contextmanager
def opened(file: Path) -> Iterator[Page]:
    """Open a file in a browser of its own; end the browser at the end of the block."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("needs a browser: apt install chromium")
    (commands_out, commands), (answers, answers_in) = os.pipe(), os.pipe()
    script = f'exec "$@" 3<&{commands_out} 4>&{answers_in}'  # the browser reads from 3, and writes to 4
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = ["bash", "-c", script, "browser", program, *OPTIONS, f"--user-data-dir={profile}"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        browser = subprocess.Popen(arguments, pass_fds=(commands_out, answers_in), start_new_session=True, **quiet)
        os.close(commands_out)
        os.close(answers_in)
        try:
            yield Page(commands, answers, file.resolve().as_uri())
        finally:
            os.close(commands)  # the browser ends with its pipe
            try:
                browser.wait(20)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()
            os.close(answers)

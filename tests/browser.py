"""A real headless Chromium for tests of HTML pages, driven over the DevTools protocol on a pipe."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}  # Windows' codes


class Browser:
    """One tab. `problems` has all that pages complained about: errors, warnings and refused requests."""

    def __init__(self, executable: str, profile: str):
        ours, theirs = os.pipe(), os.pipe()
        # The protocol is spoken on descriptors 3 and 4, which may be taken here.
        inner = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (ours[0], theirs[1])]
        command = f'exec "$@" 3<&{inner[0]} 4>&{inner[1]}'
        arguments = [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        words = ["bash", "-c", command, "bash", *arguments]
        self.process = subprocess.Popen(words, pass_fds=inner, stderr=subprocess.DEVNULL)
        for end in (ours[0], theirs[1], *inner):
            os.close(end)
        self.input, self.output = os.fdopen(ours[1], "wb"), os.fdopen(theirs[0], "rb")
        self.number, self.session, self.pending, self.problems = 0, None, b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.input.write(json.dumps(message).encode() + b"\0")
        self.input.flush()
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def read(self) -> dict:
        while b"\0" not in self.pending:
            part = self.output.read1()
            assert part, "the browser is gone"
            self.pending += part
        text, _, self.pending = self.pending.partition(b"\0")
        message = json.loads(text)
        method, params = message.get("method"), message.get("params", {})
        external = method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:"))
        if external or method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.problems.append(params)
        return message

    def open(self, path: Path, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Until the page says that it is ready; with no problem left from another page."""
        self.problems.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.as_uri())
        ready = "document.body?.dataset.ready ? done() : setTimeout(look)"
        self.run(f"new Promise((done, fail) => {{ setTimeout(fail, 30000); (function look() {{ {ready} }})() }})")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it is."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def point(self, selector: str) -> None:
        """The mouse at the middle of an element, which is scrolled into view."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = self.run(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.input.close()
        self.output.close()


@pytest.fixture(scope="session", name="browser")
def browser_fixture() -> Iterator[Browser]:
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        message = "no Chromium here; apt-get install chromium to run these tests"
        if os.environ.get("CLMAE_REQUIRE_CHROMIUM") == "1":
            pytest.fail(message)
        pytest.skip(message)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        opened = Browser(executable, profile)
        yield opened
        opened.close()

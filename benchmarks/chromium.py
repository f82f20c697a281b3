"""A Chromium that is driven as a person would: it opens a page, types, looks, over DevTools' own pipe."""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
NEEDED = ("chromium", "bash")
"""Programs on the PATH."""


@dataclass
class Tab:
    """One page. requests: the addresses that it has asked for; problems: what it has written to its console."""

    sending: IO[bytes]
    receiving: IO[bytes]
    session: str = ""
    number: int = 0
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def do(self, method: str, **parameters: Any) -> Any:
        """Send one command of the DevTools protocol, and wait for what it gives back."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            command["sessionId"] = self.session
        self.sending.write(json.dumps(command).encode() + b"\0")
        self.sending.flush()
        while True:
            said = json.loads(self._next())
            if said.get("id") == self.number:
                assert "error" not in said, f"{method}: {said}"
                return said["result"]
            if said.get("method") == "Network.requestWillBeSent":
                self.requests.append(said["params"]["request"]["url"])
            if said.get("method") == "Log.entryAdded":
                self.problems.append(said["params"]["entry"]["text"])
            if said.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(said["params"]["exceptionDetails"]))

    def _next(self) -> bytes:
        found = bytearray()
        while (byte := self.receiving.read(1)) != b"\0":
            assert byte, "the browser is gone"
            found += byte
        return bytes(found)

    def see(self, script: str) -> Any:
        """Evaluate an expression in the page."""
        done = self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        return done["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> Any:
        """Wait for an expression to be true, and return it."""
        end = time.monotonic() + seconds
        while not (found := self.see(script)):
            assert time.monotonic() < end, f"not so after {seconds} s: {script}; {self.see('document.body.innerText')}"
            time.sleep(0.02)
        return found

    def type(self, selector: str, text: str) -> None:
        """Put the focus on a field, empty it, and type; again where a page just opened has not had the focus yet."""
        field, end = f"document.querySelector({json.dumps(selector)})", time.monotonic() + 60
        while self.see(f"{field}.value") != text:
            assert time.monotonic() < end, f"{selector} takes no text"
            self.see(f"{field}.focus(), {field}.select()")
            self.do("Input.insertText", text=text) if text else self.press("Delete")

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Delete": 46}[key]
        for kind in ("keyDown", "keyUp"):
            self.do("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def look(self, file: Path, *, width: int, height: int, dark: bool = False) -> None:
        """Take a picture of the whole page at a size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.do("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])
        shot = self.do("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(shot))


@contextmanager
def open_tab(profile: Path, link: str) -> Iterator[Tab]:
    """Open a page in a Chromium of its own, which ends with the block."""
    assert all(map(shutil.which, NEEDED)), f"needs {' and '.join(NEEDED)}"
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    command = ["chromium", *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    with (
        os.fdopen(ours_out, "wb") as sending,
        os.fdopen(ours_in, "rb") as receiving,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
    ):
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env=os.environ | {"TMPDIR": scratch},
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            tab = Tab(sending, receiving)
            # what its pages store is in memory: Chromium stores nothing on a disk that is nearly full
            private = tab.do("Target.createBrowserContext")["browserContextId"]
            target = tab.do("Target.createTarget", url="about:blank", browserContextId=private)["targetId"]
            tab.session = tab.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log"):
                tab.do(f"{domain}.enable")
            tab.do("Page.navigate", url=link)
            yield tab
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the whole family: a browser is many processes
            process.wait()
            with suppress(BrokenPipeError):
                sending.flush()

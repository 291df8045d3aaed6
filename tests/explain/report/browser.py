"""A real browser without a window, driven over the WebDriver protocol (W3C), which chromedriver speaks in JSON."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import Request, urlopen

from tests.ports import free_port

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
#: How WebDriver says that a value is an element.
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def find_browser() -> str | None:
    """The browser of this machine, if it has one and its driver."""
    if shutil.which(DRIVER) is None:
        return None
    return next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)


def _start_driver(tries: int = 10) -> tuple[subprocess.Popen[str], int]:
    """Start chromedriver, and return it with the port on which it listens.

    It wants the same port for IPv4 and IPv6. Where one of them is taken chromedriver ends, and is started again with
    another.
    """
    for _ in range(tries):
        driver = subprocess.Popen([DRIVER, f"--port={free_port()}"], stdout=subprocess.PIPE, text=True)
        assert driver.stdout is not None, "its output is read"
        for line in driver.stdout:
            found = re.search(r"started successfully on port (\d+)", line)
            if found is not None:
                return driver, int(found[1])
        driver.stdout.close()
        driver.wait()
    raise AssertionError(f"chromedriver was started {tries} times, and ended each time before it listened")


class Browser:
    """One window. What it is asked to do it has done when the call returns."""

    def __init__(self, *, width: int = 1280, height: int = 900) -> None:
        binary = find_browser()
        assert binary is not None, "there is no browser"
        self._profile = tempfile.TemporaryDirectory(prefix="browser-")
        self._driver, port = _start_driver()
        self._address = f"http://127.0.0.1:{port}"
        flags = [*_FLAGS, f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}"]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": binary, "args": flags},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{answer['sessionId']}"

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._ask("DELETE", self._session)
        self._driver.terminate()
        self._driver.wait(timeout=20)
        assert self._driver.stdout is not None, "its output is read"
        self._driver.stdout.close()
        self._profile.cleanup()

    def open(self, path: Path) -> None:
        """Open a file from the disk."""
        self._do("POST", "/url", {"url": path.resolve().as_uri()})

    def visit(self, url: str) -> None:
        """Open what a server has."""
        self._do("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """Run a script, and return what it returns."""
        return self._do("POST", "/execute/sync", {"script": script, "args": []})

    def settle(self) -> None:
        """Wait until what glides has arrived and has been drawn."""
        script = "const done = arguments[0]; setTimeout(() => requestAnimationFrame(() => done()), 260);"
        self._do("POST", "/execute/async", {"script": script, "args": []})

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        pressed = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._act({"type": "key", "id": "keys", "actions": pressed})

    def type_into(self, selector: str, text: str) -> None:
        element = self._do("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]
        self._do("POST", f"/element/{element}/value", {"text": text})

    def click(self, x: float, y: float, *, to_x: float | None = None) -> None:
        """Click at a point of the window; or drag from it, sideways."""
        moves: list[dict[str, Any]] = [{"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}]
        moves.append({"type": "pointerDown", "button": 0})
        if to_x is not None:
            moves.append({"type": "pointerMove", "duration": 50, "x": round(to_x), "y": round(y)})
        moves.append({"type": "pointerUp", "button": 0})
        self._act({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": moves})

    def prefer(self, scheme: str) -> None:
        """Let the system be light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.tell("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path, *, height: int | None = None) -> None:
        if height is not None:
            width = self.run("return innerWidth")
            self.tell(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            self.settle()
        path.write_bytes(base64.b64decode(self._do("GET", "/screenshot")))

    def tell(self, command: str, **params: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._do("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def complaints(self) -> list[str]:
        """What the browser has complained of since the last time: errors of scripts, what could not be loaded."""
        return [entry["message"] for entry in self._do("POST", "/se/log", {"type": "browser"})]

    def _act(self, source: dict[str, Any]) -> None:
        self._do("POST", "/actions", {"actions": [source]})

    def _do(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._ask(method, self._session + path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._address + path, data=data, method=method, headers={"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

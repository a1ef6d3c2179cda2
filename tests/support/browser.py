"""A headless Chromium, spoken to in WebDriver, which is JSON over HTTP (www.w3.org/TR/webdriver2).

Debian: `apt install chromium chromium-driver libjs-katex`.
"""

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

EXPLORER = Path("docs/explorer.html")
KATEX = Path("/usr/share/javascript/katex")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Chromium and chromedriver"
)
needs_katex = pytest.mark.skipif(not KATEX.is_dir(), reason="needs KaTeX: apt install libjs-katex")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, by the standard


class Browser:
    """One tab of a headless Chromium."""

    def __init__(self, folder):
        log = (folder / "driver.txt").open("w+")
        self.driver = subprocess.Popen([DRIVER, "--port=0"], stdout=log, stderr=log)
        deadline, port = time.monotonic() + 20, None
        while port is None and time.monotonic() < deadline:
            time.sleep(0.05)
            port = re.search(r"successfully on port (\d+)", (folder / "driver.txt").read_text())
        self.address = f"http://127.0.0.1:{port[1]}"
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
        ]
        options = {"binary": CHROMIUM, "args": [*flags, f"--user-data-dir={folder / 'profile'}"]}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        session = self.send("POST", "/session", wanted)["sessionId"]
        self.address += f"/session/{session}"

    def send(self, method, path, body=None):
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.address + path, data, method=method)
        proxies = urllib.request.ProxyHandler({})
        with urllib.request.build_opener(proxies).open(request, timeout=60) as reply:
            return json.load(reply)["value"]

    def close(self):
        try:
            self.send("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()

    def run(self, script, *args):
        """What a JavaScript function body returns."""
        return self.send("POST", "/execute/sync", {"script": script, "args": [*args]})

    def emulate(self, command, **params):
        """A command of the DevTools protocol."""
        return self.send("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, width=1280, dark=False, address="", page=None):
        """A fresh page. `address` is what stands after the #."""
        self.emulate(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.emulate("Emulation.setEmulatedMedia", features=[scheme])
        self.send("POST", "/url", {"url": "about:blank"})
        page = page or EXPLORER.absolute().as_uri()
        self.send("POST", "/url", {"url": f"{page}#{address}"})
        # On a busy machine the driver answers before the page is there.
        state = "return location.href.startsWith(arguments[0]) && document.readyState"
        deadline = time.monotonic() + 20
        while self.run(state, page) != "complete" and time.monotonic() < deadline:
            time.sleep(0.05)

    def element(self, css):
        found = self.send("POST", "/element", {"using": "css selector", "value": css})
        return f"/element/{found[ELEMENT]}"

    def click(self, css):
        self.send("POST", f"{self.element(css)}/click")

    def type(self, css, text):
        """Replaces what a field holds, key by key, and leaves the field."""
        element = self.element(css)
        self.send("POST", f"{element}/clear")
        self.send("POST", f"{element}/value", {"text": text})
        self.run("document.activeElement.blur()")

    def press(self, *keys):
        downs_and_ups = [
            {"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")
        ]
        keyboard = {"type": "key", "id": "keyboard", "actions": downs_and_ups}
        self.send("POST", "/actions", {"actions": [keyboard]})

    def drop(self, *paths):
        """Files or folders, on the page, as from a file manager."""
        data = {"items": [], "files": [*map(str, paths)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.emulate("Input.dispatchDragEvent", type=kind, x=99, y=99, data=data)

    def until(self, css, expected):
        """Waits for a text in an element."""
        script = "return document.querySelector(arguments[0])?.textContent ?? ''"
        deadline = time.monotonic() + 20
        while expected not in (found := self.run(script, css)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert expected in found

    def text(self, css):
        return self.run("return document.querySelector(arguments[0]).innerText", css)

    def hash(self):
        return self.run("return location.hash")


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextmanager
def serve(folder):
    """The address at which the files of a folder are served."""
    handler = partial(QuietHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()

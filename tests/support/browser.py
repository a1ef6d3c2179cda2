"""A headless Chromium, by selenium.

`pip install -e '.[docs]'` and, on Debian, `apt install chromium chromium-driver libjs-katex`.
"""

import importlib.util
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

EXPLORER = Path("docs/explorer.html")
KATEX = Path("/usr/share/javascript/katex")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
SELENIUM = importlib.util.find_spec("selenium")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER and SELENIUM), reason="needs Chromium, chromedriver and selenium"
)
needs_katex = pytest.mark.skipif(not KATEX.is_dir(), reason="needs KaTeX: apt install libjs-katex")
FLAGS = "--headless=new --no-sandbox --disable-gpu --allow-file-access-from-files"


class Browser:
    """One tab of a headless Chromium."""

    def __init__(self):
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in FLAGS.split():
            options.add_argument(flag)
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
        self.run = self.driver.execute_script  # what a JavaScript function body returns
        self.close = self.driver.quit

    def emulate(self, command, **params):
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(command, params)

    def resize(self, width):
        size = dict(width=width, height=800, deviceScaleFactor=1, mobile=width < 600)
        self.emulate("Emulation.setDeviceMetricsOverride", **size)

    def open(self, width=1280, dark=False, address="", page=None):
        """A fresh page. `address` is what stands after the #."""
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.emulate("Emulation.setEmulatedMedia", features=[scheme])
        self.driver.get("about:blank")
        page = page or EXPLORER.absolute().as_uri()
        self.driver.get(f"{page}#{address}")
        # On a busy machine the driver answers before the page is there.
        state = "return location.href.startsWith(arguments[0]) && document.readyState"
        self.wait_for(lambda: self.run(state, page) == "complete", page)

    def wait_for(self, condition, awaited):
        from selenium.webdriver.support.wait import WebDriverWait

        waiting = WebDriverWait(self.driver, 20, poll_frequency=0.05)
        waiting.until(lambda driver: condition(), awaited)

    def element(self, css):
        return self.driver.find_element("css selector", css)

    def click(self, css):
        self.element(css).click()

    def press(self, *keys):
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def drop(self, *paths):
        """Files or folders, on the page, as from a file manager."""
        data = {"items": [], "files": [*map(str, paths)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.emulate("Input.dispatchDragEvent", type=kind, x=99, y=99, data=data)

    def until(self, css, expected):
        """Waits for a text in an element."""
        script = "return document.querySelector(arguments[0])?.textContent ?? ''"
        self.wait_for(lambda: expected in self.run(script, css), f"{css}: {expected}")

    def text(self, css):
        return self.run("return document.querySelector(arguments[0]).innerText", css)

    def hash(self):
        return self.run("return location.hash")


@contextmanager
def serve(folder):
    """The address at which the files of a folder are served."""
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()

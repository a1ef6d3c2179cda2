"""A headless Chromium, by selenium.

`pip install -e '.[docs]'` and, on Debian, `apt install chromium chromium-driver`.
"""

import importlib.util
import shutil
from pathlib import Path

import pytest

EXPLORER = Path("docs/explorer.html")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
SELENIUM = importlib.util.find_spec("selenium")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER and SELENIUM), reason="needs Chromium, chromedriver and selenium"
)
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
        self.emulate = self.driver.execute_cdp_cmd  # a command of the DevTools protocol
        self.close = self.driver.quit

    def open(self, page=EXPLORER):
        """A fresh page, 1280 pixels wide."""
        size = dict(width=1280, height=800, deviceScaleFactor=1, mobile=False)
        self.emulate("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        address = page.absolute().as_uri()
        self.driver.get(address)
        # On a busy machine the driver answers before the page is there.
        state = "return location.href.startsWith(arguments[0]) && document.readyState"
        self.wait_for(lambda: self.run(state, address) == "complete", address)

    def wait_for(self, condition, awaited):
        from selenium.webdriver.support.wait import WebDriverWait

        waiting = WebDriverWait(self.driver, 20, poll_frequency=0.05)
        waiting.until(lambda driver: condition(), awaited)

    def press(self, *keys):
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def drop(self, *paths):
        """Files or folders, on the page, as from a file manager."""
        data = {"items": [], "files": [*map(str, paths)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.emulate("Input.dispatchDragEvent", dict(type=kind, x=99, y=99, data=data))

    def until(self, css, expected):
        """Waits for a text in an element."""
        script = "return document.querySelector(arguments[0])?.textContent ?? ''"
        self.wait_for(lambda: expected in self.run(script, css), f"{css}: {expected}")

    def text(self, css):
        return self.run("return document.querySelector(arguments[0]).innerText", css)

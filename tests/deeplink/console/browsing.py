"""A real browser for the console's tests, and short ways to look at what it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.waiting import LIMIT_S

BUILD = Path(__file__).parents[3] / "build"
DRIVER, BROWSER = Path("/usr/bin/chromedriver"), Path("/usr/bin/chromium")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)

NEEDS_BROWSER = pytest.mark.skipif(
    not (DRIVER.exists() and BROWSER.exists()), reason="needs Debian's chromium and chromium-driver"
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    """Open a browser; at the end it must have had nothing to complain of."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,1100"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    driver.set_page_load_timeout(60)
    yield driver
    said = complaints(driver)
    driver.quit()
    assert said == []


def complaints(browser: Any) -> list[dict[str, Any]]:
    """Return what the browser logged since it was last asked."""
    found: list[dict[str, Any]] = browser.get_log("browser")
    return found


def picture(browser: webdriver.Chrome, name: str, scheme: str = "light", width: int = 1280) -> None:
    """Photograph the whole page into build/."""
    BUILD.mkdir(exist_ok=True)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "height": height})
    script = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
    browser.execute_async_script(script)  # two frames: the charts follow their new size in the first
    assert browser.save_screenshot(str(BUILD / name))


def texts(browser: webdriver.Chrome, selector: str) -> list[str]:
    found: list[str] = browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)", selector
    )
    return found


def go(browser: webdriver.Chrome, served: Any, place: str, ready: str, eventually: Callable[..., Any]) -> None:
    """Open a place by its URL, and wait until there is something of it."""
    browser.get(f"http://127.0.0.1:{served.port}/#/{place}")
    eventually(lambda: texts(browser, ready), LIMIT_S)


def place(browser: webdriver.Chrome) -> str:
    return str(browser.execute_script("return location.hash"))


def lanes(browser: webdriver.Chrome) -> list[str]:
    """Return the lanes of the job's course as they are drawn."""
    return str(
        browser.execute_script("return document.querySelector('.course-base')?.dataset.lanes || ''")
    ).split()

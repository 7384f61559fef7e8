"""The page in a real browser: what is on it, what comes live, and that it says what it does not know."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from deeplink.console.collect import Collector
from deeplink.core.finding import Finding, Severity
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Beat, Incident, IncidentOutcome, NodeRecord, Phase
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
pytestmark = [pytest.mark.slow, NEEDS_BROWSER]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
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


def test_the_page_shows_the_cluster_and_follows_it(
    living: Journal,
    collector: Collector,
    serve: Callable[..., Any],
    browser: webdriver.Chrome,
    eventually: Callable[..., Any],
) -> None:
    browser.get(f"http://127.0.0.1:{serve(collector).port}/")
    eventually(lambda: len(texts(browser, ".tile")) == 8, LIMIT_S)
    assert texts(browser, ".tile .t-name") == [f"n{number}" for number in range(8)]
    assert texts(browser, ".switch-name") == [
        "core", "spine0", "leaf0", "leaf1", "spine1", "leaf2", "leaf3",
    ]  # fmt: skip
    assert "17 · ranks 4\N{EN DASH}5" in texts(browser, ".tile[data-node=n3] .t-job")
    assert texts(browser, ".tile[data-node=n1] .t-state") == ["down \N{EN DASH} Not responding"]
    assert texts(browser, ".job-name") == ["resnet50-warmup", "digits-ddp", "gpt-small", "hyperband-3"]
    curve = browser.find_element(By.CSS_SELECTOR, ".job[data-job='17'] .curve")
    assert len(curve.find_elements(By.CSS_SELECTOR, ".c-line")) == 2
    assert "32 repeated" in curve.text
    assert len(curve.find_element(By.CSS_SELECTOR, ".c-line").get_attribute("d") or "") > 500
    assert len(texts(browser, ".incident")) == 3
    assert len(texts(browser, "#shards tbody tr")) == 6
    shares = zip(texts(browser, "#shards tbody th"), texts(browser, "#shards td:nth-child(4)"), strict=True)
    assert {("n0", "100 %"), ("n3", "87.2 %")} <= set(shares)  # 38 of 38 shards' bytes, 41 of 47
    assert "verified 9" in texts(browser, "#n-shards")[0]
    bars = browser.find_elements(By.CSS_SELECTOR, "#shards .bar i")
    widths = [float(bar.value_of_css_property("width").removesuffix("px")) for bar in bars]
    assert all(held >= verified > 0 for held, verified in zip(widths[::2], widths[1::2], strict=True))
    assert "2 nodes down" in texts(browser, "#headline")[0]
    picture(browser, "console.png")
    picture(browser, "console-dark.png", "dark")
    picture(browser, "console-800.png", "light", 800)
    sideways = browser.execute_script("return document.documentElement.scrollWidth")
    assert sideways == 800, "nothing sticks out to the side"
    picture(browser, "console-dark-800.png", "dark", 800)

    browser.execute_script("document.querySelector('.tile').dataset.witness = 'kept'")
    now = time.time()
    living.record_incident(
        Incident(
            id="21.0.0-node-dead-n5",
            kind="node-dead",
            attempt=Attempt(21, 0, 0),
            node=NodeName("n5"),
            began_unix=now,
            detected_unix=now + 1.5,
            evidence="<img src=x onerror=alert(1)>",
            outcome=IncidentOutcome.OPEN,
        )
    )
    eventually(lambda: len(texts(browser, ".incident")) == 4)
    newest = browser.find_element(By.CSS_SELECTOR, ".incident")
    assert "node died · n5 · job 21" in newest.text
    assert "detected 1.5 s" in newest.text
    newest.find_element(By.CSS_SELECTOR, "summary").send_keys(Keys.ENTER)
    eventually(lambda: "<img src=x onerror=alert(1)>" in newest.text)  # shown as text, not as a page
    assert "1 incident open" in texts(browser, "#headline")[0]
    eventually(lambda: "first sign of it" in newest.text)
    assert texts(browser, ".incident:first-child .i-course li")[-1].startswith("+1.5 sdetected: node-dead")
    living.record_moment("21.0.0-node-dead-n5", now + 2.0, "its agent was asked")
    eventually(lambda: "its agent was asked" in newest.text)
    (hung,) = [each for each in browser.find_elements(By.CSS_SELECTOR, ".incident") if "ranks hung" in each.text]
    hung.find_element(By.CSS_SELECTOR, "summary").click()
    eventually(lambda: "rank 2: process 4002 D, by kernel" in hung.text)
    hung.find_elements(By.CSS_SELECTOR, ".i-stacks summary")[1].click()
    eventually(lambda: "<b>nfs_wait</b>" in hung.text)
    assert texts(browser, ".tile[data-witness=kept]"), "tiles are updated in place, not made again"


def test_keys_reach_nodes_and_curves(
    living: Journal,
    collector: Collector,
    serve: Callable[..., Any],
    browser: webdriver.Chrome,
    eventually: Callable[..., Any],
) -> None:
    browser.get(f"http://127.0.0.1:{serve(collector).port}/")
    eventually(lambda: len(texts(browser, ".tile")) == 8, LIMIT_S)
    body = browser.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.text == "Skip to the fabric"
    browser.switch_to.active_element.send_keys(Keys.TAB)
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element.get_attribute("data-node") == "n1"
    eventually(lambda: "reason: Not responding" in texts(browser, "#inspector")[0])
    browser.execute_script("document.querySelector('.job[data-job=\"17\"] .curve').focus()")
    browser.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    eventually(lambda: "step 639" in texts(browser, ".job[data-job='17'] .curve-read")[0])
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('button, svg[role=img], section, table')].filter((each) => "
        "!each.getAttribute('aria-label') && !each.getAttribute('aria-labelledby') "
        "&& !each.querySelector('caption'))"
        ".map((each) => each.outerHTML.slice(0, 80))"
    )
    assert unnamed == []


def test_a_held_job_and_findings_are_on_the_page_with_what_helps(  # noqa: PLR0917 - fixtures
    living: Journal,
    collector: Collector,
    slurm: Any,
    serve: Callable[..., Any],
    browser: webdriver.Chrome,
    eventually: Callable[..., Any],
) -> None:
    now = time.time()
    living.record_beat(Beat(attempt=Attempt(31, 0, 1), phase=Phase.FAILED, job_label="30_2", user="eve"), now)
    found = Finding(check="disk", severity=Severity.WARNING, text="slow <b>", since_unix=now)
    living.record_node(NodeRecord(name=NodeName("n4"), seen_unix=now, health=(found,)))
    slurm.jobs = (
        ("31", "30_2", "PENDING", "job requeued in held state", "1", "1", "eve", "", "", "array"),
        ("30", "30_3", "FAILED", "None", "0", "1", "eve", "n7", "n7", "array"),
    )
    browser.get(f"http://127.0.0.1:{serve(collector).port}/")
    card = ".job[data-job='31']"
    eventually(lambda: texts(browser, f"{card} .badge") == ["held"], LIMIT_S)
    assert texts(browser, f"{card} .job-id") == ["30_2"]
    assert texts(browser, f"{card} .job-remedy") == ["held: `scontrol release 30_2` lets it start"]
    assert browser.find_element(By.CSS_SELECTOR, card).get_attribute("open"), "not among those that ended"
    assert browser.find_element(By.CSS_SELECTOR, f"{card} .job-remedy").is_displayed()
    assert "job 30_2 is held" in texts(browser, "#headline")[0].lower()
    line = "n4: disk (comment): slow <b>; `deeplink health` on n4 looks again"
    eventually(lambda: line in texts(browser, "#findings li"))
    assert texts(browser, ".tile[data-node=n4][data-unfit] .t-state")[0].endswith("; disk (comment): slow <b>")
    picture(browser, "console-held.png")
    slurm.jobs = (("31", "30_2", "PENDING", "Resources", "1", "1", "eve", "", "", "array"),)
    living.record_node(NodeRecord(name=NodeName("n4"), seen_unix=time.time()))
    eventually(lambda: texts(browser, f"{card} .badge") == ["pending"])
    assert not browser.find_element(By.CSS_SELECTOR, f"{card} .job-remedy").is_displayed()
    eventually(lambda: not [each for each in texts(browser, "#findings li") if each.startswith("n4")])


@pytest.mark.usefixtures("living")
def test_a_dead_controller_and_a_lost_console_are_said(
    collector: Collector,
    slurm: Any,
    serve: Callable[..., Any],
    browser: webdriver.Chrome,
    eventually: Callable[..., Any],
) -> None:
    served = serve(collector)
    browser.get(f"http://127.0.0.1:{served.port}/")
    eventually(lambda: len(texts(browser, ".tile")) == 8, LIMIT_S)
    slurm.dead = True
    eventually(lambda: "Slurm stopped answering" in texts(browser, "#headline")[0])
    eventually(lambda: "Unable to contact slurm controller" in texts(browser, "#notice")[0])
    eventually(lambda: "no answer since" in texts(browser, "#a-fabric")[0])
    assert len(texts(browser, ".tile")) == 8, "the last known nodes stay"
    picture(browser, "console-slurm-dead.png")
    slurm.dead = False
    eventually(lambda: "2 nodes down" in texts(browser, "#headline")[0])
    served.server.should_exit = True
    eventually(lambda: "Lost the console" in texts(browser, "#notice")[0])
    assert len(texts(browser, ".tile")) == 8
    log = complaints(browser)  # the browser itself notes each failed attempt to come back
    assert all("ERR_CONNECTION_REFUSED" in line["message"] or "ERR_INCOMPLETE" in line["message"] for line in log)
    browser.get("about:blank")
    complaints(browser)

"""What an operator asks at three in the morning, asked of the recorded day: each within three clicks or keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from deeplink.console.demo_sources import DemoDay
from tests.deeplink.console.browsing import NEEDS_BROWSER, browser, go, picture, place, texts
from tests.waiting import LIMIT_S

__all__ = ["browser"]
pytestmark = [pytest.mark.slow, NEEDS_BROWSER]
MOST = 3
READY = {
    "now": ".concern",
    "fabric": ".cell",
    "jobs": ".row-link",
    "jobs/17": ".course-base[data-lanes]",
    "jobs/22": ".course-base[data-lanes]",
    "cache": ".datasets tbody tr",
    "incidents": ".week",
}
"""Each place, and what there is of it once it is drawn."""


@dataclass
class Operator:
    """Somebody at the page, whose clicks and searches are counted."""

    browser: webdriver.Chrome
    eventually: Callable[..., Any]
    done: int = 0

    def click(self, text: str, within: str = "a, button, summary") -> None:
        def hit() -> bool:
            return bool(
                self.browser.execute_script(
                    "const hit = [...document.querySelectorAll(arguments[0])].find((each) => "
                    "each.offsetParent && each.textContent.includes(arguments[1])); hit?.click(); return !!hit",
                    within,
                    text,
                )
            )

        self.eventually(hit)
        self.done += 1

    def search(self, text: str) -> None:
        self.browser.find_element(By.TAG_NAME, "body").send_keys("/")
        field = self.browser.switch_to.active_element
        field.send_keys(text)
        self.eventually(lambda: texts(self.browser, ".hit[aria-selected=true]"))
        field.send_keys(Keys.ENTER)
        self.done += 1

    def reads(self, *wanted: str) -> None:
        """See all of these on the page, within as many steps as are allowed."""

        def seen() -> bool:
            page = self.browser.find_element(By.TAG_NAME, "main").text
            return all(each in page for each in wanted)

        self.eventually(seen)
        assert self.done <= MOST


@pytest.fixture
def served(tmp_path: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    day = DemoDay(tmp_path, 0.5)
    yield serve(day.collector)
    day.close()


def test_ten_questions_are_answered_within_three_steps_each(
    served: Any, browser: webdriver.Chrome, eventually: Callable[..., Any]
) -> None:
    def at_the_page() -> Operator:
        go(browser, served, "now", ".concern", eventually)
        return Operator(browser, eventually)

    lemon = at_the_page()
    lemon.reads("n142 fails again and again")
    lemon.click("n142 fails again and again")
    lemon.reads("node fell silent · n142 · job 29", "ranks hung · n142 · job 29")

    slow = at_the_page()
    slow.search("17")
    slow.reads("vit-large-in22k", "waiting for data 63 %", "from the source")

    night = at_the_page()
    night.click("Incidents", "nav a")
    night.click("a day")
    night.reads("rank-hours, as far as that is known: bo 45.4, dora 14.4")

    dataset = at_the_page()
    dataset.search("in22k")
    dataset.reads("newest", "n[224-247]", "n[000-031]")

    held = at_the_page()
    held.reads("Job 29 is held", "scontrol release 29")

    disk = at_the_page()
    disk.reads("n201: disk (comment): /scratch: 312 MiB free of at least 1024", "min ago")

    leaf = at_the_page()
    leaf.click("every node of leaf13 is lost")
    leaf.reads("leaf13", "n208", "not answering", "16 of 16 not well")

    cable = at_the_page()
    cable.search("26")
    cable.reads("rank 56 on n119 is slowest", "straggler on n119")
    cable.click("straggler on n119")
    cable.reads("ib0 of n119: 50 Gb/s")

    went_on = at_the_page()
    went_on.search("22")
    went_on.reads("relaunched on spare n104 from checkpoint step 20100", "node-silent on n087", "22.0.1")

    worse = at_the_page()
    worse.click("Incidents", "nav a")
    worse.reads("11-16", "11-09")
    worse.click("11-16", ".week")
    eventually(lambda: "since=" in place(browser))
    worse.reads("switch suspected")


@pytest.mark.parametrize("where", READY)
def test_every_place_of_the_day_fits_three_sizes_in_both_themes(
    where: str, served: Any, browser: webdriver.Chrome, eventually: Callable[..., Any]
) -> None:
    go(browser, served, where, READY[where], eventually)
    for width in (390, 1280, 2560):
        for scheme in ("light", "dark"):
            picture(browser, f"demo-{where.replace('/', '-')}-{width}-{scheme}.png", scheme, width)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_to_complain_of_in_any_place(
    scheme: str, served: Any, browser: webdriver.Chrome, eventually: Callable[..., Any]
) -> None:
    axe = resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.set_script_timeout(LIMIT_S)
    more = {"jobs/29": ".job .badge", "fabric?leaf=leaf13": ".tile", "incidents?within=86400": ".week"}
    for where, ready in ({**READY, **more}).items():
        if where == "incidents":  # a page of fifty takes axe as long as all others together
            continue
        go(browser, served, where, ready, eventually)
        browser.execute_script(axe)
        found = browser.execute_async_script("axe.run().then(arguments[0])")
        said = [
            (each["id"], each["impact"], [node["target"] for node in each["nodes"]][:4])
            for each in found["violations"]
        ]
        assert said == [], where


def test_what_is_shown_of_a_job_is_saved_as_csv_and_as_png(
    served: Any, browser: webdriver.Chrome, eventually: Callable[..., Any]
) -> None:
    go(browser, served, "jobs/22", READY["jobs/22"], eventually)
    # The browser would ask where to put a file: what it is given is looked at instead.
    browser.execute_script("URL.createObjectURL = (blob) => { globalThis.saved = blob; return '#/jobs/22'; }")
    browser.find_element(By.XPATH, "//button[text()='CSV']").click()
    lines = browser.execute_async_script("saved.text().then(arguments[0])").splitlines()
    assert lines[0].startswith("unix,time,step,loss,lr,steps,span_s,data_s,compute_s,others_s,checkpoint_s,rest_s")
    assert len(lines) > 500
    assert len({line.count(",") for line in lines}) == 1
    browser.find_element(By.XPATH, "//button[text()='PNG']").click()
    kind = "return saved.size > 10_000 && saved.type"
    eventually(lambda: browser.execute_script(kind) == "image/png")

"""The page in a real browser: what is on it, what comes live, and that it says what it does not know."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from benchmarks.console import stand_ins
from deeplink.console.collect import Collector, ConsoleSettings
from deeplink.core.finding import Finding, Severity
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Beat, Incident, IncidentOutcome, NodeRecord, Phase
from tests.deeplink.console.browsing import NEEDS_BROWSER, browser, complaints, go, lanes, picture, place, texts
from tests.waiting import LIMIT_S

__all__ = ["browser"]
pytestmark = [pytest.mark.slow, NEEDS_BROWSER]


def test_the_fabric_shows_the_cluster_and_follows_it(
    living: Journal,
    collector: Collector,
    serve: Callable[..., Any],
    browser: webdriver.Chrome,
    eventually: Callable[..., Any],
) -> None:
    go(browser, serve(collector), "fabric", ".tile:nth-child(2)", eventually)
    eventually(lambda: len(texts(browser, ".tile")) == 8)
    assert texts(browser, ".tile .t-name") == [f"n{number}" for number in range(8)]
    assert texts(browser, ".switch-name") == [
        "core", "spine0", "leaf0", "leaf1", "spine1", "leaf2", "leaf3",
    ]  # fmt: skip
    assert "17 · ranks 4\N{EN DASH}5" in texts(browser, ".tile[data-node=n3] .t-job")
    assert texts(browser, ".tile[data-node=n1] .t-state") == ["down \N{EN DASH} Not responding"]
    assert "2 nodes down" in texts(browser, "#headline")[0]
    browser.execute_script("document.querySelector('.tile').dataset.witness = 'kept'")
    found = Finding(check="disk", severity=Severity.WARNING, text="slow <b>", since_unix=1.0)
    living.record_node(NodeRecord(name=NodeName("n2"), seen_unix=time.time(), health=(found,)))
    eventually(lambda: texts(browser, ".tile[data-node=n2][data-unfit]"))
    assert texts(browser, ".tile[data-witness=kept]"), "tiles are updated in place, not made again"
    browser.find_element(By.CSS_SELECTOR, ".tile[data-node=n5]").click()
    eventually(lambda: place(browser) == "#/fabric?node=n5")
    eventually(lambda: "n5, running" in texts(browser, "#inspector")[0])
    browser.find_element(By.CSS_SELECTOR, ".chip[href*='health=down']").click()
    eventually(lambda: "health=down" in place(browser))
    eventually(lambda: len(texts(browser, ".tile.aside")) == 6)
    browser.back()
    eventually(lambda: place(browser) == "#/fabric?node=n5" and not texts(browser, ".tile.aside"))
    browser.forward()
    eventually(lambda: len(texts(browser, ".tile.aside")) == 6)


@pytest.mark.usefixtures("living")
def test_every_place_at_three_sizes_in_both_themes_sticks_out_nowhere(
    collector: Collector, serve: Callable[..., Any], browser: webdriver.Chrome, eventually: Callable[..., Any]
) -> None:
    served = serve(collector)
    ready = {
        "now": ".concern",
        "fabric": ".tile",
        "jobs": "[data-job] .row-link",
        "jobs/17": ".job .course-base[data-lanes]",
        "cache": "#shards tbody tr",
        "incidents": ".incident",
    }
    for where, shown in ready.items():
        go(browser, served, where, shown, eventually)
        for width in (390, 1280, 2560):
            for scheme in ("light", "dark"):
                picture(browser, f"console-{where.replace('/', '-')}-{width}-{scheme}.png", scheme, width)
                assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('button, input, svg[role=img], section.place, table, [role=group]')]"
        ".filter((each) => !each.getAttribute('aria-label') && !each.getAttribute('aria-labelledby') "
        "&& !each.querySelector('caption') && !each.textContent.trim()).map((each) => each.outerHTML.slice(0, 80))"
    )
    assert unnamed == []


@pytest.mark.usefixtures("living")
def test_jobs_are_found_by_what_is_chosen_and_each_has_its_page(
    collector: Collector,
    slurm: Any,
    serve: Callable[..., Any],
    browser: webdriver.Chrome,
    eventually: Callable[..., Any],
) -> None:
    slurm.jobs = tuple(
        (str(i), str(i), "PENDING", "Priority", "0", "1", "dora", "", "", f"sweep-{i}") for i in range(100, 220)
    )

    def rows() -> list[str]:
        return texts(browser, ".jobs-table .row-link")

    go(browser, serve(collector), "jobs", ".row-link", eventually)
    eventually(lambda: len(rows()) == 50)
    assert rows()[:3] == ["21", "17", "219"], "what runs comes first"
    browser.find_element(By.CSS_SELECTOR, ".page[href*='page=2']").click()
    eventually(lambda: place(browser) == "#/jobs?page=2" and len(rows()) == 50 and "17" not in rows())
    browser.execute_script("scrollTo(0, 0)")
    browser.find_element(By.LINK_TEXT, "steps/s").click()
    eventually(lambda: rows()[:2] == ["21", "17"])
    assert texts(browser, "[aria-sort=descending] .sort") == ["steps/s"]
    field = browser.find_element(By.CSS_SELECTOR, "#job-list .filter-text")
    field.send_keys("digits")
    eventually(lambda: rows() == ["17"])
    assert "text=digits" in place(browser)
    browser.find_element(By.LINK_TEXT, "17").click()
    eventually(lambda: lanes(browser)[:4] == ["attempts", "incidents", "loss", "lr"])
    assert "node-silent on n1" in texts(browser, ".befell a")[0]
    browser.execute_script("document.querySelector('.course-over').focus()")
    course = browser.switch_to.active_element
    course.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    eventually(lambda: "attempts attempt 17.0.1" in texts(browser, ".course-read")[0])
    assert "loss 0." in texts(browser, ".course-read")[0]
    course.send_keys("+")
    eventually(lambda: "from=" in place(browser))
    course.send_keys(Keys.ESCAPE)
    eventually(lambda: place(browser) == "#/jobs/17")
    pixels = webdriver.ActionChains(browser).move_to_element_with_offset(course, -200, 0).click_and_hold()
    pixels.move_by_offset(300, 0).release().perform()
    eventually(lambda: "from=" in place(browser) and "to=" in place(browser))
    for _ in range(3):
        browser.back()
    eventually(lambda: rows() == ["17"])


def test_incidents_are_filtered_and_one_is_told_whole(
    living: Journal,
    collector: Collector,
    serve: Callable[..., Any],
    browser: webdriver.Chrome,
    eventually: Callable[..., Any],
) -> None:
    go(browser, serve(collector), "incidents", ".incident", eventually)
    eventually(lambda: len(texts(browser, ".incident")) == 3)
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
    eventually(lambda: "1 incident open" in texts(browser, "#headline")[0])
    eventually(lambda: "first sign of it" in newest.text)
    assert texts(browser, ".incident:first-child .i-course li")[-1].startswith("+1.5 sdetected: node-dead")
    living.record_moment("21.0.0-node-dead-n5", now + 2.0, "its agent was asked")
    eventually(lambda: "its agent was asked" in newest.text)
    (again,) = [chip for chip in browser.find_elements(By.CSS_SELECTOR, ".chip") if "again and again" in chip.text]
    assert "n5" in again.text
    again.click()
    eventually(lambda: len(texts(browser, ".incident")) == 2)
    assert "node=n5" in place(browser)
    browser.get(browser.current_url.partition("#")[0] + "#/incidents?kind=ranks-hung")
    eventually(lambda: len(texts(browser, ".incident")) == 1)
    (hung,) = browser.find_elements(By.CSS_SELECTOR, ".incident")
    hung.find_element(By.CSS_SELECTOR, "summary").click()
    eventually(lambda: "rank 2: process 4002 D, by kernel" in hung.text)
    hung.find_elements(By.CSS_SELECTOR, ".i-stacks summary")[1].click()
    eventually(lambda: "<b>nfs_wait</b>" in hung.text)


@pytest.mark.usefixtures("living")
def test_one_field_finds_everything_and_keys_reach_it(
    collector: Collector, serve: Callable[..., Any], browser: webdriver.Chrome, eventually: Callable[..., Any]
) -> None:
    go(browser, serve(collector), "now", ".concern", eventually)
    body = browser.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.text == "Skip to the page"
    for text, found, leads in (
        ("n3", "noden3", "#/fabric?leaf=leaf1&node=n3"),
        ("digits", "job17", "#/jobs/17"),
        ("chi", "userchi", "#/jobs?user=chi"),
        ("node-silent", "incident3", "#/incidents/3"),
    ):
        browser.find_element(By.TAG_NAME, "body").send_keys("/")
        field = browser.switch_to.active_element
        assert field.get_attribute("role") == "combobox"
        field.send_keys(text)
        eventually(lambda found=found: [hit for hit in texts(browser, ".hit[aria-selected=true]") if found in hit])
        field.send_keys(Keys.ENTER)
        eventually(lambda leads=leads: place(browser) == leads)
    eventually(lambda: texts(browser, "#places [aria-current]") == ["Incidents"])
    go(browser, serve(collector), "fabric", ".tile", eventually)
    browser.execute_script("document.querySelector('.tile[tabindex=\"0\"]').focus()")
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element.get_attribute("data-node") == "n1"
    eventually(lambda: "reason: Not responding" in texts(browser, "#inspector")[0])


def test_what_needs_a_hand_stands_first_with_the_command_to_copy(  # noqa: PLR0917 - fixtures
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
    served = serve(collector)
    go(browser, served, "now", ".concern[data-kind=held]", eventually)
    assert texts(browser, ".concern .c-title")[0] == "2 nodes down"
    assert texts(browser, ".concern[data-kind=held] .command-text") == ["scontrol release 30_2"]
    eventually(lambda: texts(browser, ".concern[data-kind=finding] .c-title") == ["n4: disk (comment): slow <b>"])
    browser.find_element(By.CSS_SELECTOR, ".concern[data-kind=held] .copy").click()
    eventually(lambda: "Copied" in texts(browser, ".concern[data-kind=held] .copy"))
    browser.find_element(By.CSS_SELECTOR, ".concern[data-kind=held] .c-title").click()
    eventually(lambda: texts(browser, ".job .badge") == ["held"])
    assert texts(browser, ".job .command-text") == ["scontrol release 30_2"]
    go(browser, served, "fabric", ".tile[data-node=n4][data-unfit]", eventually)
    assert texts(browser, ".tile[data-node=n4] .t-state")[0].endswith("; disk (comment): slow <b>")
    assert "n4: disk (comment): slow <b>; `deeplink health` on n4 looks again" in texts(browser, "#findings li")
    slurm.jobs = (("31", "30_2", "PENDING", "Resources", "1", "1", "eve", "", "", "array"),)
    living.record_node(NodeRecord(name=NodeName("n4"), seen_unix=time.time()))
    eventually(lambda: not texts(browser, "#findings li"))
    go(browser, served, "jobs/31", ".job .badge", eventually)
    eventually(lambda: texts(browser, ".job .badge") == ["pending"])
    assert not browser.find_element(By.CSS_SELECTOR, ".job-remedy").is_displayed()


def test_ten_thousand_nodes_are_rows_of_cells_and_a_leaf_is_its_tiles(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    serve: Callable[..., Any],
    browser: webdriver.Chrome,
    eventually: Callable[..., Any],
) -> None:
    stand_ins(tmp_path, 10_000, 300)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    served = serve(Collector(ConsoleSettings(journal=tmp_path / "none", interval_s=5.0)))
    go(browser, served, "fabric", ".leaf:nth-child(313)", eventually)
    assert browser.execute_script("return document.querySelectorAll('.cell').length") == 10_000
    height = browser.execute_script("return document.documentElement.scrollHeight")
    assert height < 6_000, "a wall of 35,000 pixels was what a thousand nodes took"
    picture(browser, "console-ten-thousand.png")
    label = browser.find_element(By.CSS_SELECTOR, ".leaf").get_attribute("aria-label") or ""
    assert label.startswith("leaf0: 32 nodes, 2 not well: node00007 down")
    browser.find_element(By.CSS_SELECTOR, ".leaf").click()
    eventually(lambda: len(texts(browser, ".tile")) == 32)
    assert "leaf=leaf0" in place(browser)
    browser.back()
    eventually(lambda: len(texts(browser, ".leaf")) == 313)


@pytest.mark.usefixtures("living")
def test_a_dead_controller_and_a_lost_console_are_said(
    collector: Collector,
    slurm: Any,
    serve: Callable[..., Any],
    browser: webdriver.Chrome,
    eventually: Callable[..., Any],
) -> None:
    served = serve(collector)
    go(browser, served, "fabric", ".tile", eventually)
    eventually(lambda: len(texts(browser, ".tile")) == 8, LIMIT_S)
    slurm.dead = True
    eventually(lambda: "Slurm stopped answering" in texts(browser, "#headline")[0])
    eventually(lambda: "Unable to contact slurm controller" in texts(browser, "#notice")[0])
    eventually(lambda: "no answer since" in texts(browser, "#a-fabric")[0])
    assert len(texts(browser, ".tile")) == 8, "the last known nodes stay"
    slurm.dead = False
    eventually(lambda: "2 nodes down" in texts(browser, "#headline")[0])
    served.server.should_exit = True
    eventually(lambda: "Lost the console" in texts(browser, "#notice")[0])
    assert len(texts(browser, ".tile")) == 8
    log = complaints(browser)  # the browser itself notes each failed attempt to come back
    assert all("ERR_CONNECTION_REFUSED" in line["message"] or "ERR_INCOMPLETE" in line["message"] for line in log)
    browser.get("about:blank")
    complaints(browser)

"""Actions in a real browser, by every role: what each sees, what is asked again, what is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from deeplink.scheduler.journal.journal import Journal
from tests.deeplink.console.browsing import NEEDS_BROWSER, browser, complaints, picture, texts
from tests.deeplink.console.test_actions import BEARER, PROXY, Acting, act
from tests.scheduler.watch.operator_desk import EXPIRED, FORGED, OPERATORS, Desk
from tests.waiting import LIMIT_S

__all__ = ["act", "browser"]  # fixtures
pytestmark = [pytest.mark.slow, NEEDS_BROWSER]


def press(driver: webdriver.Chrome, text: str) -> None:
    """Press the button of this text that is on top."""
    found = [each for each in driver.find_elements(By.CSS_SELECTOR, "button.act") if each.text == text]
    assert found, texts(driver, "button.act")
    found[0].click()


def opened(driver: webdriver.Chrome, console: Acting, place: str, eventually: Callable[..., Any]) -> None:
    driver.get("about:blank")
    driver.get(f"http://127.0.0.1:{console.port}/#/{place}")
    eventually(lambda: texts(driver, ".who") not in ([], [""]), LIMIT_S)


def write(driver: webdriver.Chrome, text: str) -> None:
    driver.find_element(By.CSS_SELECTOR, "dialog .act-field input").send_keys(text)


def drained(desk: Desk) -> list[str]:
    return [line for line in desk.machine.orders if "state=drain" in line]


def test_a_viewer_has_no_action_and_a_wrong_token_makes_nobody_an_operator(
    living: Journal, act: Callable[..., Acting], browser: webdriver.Chrome, eventually: Callable[..., Any]
) -> None:
    console = act()
    opened(browser, console, "fabric?node=n3", eventually)
    assert texts(browser, ".who") == ["Viewer"]
    assert not texts(browser, ".actions .act")
    for token in (FORGED, EXPIRED):
        browser.find_element(By.CSS_SELECTOR, ".who").click()
        write(browser, token)
        press(browser, "Enter")
        eventually(lambda: "no token of this watchdog" in texts(browser, "dialog .act-problem")[0], LIMIT_S)
        press(browser, "Close")
    assert texts(browser, ".who") == ["Viewer"]
    assert not texts(browser, ".actions .act")
    assert not console.desk.log.newest()


def test_an_operator_drains_a_node_by_token_and_takes_it_back(
    living: Journal, act: Callable[..., Acting], browser: webdriver.Chrome, eventually: Callable[..., Any]
) -> None:
    console = act()
    opened(browser, console, "fabric?node=n3", eventually)
    browser.find_element(By.CSS_SELECTOR, ".who").click()
    write(browser, OPERATORS)
    press(browser, "Enter")
    eventually(lambda: "operator" in texts(browser, ".who")[0], LIMIT_S)
    eventually(lambda: texts(browser, "#inspector ~ .actions .act") == ["Drain", "Resume"], LIMIT_S)
    press(browser, "Drain")
    press(browser, "Show the commands")
    eventually(lambda: "Say why" in texts(browser, ".act-plan")[0], LIMIT_S)
    write(browser, "fan is loud")
    press(browser, "Show the commands")
    eventually(lambda: texts(browser, ".act-plan .command-text"), LIMIT_S)
    (line,) = texts(browser, ".act-plan .command-text")
    assert line.startswith("scontrol update nodename=n3 state=drain 'reason=operator ")
    assert not drained(console.desk), "it was only asked"
    picture(browser, "console-action.png")
    press(browser, "Drain now")
    eventually(lambda: "done: " in "".join(texts(browser, ".act-plan")), LIMIT_S)
    assert len(drained(console.desk)) == 1
    press(browser, "Close")
    eventually(lambda: any("Drain n3: done" in each for each in texts(browser, ".act-log li")), LIMIT_S)
    # Somebody is quicker than the next answer: nothing is done, and what has changed is said.
    press(browser, "Resume")
    write(browser, "fan replaced")
    press(browser, "Show the commands")
    eventually(lambda: texts(browser, ".act-plan .command-text"), LIMIT_S)
    console.desk.machine.reasons["n3"] = "carla took it"
    press(browser, "Resume now")
    eventually(lambda: "reason was operator" in "".join(texts(browser, ".act-plan")), LIMIT_S)
    assert len(console.desk.machine.orders) == 1
    press(browser, "Close")
    browser.find_element(By.CSS_SELECTOR, ".who").click()
    press(browser, "Be a viewer again")
    eventually(lambda: texts(browser, ".who") == ["Viewer"], LIMIT_S)
    eventually(lambda: not texts(browser, ".actions .act"), LIMIT_S)


def test_whom_a_trusted_proxy_names_acknowledges_and_another_sites_form_does_nothing(
    living: Journal, act: Callable[..., Acting], browser: webdriver.Chrome, eventually: Callable[..., Any]
) -> None:
    console, stranger = act("127.0.0.1"), act()
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.setExtraHTTPHeaders", {"headers": {**PROXY, **BEARER}})  # as the proxy would
    opened(browser, stranger, "fabric?node=n3", eventually)
    assert texts(browser, ".who") == ["Viewer"], "no proxy is trusted there"
    (incident,) = living.incidents(node="n1", limit=1)
    opened(browser, console, f"incidents/{incident.number}", eventually)
    assert texts(browser, ".who") == ["ada, operator"]
    eventually(lambda: any(each.startswith("Acknowledge") for each in texts(browser, ".actions .act")), LIMIT_S)
    press(browser, next(each for each in texts(browser, ".actions .act") if each.startswith("Acknowledge")))
    write(browser, "on it")
    press(browser, "Show the commands")
    eventually(lambda: "only the journal is written" in "".join(texts(browser, ".act-plan")), LIMIT_S)
    press(browser, "Acknowledge now")
    eventually(lambda: "done: " in "".join(texts(browser, ".act-plan")), LIMIT_S)
    (record,) = console.desk.log.newest([incident.id])
    assert (record.verb, record.person, record.outcome) == ("acknowledge", "ada", "done")
    form = (
        f"data:text/html,<form method=post enctype=text/plain action=http://127.0.0.1:{console.port}/api/v1/actions>"
        '<input name=\'{"verb":"drain","target":"n3","why":"\' value=\'x","saw":"{}","request":"request-9"}\'>'
        "</form><script>document.forms[0].submit()</script>"
    )
    browser.get(form)
    eventually(lambda: "error" in browser.find_element(By.TAG_NAME, "body").text, LIMIT_S)
    assert len(console.desk.log.newest()) == 1
    complaints(browser)  # of the refusal

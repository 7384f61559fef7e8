"""The report in a real browser: wide, narrow and dark."""

from __future__ import annotations

from pathlib import Path

import pytest
from selenium import webdriver

from benchmarks.simulate.page import as_html
from tests.benchmarks.simulate.test_study import told
from tests.deeplink.console.browsing import NEEDS_BROWSER, browser, picture, texts

__all__ = ["browser"]
pytestmark = [pytest.mark.slow, NEEDS_BROWSER]

OVERLAPS = """
const found = [];
for (const plot of document.querySelectorAll("svg")) {
  const all = [...plot.querySelectorAll("text")].map((each) => [each.textContent, each.getBoundingClientRect()]);
  const edge = plot.getBoundingClientRect();
  for (const [here, [said, one]] of all.entries()) {
    if (one.left < edge.left || one.right > edge.right || one.bottom > edge.bottom) found.push([said, "cut off"]);
    for (const [other, two] of all.slice(here + 1)) {
      const beside = one.right <= two.left || two.right <= one.left;
      const below = one.bottom <= two.top || two.bottom <= one.top;
      if (!beside && !below) found.push([said, other]);
    }
  }
}
return found;
"""


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "light"), (1280, "dark")])
def test_plots_and_tables_can_be_read(browser: webdriver.Chrome, tmp_path: Path, width: int, scheme: str) -> None:
    page = tmp_path / "page.html"
    page.write_text(as_html(told(), "deeplink simulate jobs.csv --names <b>"), encoding="utf-8")
    browser.get(page.as_uri())
    picture(browser, f"simulation-{width}-{scheme}.png", scheme, width)
    assert len(texts(browser, "svg")) == 8
    assert len(texts(browser, "table")) == 5
    assert texts(browser, "code")[0] == "deeplink simulate jobs.csv --names <b>"
    assert browser.execute_script(OVERLAPS) == []
    beyond = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(beyond) == 0, "only tables and plots are scrolled sideways, each alone"

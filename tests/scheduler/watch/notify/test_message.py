"""What messages say: of one incident, of many, of a test; and that a program can read them."""

from __future__ import annotations

import json

from deeplink.scheduler.journal.incident_json import IncidentNews
from deeplink.scheduler.watch.notify.delivery import message, trial
from tests.hostile import WORDS
from tests.scheduler.watch.notify.things import dead, news, recovered


def test_one_incident_is_told_in_a_line() -> None:
    said = message([news(17, number=12)], "head")
    assert said.subject == "DeepLink: node-dead on n1 job 17: open"
    assert said.text == "node-dead on n1 job 17: open. slurmd is silent for 3.1 s (deeplink incident 12)"
    ended = message([IncidentNews(recovered(dead(17, number=12)))], "head")
    assert ended.text.startswith(
        "node-dead on n1 job 17: recovered after 10.5 s by drain-down at 5.60 rank-hours. "
    )
    assert said.id != ended.id
    assert said.id == message([news(17, number=12)], "head").id


def test_many_are_counted_and_the_first_are_told() -> None:
    said = message([news(job, f"n{job % 6}") for job in range(150)], "head")
    assert said.subject == "DeepLink: 150 incidents (150 node-dead) on n0, n1, n2, n3 and others: 150 open"
    assert len(said.text.splitlines()) == 22
    assert said.text.splitlines()[-1].startswith("and 130 more")
    assert (len(said.document["incidents"]), said.document["incidents_left_out"]) == (100, 50)


def test_it_is_a_document_with_what_slack_shows() -> None:
    said = message([IncidentNews(recovered(dead(17)))], "head")
    document = json.loads(json.dumps(said.document))
    assert document["text"] == said.text
    assert (document["host"], document["test"]) == ("head", False)
    (incident,) = document["incidents"]
    assert (incident["id"], incident["outcome"], incident["severity"]) == (dead(17).id, "recovered", "warning")
    assert incident["cost"]["rank_hours"] == 5.6


def test_evidence_cannot_make_lines_or_colours() -> None:
    for evidence in WORDS:
        said = message([news(17, evidence=evidence)], "head")
        assert said.text.isprintable()
        assert len(said.text) < 600


def test_a_test_says_that_it_is_one() -> None:
    said = trial("head", 1_700_000_000.0)
    assert "test" in said.subject
    assert said.document["test"] is True

from __future__ import annotations

from deeplink.demo.story import DemoFigures, Event, recovery


def event(name: str, unix: float, **more: object) -> Event:
    return {"event": name, "unix": unix, **more}


EVENTS = [
    event("attempt-started", 10.0),
    event("first-step", 12.0, attempt="1.0.0", steps_repeated=0),
    event("node-silent", 19.0, nodes=["n1"]),
    event("node-silent", 23.5, nodes=["n3"]),
    event("relaunch", 23.6),
    event("first-step", 30.0, attempt="1.0.1", steps_repeated=7),
]


def test_a_recovery_is_measured_from_the_death() -> None:
    found = recovery(EVENTS, 20.0, "n3")
    assert (found.detect_s, found.resume_s) == (3.5, 10.0)
    assert "first step" in found.rung


def test_what_came_before_the_death_or_of_another_node_does_not_count() -> None:
    found = recovery(EVENTS, 20.0, "n1")
    assert (found.detect_s, found.resume_s) == (None, None)


def test_a_requeue_is_another_rung() -> None:
    events = [event("node-silent", 21.0, nodes=["n3"]), event("requeue", 22.0)]
    found = recovery(events, 20.0, "n3")
    assert "third step" in found.rung
    assert found.resume_s is None


def test_facts_carry_the_agreed_names() -> None:
    facts = DemoFigures(
        files=3,
        files_per_s=1.23456,
        ring_crossings=2,
        ring_crossings_stock=4,
        detect_s=None,
        resume_s=2.0,
        attempts=2,
        steps_repeated=1,
        accuracy=0.5,
        digest_equal=True,
        wall_s=1.0,
        backend="slurm",
    ).as_dict()
    agreed = (
        "files files_per_s ring_crossings ring_crossings_stock detect_s resume_s attempts accuracy digest_equal "
        "wall_s backend"
    )
    assert set(agreed.split()) <= set(facts)
    assert facts["files_per_s"] == 1.2346
    assert facts["detect_s"] is None

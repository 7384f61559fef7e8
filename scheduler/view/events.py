"""Our own events of a job, in words; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deeplink.scheduler.slurm.nodeset import NodeSetError, fold
from deeplink.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def in_words(event: Mapping[str, Any]) -> str:
    """Return what an event says; one that this version does not know, as it is."""
    name = str(event.get("event", ""))
    said = _WORDS.get(name)
    if said is not None:
        return printable(said(event))
    facts = ", ".join(
        f"{key} {value}" for key, value in event.items() if key not in {"event", "unix", "monotonic"}
    )
    return printable(f"{name}: {facts}" if facts else name)


def _nodes(event: Mapping[str, Any], name: str = "nodes") -> str:
    listed = event.get(name)
    if not isinstance(listed, list) or not listed:
        return "no node"
    try:
        return fold(map(str, listed))
    except NodeSetError:
        return ", ".join(map(str, listed))


def _because(event: Mapping[str, Any]) -> str:
    return f": {event['because']}" if event.get("because") else ""


def _number(event: Mapping[str, Any], name: str) -> float:
    try:
        return float(event.get(name) or 0)
    except (TypeError, ValueError):
        return 0.0


def _late(event: Mapping[str, Any]) -> str:
    ranks = event.get("ranks")
    named = ", ".join(map(str, ranks)) if isinstance(ranks, list) else "?"
    return f"nothing new of ranks {named} for {_number(event, 'silent_s'):.0f} s: {event.get('answer')}"


def _attempt_started(event: Mapping[str, Any]) -> str:
    spares = f", {_nodes(event, 'spares')} rests" if event.get("spares") else ""
    ranks = counted(int(event.get("world_size") or 0), "rank")
    crossings = f"{event.get('ring_crossings', 'unknown')} ring crossings"
    return f"attempt {event.get('attempt')} started: {ranks} on {_nodes(event)}{spares}, {crossings}"


def _first_step(event: Mapping[str, Any]) -> str:
    again = f" ({event['steps_repeated']} steps done again)" if event.get("steps_repeated") else ""
    return f"attempt {event.get('attempt')} reports step {event.get('step')}{again}"


def _ended(event: Mapping[str, Any]) -> str:
    return f"ended with exit code {event.get('code')}{_because(event)}"


def _network(event: Mapping[str, Any]) -> str:
    interfaces = event.get("interfaces")
    listed = ", ".join(map(str, interfaces)) if isinstance(interfaces, list) else ""
    return f"ranks speak over {event.get('network')}" + (f" ({listed})" if listed else "")


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "job-started": lambda event: f"`deeplink run` started on {_nodes(event)} (restart {event.get('restart', 0)})",
    "network": _network,
    "agents-ready": lambda event: f"{counted(len(event.get('agents') or ()), 'agent')} ready",
    "attempt-started": _attempt_started,
    "first-step": _first_step,
    "node-silent": lambda event: f"{_nodes(event)} silent for {_number(event, 'silent_s'):.1f} s",
    "relaunch": lambda event: f"ranks start again{_because(event)}",
    "stranded": lambda event: f"stranded, waits for a rescue{_because(event)}",
    "drained": lambda event: f"{_nodes(event)} is out of service by Slurm's word{_because(event)}",
    "taken": lambda event: f"{_nodes(event)} is not the job's any more by Slurm's word{_because(event)}",
    "nodes-unknown": lambda _event: "Slurm did not say how the nodes stand",
    "spare-lost": lambda event: f"spare {_nodes(event)} lost",
    "agents-again": lambda event: f"agents start once more on {_nodes(event)}",
    "back": lambda event: f"{_nodes(event)} answers again",
    "requeue": lambda _: "Slurm was asked to start the job again",
    "held": lambda _: "Slurm was asked to hold the job",
    "waiting": lambda event: f"waits{_because(event)}",
    "elsewhere": lambda event: f"runs elsewhere by now{_because(event)}",
    "late": _late,
    "stacks": lambda event: f"ranks were asked where they are: {event.get('file')}",
    "straggler": lambda event: (
        f"rank {event.get('rank')} is {_number(event, 'factor'):.1f} times as slow as others"
    ),
    "straggler-over": lambda event: f"rank {event.get('rank')} is as fast as the others again",
    "save-wanted": lambda event: (
        f"a save is wanted at step {event.get('step')}, {_number(event, 'left_s'):.0f} s before the time limit"
    ),
    "storage-frozen": lambda event: f"the job's folder could not be written for {_number(event, 'stuck_s'):.0f} s",
    "storage-back": lambda _: "the job's folder can be written again",
    "signal": lambda event: f"{event.get('signal')} passed on to the ranks",
    "ended": _ended,
    "resubmitted": lambda event: f"submitted anew as job {event.get('as')} by {event.get('by')}",
    "resubmission": lambda event: f"submitted in place of job {event.get('of')}",
    "cancelled": lambda event: f"cancelled by {event.get('by')}",
    "requeued": lambda event: (
        f"requeued by {event.get('by')}"
        + (f", not to run on {_nodes(event, 'exclude')}" if event.get("exclude") else "")
    ),
}

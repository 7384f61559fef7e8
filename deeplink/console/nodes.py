"""Nodes and switches as the page shows them: what is known of each, and never more than that; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from deeplink.core.finding import Severity
from deeplink.scheduler.jobs.picture import help_for, in_short
from deeplink.scheduler.slurm.states import NodeFlag, NodeState

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from deeplink.console.collect import Readings
    from deeplink.console.snapshot import Memo
    from deeplink.scheduler.recovery.records import NodeRecord
    from deeplink.scheduler.slurm.parse import NodeRow, SwitchRow

SILENT_S = 5.0
"""A node of a running job whose agent has been silent for so long, by its launcher, is shown as not answering."""
LIVE_S = 15.0
"""An agent that was heard so lately is live. That a thousand agents are heard once more is no news for a page."""
STANDING_S = 86_400.0  # a standing agent that was last heard longer ago was removed
ROOM_STEP = 64 << 20  # free room is told in such steps: a disk in use changes by less all the time
OUTSIDE = "?"  # key of what stands for the switch of nodes that no switch is known for


class ShownHealth(Enum):
    """Health of a node, in the words of the page."""

    BUSY = "busy"
    IDLE = "idle"
    DRAINING = "draining"
    DRAINED = "drained"
    SILENT = "silent"
    DOWN = "down"
    MAINT = "maint"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchView:
    """A switch, or what stands for one where none is known."""

    name: str
    title: str
    level: int
    parent: str | None
    order: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node. None and the empty text mean that it is not known."""

    name: str
    order: int
    switch: str
    health: ShownHealth
    state: str
    reason: str
    gpus: int | None
    job: int | None
    ranks: tuple[int, ...]
    spare: bool
    shards: int | None
    shard_bytes: int | None
    verified_bytes: int | None
    free_bytes: int | None
    live: bool  # whether its agent was heard within `LIVE_S`
    standing: bool  # whether its standing agent, which outlives jobs, was heard within `STANDING_S`
    heard_unix: float  # when it was last heard, where it is not live; 0: never
    findings: tuple[str, ...]  # of its own checks, as it last reported
    found_unix: float  # since when there is one of them; 0: not known
    unfit: bool  # whether one of them asks for a comment or a drain
    remedy: str  # empty also where somebody else took it out of service


_NAME = re.compile(r"\w[\w.-]{0,254}", re.ASCII)
"""Of a node; a user's own launcher may say anything, and names go into commands to copy."""


@dataclass(frozen=True, slots=True)
class NodeRole:
    """Role of a node in a job: the ranks it carries (none: a spare, or a job that does not say)."""

    job: int
    ranks: tuple[int, ...] = ()
    spare: bool = False
    watched: bool = False


_BROKEN = {NodeFlag.INVALID_REG, NodeFlag.FAIL}
_AWAY = {
    NodeFlag.MAINTENANCE,
    NodeFlag.RESERVED,
    NodeFlag.POWERED_DOWN,
    NodeFlag.POWERING_DOWN,
    NodeFlag.POWERING_UP,
    NodeFlag.POWER_DOWN,
    NodeFlag.POWER_UP,
    NodeFlag.REBOOT_ISSUED,
    NodeFlag.REBOOT_REQUESTED,
}


def slurm_health(row: NodeRow) -> ShownHealth:
    """Return how Slurm sees a node; the worst it says counts."""
    used = row.state in {NodeState.ALLOCATED, NodeState.MIXED} or NodeFlag.COMPLETING in row.flags
    if row.state in {NodeState.DOWN, NodeState.ERROR, NodeState.INVALID} or row.flags & _BROKEN:
        return ShownHealth.DOWN
    if not row.responding:
        return ShownHealth.SILENT
    if row.drained:
        return ShownHealth.DRAINING if used else ShownHealth.DRAINED
    if used:
        return ShownHealth.BUSY
    if row.flags & _AWAY:
        return ShownHealth.MAINT
    return ShownHealth.IDLE if row.state is NodeState.IDLE else ShownHealth.UNKNOWN


def node_views(
    readings: Readings, seats: Mapping[str, NodeRole], switches: Sequence[SwitchView], memo: Memo
) -> tuple[NodeView, ...]:
    """Return every node that Slurm or the journal knows, in natural order."""
    agents, now = readings.journal.nodes, readings.unix
    live = frozenset(one.name for one in agents if now - one.seen_unix <= LIVE_S)
    standing = frozenset(one.name for one in agents if now - one.attended_unix <= STANDING_S)
    slurm = readings.slurm
    parts = (slurm.nodes, agents, seats, slurm.switches, switches, live, standing)
    return memo.of("nodes", parts, partial(_views, memo))


def _views(  # noqa: PLR0917 - each source of facts
    memo: Memo,
    rows: Iterable[NodeRow],
    records: Sequence[NodeRecord],
    seats: Mapping[str, NodeRole],
    tree: Sequence[SwitchRow],
    switches: Iterable[SwitchView],
    live: Container[str],
    standing: Container[str],
) -> tuple[NodeView, ...]:
    row_of = {str(row.name): row for row in rows}
    agents = {str(record.name): record for record in records}
    leaves, known = _leaves(tree, records), {switch.name for switch in switches}
    named = frozenset((*row_of, *agents, *seats))
    parts = {
        name: (
            order, name, leaf if (leaf := leaves.get(name)) in known else OUTSIDE, row_of.get(name),
            agents.get(name), seats.get(name), name in live, name in standing,
        )
        for order, name in enumerate(memo.of("order of nodes", (named,), _in_order))
    }  # fmt: skip
    return tuple(memo.rows("node", parts, _view).values())


def _in_order(named: Iterable[str]) -> list[str]:
    return sorted(filter(_NAME.fullmatch, named), key=natural)


def _view(  # noqa: PLR0917 - each source of facts
    order: int,
    name: str,
    switch: str,
    row: NodeRow | None,
    agent: NodeRecord | None,
    seat: NodeRole | None,
    live: bool,  # noqa: FBT001 - a part
    standing: bool,  # noqa: FBT001 - a part
) -> NodeView:
    health, reason = _health(row, agent, seat)
    found = [one for one in agent.health if one.severity is not Severity.UNKNOWN] if agent else []
    return NodeView(
        name=name,
        order=order,
        switch=switch,
        health=health,
        state="+".join([row.state.value, *sorted(flag.value for flag in row.flags)]).lower() if row else "",
        reason=reason,
        gpus=row.gpus if row else None,
        job=seat.job if seat else None,
        ranks=seat.ranks if seat else (),
        spare=seat.spare if seat else False,
        shards=agent.shards if agent else None,
        shard_bytes=agent.shard_bytes if agent else None,
        verified_bytes=agent.verified_bytes if agent else None,
        free_bytes=agent.free_bytes // ROOM_STEP * ROOM_STEP if agent else None,
        live=live,
        standing=standing,
        heard_unix=round(agent.seen_unix, 1) if agent and not live else 0.0,
        findings=tuple(in_short(one) for one in found),
        found_unix=min((one.since_unix for one in found), default=0.0),
        unfit=any(one.severity in {Severity.WARNING, Severity.ERROR} for one in found),
        remedy=help_for(name, row, found),
    )


def _health(row: NodeRow | None, agent: NodeRecord | None, seat: NodeRole | None) -> tuple[ShownHealth, str]:
    health = slurm_health(row) if row else ShownHealth.UNKNOWN
    reason = row.reason if row else ""
    if seat is None or not seat.watched or agent is None or agent.job != seat.job:
        return health, reason
    # By its launcher's word, not by our clock: a launcher or a watchdog that fell silent says nothing of the node.
    if agent.silent_s <= SILENT_S:
        return (ShownHealth.BUSY, reason) if row is None else (health, reason)
    if health in {ShownHealth.BUSY, ShownHealth.UNKNOWN, ShownHealth.IDLE}:
        return ShownHealth.SILENT, reason or f"agent silent for {agent.silent_s:.0f} s"
    return health, reason


def natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts n2 before n10.

    >>> sorted(["n10", "n2"], key=natural)
    ['n2', 'n10']
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name) if part]


def switch_views(readings: Readings, memo: Memo) -> tuple[SwitchView, ...]:
    """Return the switch tree: Slurm's own, else what the nodes say of where they hang, else one box for all."""
    slurm = readings.slurm
    return memo.of("switches", (slurm.switches, slurm.nodes, readings.journal.nodes), _switches)


def _switches(
    rows: Sequence[SwitchRow], nodes: Iterable[NodeRow], records: Sequence[NodeRecord]
) -> tuple[SwitchView, ...]:
    views = list(_from_slurm(rows) if rows else _from_addresses(records))
    leaves, known = _leaves(rows, records), {view.name for view in views}
    if any(leaves.get(one.name) not in known for some in (nodes, records) for one in some):
        title = "no switch known" if views else "all nodes (no topology known)"
        views.append(SwitchView(name=OUTSIDE, title=title, level=0, parent=None, order=len(views)))
    return tuple(views)


def _from_slurm(rows: Sequence[SwitchRow]) -> Iterable[SwitchView]:
    parent = {child: row.name for row in rows for child in row.switches}
    for order, row in enumerate(sorted(rows, key=lambda row: natural(row.name))):
        yield SwitchView(name=row.name, title=row.name, level=row.level, parent=parent.get(row.name), order=order)


def _from_addresses(nodes: Iterable[NodeRecord]) -> Iterable[SwitchView]:
    """Build the tree from addresses as Slurm gives them to a node (`core.spine0.leaf1.n3`)."""
    parents: dict[str, str | None] = {}
    depth: dict[str, int] = {}
    for record in nodes:
        path = record.topology_address.split(".")[:-1]
        for above, name in zip([None, *path], path, strict=False):
            parents.setdefault(name, above)
            depth[name] = max(depth.get(name, 0), len(path) - 1 - path.index(name))
    for order, name in enumerate(sorted(parents, key=natural)):
        yield SwitchView(name=name, title=name, level=depth[name], parent=parents[name], order=order)


def _leaves(tree: Sequence[SwitchRow], records: Iterable[NodeRecord]) -> dict[str, str]:
    if tree:
        return {name: row.name for row in tree if row.level == 0 for name in row.nodes}
    return {record.name: record.leaf for record in records if record.leaf}

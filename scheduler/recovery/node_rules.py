"""Which nodes are lost, cut off, sick, rebooted or back, by how many witnesses. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from deeplink.core.finding import Finding, Severity
from deeplink.scheduler.recovery.evidence import (
    FORGOTTEN_S,
    HEARD_SINCE_S,
    MOUNT,
    PROCESSES,
    SLURMD,
    ProbeResult,
    Remedy,
    Verdict,
    may_return,
)
from deeplink.scheduler.recovery.records import IncidentKind, Phase
from deeplink.scheduler.recovery.witnesses import NodeWitness, is_braked, is_proved

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from deeplink.core.types import NodeName
    from deeplink.scheduler.recovery.evidence import JobSnapshot, NodeSnapshot, Snapshot, WatchPolicy

_REMEDIES = {Severity.WARNING: Remedy.COMMENT, Severity.ERROR: Remedy.DRAIN}
"""Nothing else makes a node sick: what is merely observed is in its record, for people."""


def answers(name: NodeName | None, snapshot: Snapshot) -> bool:
    """Whether the node's slurmd answered us just now."""
    return name is not None and name in snapshot.nodes and snapshot.nodes[name].slurmd is ProbeResult.ANSWERS


def long_away(node: NodeSnapshot, policy: WatchPolicy) -> bool:
    """Whether our probes of the node failed often and long enough."""
    long = node.away_probes >= policy.away_probes and node.away_s >= policy.doubt_s
    return node.slurmd.away and not node.down and long


def jobs_on(name: NodeName, snapshot: Snapshot) -> list[JobSnapshot]:
    """Return the live jobs that have the node."""
    return [job for job in snapshot.jobs if job.live and name in job.nodes]


def missed(job: JobSnapshot, policy: WatchPolicy) -> set[NodeName]:
    """Return the nodes whose agent the job's launcher misses."""
    return {name for name, silent_s in job.agents_silent.items() if silent_s >= policy.doubt_s}


def is_lost(
    job: JobSnapshot, snapshot: Snapshot, policy: WatchPolicy, given_up: AbstractSet[NodeName | None]
) -> bool:
    """Whether the launcher is gone: its host is given up, or it is silent for long though its host answers."""
    # Under salloc the launcher runs outside of the allocation, or Slurm does not say where: no lost node ends it.
    host = snapshot.nodes.get(job.batch_host) if job.batch_host else None
    if host and (host.name in given_up or host.name not in job.nodes or host.down):
        return job.beat_age_s >= policy.silence_s
    # One that we never heard may have ended while we were away, and its script may have gone on to something else.
    return job.heard and job.beat_age_s >= policy.launcher_lost_s


def needs_rescue(
    job: JobSnapshot, snapshot: Snapshot, policy: WatchPolicy, given_up: AbstractSet[NodeName | None]
) -> bool:
    """Whether the job cannot help itself, or does not, should these nodes be lost."""
    return (
        job.phase is Phase.STRANDED
        or is_lost(job, snapshot, policy, given_up)
        or bool(waits_for(job, policy, given_up))
    )


def waits_for(
    job: JobSnapshot, policy: WatchPolicy, given_up: AbstractSet[NodeName | None]
) -> tuple[NodeName, ...]:
    """Return the lost nodes for which a launcher waits that has had time to go on without them."""
    # Where most of its nodes are silent at once, a launcher cannot know whether it is they or itself: it touches
    # nothing for a minute. We know.
    if job.phase not in {Phase.STARTING, Phase.RUNNING} or job.beat_age_s >= policy.tense_beat_s:
        return ()
    return tuple(
        name
        for name in job.rank_nodes
        if name in given_up and job.agents_silent.get(name, 0.0) >= policy.help_itself_s
    )


# Dead nodes.


def dead_nodes(
    snapshot: Snapshot, policy: WatchPolicy, on_silent_leaf: set[NodeName]
) -> dict[NodeName, tuple[str, ...]]:
    """Return the nodes proved dead, each with the proof; those of a silent leaf are not looked at."""
    dead = {}
    for name, node in sorted(snapshot.nodes.items()):
        if (
            not node.slurmd.away
            or name in on_silent_leaf
            or not long_away(node, policy)
            or not _others_answer(node, snapshot)
        ):
            continue
        others = _witnesses(node, snapshot, policy)
        if is_proved({NodeWitness.MACHINE, *others}):
            said = "refuses connections" if node.slurmd is ProbeResult.REFUSES else "is silent"
            seen = f"slurmd {said} for {node.away_s:.1f} s ({node.away_probes} probes)"
            dead[name] = (seen, *(why for whys in others.values() for why in whys))
    return dead


def _others_answer(node: NodeSnapshot, snapshot: Snapshot) -> bool:
    mates = [
        other
        for other in snapshot.nodes.values()
        if other.leaf == node.leaf and other.leaf and other.name != node.name and not other.down and not other.ours
    ]
    witnesses = mates or [other for other in snapshot.nodes.values() if other.name != node.name]
    heard = any(other.slurmd in {ProbeResult.ANSWERS, ProbeResult.REFUSES} for other in witnesses)
    return heard and any(other.slurmd is ProbeResult.ANSWERS for other in snapshot.nodes.values())


def _witnesses(node: NodeSnapshot, snapshot: Snapshot, policy: WatchPolicy) -> dict[NodeWitness, list[str]]:
    """Return who else misses the node, and why; empty where one hears it, or it is not our business."""
    jobs = jobs_on(node.name, snapshot)
    said: dict[NodeWitness, list[str]] = {}
    if node.heard_since:
        return said
    for job in jobs:
        silent = job.agents_silent.get(node.name)
        if silent is not None and job.beat_age_s < policy.tense_beat_s:
            if silent < policy.doubt_s:
                return {}
            if silent >= policy.silence_s:
                why = f"the launcher of job {job.name} misses its agent for {silent:.1f} s"
                said.setdefault(NodeWitness.AGENT, []).append(why)
        if job.batch_host == node.name and job.beat_age_s >= policy.silence_s:
            why = f"it is the batch host of job {job.name}, not heard for {job.beat_age_s:.1f} s"
            said.setdefault(NodeWitness.AGENT, []).append(why)
    if jobs and not node.responding and node.slurmd is ProbeResult.SILENT and node.away_s >= policy.silence_s:
        said[NodeWitness.CONTROLLER] = [NodeWitness.CONTROLLER.value]
    return said


def node_remedy(
    name: NodeName, snapshot: Snapshot, policy: WatchPolicy, together: AbstractSet[NodeName | None] = frozenset()
) -> Remedy:
    """Return DRAIN_DOWN where a job of ours needs it and no other job loses by it; `together` is given up too."""
    # DOWN ends what runs there.
    jobs = jobs_on(name, snapshot)
    needed = [job for job in jobs if needs_rescue(job, snapshot, policy, {name, *together})]
    used = [job for job in jobs if job not in needed and name in job.rank_nodes]
    return Remedy.DRAIN_DOWN if needed and not used and not snapshot.nodes[name].strangers else Remedy.DRAIN


def blamed(
    snapshot: Snapshot, policy: WatchPolicy, name: NodeName, why: tuple[str, ...], held: tuple[str, ...]
) -> Verdict:
    """Return the verdict on a dead node; nothing is done where the brake holds us back."""
    jobs = jobs_on(name, snapshot)
    needy = [job for job in jobs if needs_rescue(job, snapshot, policy, {name})]
    silences = [job.agents_silent.get(name, 0.0) for job in jobs]
    job = (needy or jobs)[0]
    return Verdict(
        kind=IncidentKind.NODE_DEAD,
        remedy=Remedy.NOTHING if held else node_remedy(name, snapshot, policy),
        reasons=(*why, *held),
        attempt=job.attempt,
        node=name,
        idle=name not in job.rank_nodes and not needy,
        since_s=max(snapshot.nodes[name].away_s, *silences),
    )


def brake(dead: Mapping[NodeName, object], snapshot: Snapshot, policy: WatchPolicy) -> tuple[str, ...]:
    """Return why so many deaths at once are not believed yet; empty when they are."""
    # Nodes that one job loses at once are one loss, and one incident, however many.
    silent_s: dict[object, float] = {}
    for name in {*dead, *snapshot.dead_lately}:
        job = next((job.attempt.job for job in jobs_on(name, snapshot)), name)
        away_s = snapshot.nodes[name].away_s if name in dead else 0.0
        silent_s[job] = min(away_s, silent_s.get(job, away_s))
    if not dead or not is_braked(silent_s.values(), len(snapshot.nodes), policy):
        return ()
    said = f"nothing is done until they have lasted {policy.brake_s:.0f} s"
    return (f"brake: {len(silent_s)} losses at once: {said}",)


# Silent leaves: is it their switch?


def silent_leaves(nodes: Mapping[NodeName, NodeSnapshot]) -> dict[str, tuple[NodeSnapshot, ...]]:
    """Return the leaves with two nodes or more of which none answers: their switch is the simpler explanation."""
    # Nodes given up before (down, or drained by us) do not count: two deaths far apart are no switch. Those given
    # up in the leaf's own name do: it is silent still. Where an agent is heard, the switch carries it.
    members = defaultdict(list)
    for node in nodes.values():
        if node.leaf and (node.of_leaf or not (node.down or node.ours)):
            members[node.leaf].append(node)
    return {
        leaf: tuple(sorted(those, key=lambda node: node.name))
        for leaf, those in sorted(members.items())
        if len(those) > 1
        and all(map(_silent_leaf, those))
        and any(node.slurmd is ProbeResult.SILENT for node in those)
    }


def _silent_leaf(node: NodeSnapshot) -> bool:
    # What is down is not probed any more.
    silent = node.slurmd is ProbeResult.SILENT or (node.down and node.slurmd is ProbeResult.UNKNOWN)
    return silent and not node.heard_since


def _misses(job: JobSnapshot, leaf: set[NodeName], policy: WatchPolicy) -> bool:
    """Whether a job is the second witness: its launcher misses an agent there, or ran there and is silent."""
    if job.beat_age_s >= policy.tense_beat_s:
        return job.batch_host in leaf and job.beat_age_s >= policy.silence_s
    return any(job.agents_silent.get(name, 0.0) >= policy.silence_s for name in leaf)


def about_leaf(
    leaf: tuple[NodeSnapshot, ...], snapshot: Snapshot, policy: WatchPolicy, leaves: int
) -> list[Verdict]:
    """Return what is to be said and done about a silent leaf, one of so many; empty while too early, or done."""
    # Nodes that a job of ours has are given up in the leaf's name: a job whose nodes cannot be reached is started
    # again only when Slurm has given them up (docs/decisions/0021). One leaf at a time.
    names = [node.name for node in leaf]
    hit = [job for job in snapshot.jobs if job.live and set(names) & set(job.nodes)]
    watched = [node for node in leaf if not node.down]
    if not hit or not watched or not all(long_away(node, policy) for node in watched):
        return []
    long = all(node.away_s >= policy.silence_s for node in watched)
    if not long and not any(_misses(job, set(names), policy) for job in hit):
        return []
    name = leaf[0].leaf
    who = f"all {len(names)} nodes of {name} ({', '.join(names)})"
    since = max(node.away_s for node in watched)
    verdict = Verdict(
        kind=IncidentKind.SWITCH_SUSPECT,
        remedy=Remedy.NOTHING,
        reasons=(f"{who} are silent for {since:.1f} s, others answer: the switch",),
        attempt=hit[0].attempt,
        leaf=name,
        since_s=since,
    )
    lately = snapshot.leaves_lately - {name}
    if leaves > 1 or lately:
        said = f"brake: {leaves + len(lately)} leaves within {policy.brake_s:.0f} s; one at a time is believed"
        return [replace(verdict, reasons=(*verdict.reasons, said))]
    down = [
        replace(verdict, remedy=node_remedy(node.name, snapshot, policy, set(names)), node=node.name)
        for node in watched
        if any(node.name in job.nodes for job in hit)
    ]
    return [verdict, *down]


# Nodes that live without their slurmd.


def lost_slurmds(
    snapshot: Snapshot, policy: WatchPolicy, elsewhere: AbstractSet[NodeName | None]
) -> list[Verdict]:
    """Return the nodes that live without a slurmd; nothing is done to them, nor those of another verdict."""
    # The node's system agent starts slurmd again. Where none stands, Slurm sets the node down after SlurmdTimeout
    # and starts the job again; that this was slurmd's fault, not the node's, is on record then.
    return [
        verdict
        for name, node in sorted(snapshot.nodes.items())
        if (node.slurmd.away or node.findings) and name not in elsewhere and not node.down
        if (verdict := _lost(node, snapshot, policy))
    ]


def _lost(node: NodeSnapshot, snapshot: Snapshot, policy: WatchPolicy) -> Verdict | None:
    known = [one for one in node.findings if one.check == SLURMD and one.severity is not Severity.UNKNOWN]
    said = tuple([f"its own check: {one.text}" for one in known])
    heard = (f"an agent on it was heard {node.heard_s:.1f} s ago",) if node.heard_since else ()
    # Gone is worth a comment; what is only to be observed is that the agent has started it again.
    again = not node.slurmd.away and Severity.NOTE in [one.severity for one in known]
    if not again and not (node.slurmd.away and said) and not (long_away(node, policy) and heard):
        return None
    jobs = jobs_on(node.name, snapshot)
    how = "refuses connections" if node.slurmd is ProbeResult.REFUSES else "is silent"
    seen = (f"slurmd {how} for {node.away_s:.1f} s ({node.away_probes} probes)",) if node.slurmd.away else ()
    return Verdict(
        kind=IncidentKind.SLURMD_LOST,
        remedy=Remedy.NOTHING,
        reasons=(*seen, *said, *(heard if seen else ())),
        attempt=jobs[0].attempt if jobs else None,
        node=node.name,
        since_s=node.away_s,
    )


# Nodes that are sick by their own checks.


def sick_nodes(snapshot: Snapshot, policy: WatchPolicy, elsewhere: AbstractSet[NodeName | None]) -> list[Verdict]:
    """Return what the nodes' checks found, leaving out nodes that are `elsewhere`: another verdict's."""
    frozen = storage_frozen(snapshot, policy)
    telling = {
        name: node
        for name, node in sorted(snapshot.nodes.items())
        if node.findings and name not in elsewhere and not node.down
    }
    found = {name: those for name, node in telling.items() if (those := counting(node, storage_frozen=frozen))}
    known = {name: counting(node, storage_frozen=False) for name, node in telling.items()}
    grave = {name for name, those in known.items() if those and those[0].severity is Severity.ERROR}
    # A site's check gone wrong finds fault with every node, one after another: it must not drain them all.
    count = len(grave | {name for name, node in snapshot.nodes.items() if node.sick})
    braked = is_braked([0.0] * count, len(snapshot.nodes), policy)
    held = (f"brake: {count} nodes sick at once: is a check at fault?",) if braked else ()
    return [_verdict(snapshot.nodes[name], those, held) for name, those in found.items()]


def storage_frozen(snapshot: Snapshot, policy: WatchPolicy) -> bool:
    """Whether mounts are stuck on so many nodes at once that it is the storage's fault, not theirs."""
    # Unknown counts here: it does no one harm to be taken for frozen, and a hanging look is how a freeze shows.
    stuck = [node for node in snapshot.nodes.values() if any(one.check == MOUNT for one in node.findings)]
    return len(stuck) > policy.most_at_once


def counting(node: NodeSnapshot, *, storage_frozen: bool) -> tuple[Finding, ...]:
    """Return the findings that speak of the node itself, the gravest first."""
    # A slurmd that is gone is a verdict of its own, a mount stuck everywhere is the storage's; what a check
    # could not tell is never bad.
    apart = {SLURMD, MOUNT} if storage_frozen else {SLURMD}
    known = [one for one in node.findings if one.severity in _REMEDIES and one.check not in apart]
    ladder = list(_REMEDIES)
    return tuple(sorted(known, key=lambda one: -ladder.index(one.severity)))


def _verdict(node: NodeSnapshot, findings: tuple[Finding, ...], held: tuple[str, ...]) -> Verdict:
    """A drain that is braked, or that an administrator made already, leaves the milder remedy: the comment."""
    reasons = tuple(f"{one.check} ({one.severity.action}): {one.text}" for one in findings)
    remedy = _REMEDIES[findings[0].severity]
    if remedy is Remedy.DRAIN and (held or (node.drained and not node.ours)):
        remedy, reasons = Remedy.COMMENT, (*reasons, *held)
    return Verdict(kind=IncidentKind.NODE_SICK, remedy=remedy, reasons=reasons, node=node.name)


# Nodes that we drained and that may come back.


def returning(snapshot: Snapshot, policy: WatchPolicy) -> list[Verdict]:
    """Return the nodes that we drained and that are well again: by policy, or given up in their leaf's name."""
    return [
        Verdict(
            kind=IncidentKind.NODE_BACK,
            remedy=Remedy.RESUME,
            reasons=(f"we drained it; it answers for {node.answering_s:.0f} s and is registered", *_checks(node)),
            node=name,
        )
        for name, node in sorted(snapshot.nodes.items())
        if node.ours and may_return(node, policy) and _is_back(node, policy)
    ]


def _is_back(node: NodeSnapshot, policy: WatchPolicy) -> bool:
    if not node.drained or node.answering_s < policy.resume_s:
        return False
    needed_s = policy.resume_sick_s if node.of_leaf or node.sick else policy.resume_s
    if any(map(bars_return, node.findings)):
        return False
    # Where a standing agent is known, its own word is needed, and has to last.
    return (node.answering_s if node.attended_s is None else node.well_s) >= needed_s


def bars_return(finding: Finding) -> bool:
    """Whether a node with this finding is not to come back: it is grave, or what was left there still runs."""
    if finding.severity is Severity.UNKNOWN:
        return False
    return finding.severity is not Severity.NOTE or finding.check == PROCESSES


def _checks(node: NodeSnapshot) -> tuple[str, ...]:
    return (f"its checks find nothing against it for {node.well_s:.0f} s",) if node.attended_s is not None else ()


# Nodes that rebooted under a job, perhaps before Slurm noticed.


def rebooted(job: JobSnapshot, snapshot: Snapshot, policy: WatchPolicy) -> tuple[NodeName, ...]:
    """Return the job's nodes that have another kernel than it began with, and that its launcher misses."""
    # A node whose agent its launcher hears has not rebooted since, whatever else is said of kernels: slurmd alone,
    # started again, may show another boot time.
    return tuple(
        name for name in job.nodes if name in snapshot.nodes and _another_kernel(job, snapshot.nodes[name], policy)
    )


def began_again(job: JobSnapshot, snapshot: Snapshot) -> tuple[NodeName, ...]:
    """Return the nodes that a job which is in the queue again last had, and that booted since it fell silent."""
    # Not of one that waits for long: its user may have put it off, and nodes boot for other reasons.
    if job.unheard_s > FORGOTTEN_S:
        return ()
    names = {*job.rank_nodes, *job.spares, *job.agents_silent}
    nodes = [node for name, node in snapshot.nodes.items() if name in names]
    if not job.heard:
        return _lost_its_script(job, nodes)
    return tuple(
        node.name
        for node in nodes
        if any(age is not None and age <= job.beat_age_s for age in (node.booted_s, node.slurmd_restarted_s))
    )


def _lost_its_script(job: JobSnapshot, nodes: Sequence[NodeSnapshot]) -> tuple[NodeName, ...]:
    """Return the batch host, if its slurmd was started while we were not there to see it, and others' were not."""
    # Slurm requeues a job for that node alone: the first one, in its own order. Where all were started, that was
    # maintenance, or somebody's will.
    anew = [node for node in nodes if node.slurmd_age_s is not None and node.slurmd_age_s <= job.unheard_s]
    if not anew or anew[0] is not nodes[0] or 1 < len(nodes) == len(anew):
        return ()
    return (nodes[0].name,)


def _another_kernel(job: JobSnapshot, node: NodeSnapshot, policy: WatchPolicy) -> bool:
    silent_s = _missed_s(job, node.name, policy)
    if silent_s is None:
        return False
    before = job.boots.get(node.name, "")
    if before and node.boot_id and before != node.boot_id:
        return True
    if before and node.heard_s is not None and silent_s - node.heard_s >= HEARD_SINCE_S:
        return False  # an agent was heard there since, and told about the same kernel
    if node.booted_s is not None and node.booted_s <= silent_s:
        return True
    # Without anybody to tell its kernel: what fell silent was followed by a new slurmd.
    anew = node.slurmd_restarted_s is not None and node.slurmd_restarted_s <= silent_s
    return anew and silent_s >= policy.help_itself_s


def _missed_s(job: JobSnapshot, name: NodeName, policy: WatchPolicy) -> float | None:
    """Return for how long the launcher misses its agent there, or we miss it, if it ran there; None: not."""
    if name == job.batch_host:
        return job.beat_age_s if job.beat_age_s >= policy.silence_s else None
    silent_s = job.agents_silent.get(name, 0.0)
    return silent_s if job.beat_age_s < policy.tense_beat_s and silent_s >= policy.doubt_s else None


def beyond_help(job: JobSnapshot, name: NodeName, snapshot: Snapshot, policy: WatchPolicy) -> bool:
    """Whether the launcher has had its time to recover from the loss of a node that answers again, and has not."""
    if not answers(name, snapshot):
        return False
    return name == job.batch_host or job.agents_silent.get(name, 0.0) >= policy.help_itself_s

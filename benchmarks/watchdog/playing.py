"""One run of one scenario: the stand, the job, the fault, and the facts afterwards."""

from __future__ import annotations

import random
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.watchdog.facts import Facts, newest_step
from benchmarks.watchdog.judging import Figures, judge
from benchmarks.watchdog.scenarios import AT_STEP, EIGHT, After, Hit, Never, Rights, Scenario, StockCase
from benchmarks.watchdog.stand import Stand, StandError, until, wait
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt
from deeplink.scheduler.recovery.evidence import Remedy
from deeplink.scheduler.testbed.lab.laboratory import How
from deeplink.scheduler.testbed.shape import CTL

if TYPE_CHECKING:
    from benchmarks.watchdog.facts import Line

START_S = 90.0
"""How long a job may take to its first steps: Python and torch on two cores."""
BACK_S = 90.0
"""So long a healed node is waited for: Slurm looks for it now and then, and it is to answer for 10 s."""
_ALONE: AbstractContextManager[object] = nullcontext()


@dataclass(frozen=True, slots=True)
class Played:
    """What a run was, and what it came to."""

    facts: Facts
    figures: Figures


def play(scenario: Scenario, seed: int, starting: AbstractContextManager[object] = _ALONE) -> Played:
    """Run a scenario once.

    Args:
        scenario: which.
        seed: of what is drawn.
        starting: is held while cluster and job come up, which loads the machine.

    Raises:
        StandError: it did not come so far as the fault, or the watchdog not so far as its own.
    """
    with ExitStack() as held:
        with starting:
            stand = held.enter_context(Stand.up(scenario.shape, freezable=scenario.freezable))
            stand.watch(scenario.rights, *(["--resume"] if scenario.resume else []))
            if scenario.standing:
                stand.attend()
            _submit(stand, scenario)
            _await_steps(stand, scenario.at_step)
        return _hurt(stand, scenario, random.Random(seed))  # noqa: S311 - no secret


def _submit(stand: Stand, scenario: Scenario) -> None:
    options = f"-N{scenario.nodes} --exclusive --no-kill --requeue {scenario.sbatch}"
    if scenario.all_gpus:
        options += f" --gres=gpu:{stand.cluster.shape.gpus}"
    run = f"exec deeplink run --nproc-per-node 1 --spares {scenario.spares} {scenario.options} --"
    train = stand.train(*(["--torch"] if scenario.torch else []))
    stand.submit(options, f"{run} {train}", watched=scenario.rights is not Rights.NONE)


def _await_steps(stand: Stand, step: int) -> None:
    if not until(lambda: newest_step(stand.lines()) >= step, START_S):
        raise StandError(f"the job does not come to step {step}: {stand.row()} {stand.output()[-2000:]}")


def _rank_nodes(lines: tuple[Line, ...]) -> tuple[Attempt, dict[int, str]]:
    """Return the newest attempt, and where each of its ranks runs."""
    attempt = max(line.attempt for line in lines)
    return attempt, {line.rank: line.node for line in lines if line.attempt == attempt}


def _target(stand: Stand, hit: Hit, nodes: dict[int, str], chance: random.Random) -> tuple[str, tuple[str, ...]]:
    """Return the fault's target, and the nodes that it hits."""
    row = stand.row()
    host = row.batch_host if row else None
    others = [nodes[rank] for rank in sorted(nodes) if rank and nodes[rank] != host]
    fixed = {
        Hit.CONTROL: CTL,
        Hit.CHECKPOINTS: str(stand.folder / "checkpoints"),
        Hit.JOB: str(stand.folder),
        Hit.ALL: "",
    }
    if hit in fixed:
        return fixed[hit], ()
    match hit:
        case Hit.LAST:
            return others[-1], (others[-1],)
        case Hit.MIDDLE:
            node = chance.choice(others)
            return node, (node,)
        case Hit.LEAF:
            shape = stand.cluster.shape
            leaves = [
                s for s in shape.switches if s.nodes and host not in s.nodes and {*s.nodes} & {*nodes.values()}
            ]
            if not leaves:
                raise StandError(f"all ranks are on the batch host's leaf: {nodes}")
            return leaves[0].name, leaves[0].nodes
    raise ValueError(hit)


def _hurt(stand: Stand, scenario: Scenario, chance: random.Random) -> Played:
    attempt, nodes = _rank_nodes(stand.lines())
    target, victims = _target(stand, scenario.hit, nodes, chance)
    how = How(rank=max(nodes) if scenario.hit is Hit.JOB else None, always=scenario.always)
    written, began = len(stand.output()), time.time()
    if scenario.then:
        # First, so that no rank saves a newer checkpoint than the one that is torn.
        dead, victims = _target(stand, Hit.LAST, nodes, chance)
        stand.lab.inject(scenario.then, dead)
    stand.lab.inject(scenario.fault, target, how)
    if scenario.kill_watchdog_at:
        _kill_watchdog(stand, scenario)
    over = _watched(stand, scenario, attempt, began)
    facts = _gathered(stand, scenario, attempt, began=began, over=over, victims=victims, written=written)
    return Played(facts, judge(scenario, facts))


def _kill_watchdog(stand: Stand, scenario: Scenario) -> None:
    if not until(lambda: scenario.kill_watchdog_at in stand.said(), scenario.bound_s):
        raise StandError(f"the watchdog never said {scenario.kill_watchdog_at!r}: {stand.said()[-2000:]}")
    stand.lab.inject("watchdog-killed", CTL)
    wait(1.0)
    stand.lab.undo("watchdog-killed", CTL)


def _watched(stand: Stand, scenario: Scenario, attempt: Attempt, began: float) -> float:
    """Wait for what is to come, undo the fault in time, watch on; return when it was undone, 0 if not."""
    over = 0.0

    def undone() -> None:
        nonlocal over
        if scenario.hold_s is not None and not over and time.time() >= began + scenario.hold_s:
            over = time.time()
            stand.lab.undo(scenario.fault)

    def came() -> bool:
        undone()
        if scenario.after is After.SAME:
            return bool(over)
        if scenario.after is After.HELD:
            row = stand.row()
            return (
                row is not None and (row.state.final or row.state.value == "PENDING") and bool(stand.incidents())
            )
        return _facts_now(stand, attempt).first_step is not None

    until(came, max(scenario.bound_s, (scenario.hold_s or 0) + 5))
    if scenario.hold_s is not None and not over:
        wait(max(0.0, began + scenario.hold_s - time.time()))
        undone()
    if scenario.resume:
        until(lambda: any(one.remedy == Remedy.RESUME and one.done_unix for one in stand.actions()), BACK_S)
    if scenario.kinds:
        until(lambda: any(told.kind in scenario.kinds for told in stand.incidents()), scenario.bound_s)
    wait(scenario.settle_s)
    return over


def _facts_now(stand: Stand, attempt: Attempt) -> Facts:
    return Facts(fault_unix=0.0, attempt=attempt, lines=stand.lines())


def _gathered(
    stand: Stand,
    scenario: Scenario,
    attempt: Attempt,
    *,
    began: float,
    over: float,
    victims: tuple[str, ...],
    written: int,
) -> Facts:
    """Read everything; `written` is how much the job had written before the fault."""
    output = stand.output()
    lines, row = stand.lines(), stand.row()
    first = Facts(fault_unix=began, attempt=attempt, lines=lines).first_step
    fence = first.unix if first else 0.0
    incidents = stand.incidents()
    drained: dict[str, str] = {str(node.name): node.reason for node in stand.nodes() if node.drained or node.down}
    gpus = stand.all_gpus() if Never.GRES in scenario.never and first else None
    return Facts(
        fault_unix=began,
        attempt=attempt,
        over_unix=over,
        victims=victims,
        lines=lines,
        incidents=tuple(told for told in incidents if told.detected_unix >= began),
        early=tuple(sorted({told.id for told in incidents if told.detected_unix < began})),
        actions=stand.actions(),
        state=row.state.value if row else "",
        reason=row.reason if row else "",
        restarts=row.restarts if row else 0,
        drained=drained,
        saves=late_saves(stand, attempt, fence) if first else (),
        late_lines=late_output(output, attempt) if first else 0,
        late_points=stand.late_points(attempt, fence) if first else 0,
        output=output[written:],
        gpus_s=gpus,
        job_ids=(stand.job,),
    )


def late_saves(stand: Stand, attempt: Attempt, fence: float) -> tuple[str, ...]:
    """Return the checkpoints that an older attempt put into the folder after the fence."""
    found = []
    for path in sorted((stand.folder / "checkpoints").glob("step-*/manifest.json")):
        with suppress(OSError):
            if path.stat().st_mtime > fence and f'"{attempt}"' in path.read_text(encoding="utf-8"):
                found.append(path.parent.name)
    return tuple(found)


def late_output(output: str, attempt: Attempt) -> int:
    """Return how many lines of an older attempt came after the newer one's first."""
    words = [line.split()[0] for line in output.splitlines() if line[:1].isdigit()]
    newer = next((place for place, word in enumerate(words) if _newer(word, attempt)), len(words))
    return sum(1 for word in words[newer:] if word == str(attempt))


def _newer(word: str, attempt: Attempt) -> bool:
    try:
        return Attempt.parse(word) > attempt
    except DeepLinkError:
        return False


# -- stock Slurm


_STOCK = """\
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1) MASTER_PORT=23456
exec srun bash -c 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS; exec {train}'
"""


def play_stock(case: StockCase, seed: int, starting: AbstractContextManager[object] = _ALONE) -> float | None:
    """Return the seconds from fault to the next incarnation's first step; None where there was none in time.

    `starting` is held while cluster and job come up.

    Raises:
        StandError: it did not come so far as the fault.
    """
    with ExitStack() as held:
        with starting:
            stand = held.enter_context(Stand.up(EIGHT))
            stand.submit("-N4 --exclusive --requeue", _STOCK.format(train=stand.train()), watched=False)
            _await_steps(stand, AT_STEP)
        attempt, nodes = _rank_nodes(stand.lines())
        target, _ = _target(stand, case.hit, nodes, random.Random(seed))  # noqa: S311 - no secret
        began = time.time()
        stand.lab.inject(case.fault, target, How(rank=max(nodes) if case.hit is Hit.JOB else None))
        over = False

        def came() -> bool:
            nonlocal over
            if case.hold_s is not None and not over and time.time() > began + case.hold_s:
                over = True
                stand.lab.undo(case.fault)
            return _facts_now(stand, attempt).first_step is not None

        until(came, case.bound_s)
        first = _facts_now(stand, attempt).first_step
        return None if first is None else first.unix - began

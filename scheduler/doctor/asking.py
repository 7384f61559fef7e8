"""Asking Slurm for the evidence: five questions at once, each bounded; what is not answered is told as such."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from deeplink.errors import DeepLinkError
from deeplink.scheduler.doctor.evidence import SiteEvidence
from deeplink.scheduler.slurm.command import COMMAND_TIMEOUT_S
from deeplink.scheduler.slurm.nodeset import unfold
from deeplink.scheduler.slurm.parse import parse_nodes, parse_topology
from deeplink.scheduler.slurm.partitions import parse_partitions
from deeplink.scheduler.slurm.settings import parse_settings
from deeplink.scheduler.slurm.states import LASTING_FLAGS, NodeState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deeplink.clock import Clock
    from deeplink.config import Config
    from deeplink.scheduler.slurm.command import Runner
    from deeplink.types import NodeName

MOST_NODES = 4
"""How many nodes are looked at where nobody said."""
IMMEDIATE_S = 30
_STEP_MINUTES = 5


def _nodes_of_lines(text: str) -> list[NodeName]:
    return [node for line in text.splitlines() for node in unfold(line.strip())]


_QUESTIONS: Mapping[str, tuple[Sequence[str], Callable[[str], Any]]] = {
    "settings": (("scontrol", "show", "config"), parse_settings),
    "nodes": (("scontrol", "--details", "show", "node", "--oneliner"), parse_nodes),
    "partitions": (("scontrol", "--all", "show", "partition", "--oneliner"), parse_partitions),
    "topology": (("scontrol", "show", "topology"), parse_topology),
    "suspended jobs": (("squeue", "-h", "-a", "--states=SUSPENDED", "-o", "%N"), _nodes_of_lines),
}
# Beside a job's own steps, and taking nothing from them; one node's death must not end it on the others.
_INSIDE = ("--overlap", "--gres=none", "--mem=0", "--cpus-per-task=1")
_OUTSIDE = (f"--immediate={IMMEDIATE_S}", f"--time={_STEP_MINUTES}", "--mem=1024M")
_ALWAYS = ("--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--quiet")


def asked_slurm(config: Config, run: Runner, clock: Clock) -> SiteEvidence:
    """Return what Slurm says of itself; what it does not say is in `problems`."""
    answers: dict[str, Any] = {}
    problems: dict[str, str] = {}
    asked: list[tuple[float, float]] = []

    def ask(what: str) -> None:
        argv, parse = _QUESTIONS[what]
        began = clock.unix()
        try:
            said = run(argv, timeout_s=COMMAND_TIMEOUT_S)
            if what == "settings":
                asked.append((began, clock.unix()))
            answers[what] = parse(said)
        except DeepLinkError as problem:
            problems[what] = str(problem)

    with ThreadPoolExecutor(len(_QUESTIONS)) as pool:
        list(pool.map(ask, _QUESTIONS))
    return SiteEvidence(
        config=config,
        settings=answers.get("settings"),
        nodes=_whole(answers.get("nodes")),
        partitions=_whole(answers.get("partitions")),
        switches=_whole(answers.get("topology")),
        suspended=_whole(answers.get("suspended jobs")),
        asked=asked[0] if asked else (0.0, 0.0),
        problems=problems,
    )


def _whole(rows: list[Any] | None) -> tuple[Any, ...] | None:
    return None if rows is None else tuple(rows)


def nodes_to_look_at(evidence: SiteEvidence) -> int:
    """Return how many nodes to look at where nobody said: as many as are idle, up to `MOST_NODES`."""
    idle = [row for row in evidence.nodes or () if row.state is NodeState.IDLE and row.flags <= LASTING_FLAGS]
    return min(len(idle), MOST_NODES)


def step_command(
    count: int, *, inside: bool, options: Sequence[str], program: Sequence[str], name: str = "deeplink-doctor"
) -> list[str]:
    """Return the srun that starts `program` once on each of so many nodes.

    Args:
        count: nodes.
        inside: whether we are in an allocation, of whose nodes these are.
        options: of the user's, last, so that they win.
        program: what to start.
        name: of the job, by which it can be cancelled.
    """
    where = _INSIDE if inside else _OUTSIDE
    return [
        "srun",
        f"--nodes={count}",
        f"--ntasks={count}",
        f"--job-name={name}",
        *_ALWAYS,
        *where,
        *options,
        *program,
    ]

"""How commands name one job; and that nothing else names one to a command that changes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.parse import JobAddress
from deeplink.scheduler.slurm.states import SlurmValueError
from tests.scheduler.slurm.test_client import Recorder

ROOT = Path(__file__).parents[3]
MAKERS = {
    "scheduler/slurm/parse.py": "squeue's label",
    "scheduler/placement/hint/cluster_survey.py": "squeue's label",
    "scheduler/slurm/client.py": "scontrol's record of the job",
    **dict.fromkeys(
        (
            "scheduler/watch/operator_requests.py",
            "scheduler/watch/operator_plan.py",
            "scheduler/watch/operator_actions.py",
        ),
        "what an operator named, after the check that it names one job",
    ),
}
ORDERS = {
    "scheduler/slurm/client.py",
    "scheduler/watch/requeue.py",
    "scheduler/watch/operator_requests.py",
    "scheduler/placement/hint/planner.py",
}
"""Where words are put together that change a job: by a `JobAddress` each."""


@pytest.mark.parametrize("text", ["", "12_[1-3]", "12_*", "12.0", "12_3.0", "-1", "012", "12 13", "12\n", "1٢"])
def test_what_is_not_one_job_is_refused(text: str) -> None:
    with pytest.raises(SlurmValueError, match=r"does not name one job"):
        JobAddress.of_label(text)


def test_a_component_is_not_requeued_and_slurm_is_not_asked() -> None:
    run = Recorder()
    component = JobAddress.of_label("12+1")
    for order in (Slurm(run).requeue, Slurm(run).hold):
        with pytest.raises(DeepLinkError, match="only all of them at once") as caught:
            order(component)
        assert " 12`" in caught.value.remedy
    assert run.asked == []


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("scheduler", "deeplink"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(("deeplink/scheduler/", "deeplink/v1/", "deeplink/cache/")):
                yield name, ast.parse(path.read_text(encoding="utf-8"))


def _makes(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name("JobAddress"))) | ast.Call(func=ast.Name("JobAddress")):
            return True
    return False


def _orders(node: ast.AST) -> bool:
    match node:
        case (
            ast.List(elts=[ast.Constant("scontrol"), ast.Constant(verb), *_])
            | ast.Tuple(elts=[ast.Constant("scontrol"), ast.Constant(verb), *_])
        ):
            return verb in {"update", "requeue", "requeuehold", "hold", "uhold", "release", "suspend", "top"}
    return False


def test_addresses_are_made_where_slurm_speaks_and_nowhere_else() -> None:
    made = {name for name, tree in _modules() if any(map(_makes, ast.walk(tree)))}
    assert made == MAKERS.keys()


def test_commands_that_change_jobs_are_put_together_in_few_places() -> None:
    assert {name for name, tree in _modules() if any(map(_orders, ast.walk(tree)))} == ORDERS

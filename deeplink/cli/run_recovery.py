"""Options of `deeplink run` that say what is done when ranks or nodes fail."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from deeplink.ranges import FiniteRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.scheduler.launch.verdict import RelaunchPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """What the options say; the fields are named as they are."""

    elastic: int | None
    no_retry: bool
    max_relaunches: int | None
    final_codes: tuple[int, ...]
    hold: bool | None
    time_margin: float | None
    strand_timeout: float

    def policy(self) -> RelaunchPolicy:
        """Return the thresholds of verdicts."""
        from deeplink.scheduler.launch.failure import RelaunchLimits
        from deeplink.scheduler.launch.verdict import RelaunchPolicy

        limits = RelaunchLimits(
            most_relaunches=self.max_relaunches,
            retries=not self.no_retry,
            final_codes=frozenset(self.final_codes),
        )
        return RelaunchPolicy(limits=limits)

    def check(self, count: int) -> None:
        """Check that they fit a run on so many nodes.

        Raises:
            UsageError: they do not.
        """
        if self.elastic is not None and self.elastic > count:
            raise click.UsageError(f"--elastic {self.elastic}: only {count} nodes run ranks")


_OPTIONS = (
    click.option(
        "--elastic",
        type=click.IntRange(min=1),
        envvar="DEEPLINK_ELASTIC",
        metavar="MIN",
        help="Go on with fewer nodes, down to MIN, where no more are left. [default: wait for a rescue]",
    ),
    click.option("--no-retry", is_flag=True, help="Ranks that fail end the run; lost nodes are still replaced."),
    click.option(
        "--max-relaunches",
        type=click.IntRange(min=0),
        envvar="DEEPLINK_MAX_RELAUNCHES",
        metavar="N",
        help="Start the ranks again so often at most, progress or not. [default: as long as they get further]",
    ),
    click.option(
        "--final-code",
        "final_codes",
        multiple=True,
        type=click.IntRange(1, 255),
        metavar="CODE",
        help="Ranks that exit so end the run, and their code is passed on; repeatable.",
    ),
    click.option(
        "--hold/--no-hold",
        default=None,
        envvar="DEEPLINK_HOLD",
        help="Whether Slurm is to hold the job, instead of ending it, when the application itself fails again and "
        "again. [default: if it ever came to a step, and may be requeued]",
    ),
    click.option(
        "--time-margin",
        type=FiniteRange(min=0),
        envvar="DEEPLINK_TIME_MARGIN",
        metavar="SECONDS",
        help="Have the ranks save so long before the job's time limit. "
        "[default: learned from their saves, 60 at least]",
    ),
    click.option(
        "--strand-timeout",
        type=FiniteRange(min=0),
        default=900.0,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for a rescue when too few nodes are left.",
    ),
)


def recovery_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options to a command, which gets them as one value, `recovery`."""

    @functools.wraps(command)
    def with_recovery(**options: object) -> int:
        names = RecoveryOptions.__dataclass_fields__
        said = {name: options.pop(name) for name in names}
        return command(**options, recovery=RecoveryOptions(**said))  # type: ignore[arg-type] # as click has checked them

    for option in reversed(_OPTIONS):
        with_recovery = option(with_recovery)
    return with_recovery

"""`deeplink calibrate`: time all-reduces and reading on a job's nodes, and tell the cost model's constants."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deeplink.errors import DeepLinkError
from deeplink.ranges import FiniteRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deeplink.readtimes import ReadBounds, ReadTimer
    from deeplink.scheduler.model.constants import Constants
    from deeplink.scheduler.model.read_sweep import ReadSweep
    from deeplink.scheduler.model.sweep import RankLocation, Sweep

_EPILOG = """
It is a rank's program: start it on all nodes of a job, better on three or more, with two ranks on a node or more.
Two ranks of one node, two nodes below one leaf, below two leaves and farther apart, and one rank on each node sum
buffers of growing size; nothing else should use the nodes meanwhile. What there is none of, or what no line can be
drawn through, keeps its default.
The constants are bytes a second and seconds; they hold for the backend that they were timed with.

With --data samples of a packed dataset are read as well: by each node from its own store, by each from those of
the others, by one node alone from the source (or its packed home), and by all at once. Warm it before; where disks
are to be timed and not their caches, take one that is greater than the nodes' memory.

\b
Examples:
  deeplink run --nproc-per-node 2 -- deeplink calibrate --out constants.json        in a batch script
  deeplink run --local 3 --nproc-per-node 2 -- deeplink calibrate                   on this machine, over loopback
  deeplink run -- deeplink calibrate --data imagenet --out constants.json           after deeplink warm imagenet
  deeplink run -- deeplink calibrate --largest 16777216 --repeats 21 --json

\b
Exit codes: 0 done, 1 none of the times make sense, 2 wrong usage, or no rank.
"""
_FACTOR = 4


class TorchMissingError(DeepLinkError):
    """torch is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "torch is not installed here", remedy='Install it on all nodes: pip install "deeplink[torch]".'
        )


@click.command("calibrate", epilog=_EPILOG)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the constants to this file (rank 0 does).",
)
@click.option(
    "--smallest",
    type=click.IntRange(min=4),
    default=1 << 10,
    show_default=True,
    metavar="BYTES",
    help="First size.",
)
@click.option(
    "--largest",
    type=click.IntRange(min=4),
    default=64 << 20,
    show_default=True,
    metavar="BYTES",
    help="Sizes grow by four until they are beyond this.",
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Of each size, at least."
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "gloo", "nccl"]),
    default="auto",
    show_default=True,
    help="auto: nccl where each rank has a GPU, else gloo. nccl has not been tried yet.",
)
@click.option("--data", metavar="NAME[@VERSION]", help="Time reading this packed dataset, too.")
@click.option(
    "--data-bytes",
    type=click.IntRange(min=1),
    default=256 << 20,
    show_default=True,
    metavar="BYTES",
    help="Each rank reads so much from each place, at most.",
)
@click.option(
    "--data-seconds",
    type=FiniteRange(0.1, 600.0),
    default=5.0,
    show_default=True,
    metavar="S",
    help="And for so long.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: the times, and the constants.")
def command(
    *,
    out: Path | None,
    smallest: int,
    largest: int,
    repeats: int,
    backend: str,
    data: str | None,
    data_bytes: int,
    data_seconds: float,
    as_json: bool,
) -> None:
    """Time all-reduces and reading on a job's nodes, and tell the cost model's constants from that."""
    sizes = _sizes(smallest, largest)
    try:
        from deeplink.calibration import backend_here, seat_here, timed_between
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise TorchMissingError from missing
    from dataclasses import replace

    from deeplink.clock import SystemClock
    from deeplink.files import write_output
    from deeplink.readtimes import ReadBounds
    from deeplink.scheduler.model.constants import Constants
    from deeplink.scheduler.model.read_sweep import reads_from
    from deeplink.scheduler.model.stored import constants_text
    from deeplink.scheduler.model.sweep import calibrated, usable

    seat = seat_here(os.environ)
    chosen = backend_here(os.environ) if backend == "auto" else backend
    with _timer(data, seat, ReadBounds(bytes=data_bytes, seconds=data_seconds)) as timer:
        sweeps, reads = timed_between(seat, sizes, repeats, SystemClock(), backend=chosen, reads=timer)
    if seat.rank != 0:
        return
    good, wrong = usable(sweeps)
    for problem in wrong:
        click.echo(f"deeplink: left out: {problem}\n  {problem.remedy}", err=True)
    for sweep in reads:
        if sweep.problem:
            click.echo(f"deeplink: reading was not timed: {sweep.place.value}: {sweep.problem}", err=True)
    known = replace(calibrated(good, Constants()), reads=reads_from(reads))
    # First of all told: a file that cannot be written does not cost the measurement.
    click.echo(_as_json(chosen, sweeps, reads, known) if as_json else _as_text(chosen, good, reads, known))
    if out is not None:
        write_output(out, constants_text(known))
        if not as_json:
            click.echo(f"written to {out}")


def _sizes(smallest: int, largest: int) -> list[int]:
    """Return the sizes, whole floats each.

    Raises:
        click.UsageError: there are fewer than three.
    """
    sizes = [smallest // 4 * 4]
    while sizes[-1] * _FACTOR <= largest:
        sizes.append(sizes[-1] * _FACTOR)
    if len(sizes) < 3:  # noqa: PLR2004 (a line through two points is always right)
        raise click.UsageError(
            f"--largest must be at least {_FACTOR**2} times --smallest: three sizes make a line"
        )
    return sizes


@contextmanager
def _timer(data: str | None, seat: RankLocation, bounds: ReadBounds) -> Iterator[ReadTimer | None]:
    if data is None:
        yield None
        return
    from deeplink.clock import SystemClock
    from deeplink.config import load_config
    from deeplink.readtimes import ReadTimer, SampleSlice

    part = SampleSlice(rank=seat.rank, ranks=int(os.environ["WORLD_SIZE"]), node=seat.node)
    with ReadTimer(data, load_config(), part, bounds, SystemClock()) as timer:
        yield timer


def _as_json(backend: str, sweeps: Sequence[Sweep], reads: Sequence[ReadSweep], known: Constants) -> str:
    from deeplink.scheduler.model.stored import constants_text

    timed = [
        {
            "reach": sweep.reach.name.lower(),
            "ranks": sweep.ranks,
            "timings": [{"bytes": timing.size, "seconds": timing.seconds} for timing in sweep.timings],
        }
        for sweep in sweeps
    ]
    read = [
        {
            "place": sweep.place.value,
            "ranks": [{"node": one.node, "bytes": one.bytes, "seconds": one.seconds} for one in sweep.told],
            "problem": sweep.problem,
        }
        for sweep in reads
    ]
    constants = json.loads(constants_text(known))
    return json.dumps({"backend": backend, "sweeps": timed, "reads": read, "constants": constants})


def _as_text(backend: str, sweeps: Sequence[Sweep], reads: Sequence[ReadSweep], known: Constants) -> str:
    from deeplink.scheduler.model.sweep import line
    from deeplink.text import sized

    lines = []
    if sweeps:
        first, *_, last = (sized(timing.size) for timing in sweeps[0].timings)
        lines.append(f"{backend}, all-reduces of {first} to {last}:")
    for sweep in sweeps:
        found = line(sweep)
        lines.append(
            f"  {sweep.reach.value:<28} {sweep.ranks:>4} ranks  {sized(found.bandwidth):>12}/s  "
            f"{found.latency_s * 1e6:9.1f} us a step"
        )
    if reads:
        lines.append("samples read, by each node:")
    for read in reads:
        speeds = ", ".join(f"{sized(rate)}/s" for rate in read.per_node().values()) or "not timed"
        lines.append(f"  {read.place.value:<28} {sized(sum(one.bytes for one in read.told)):>10}  {speeds}")
    lines.append("constants of the cost model:")
    for name in ("gpu", "nic", "leaf", "spine"):
        link = getattr(known, name)
        lines.append(f"  {name:<28}             {sized(link.bandwidth):>12}/s  {link.latency_s * 1e6:9.1f} us")
    if known.path_bandwidth < float("inf"):
        lines.append(f"  {'path between two nodes':<28}             {sized(known.path_bandwidth):>12}/s")
    for name in ("local", "peer", "source"):
        speed = getattr(known.reads, name)
        if speed is not None:
            lines.append(f"  {f'a node reads, {name}':<28}             {sized(speed):>12}/s")
    if known.reads.source_of_all < float("inf"):
        lines.append(f"  {'all nodes read, source':<28}             {sized(known.reads.source_of_all):>12}/s")
    return "\n".join(lines)

"""`deeplink calibrate`: time all-reduces and reading on a job's nodes, and derive the cost model's constants."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from deeplink.cli.options import integer, json_option, option, path_option, real
from deeplink.cli.output import print_json, warn
from deeplink.core.clock import SystemClock
from deeplink.core.config import load_config
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import write_output
from deeplink.core.text import sized
from deeplink.scheduler.placement.model import Constants, constants_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.ops.calibration import ReadBounds, ReadTimer
    from deeplink.scheduler.placement.sweep import RankLocation, ReadSweep, Sweep

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


@click.command("calibrate", epilog=_EPILOG)
@path_option("--out", "Write the constants to this file (rank 0 does).", dir_okay=False)
@integer("--smallest BYTES", "First size.", 4, default=1 << 10)
@integer("--largest BYTES", "Sizes grow by four until they are beyond this.", 4, default=64 << 20)
@integer("--repeats", "Of each size, at least.", 1, default=7)
@option(
    "--backend",
    "auto: nccl where each rank has a GPU, else gloo. nccl has not been tried yet.",
    type=click.Choice(["auto", "gloo", "nccl"]),
    default="auto",
)
@option("--data NAME[@VERSION]", "Time reading this packed dataset, too.")
@integer("--data-bytes BYTES", "Each rank reads so much from each place, at most.", 1, default=256 << 20)
@real("--data-seconds S", "And for so long.", 0.1, 600.0, default=5.0)
@json_option("Print one JSON object: the times, and the constants.")
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
    """Time all-reduces and reading on a job's nodes, and derive the cost model's constants from that."""
    sizes, clock = _sizes(smallest, largest), SystemClock()
    try:
        from deeplink.ops.calibration import ReadBounds, backend_here, location_here, timed_between
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        remedy = 'Install it on all nodes: pip install "deeplink[torch]".'
        raise DeepLinkError("torch is not installed here", remedy=remedy) from missing
    from deeplink.scheduler.placement.sweep import calibrated, reads_from, usable

    here = location_here(os.environ)
    chosen = backend_here(os.environ) if backend == "auto" else backend
    with _timer(data, here, ReadBounds(bytes=data_bytes, seconds=data_seconds), clock) as timer:
        sweeps, reads = timed_between(here, sizes, repeats, clock, backend=chosen, reads=timer)
    if here.rank != 0:
        return
    good, wrong = usable(sweeps)
    for problem in wrong:
        warn(f"left out: {problem}\n  {problem.remedy}")
    for sweep in reads:
        if sweep.problem:
            warn(f"reading was not timed: {sweep.place.value}: {sweep.problem}")
    known = replace(calibrated(good, Constants()), reads=reads_from(reads))
    # Printed first: a file that cannot be written does not cost the measurement.
    if as_json:
        _print_json(chosen, sweeps, reads, known)
    else:
        click.echo(_as_text(chosen, good, reads, known))
    if out is not None:
        write_output(out, constants_text(known))
        if not as_json:
            click.echo(f"written to {out}")


def _sizes(smallest: int, largest: int) -> list[int]:
    sizes = [smallest // 4 * 4]  # whole floats
    while sizes[-1] * _FACTOR <= largest:
        sizes.append(sizes[-1] * _FACTOR)
    if len(sizes) < 3:  # noqa: PLR2004 (a line through two points is always right)
        raise click.UsageError(
            f"--largest must be at least {_FACTOR**2} times --smallest: three sizes make a line"
        )
    return sizes


def _timer(
    data: str | None, here: RankLocation, bounds: ReadBounds, clock: Clock
) -> AbstractContextManager[ReadTimer | None]:
    from deeplink.ops.calibration import ReadTimer

    if data is None:
        return nullcontext()
    return ReadTimer(data, load_config(), here, bounds, clock, ranks=int(os.environ["WORLD_SIZE"]))


def _print_json(backend: str, sweeps: Sequence[Sweep], reads: Sequence[ReadSweep], known: Constants) -> None:
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
    print_json({"backend": backend, "sweeps": timed, "reads": read, "constants": constants})


def _as_text(backend: str, sweeps: Sequence[Sweep], reads: Sequence[ReadSweep], known: Constants) -> str:
    from deeplink.scheduler.placement.sweep import line

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
        lines.append(f"{_rate(name, link.bandwidth)}  {link.latency_s * 1e6:9.1f} us")
    if known.path_bandwidth < float("inf"):
        lines.append(_rate("path between two nodes", known.path_bandwidth))
    for name in ("local", "peer", "source"):
        speed = getattr(known.reads, name)
        if speed is not None:
            lines.append(_rate(f"a node reads, {name}", speed))
    if known.reads.source_of_all < float("inf"):
        lines.append(_rate("all nodes read, source", known.reads.source_of_all))
    return "\n".join(lines)


def _rate(name: str, bytes_per_s: float) -> str:
    return f"  {name:<28}             {sized(bytes_per_s):>12}/s"

"""`deeplink node`: run this node's agent until told to end."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from typing import NoReturn

    from deeplink.agent import AgentSettings

JOB_END_S, END_S = 0.7, 5.0
"""How long a job's agent takes for its end at most, for Slurm waits for it before it gives a job's nodes to
anybody; and a standing one."""
LOOK_S = 1.0
"""A signal whose exception was lost (raised where Python only reports it) is seen after so long."""

_EPILOG = """
Ready is one line of JSON on standard output (and READY=1 to systemd, Type=notify): node, address,
topology_address, token_file, store, interface, pid, weight, data_port (a second port, for samples alone: 100 above
that of --bind; readers find it by themselves). SIGTERM and SIGINT end it: a job's within a second, one
that stands within five.

\b
Examples:
  deeplink node                            loopback, a token of its own
  deeplink node --bind 0.0.0.0:7411 --token-file /etc/deeplink/token --metrics-bind 127.0.0.1:9411
  echo "$TOKEN" | srun --overlap --ntasks-per-node=1 deeplink node --job --bind 0.0.0.0:0
"""


@click.command("node", epilog=_EPILOG)
@click.option("--job", is_flag=True, help="Belong to a job: take the token as one line from standard input.")
@click.option(
    "--bind", metavar="HOST:PORT", help="Where to listen; port 0: a free one. [default: config agent_bind]"
)
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Shards on this node's SSD. [default: config store]",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="0600 file with the token every call must carry; made when it is not there. Needed beyond loopback.",
)
@click.option("--metrics-bind", metavar="HOST:PORT", default="", help="Serve Prometheus metrics over HTTP there.")
@click.option("--name", metavar="NODE", help="This member's name. [default: config node, Slurm's name, host name]")
def command(
    *,
    job: bool,
    bind: str | None,
    store: Path | None,
    token_file: Path | None,
    metrics_bind: str,
    name: str | None,
) -> None:
    """Serve this node's shards and watch over its ranks, until SIGTERM."""
    _end_on_signals()
    import os
    from contextlib import ExitStack

    from deeplink.agent import AgentSettings
    from deeplink.config import load_config
    from deeplink.daemon import member_name

    if job and token_file:
        raise click.UsageError("--job takes the token from standard input; leave --token-file out")
    config = load_config()
    bind = bind or config.agent_bind
    node = member_name(name or config.node)
    with ExitStack() as stack:
        if job:
            token, token_file, bind = _job_token(stack, node, bind)
        else:
            token, token_file = _standing_token(bind, token_file or config.token_file, config.state)
        settings = AgentSettings(
            node=node,
            bind=bind,
            token=token,
            store=(store or config.store).absolute(),
            metrics_bind=metrics_bind,
            topology_address=os.environ.get("SLURM_TOPOLOGY_ADDR", ""),
            config=config,
            keeps_copies=job,
            of_job=job,
        )
        _serve(settings, token_file)
    _leave()


def _leave() -> NoReturn:
    """End at once: Python would wait for calls that a hung disk holds up, and Slurm counts each second for ten."""
    import os
    import sys

    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def _job_token(stack: ExitStack, node: str, bind: str) -> tuple[str, Path, str]:
    """Return the token, where it lies, and where to listen: in the place of the agent before, if there was one."""
    import os
    import sys

    from deeplink.daemon import read_token_line, runtime_folder
    from deeplink.listening import free_again
    from deeplink.scheduler.launch.seats import seat_in
    from deeplink.tokens import write_token

    token = read_token_line(sys.stdin.fileno())
    seat = seat_in(os.environ, node)
    folder = stack.enter_context(runtime_folder(node, again=seat.folder if seat else None))
    write_token(folder / "token", token)
    return token, folder / "token", free_again(bind, seat.port) if seat else bind


def _standing_token(bind: str, token_file: Path | None, state: Path) -> tuple[str, Path]:
    from deeplink.daemon import BindError, is_loopback, split_bind, standing_token

    if token_file is None and not is_loopback(split_bind(bind)[0]):
        raise BindError(
            bind,
            "others can reach it, and there is no token file",
            "Give --token-file FILE (it is made when absent), and the same token to every client.",
        )
    return standing_token(token_file, state / "agent.token")


def _end_on_signals() -> None:
    """Make SIGTERM and SIGINT unwind the main thread from wherever it is, so that everything is tidied up."""
    import signal

    def end(_number: int, _frame: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def _until_told() -> None:
    """Return at SIGTERM or SIGINT."""
    import select
    import signal

    with suppress(SystemExit):
        while signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            select.select([], [], [], LOOK_S)


def _serve(settings: AgentSettings, token_file: Path) -> None:
    import json

    from deeplink.agent import Agent
    from deeplink.daemon import notify_systemd

    agent = Agent(settings)
    try:
        announcement = agent.start(token_file)
        click.echo(json.dumps(announcement.as_dict()))
        notify_systemd("READY=1")
        _until_told()
    finally:
        notify_systemd("STOPPING=1")
        _in_time(agent.stop, JOB_END_S if settings.of_job else END_S)


def _in_time(work: Callable[[], None], bound_s: float) -> None:
    """Return once the work is done, after `bound_s` at most; what hangs is left behind."""
    import threading

    thread = threading.Thread(target=work, name="deeplink-end", daemon=True)
    thread.start()
    thread.join(bound_s)

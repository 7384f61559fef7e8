"""`deeplink node`: run this node's agent until SIGTERM."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import click

from deeplink.cli.options import flag, metrics_token, option, path_option, standing_secret
from deeplink.core.clock import SystemClock
from deeplink.core.config import explained_store, load_config
from deeplink.core.prctl import die_with

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import NoReturn

    from deeplink.agent.agent import AgentSettings

JOB_END_S, END_S = 0.7, 5.0
"""How long a job's agent takes for its end at most, for Slurm waits for it before it gives a job's nodes to
anybody; and a standing one."""
SLACK_S = 0.2
AGAIN_S, MOST_CHILDREN = 0.5, 5  # an agent that is killed is started again after so long, this often in a row
STEADY_S = 60.0  # an agent that was there for so long begins a new row
LOOK_S = 1.0  # a signal whose exception was lost (raised where Python only reports it) is seen after so long
_of_the_keeper: list[ExitStack] = []  # in a child: what is not its own to tidy up, and must not be let go of

_EPILOG = """
Ready is one line of JSON on standard output (and READY=1 to systemd, Type=notify): node, address,
topology_address, token_file, store, interface, pid, weight. SIGTERM and SIGINT end it: a job's within a second,
one that stands within five.

\b
Examples:
  deeplink node                            loopback, a token of its own
  deeplink node --bind 0.0.0.0:7411 --token-file /etc/deeplink/token --metrics-bind 127.0.0.1:9411
  echo "$SECRET" | srun --overlap --ntasks-per-node=1 deeplink node --job --bind 0.0.0.0:0
"""


@click.command("node", epilog=_EPILOG)
@flag("--job", "Belong to a run: take its secret as one line from standard input.")
@option("--bind HOST:PORT", "Where to listen; port 0: a free one. [default: config agent_bind]")
@path_option("--store DIR", "Shards on this node's SSD. [default: config store]")
@path_option(
    "--token-file FILE",
    "0600 file with the token every call must carry; made when it is not there. Needed beyond loopback.",
)
@option("--metrics-bind HOST:PORT", "Serve Prometheus metrics over HTTP there.", default="")
@path_option("--metrics-token-file FILE", "0600 file with the token to show for metrics. Needed beyond loopback.")
@option("--name NODE", "This member's name. [default: config node, Slurm's name, host name]")
def command(
    *,
    job: bool,
    bind: str | None,
    store: Path | None,
    token_file: Path | None,
    metrics_bind: str,
    metrics_token_file: Path | None,
    name: str | None,
) -> None:
    """Serve this node's shards and watch over its ranks, until SIGTERM."""
    _end_on_signals()
    from deeplink.rpc.daemon import member_name
    from deeplink.rpc.listeners import listening_socket

    if job and token_file:
        raise click.UsageError("--job takes the run's secret from standard input; leave --token-file out")
    config = load_config()
    bind = bind or config.agent_bind
    node = member_name(name or config.node)
    pid, end_s = os.getpid(), JOB_END_S if job else END_S
    with ExitStack() as stack:
        if job:
            secret, token_file, bind = _job_secret(stack, node, bind)
        else:
            token_file = token_file or config.token_file
            secret, token_file = standing_secret(bind, token_file, config.state / "agent.token")
        listener = listening_socket(bind)
        tell_ready = _go_on_in_child(stack, end_s)
        from deeplink.agent.agent import AgentSettings  # not in the process that keeps the sockets
        from deeplink.rpc.tokens import RunTokens

        settings = AgentSettings(
            node=node,
            bind=bind,
            token=RunTokens(secret, token_file.parent) if job else secret,
            store=(store or config.store).absolute(),
            store_why="--store" if store else explained_store().why,
            metrics_bind=metrics_bind,
            metrics_token=metrics_token(metrics_bind, metrics_token_file),
            topology_address=os.environ.get("SLURM_TOPOLOGY_ADDR", ""),
            config=config,
            keeps_copies=job,
            of_job=job,
            listener=listener,
            pid=pid,
        )
        _serve(settings, token_file, tell_ready, end_s)
    _leave()


def _go_on_in_child(stack: ExitStack, end_s: float) -> Callable[[], object]:
    """Return in a child; where it is killed, in another one. This process keeps the sockets open meanwhile.

    Ranks and readers know the ports and show their token there: while they do, no stranger gets them. What `stack`
    holds stays with this process, which imports little, so that it is the last to be killed for want of memory. It
    is the one that systemd hears; the child is to call what is returned when it is ready.
    """
    keeper, code, clock, left = os.getpid(), 0, SystemClock(), MOST_CHILDREN
    while left:
        ready, written = os.pipe()
        began, child = clock.monotonic(), os.fork()
        if not child:
            die_with(keeper)  # the one that keeps our sockets
            _of_the_keeper.append(stack.pop_all())
            os.close(ready)
            return partial(os.write, written, b"ready")
        os.close(written)
        code = _awaited(child, ready, end_s)
        if code >= 0:
            sys.exit(code)
        left = (MOST_CHILDREN if clock.monotonic() - began > STEADY_S else left) - 1
        click.echo(f"deeplink node: signal {-code} ended the agent; it is started again", err=True)
        select.select([], [], [], AGAIN_S)
    raise SystemExit(128 - code)


def _awaited(child: int, ready: int, end_s: float) -> int:
    """Return how a child ended; notify systemd when it is ready, and end it when this process is to end."""
    from deeplink.rpc.daemon import notify_systemd

    reaped: list[object] = []
    try:
        if os.read(ready, 1):
            notify_systemd("READY=1")
        os.close(ready)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except SystemExit:
        notify_systemd("STOPPING=1")
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
            _in_time(lambda: reaped.append(os.waitpid(child, 0)), end_s + SLACK_S)
            if not reaped:
                os.kill(child, signal.SIGKILL)
        raise


def _leave() -> NoReturn:
    """End at once: Python would wait for calls that a hung disk holds up, and Slurm counts each second for ten."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def _job_secret(stack: ExitStack, node: str, bind: str) -> tuple[str, Path, str]:
    """Return the run's secret, where it lies, and where to listen: in the place of an agent before, if any was."""
    from deeplink.rpc.daemon import read_token_line, runtime_folder
    from deeplink.rpc.listeners import free_again
    from deeplink.rpc.tokens import write_token
    from deeplink.scheduler.launch.environment import seat_in

    secret = read_token_line(sys.stdin.fileno())
    port, before = seat_in(os.environ, node) or (0, None)  # ranks hold their locks in that folder, too
    folder = stack.enter_context(runtime_folder(node, again=before))
    write_token(folder / "secret", secret)
    return secret, folder / "secret", free_again(bind, port) if port else bind


def _end_on_signals() -> None:
    """Make SIGTERM and SIGINT unwind the main thread from wherever it is, so that everything is tidied up."""
    from deeplink.rpc.daemon import ending_signals

    ending = ending_signals()

    def end(_number: int, _frame: object) -> None:
        for number in ending:
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(0)

    for number in ending:
        signal.signal(number, end)


def _until_told() -> None:
    """Return at SIGTERM or SIGINT."""
    with suppress(SystemExit):
        while signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            select.select([], [], [], LOOK_S)


def _serve(settings: AgentSettings, token_file: Path, tell_ready: Callable[[], object], end_s: float) -> None:
    from deeplink.agent.agent import Agent

    agent = Agent(settings)
    try:
        click.echo(agent.start(token_file).announcement)
        tell_ready()
        _until_told()
    finally:
        _in_time(agent.stop, end_s)


def _in_time(work: Callable[[], None], bound_s: float) -> None:
    """Return once the work is done, after `bound_s` at most; what hangs is left behind."""
    thread = threading.Thread(target=work, name="deeplink-end", daemon=True)
    thread.start()
    thread.join(bound_s)

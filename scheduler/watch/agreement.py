"""Asks a watchdog's health service whether it serves, and looks after nodes wished by name."""

from __future__ import annotations

from ipaddress import ip_address

from deeplink.clock import SystemClock
from deeplink.resolving import UnresolvedError, addresses, split_address

ANSWER_S = 1.0
"""How long it may take to answer, for who only wants to know."""
BINDINGS = "deeplink.bindings"
"""The health service's name for: nodes wished by name are taken off jobs that wait for them."""


def bindings_of(user: str) -> str:
    """Return the same for the jobs of one user: a watchdog without an operator's rights changes only its own."""
    return f"{BINDINGS}.{user}"


def looks_after(address: str, user: str) -> str:
    """Return why a watchdog does not take wished nodes off a user's waiting jobs; empty where it does.

    On the loopback, one that looks after its user's jobs alone does not count: it may end with the login session.
    """
    problem = asked_watchdog(address, service=BINDINGS)
    if not problem.startswith("not found"):
        return problem
    if _is_loopback(address):
        return "it does not look after all users' jobs, and your own does not count on the loopback"
    return asked_watchdog(address, service=bindings_of(user))


def _is_loopback(address: str) -> bool:
    """Whether a host that answered lies on this host's loopback; true as well where that cannot be found out."""
    try:
        found = addresses(*split_address(address), SystemClock())
        hosts = [ip_address(str(where[0]).partition("%")[0]) for *_, where in found]
    except (UnresolvedError, ValueError):
        return True
    return any((getattr(host, "ipv4_mapped", None) or host).is_loopback or host.is_unspecified for host in hosts)


def asked_watchdog(address: str, token: str = "", *, service: str = "", timeout_s: float = ANSWER_S) -> str:
    """Ask the watchdog whether it is well, or does one thing; return what is wrong, empty where nothing is.

    It needs no token, but a token that is given has to be a valid one.
    """
    # Not above: gRPC costs 0.1 s, and is needed only where there is a watchdog.
    import grpc  # noqa: PLC0415
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415

    from deeplink.wire import open_channel  # noqa: PLC0415

    try:
        channel = open_channel(address, token)
    except UnresolvedError as problem:
        return str(problem)
    try:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    except grpc.RpcError as problem:
        if problem.code() is grpc.StatusCode.UNAUTHENTICATED:
            return (
                "it refuses our token, which is not of this watchdog or has ended: `deeplink watch --mint USER` "
                "makes one for watch_token_file"
            )
        return f"{problem.code().name.lower().replace('_', ' ')}: {problem.details()}"
    finally:
        channel.close()
    return "" if reply.status == health_pb2.HealthCheckResponse.SERVING else "it says that it does not serve"

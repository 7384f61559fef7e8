"""Faults of a node's network that leave its cable in, as shell scripts: each may run twice. Pure."""

from __future__ import annotations

from deeplink.scheduler.testbed.shape import INTERFACE

TCP = "6"  # by number: a minimal Debian has no /etc/protocols
_PORTS = "20000-31999"  # of ranks' own rendezvous (docs/launch.md)
# A queue without room: who sends is told nothing.
SENDS = (
    f"tc qdisc replace dev {INTERFACE} root pfifo limit 0",
    f"tc qdisc del dev {INTERFACE} root 2>/dev/null || true",
)
# The kernel asks first what is for the host itself: a filter of what comes in has to be before that.
RECEIVES = (
    f"""set -e
ip rule | grep -q 'iif {INTERFACE} blackhole' && exit 0
ip rule add pref 2 lookup local
ip rule add pref 1 iif {INTERFACE} blackhole
ip rule del pref 0
""",
    f"""ip rule | grep -q 'iif {INTERFACE} blackhole' || exit 0
ip rule add pref 0 lookup local
ip rule del pref 1
ip rule del pref 2
""",
)
_DATA = "".join(f"ip rule {{what}} ipproto {TCP} {end} {_PORTS} blackhole\n" for end in ("sport", "dport"))
DATA = (
    f"ip rule | grep -q 'port {_PORTS} blackhole' && exit 0\n{_DATA.format(what='add')}",
    f"ip rule | grep -q 'port {_PORTS} blackhole' || exit 0\n{_DATA.format(what='del')}",
)

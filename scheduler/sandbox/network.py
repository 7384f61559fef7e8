"""The fabric as `ip` commands: switches are bridges, cables are veth pairs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.scheduler.sandbox.shape import Shape

INTERFACE = "eth0"
"""The one interface of every machine."""


def cable(part: str) -> str:
    """Return the fabric's end of the cable from a machine, or from a switch, to the switch above."""
    return f"up-{part}"


def fabric(shape: Shape) -> list[str]:
    """Return `ip -batch` lines that make the switches and the cables between them."""
    lines = ["link set lo up"]
    for switch in shape.switches:
        lines += [f"link add {switch.name} type bridge", f"link set {switch.name} up"]
        if switch.up:
            lines += [
                f"link add {cable(switch.name)} type veth peer name dn-{switch.name}",
                f"link set {cable(switch.name)} master {switch.name} up",
                f"link set dn-{switch.name} master {switch.up} up",
            ]
    return lines


def plug(shape: Shape, machine: str, namespace: Path) -> list[str]:
    """Return `ip -batch` lines that lay the cable from a machine's network namespace to its switch.

    The hardware address follows the machine, so that peers know it again after it booted.
    """
    hardware = "02:00:" + ":".join(f"{int(part):02x}" for part in shape.address(machine).split("."))
    return [
        f"link add {cable(machine)} type veth peer name {INTERFACE} address {hardware} netns {namespace}",
        f"link set {cable(machine)} master {shape.above(machine)} up",
    ]


def interface(shape: Shape, machine: str) -> list[str]:
    """Return `ip -batch` lines, for inside a machine, that give it its address."""
    return [
        "link set lo up",
        f"addr add {shape.address(machine)}/24 dev {INTERFACE}",
        f"link set {INTERFACE} up",
    ]

"""Which address others reach this machine by."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from deeplink.rpc.resolving import LOOPBACK, LocalAddress, local_addresses, primary_address


def others() -> list[LocalAddress]:
    return [address for address in local_addresses() if not ipaddress.IPv4Address(address.ip).is_loopback]


def test_every_address_found_can_be_listened_on_and_its_interface_exists() -> None:
    found = local_addresses()
    assert LOOPBACK in found
    interfaces = {name for _, name in socket.if_nameindex()}
    for address in found:
        with socket.create_server((address.ip, 0)):
            assert address.interface.split(":")[0] in interfaces


def test_the_primary_address_is_one_of_this_machine_and_loopback_only_if_there_is_no_other() -> None:
    primary = primary_address({})
    assert primary in (others() or [LOOPBACK])


@pytest.mark.parametrize(
    "env",
    [
        {"SLURMD_NODENAME": "no-such-name.invalid"},
        {"SLURMD_NODENAME": "localhost"},
        {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"},
        {"SLURM_LAUNCH_NODE_IPADDR": "no address"},
    ],
)
def test_what_leads_nowhere_or_to_loopback_does_not_count(env: dict[str, str]) -> None:
    assert primary_address(env) == primary_address({})


def test_the_address_slurm_knows_this_node_by_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in others():
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address.ip, 0))]
        monkeypatch.setattr("deeplink.rpc.resolving.addresses", lambda _host, _port, _clock, found=found: found)
        assert primary_address({"SLURMD_NODENAME": "n7"}) == address

"""This machine's links and routes."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import pytest

from deeplink.rpc.resolving import MOST_ROUTES, LocalAddress, Route, links, local_addresses, parse_routes, routes

TABLE = """\
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
eth0	00000000	0100A8C0	0003	0	0	100	00000000	0	0	0
ib0	0000010A	00000000	0001	0	0	0	0000FFFF	0	0	0
eth0	0000A8C0	00000000	0001	0	0	100	00FFFFFF	0	0	0
eth1	0000A8C0	00000000	0001	0	0	0	00FFFFFF	0	0	0
*	0000010A	00000000	0201	0	0	0	0000FFFF	0	0	0
eth2	0000020A	00000000	0000	0	0	0	0000FFFF	0	0	0
"""


def test_the_narrowest_route_counts_and_of_equals_the_one_of_the_least_metric() -> None:
    assert parse_routes(TABLE) == (
        Route("192.168.0.0/24", "eth1"),
        Route("192.168.0.0/24", "eth0"),
        Route("10.1.0.0/16", "ib0"),
        Route("0.0.0.0/0", "eth0"),
    )


def test_of_very_many_routes_the_wide_ones_are_told() -> None:
    narrow = "".join(
        f"cali{n}\t{n:02X}{n % 7:02X}000A\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0\n" for n in range(250)
    )
    found = parse_routes(TABLE + narrow * 2)
    assert len(found) == MOST_ROUTES
    assert found[-4:] == parse_routes(TABLE)


def test_every_link_is_an_address_of_this_machine_in_its_network() -> None:
    addresses = {address.ip for address in local_addresses()}
    names = {name for _, name in socket.if_nameindex()}
    for link in links():
        assert link.ip in addresses
        assert link.interface in names
        assert ipaddress.IPv4Address(link.ip) in ipaddress.IPv4Network(link.network)
        assert not ipaddress.IPv4Address(link.ip).is_loopback
        assert link.speed_mbps >= 0


def test_an_interface_that_goes_away_meanwhile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = links()
    gone = LocalAddress("10.9.8.7", "veth0gone")
    monkeypatch.setattr("deeplink.rpc.resolving.local_addresses", lambda: (gone, *local_addresses()))
    assert links() == before


def test_a_table_of_routes_that_is_none_of_ours_to_know_says_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = tmp_path / "route"
    table.write_bytes(TABLE.encode() + "lösch0\t0000010A".encode())
    monkeypatch.setattr("deeplink.rpc.resolving.ROUTES", table)
    assert routes() == ()
    table.write_text(TABLE + "eth0\tno\n")
    assert routes() == ()


def test_every_route_leads_through_an_interface_that_is_there() -> None:
    names = {name for _, name in socket.if_nameindex()}
    assert {route.interface for route in routes()} <= names

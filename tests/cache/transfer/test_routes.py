from __future__ import annotations

import threading
from typing import Any

import pytest

from deeplink.cache.transfer import transport
from deeplink.cache.transfer.transport import DATA_PORT_HEADER, PROTOCOL, PROTOCOL_HEADER, Routes
from deeplink.core.clock import ManualClock
from deeplink.rpc.forksafe import PlainBusyError, PlainConnection, PlainSilentError
from deeplink.rpc.forksafe.connection import check_status
from tests.waiting import LIMIT_S

AGENT, OTHER = "127.0.0.1:1", "127.0.0.1:2"
SAID = {DATA_PORT_HEADER: "101", PROTOCOL_HEADER: str(PROTOCOL)}


def test_a_data_port_that_takes_long_to_look_up_holds_up_no_other_member(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = Routes("token", ManualClock())
    routes.learn(AGENT, SAID)
    tried: list[str] = []

    def connect(address: str, *rest: Any) -> PlainConnection:
        tried.append(address)
        if address.endswith(":101"):
            other = threading.Thread(target=lambda: routes.connection(OTHER, fresh=True).close(), daemon=True)
            other.start()
            other.join(LIMIT_S)
            assert not other.is_alive()
            raise PlainSilentError(address, "no such host")
        return PlainConnection(address, *rest)

    monkeypatch.setattr(transport, "PlainConnection", connect)
    routes.connection(AGENT, fresh=True).close()
    routes.connection(AGENT, fresh=True).close()
    assert tried == ["127.0.0.1:101", OTHER, AGENT, AGENT]  # and the port is left alone for a while
    routes.close()


@pytest.mark.parametrize("port", ["1" * 5000, "65536", "0", "x", "9" * 6])
def test_a_port_that_is_none_is_not_learned(port: str) -> None:
    routes = Routes("token", ManualClock())
    routes.learn(AGENT, {**SAID, DATA_PORT_HEADER: port})
    with routes.connection(AGENT, fresh=True) as connection:
        assert connection.address == AGENT
    routes.close()


@pytest.mark.parametrize(("said", "retry_s"), [("9" * 5000, 60.0), ("99999999", 60.0), ("250", 0.25), ("x", 0.0)])
def test_however_long_a_busy_server_says_to_wait_is_bounded(said: str, retry_s: float) -> None:
    with pytest.raises(PlainBusyError) as busy:
        check_status(AGENT, {"grpc-status": "8", "grpc-retry-pushback-ms": said})
    assert busy.value.retry_s == retry_s

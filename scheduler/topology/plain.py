"""The graph as plain values, for JSON and YAML; `sources.document` reads them; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deeplink.scheduler.topology.network import DeviceHealth, Role

if TYPE_CHECKING:
    from deeplink.scheduler.topology.inside import Inside
    from deeplink.scheduler.topology.network import Cable, FabricLink, Network


def document_of(network: Network) -> dict[str, Any]:
    """Return the whole graph as plain values, which `read_document` makes the same graph of."""
    document: dict[str, Any] = {
        "switches": {
            switch.name: _filled({"level": switch.level, "id": switch.id, "link_speed": switch.link_speed})
            for switch in network.switches.values()
        },
        "nodes": {
            node.name: _filled(
                {
                    "domain": node.domain,
                    "health": node.health.value if node.health is not DeviceHealth.UNKNOWN else None,
                }
            )
            for node in network.nodes.values()
        },
        "links": [_cable_document(link, cable) for link in network.links for cable in link.cables],
    }
    if insides := network.insides():
        document["inside"] = [{"nodes": names, **_inside_document(inside)} for inside, names in insides]
    if network.others:
        document["others"] = [
            _filled(
                {
                    "name": other.name,
                    "role": other.role.value,
                    "switch": other.switch,
                    "port": other.port,
                    "gbps": other.gbps,
                }
            )
            for other in network.others
        ]
    return document


def _cable_document(link: FabricLink, cable: Cable) -> dict[str, Any]:
    told = [cable.lower.told, cable.upper.told]
    return _filled(
        {
            "below": link.below,
            "above": link.above,
            "host": link.host,
            "ports": [cable.lower.port, cable.upper.port],
            "gbps": [cable.lower.gbps, cable.upper.gbps],
            "usual_gbps": cable.usual_gbps,
            "latency_us": cable.latency_us,
            "health": cable.said.value if cable.said else None,
            "role": cable.role.value if cable.role is not Role.COMPUTE else None,
            "told": None if all(told) else told,
        }
    )


def _inside_document(inside: Inside) -> dict[str, Any]:
    return {
        "gpus": [_filled({"name": gpu.name, "cpus": gpu.cpus, "numa": gpu.numa}) for gpu in inside.gpus],
        "nics": [{"name": nic.name, "device": nic.device} for nic in inside.nics],
        "joins": [[one, other, str(joined)] for (one, other), joined in inside.pairs.items()],
    }


def _filled(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out what says nothing; a rate of 0 says something."""
    return {
        key: value
        for key, value in fields.items()
        if value is not None and value != "" and value not in ([None, None], ["", ""])
    }

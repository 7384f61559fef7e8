"""Which format a text is in, and reading it so."""

from __future__ import annotations

import re
from enum import Enum

from deeplink.scheduler.topology.finding import TopologyFinding, TopologyFindingKind
from deeplink.scheduler.topology.network import Network
from deeplink.scheduler.topology.sources.document import read_document
from deeplink.scheduler.topology.sources.flat import read_names
from deeplink.scheduler.topology.sources.gathering import Reading
from deeplink.scheduler.topology.sources.ibnet import read_ibnetdiscover
from deeplink.scheduler.topology.sources.netq import read_netq
from deeplink.scheduler.topology.sources.slurm import read_slurm
from deeplink.scheduler.topology.sources.smi import is_header


class Format(Enum):
    """What a topology can be told in."""

    SLURM = "slurm"
    IBNETDISCOVER = "ibnetdiscover"
    NETQ = "netq"
    YAML = "yaml"
    NAMES = "names"
    MATRIX = "nvidia-smi"


# Blanks of one line: over those of all that follow, empty lines would take time by their number's square.
_SLURM = re.compile(r"^[ \t]*(?:SwitchName|BlockName)[ \t]*=", re.MULTILINE | re.IGNORECASE)
_IBNETDISCOVER = re.compile(
    r"^[ \t]*(?:vendid=|(?:Switch|Ca|Rt)\s+\d+\s+\"|# Topology file: generated)", re.MULTILINE
)
_YAML = re.compile(r"^(?:switches|blocks|nodes|links|inside)\s*:", re.MULTILINE)
_JSON = re.compile(r"\s*(?:\{\s*[\"}]|\[\s*[\[{\"\]])")
_OUR_KEYS = re.compile(r"\s*\{\s*\"(?:switches|blocks|inside|others)\"")

# What is no list may begin with the keys that both have, `nodes` and `links`.
_NETQ_KEYS = re.compile(r"\"(?:compounded_nodes|compounded_links|interfaces|tier|Name|DomainUUID)\"\s*:")


def format_of(text: str) -> Format:
    """Tell which format a text is most likely in; NAMES where it is like none of the others."""
    if any(is_header(line) for line in text.split("\n", 20)[:20]):
        return Format.MATRIX
    if _IBNETDISCOVER.search(text):
        return Format.IBNETDISCOVER
    if _JSON.match(text):
        ours = _OUR_KEYS.match(text) or (text.lstrip()[0] == "{" and not _NETQ_KEYS.search(text))
        return Format.YAML if ours else Format.NETQ
    if _SLURM.search(text):
        return Format.SLURM
    return Format.YAML if _YAML.search(text) else Format.NAMES


def read(text: str, source: str, told: Format, *, storage: tuple[str, ...] = ()) -> Reading:
    """Read a text in any format but the matrix of a node's inside, which is no graph.

    A text in which nothing at all was found says so.

    Args:
        text: what to read.
        source: where it is from, for messages.
        told: its format.
        storage: patterns of ibnetdiscover's descriptions of storage adapters.
    """
    readers = {
        Format.SLURM: read_slurm,
        Format.NETQ: read_netq,
        Format.YAML: read_document,
        Format.NAMES: read_names,
    }
    if told is Format.IBNETDISCOVER:
        reading = read_ibnetdiscover(text, source, storage=storage)
    else:
        reading = readers[told](text, source)
    if reading.network == Network():
        nothing = TopologyFinding(
            TopologyFindingKind.NO_TOPOLOGY, f"no switch and no node was found (read as {told.value})", source
        )
        return Reading(reading.network, (*reading.findings, nothing))
    return reading

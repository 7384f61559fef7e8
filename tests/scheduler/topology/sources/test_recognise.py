"""Any text in any format is read or noted, and what is read is whole enough for all that comes after."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.topology.graph import checked
from deeplink.scheduler.topology.network import TopologyCheck
from deeplink.scheduler.topology.sources.assemble import Format, assembled, format_of, read
from deeplink.scheduler.topology.sources.document import document_of, read_document
from deeplink.scheduler.topology.sources.nvidia import read_matrix
from deeplink.scheduler.topology.sources.slurm_topology import read_slurm, topology_conf
from tests.effort import examples
from tests.scheduler.topology.fabrics import MATRIX, SCONTROL, TOPOLOGY_CONF, graph, rails

DOCUMENT = """\
# ours
switches:
  top: {switches: [a, b], gbps: 400}
  a: {nodes: "n[0-1]", gbps: 400}
  b: {nodes: "n[2-3]", gbps: [100, 400]}
links:
- {below: n4, above: b, ports: [mlx5_0, 7], told: [true, false]}
inside:
- {gpus: [{name: GPU0}, {name: GPU1}], nics: [{name: m}], joins: [[GPU0, GPU1, NV4], [GPU0, m, PIX]]}
"""
FIXTURES = {
    Format.SLURM: TOPOLOGY_CONF,
    Format.IBNETDISCOVER: rails(),
    Format.NETQ: json.dumps(graph(), indent=1),
    Format.YAML: DOCUMENT,
    Format.NAMES: "ip-10-0-1-17\nn[0-3] n7\n",
    Format.MATRIX: MATRIX,
}


@pytest.mark.parametrize("told", Format)
def test_each_format_is_recognised(told: Format) -> None:
    assert format_of(FIXTURES[told]) is told
    assert format_of("\n" + FIXTURES[told].replace("\n", "\r\n")) is told


def test_also_in_other_guises() -> None:
    assert format_of(SCONTROL.read_text()) is Format.SLURM
    assert format_of("blockname=b Nodes=n0") is Format.SLURM
    assert format_of(json.dumps(document_of(read(DOCUMENT, "f", Format.YAML).network))) is Format.YAML
    assert format_of('[{"Name": "n0"}]') is Format.NETQ
    assert format_of("[]") is Format.NETQ
    assert format_of('{"nodes": ["n0"]}') is Format.YAML
    assert format_of('{"nodes": {"n0": {}}, "switches": {"a": {"nodes": "n0"}}}') is Format.YAML
    assert format_of(json.dumps(graph()[0])) is Format.NETQ
    assert format_of(json.dumps(graph()[0], sort_keys=True)) is Format.NETQ
    assert format_of('{"Name": "n0"}') is Format.NETQ
    assert format_of("[1101-1102]") is Format.NAMES
    assert format_of("") is Format.NAMES


def goes_through(text: str, told: Format) -> None:
    """Take a text through all that is done with one."""
    if told is Format.MATRIX:
        read_matrix(text, "f")
        return
    reading = assembled([read(text, "f", told)])
    for finding in (*reading.findings, *checked(reading.network)):
        assert "\n" not in str(finding)
        assert 0 <= finding.line <= len(text) + 1  # YAML knows more line breaks than one
    assert read_document(json.dumps(document_of(reading.network)), "again").network == reading.network
    try:
        written = topology_conf(reading.network)
    except DeepLinkError:
        return
    assert read_slurm(written, "topology.conf").findings == ()


@pytest.mark.parametrize("told", Format)
@given(text=st.text(max_size=300))
@settings(max_examples=examples(60))
def test_any_text_goes_through(told: Format, text: str) -> None:
    goes_through(text, told)


@pytest.mark.parametrize("told", Format)
@given(data=st.data())
@settings(max_examples=examples(60))
def test_any_fixture_with_lines_lost_doubled_mixed_and_bent_goes_through(
    told: Format, data: st.DataObject
) -> None:
    lines = FIXTURES[told].split("\n")
    for _ in range(data.draw(st.integers(1, 8))):
        at, other = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        line = lines[at]
        cut = data.draw(st.integers(0, len(line)))
        how = data.draw(st.sampled_from(["lose", "double", "swap", "cut", "bend", "splice"]))
        if how == "lose" and len(lines) > 1:
            del lines[at]
        elif how == "double":
            lines.insert(other, line)
        elif how == "swap":
            lines[at], lines[other] = lines[other], line
        elif how == "cut":
            lines[at] = line[:cut]
        elif how == "bend":
            lines[at] = (
                line[:cut] + data.draw(st.text("[]{}=,-#\"'\\0 9:&*\x00\x1bx", max_size=3)) + line[cut + 1 :]
            )
        elif how == "splice":
            lines[at] = line[:cut] + lines[other][cut:]
    text = "\n".join(lines)
    goes_through(text, told)
    goes_through(text, format_of(text))


@pytest.mark.parametrize("told", [one for one in Format if one is not Format.MATRIX])
def test_where_nothing_is_found_that_is_said(told: Format) -> None:
    kinds = [finding.check for finding in read("", "f", told).findings]
    assert kinds[-1] is TopologyCheck.NO_TOPOLOGY


def test_empty_lines_cost_no_more_than_their_number() -> None:
    assert format_of("\n" * 200_000) is Format.NAMES
    assert format_of("\n" * 200_000 + "SwitchName=a") is Format.SLURM

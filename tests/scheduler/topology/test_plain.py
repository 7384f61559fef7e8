"""The graph as plain values is the whole graph."""

from __future__ import annotations

import json

import yaml
from hypothesis import given, settings

from deeplink.scheduler.topology.network import Network
from deeplink.scheduler.topology.sources.document import document_of, read_document
from tests.effort import examples
from tests.scheduler.topology.fabrics import networks


@given(networks())
@settings(max_examples=examples(100))
def test_what_is_written_is_read_as_the_same_graph(graph: Network) -> None:
    for text in (json.dumps(document_of(graph)), yaml.safe_dump(document_of(graph))):
        reading = read_document(text, "graph")
        assert reading.findings == ()
        assert reading.network == graph

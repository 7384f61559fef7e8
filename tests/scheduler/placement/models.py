"""Jobs, placements and constants to predict with: a hand's width of each, and strategies that draw any."""

from __future__ import annotations

from math import inf

from hypothesis import strategies as st

from deeplink.scheduler.placement.model import (
    Algorithm,
    Constants,
    Job,
    LinkSpeed,
    NodeShare,
    Placement,
    ReadSpeeds,
    Schedule,
)

PLAIN = Constants(
    gpu=LinkSpeed(10e9, 0.0),
    nic=LinkSpeed(1e9, 0.0),
    leaf=LinkSpeed(1e9, 0.0),
    spine=LinkSpeed(1e9, 0.0),
    nic_sharing=0.0,
    host_contention=0.0,
    straggling=0.0,
    unhidden=0.1,
)
"""Nothing shares, nothing waits, no step has a latency: what is left is bytes over bandwidth."""


def placement(shape: str) -> Placement:
    """A digit per node, the GPUs used of its four; all below one switch."""
    return Placement(tuple(NodeShare(int(gpus), 4) for gpus in shape))


seconds = st.floats(1e-6, 10)
bandwidths = st.floats(1e6, 1e12)
shares = st.floats(0, 1)
links = st.builds(LinkSpeed, bandwidths, st.floats(0, 1e-2))
constants = st.builds(
    Constants,
    gpu=links,
    nic=links,
    leaf=links,
    spine=links,
    nics=st.integers(1, 8),
    path_bandwidth=bandwidths,
    nic_sharing=st.floats(0, 0.2),
    host_contention=st.floats(0, 0.3),
    straggling=st.floats(0, 0.3),
    unhidden=shares,
    reads=st.builds(
        ReadSpeeds,
        local=st.none() | bandwidths,
        peer=st.none() | bandwidths,
        source=st.none() | bandwidths,
        source_of_all=bandwidths | st.just(inf),
    ),
)
jobs = st.builds(
    Job,
    batch=st.integers(1, 4096),
    sample_s=seconds,
    gradient_bytes=st.floats(1, 1e11),
    fixed_s=st.floats(0, 1),
    overlap=shares,
    sample_bytes=st.floats(0, 1e6),
    algorithm=st.sampled_from(Algorithm),
    schedule=st.sampled_from(Schedule),
)
paths = st.sampled_from(
    [(), ("core", "s0", "l0"), ("core", "s0", "l1"), ("core", "s1", "l2"), ("core", "s1", "l3")]
)
placements = st.builds(
    Placement,
    st.lists(
        st.builds(NodeShare, st.integers(1, 8), st.just(8), paths, st.floats(0.1, 1)), min_size=1, max_size=12
    ).map(tuple),
)

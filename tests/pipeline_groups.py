"""Groups, phase times and cases for tests of the pipeline simulator."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from csps.configurator.model.attention_shape import AttentionShape
from csps.configurator.model.phase_times import AttentionTimes, LinearTime, PhaseTimes
from csps.configurator.pipeline.cases import LayerCases, SimulatedGroup
from csps.configurator.pipeline.program import LinkSpeed, Wiring
from csps.protocols.attention.csa import halving
from csps.protocols.core.topology import Topology

TWO_SERVERS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")
PLACES = [("0-0-0",), ("0-0-0", "0-0-1", "0-0-2"), TWO_SERVERS, (*TWO_SERVERS[:3], "1-0-0")]
TIMES = PhaseTimes(
    qkv=LinearTime(fixed=1e-4, each=1e-7),
    attention=AttentionTimes(call=2e-5, row=1e-8, pair=2e-9),
    linear=LinearTime(fixed=1e-4, each=1e-7),
    rest=LinearTime(each=2e-7),
    select=LinearTime(each=1e-8),
    importance=LinearTime(fixed=1e-5, each=2e-9),
    merge=LinearTime(fixed=1e-5, each=2e-9),
    copy=LinearTime(each=1e-10),
)
INSIDE = LinkSpeed(bytes_per_s=1.3e9, latency_s=5e-5)
BETWEEN = LinkSpeed(bytes_per_s=1e8, latency_s=2e-4)


def group(
    locations: tuple[str, ...] = TWO_SERVERS,
    *,
    heads: int = 8,
    kv_heads: int = 4,
    layers: int = 4,
    tp: int = 1,
    inside: LinkSpeed = INSIDE,
    between: LinkSpeed = BETWEEN,
    racks: LinkSpeed | None = None,
    times: PhaseTimes = TIMES,
    cores: float | None = None,
) -> SimulatedGroup:
    """Return ranks of equal speed; `cores` of them for all, if they share some."""
    servers = [place.server_id for place in Topology.of(locations).locations]
    return SimulatedGroup(
        shape=AttentionShape(hidden=64, heads=heads, kv_heads=kv_heads, head_dim=16, layers=layers),
        locations=locations,
        tp=tp,
        times=times,
        wiring=Wiring.of_servers(servers, inside=inside, between=between, racks=racks),
        cores_of=None if cores is None else (0,) * len(locations),
        cores=() if cores is None else (cores,),
    )


@st.composite
def cases(
    draw: st.DrawFn, of: SimulatedGroup, *, most: int = 4, micro: int = 5, scoring: bool = True
) -> LayerCases:
    """Draw layers of several configurations with one number of levels."""
    levels = draw(st.integers(1, len(Topology.of(of.locations).granularities)))
    count = draw(st.integers(1, most))
    ratios = [
        halving([draw(st.sampled_from((0.0, 0.3, 0.9))) for _ in range(of.kv_heads)], levels)
        for _ in range(count)
    ]
    ratios_cvg = np.array(ratios, float).reshape(count, levels - 1, of.kv_heads)
    numbers = st.integers(1, micro)
    small = st.integers(0, 9)
    scores = st.booleans() if scoring else st.just(False)
    return LayerCases(
        levels=levels,
        ratios_cgv=np.concatenate(
            [np.zeros((count, 1, of.kv_heads)), ratios_cvg], axis=1
        ).transpose(0, 2, 1),
        micro_cv=np.array([[draw(numbers) for _ in range(levels)] for _ in range(count)]),
        scores_c=np.array([draw(scores) for _ in range(count)]),
        same_c=np.array([draw(scores) for _ in range(count)]),
        window_c=np.array([draw(st.integers(1, 9)) for _ in range(count)]),
        sinks_c=np.array([draw(small) for _ in range(count)]),
        tail_c=np.array([draw(small) for _ in range(count)]),
        drop_queries=draw(st.booleans()),
        pipelined=draw(st.booleans()),
    )

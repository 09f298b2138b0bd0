"""A workload's lengths and an arrival process become requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csps.loadgen.workloads.arrivals import Arrivals
from csps.loadgen.workloads.named import Workload
from csps.loadgen.workloads.request import Fitted, Request, fit


@dataclass(frozen=True, kw_only=True)
class Size:
    """How a workload is made to fit a server that is smaller than the papers'."""

    longest_input: int | None = None
    """Scale all prompts by one factor, so that the workload's longest becomes this long. None:
    as published."""
    shortest_input: int = 1
    """Of scaled prompts."""
    longest_output: int | None = None
    """Scale all answers over this length down to it. None: as published."""
    positions: int | None = None
    """Of the model: longer prompts are cut, after scaling. None: no limit."""


def generate(
    workload: Workload,
    requests: int,
    *,
    arrivals: Arrivals,
    seed: int = 0,
    size: Size | None = None,
) -> Fitted:
    """Draw requests; the same arguments give the same requests.

    Arrivals and lengths have streams of random numbers of their own: another rate leaves the
    lengths as they are.

    Args:
        requests: how many.
        arrivals: when they come.
        seed: of both streams.
        size: fits the workload to a smaller server.

    Raises:
        ValueError: an answer leaves no position for its prompt.
    """
    size = size or Size()
    lengths_rng, arrivals_rng = np.random.default_rng(seed).spawn(2)
    inputs, outputs = workload.draw(requests, lengths_rng)
    if size.longest_input is not None:
        scaled = np.rint(inputs * (size.longest_input / workload.longest_input))
        inputs = np.maximum(scaled.astype(np.int64), size.shortest_input)
    if size.longest_output is not None:
        outputs = np.minimum(outputs, size.longest_output)
    times = arrivals.draw(requests, arrivals_rng)
    drawn = [
        Request(arrival_ns=time, input_length=length, output_length=answer)
        for time, length, answer in zip(
            times.tolist(), inputs.tolist(), outputs.tolist(), strict=True
        )
    ]
    if size.positions is None:
        return Fitted(requests=tuple(drawn), cut=0)
    return fit(drawn, size.positions)

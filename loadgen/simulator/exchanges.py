"""Time that steps and decode iterations spend on links.

A latency table holds times of computing. What instances exchange depends on where they are, so it
is added here: bytes by the formulas of `configurator/model/traffic.py`, on links that other
transfers use at the same time.

- Rings exchange while they compute. A step ends when both are done.
- All-to-alls of SP-NTP and all-gathers of SP-TP are waited for: their bytes are sent after a step
  has computed. Sending each layer's share between its computations would take as long.
- With the speed of a rank (`rank`), the pipeline simulator prices these and sparse attention,
  exchanges included, relative to computing alone. Its exchanges then take links from others only.
- History that moves to other members (Tetris §4.1) travels while the step computes; the first
  layer waits for its share.
- New KV that others keep goes round with a ring, except for the last layer's.
- In a decode iteration masters send queries to the other holders of their sequences' KV. These
  messages are too short to notice how many transfers share a link.

Times that were measured on instances of one server hold their exchanges already: `measured` is
the link between those instances, and what they spent on it is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import TypeVar

from csps.configurator.costs.cost_table import WHOLE_PERMILLE
from csps.configurator.costs.latency import FRACTION_BITS, HybridCost
from csps.configurator.model.attention_shape import AttentionShape
from csps.configurator.model.traffic import (
    Traffic,
    csa_traffic,
    levels_traffic,
    sp_tp_traffic,
    ulysses_traffic,
)
from csps.loadgen.simulator.cluster import ClusterModel, InstanceModel, LinkModel
from csps.loadgen.simulator.decode_batch import CostOf, IterationCost
from csps.loadgen.simulator.step_order import Sends
from csps.loadgen.simulator.timeline import NS_PER_S, Link, SimulatedNetwork
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import EXACT, LEVELS, RINGS, SPARSE, parse_option
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.placement import Span, within
from csps.protocols.core.topology import GroupShape, Location
from csps.protocols.gang.step_messages import PrefillStep, rebalanced_kv
from csps.services.scheduling.deciding.step_layout import rows_of
from csps.services.scheduling.events.events import index_of

TRAFFIC_TOKENS = 1 << 16
"""Prompt by which the bytes of a token are counted; they hardly depend on the length."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of a step, as far as it does not depend on what else uses the links."""

    work_ns: int
    beside: Sends = ()
    """Bytes that are sent while it computes."""
    after: Sends = ()
    """Bytes that are sent when it has computed."""


@dataclass(frozen=True)
class _GroupLinks:
    """Links of a group's exchange, with the bytes on each for a token of the prompt."""

    shares: tuple[tuple[Link, float], ...]
    latency_ns: int
    """Latency of the slowest of the links."""

    def sends(self, tokens: float) -> Sends:
        return tuple((link, round(share * tokens)) for link, share in self.shares)


class StepPricer:
    """Prices the steps of a gang.

    Args:
        cluster: the model of the cluster.
        network: its links.
    """

    def __init__(self, cluster: ClusterModel, network: SimulatedNetwork) -> None:
        self._cluster, self._network = cluster, network
        self._links: dict[tuple[tuple[int, ...], str], _GroupLinks] = {}
        self._token_bytes = cluster.token_bytes
        self._measured_rings = {key.strategy for key, _ in cluster.table.steps}.intersection(RINGS)

    def of(self, step: PrefillStep) -> StepTime:
        """Return the time of a step."""
        alone_ns = self._cluster.step_ns(step)
        if len(step.group) == 1:
            return StepTime(work_ns=alone_ns)
        strategy, settings = parse_option(step.strategy)
        if strategy == EXACT and settings is None:
            strategy = self._cluster.table.exact
        permille = self._cluster.permille(step)
        if permille is not None and strategy not in self._measured_rings:
            time = self._of_option(step, alone_ns, permille)
        elif strategy in RINGS:
            time = self._of_ring(step, strategy, alone_ns)
        else:
            time = self._of_exchange(step, strategy, settings, alone_ns)
        return self._with_moves(step, strategy, time)

    def _of_ring(self, step: PrefillStep, ring: str, alone_ns: int) -> StepTime:
        links, tokens = self._group_links(step, ring), step.bounds[-1]
        sends = links.sends(tokens + self._history_share(step, ring))
        hops = (len(step.group) - 1) * self._cluster.layers
        exchange_ns = hops * links.latency_ns + longest_ns(sends)
        return StepTime(work_ns=max(alone_ns, exchange_ns), beside=sends)

    def _history_share(self, step: PrefillStep, ring: str) -> float:
        """Return the new tokens whose exchange would take as long as that of the history.

        The keys and values of the history go round, or it is asked where it lies: whatever is less.
        """
        if ring != "ring_kv":
            return 0.0  # queries meet the history wherever they are
        ratio = 2 * self._token_bytes.queries / max(1.0, self._token_bytes.kv)
        return sum(min(chunk.start, ratio * chunk.length) for chunk in step.chunks)

    def _of_exchange(
        self, step: PrefillStep, strategy: str, settings: CsaSettings | None, alone_ns: int
    ) -> StepTime:
        links, tokens = self._group_links(step, step.strategy), step.bounds[-1]
        computing_ns = max(0, alone_ns - self._measured_ns(step, strategy))
        if strategy in (LEVELS, SPARSE):
            # Without the speed of a rank nothing is known of how much computing hides.
            return StepTime(work_ns=computing_ns, after=links.sends(tokens))
        waits = 2 * self._cluster.layers - 1  # a link adds its latency once by itself
        return StepTime(work_ns=computing_ns + waits * links.latency_ns, after=links.sends(tokens))

    def _measured_ns(self, step: PrefillStep, strategy: str) -> int:
        """Return the part of a step's measured time that was spent on the links."""
        measured = self._cluster.measured
        if measured is None:
            return 0
        members, tokens = len(step.group), step.bounds[-1]
        sent = self._traffic(strategy, None, GroupShape((members,))).inside
        pairs = 1 if measured.shared else members * (members - 1)
        taken_ns = transfer_ns(measured, round(sent / pairs * tokens))
        return 2 * self._cluster.layers * measured.latency_ns + taken_ns

    def _of_option(self, step: PrefillStep, alone_ns: int, permille: int) -> StepTime:
        """Price an option by the pipeline simulator, which knows what its exchanges wait for."""
        computing_ns = max(0, alone_ns - self._measured_ns(step, EXACT))
        sends = self._group_links(step, step.strategy).sends(step.bounds[-1])
        return StepTime(work_ns=computing_ns * permille // WHOLE_PERMILLE, beside=sends)

    # --- moves of KV ---

    def _with_moves(self, step: PrefillStep, strategy: str, time: StepTime) -> StepTime:
        if not any(chunk.placement for chunk in step.chunks):
            return time
        moved = self._balanced(step)
        layers = self._cluster.layers
        first = tuple((link, -(-size // layers)) for link, size in moved.items())
        rest = tuple((link, size - size // layers) for link, size in moved.items())
        wait_ns = max((send_ns(link, size) for link, size in first), default=0)
        # On an elastic gang this is the way to where the sequence is decoded (`PrefillGang`).
        kept = {} if self._cluster.in_place else self._kept_elsewhere(step)
        if strategy in RINGS:
            kept = {link: -(-size // layers) for link, size in kept.items()}
        return StepTime(
            work_ns=time.work_ns + wait_ns,
            beside=(*time.beside, *rest),
            after=(*time.after, *kept.items()),
        )

    def _balanced(self, step: PrefillStep) -> dict[Link, int]:
        """Return the bytes of history that moves to other members, by link."""
        sizes: dict[Link, int] = {}
        for chunk in step.chunks:
            if chunk.placement and chunk.history:
                for move in rebalanced_kv(chunk):
                    self._add(sizes, move.sender, move.receiver, move.span.length)
        return _followed(sizes)

    def _kept_elsewhere(self, step: PrefillStep) -> dict[Link, int]:
        """Return the bytes of new KV that other members keep, by link."""
        sizes: dict[Link, int] = {}
        for chunk, rows in zip(step.chunks, rows_of(step), strict=True):
            new = within(chunk.placement, Span(chunk.start, chunk.start + chunk.length))
            for row in rows:
                for kept in new:
                    if kept.instance != row.instance:
                        tokens = row.span.intersection(kept.span).length
                        self._add(sizes, row.instance, kept.instance, tokens)
        return _followed(sizes)

    def _add(self, sizes: dict[Link, int], sender: int, receiver: int, tokens: int) -> None:
        members = self._cluster.prefill.instances
        link = self._network.between(members[index_of(sender)], members[index_of(receiver)])
        if link is not None and tokens:
            size = tokens * self._cluster.kv_bytes_per_token
            sizes[link] = sizes.get(link, 0) + size

    # --- links of a group ---

    def _group_links(self, step: PrefillStep, strategy: str) -> _GroupLinks:
        key = step.group, strategy
        if key not in self._links:
            instances = self._cluster.prefill.instances
            members = [instances[index_of(instance)] for instance in step.group]
            shares: dict[Link, float] = {}
            for link, share in self._shares(members, strategy):
                shares[link] = shares.get(link, 0.0) + share
            latency_ns = max((link.latency_ns for link in shares), default=0)
            self._links[key] = _GroupLinks(tuple(_followed(shares).items()), latency_ns)
        return self._links[key]

    def _shares(
        self, members: Sequence[InstanceModel], strategy: str
    ) -> Iterator[tuple[Link, float]]:
        """Yield links, and the bytes that a token of the prompt sends over each."""
        if strategy in RINGS:
            each = self._ring_bytes(strategy, len(members))
            for sender, receiver in pairwise([*members, members[0]]):
                yield from self._share(sender, receiver, each)
            return
        name, settings = parse_option(strategy)
        group = GroupShape.of(sorted(Location.parse(member.location) for member in members), 1)
        traffic = self._traffic(name, settings, group)
        near = sum(count * (count - 1) for count in group.servers)
        far = len(members) * (len(members) - 1) - near
        for sender, receiver in permutations(members, 2):
            if sender.server == receiver.server:
                yield from self._share(sender, receiver, traffic.inside / near)
            else:
                yield from self._share(sender, receiver, traffic.between / far)

    def _share(
        self, sender: InstanceModel, receiver: InstanceModel, each: float
    ) -> Iterator[tuple[Link, float]]:
        if (link := self._network.between(sender, receiver)) is not None:
            yield link, each

    def _ring_bytes(self, ring: str, members: int) -> float:
        """Return the bytes of a token on each hop: every member passes on N - 1 shares."""
        token = self._token_bytes
        queries = 2 * token.queries  # their outputs return
        return (token.kv if ring == "ring_kv" else queries) * (members - 1) / members

    def _traffic(self, strategy: str, settings: CsaSettings | None, group: GroupShape) -> Traffic:
        """Return the bytes of a token in all layers, over all instances."""
        shape, tokens = self._token_bytes.shape, TRAFFIC_TOKENS
        if strategy.startswith("sp_tp"):
            hierarchical = strategy == "sp_tp"
            traffic = sp_tp_traffic(shape, group, tokens, hierarchical=hierarchical)
        elif strategy == LEVELS:
            traffic = levels_traffic(shape, group, tokens)
        elif settings is not None:
            traffic = _csa_traffic(shape, group.places, settings, tokens)
        else:
            traffic = ulysses_traffic(shape, group, tokens)
        return traffic * (self._token_bytes.element * self._cluster.layers / tokens)


Size = TypeVar("Size", int, float)


def _followed(sizes: Mapping[Link, Size]) -> dict[Link, Size]:
    """Leave out all but the fullest of the links that only two instances use.

    A step waits for all of its transfers. Following each of a hundred pairs would make simulations
    slow and change nothing, unless another step happened to use just these pairs.
    """
    fullest: Link | None = None
    for link, size in sizes.items():
        if link.private and (fullest is None or size > sizes[fullest]):
            fullest = link
    return {link: size for link, size in sizes.items() if not link.private or link is fullest}


def _csa_traffic(
    shape: AttentionShape, places: Sequence[str], settings: CsaSettings, tokens: int
) -> Traffic:
    spts = [tokens // len(places)] * len(places)
    plan = settings.for_group(places, layers=shape.layers, longest_spt=spts[0])
    return csa_traffic(shape, plan, tp=1, spts=spts)


def transfer_ns(link: LinkModel, size: int) -> int:
    """Return the time of a transfer that has a link for itself, without latency."""
    return -(-size * NS_PER_S // link.bytes_per_s)


def send_ns(link: Link, size: int) -> int:
    """Return the time of a transfer that has a link for itself, with latency."""
    return -(-size * NS_PER_S // link.bytes_per_s) + link.latency_ns


def longest_ns(sends: Sends) -> int:
    """Return the time of transfers that have their links for themselves."""
    return max((send_ns(link, size) for link, size in sends), default=0)


# --- decode iterations -------------------------------------------------------------------------


def iteration_costs(cluster: ClusterModel) -> CostOf:
    """Return the function that prices a cluster's decode iterations by the group of instances."""
    found: dict[tuple[int, ...], IterationCost] = {}

    def cost(instances: tuple[int, ...]) -> IterationCost:
        if instances not in found:
            found[instances] = _iteration_cost(cluster, instances)
        return found[instances]

    return cost


def _iteration_cost(cluster: ClusterModel, instances: tuple[int, ...]) -> IterationCost:
    members = [cluster.decode.instances[index] for index in instances]
    exchange, far_row = 0, 0
    if len(members) > 1:
        exchange, far_row = _exchanged(cluster, _slowest(cluster, members), len(members))
        if cluster.measured is not None:
            fixed, row = _exchanged(cluster, cluster.measured, len(members))
            exchange, far_row = max(0, exchange - fixed), max(0, far_row - row)
    return IterationCost(
        decode=cluster.table.iteration(len(members), cluster.decode.tp),
        hybrid=_hybrid(cluster, len(members)),
        instances=len(members),
        exchange=exchange,
        far_row=far_row,
    )


def _hybrid(cluster: ClusterModel, instances: int) -> HybridCost | None:
    try:
        return cluster.hybrid_of(instances)
    except ConfigError:
        return None


def _slowest(cluster: ClusterModel, members: Sequence[InstanceModel]) -> LinkModel | None:
    """Return the farthest link between any two."""
    if cluster.racks is not None and len({member.rack for member in members}) > 1:
        return cluster.racks
    far = len({member.server for member in members}) > 1
    return cluster.between if far else cluster.inside


def _exchanged(cluster: ClusterModel, link: LinkModel | None, members: int) -> tuple[int, int]:
    """Return the time of the messages, and of one sequence's bytes, in 2^-48 ns."""
    if link is None:
        return 0, 0
    fixed = 2 * cluster.layers * link.latency_ns << FRACTION_BITS
    size = round(2 * cluster.token_bytes.queries)
    # Members send at the same time, unless they have one link for all.
    senders = 1 if link.shared else members
    return fixed, (size * NS_PER_S << FRACTION_BITS) // (link.bytes_per_s * senders)

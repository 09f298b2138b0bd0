"""A paced prefill gang: the ranks' messages around the simulator's model."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.exchanges import StepPricer
from csps.loadgen.simulator.kv_slots import Slots
from csps.loadgen.simulator.prefill_gang import PrefillGang
from csps.loadgen.simulator.step_order import StepOrder
from csps.loadgen.simulator.timeline import SimulatedNetwork
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import CancelSequence, PrefillDone, SampledToken, SampledTokens
from csps.protocols.gang.step_messages import PrefillStep
from csps.protocols.rpc.schema import unpack
from csps.protocols.rpc.server import Peer
from csps.services.scheduling.events.events import index_of, instance_id
from paced.clock import PacedTimeline
from paced.ranks import PacedRanks, Words

PREFILL, DECODE = 1, 2
"""Gang numbers, so that instances have ids."""


class KvReceiver(Protocol):
    """The decode gang, as it receives KV."""

    def arrived(self, sequence_id: int, index: int, tokens: int) -> None:
        """Take KV of a sequence that has arrived at an instance."""


class PacedPrefill:
    """Runs steps at the model's pace."""

    def __init__(
        self,
        timeline: PacedTimeline,
        cluster: ClusterModel,
        kv_receiver: KvReceiver,
        words: Words,
        secret: bytes,
    ) -> None:
        self._timeline, self._cluster = timeline, cluster
        self._kv_receiver, self._words = kv_receiver, words
        self._jobs: dict[int, PrefillStep] = {}
        handlers = {"sampler": _ignore, "prefill": self._prefill, "cancel": self._cancel}
        self.ranks = PacedRanks("prefill", cluster, handlers, secret)
        network = SimulatedNetwork(timeline, cluster)
        self._gang = PrefillGang(
            order=StepOrder(timeline, len(cluster.prefill.instances), cluster.quantum_ns),
            slots=Slots(cluster.prefill.kv_slots),
            times=StepPricer(cluster, network),
            route=network.route,
            kv_bytes_per_token=cluster.kv_bytes_per_token,
            layers=cluster.layers,
            listener=self,
        )

    @property
    def steps(self) -> int:
        """Return the number of steps that are not done."""
        return len(self._gang.steps)

    def _prefill(self, payload: Any, _: Peer) -> None:
        job = unpack(PrefillStep, payload)
        self._timeline.catch_up()
        self._jobs[job.step_id] = job
        destinations = {
            chunk.sequence_id: tuple(
                KvSlice.of(instance_id(DECODE, destination.instance), destination.span)
                for destination in chunk.destinations
            )
            for chunk in job.chunks
        }
        self._gang.run(_step(job), destinations)

    def _cancel(self, payload: Any, _: Peer) -> None:
        self._timeline.catch_up()
        self._gang.cancel(unpack(CancelSequence, payload).sequence_id)

    # --- what the model tells (PrefillListener) ---

    def started(self, step: PrefillStep) -> None:
        """Ignore the start of a step, which real ranks do not report either."""

    def computed(self, step: PrefillStep) -> None:
        job = self._jobs[step.step_id]
        sampled = []
        for chunk in job.chunks:
            if chunk.last:
                index = chunk.first_index
                token = self._words.token(index)
                reason = None if chunk.decoded else "length"
                sampled.append(
                    SampledToken(
                        sequence_id=chunk.sequence_id,
                        index=index,
                        token=token,
                        finish_reason=reason,
                    )
                )
        if sampled:
            self.ranks.ranks[job.group[-1]].notify("tokens", SampledTokens.of(sampled))

    def arrived(self, sequence: int, instance: int, tokens: int) -> None:
        self._kv_receiver.arrived(sequence, index_of(instance), tokens)

    def step_done(self, step: int, instance: int, took_ns: int) -> None:
        rank = index_of(instance)
        self.ranks.ranks[rank].notify(
            "prefill_done",
            PrefillDone(
                step_id=step,
                rank=rank,
                cancelled=took_ns == 0,
                queue_s=0.0,
                compute_s=took_ns / 1e9,
                communication_s=0.0,
                transfer_s=0.0,
                yielded_s=0.0,
            ),
        )


def _ignore(payload: Any, _: Peer) -> None:
    """Take no notice: nothing is sampled here."""


def _placed(slices: tuple[KvSlice, ...]) -> tuple[KvSlice, ...]:
    return tuple(
        KvSlice.of(instance_id(PREFILL, kv_slice.instance), kv_slice.span) for kv_slice in slices
    )


def _step(job: PrefillStep) -> PrefillStep:
    """Return the step with instances numbered as the scheduler does."""
    return msgspec.structs.replace(
        job,
        group=tuple(instance_id(PREFILL, index) for index in job.group),
        chunks=tuple(
            msgspec.structs.replace(
                chunk,
                rows=_placed(chunk.rows),
                history=_placed(chunk.history),
                placement=_placed(chunk.placement),
                retain=False,
            )
            for chunk in job.chunks
        ),
    )

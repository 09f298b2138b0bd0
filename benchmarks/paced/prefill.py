"""A paced prefill gang: today's messages around the simulator's model of one."""

from __future__ import annotations

from typing import Any, Protocol

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.network import Network
from csps.loadgen.simulator.prefill_gang import PrefillGang
from csps.loadgen.simulator.slots import Slots
from csps.loadgen.simulator.step_order import StepOrder
from csps.protocols.messages import CancelRequest, PrefillDone
from csps.protocols.placement import KvShare
from csps.protocols.prefill_job import PrefillJob
from csps.protocols.rpc_server import Peer
from csps.protocols.schema import unpack
from csps.protocols.tokens import TokenDrawn, Tokens
from csps.services.scheduling.commands import Piece, RunStep, Share
from csps.services.scheduling.ids import index_of, instance_id
from paced.clock import PacedTimeline
from paced.ranks import PacedRanks, Words

PREFILL, DECODE = 1, 2
"""Gang numbers, so that instances have ids."""


class Landing(Protocol):
    """The decode gang, as KV arrives."""

    def arrived(self, rid: int, index: int, tokens: int) -> None:
        """KV of a request has arrived at an instance."""


class PacedPrefill:
    """Runs jobs at the model's pace."""

    def __init__(
        self,
        timeline: PacedTimeline,
        cluster: ClusterModel,
        landing: Landing,
        words: Words,
        secret: bytes,
    ) -> None:
        self._timeline, self._cluster = timeline, cluster
        self._landing, self._words = landing, words
        self._jobs: dict[int, PrefillJob] = {}
        self.ranks = PacedRanks(
            "prefill", cluster, {"prefill": self._prefill, "cancel": self._cancel}, secret
        )
        self._gang = PrefillGang(
            order=StepOrder(timeline, len(cluster.prefill.instances), cluster.quantum_ns),
            slots=Slots(cluster.prefill.kv_slots),
            work_ns=cluster.step_ns,
            route=Network(timeline, cluster).route,
            kv_bytes_per_token=cluster.kv_bytes_per_token,
            layers=cluster.layers,
            listener=self,
        )

    @property
    def steps(self) -> int:
        """Not done yet."""
        return self._gang.steps

    def _prefill(self, payload: Any, _: Peer) -> None:
        job = unpack(PrefillJob, payload)
        self._timeline.catch_up()
        self._jobs[job.job_id] = job
        destinations = {
            piece.rid: tuple(
                Share.of(instance_id(DECODE, it.instance), it.span) for it in piece.destinations
            )
            for piece in job.pieces
        }
        self._gang.run(_step(job), destinations)

    def _cancel(self, payload: Any, _: Peer) -> None:
        self._timeline.catch_up()
        self._gang.cancel(unpack(CancelRequest, payload).rid)

    # --- what the model tells (PrefillListener) ---

    def started(self, step: RunStep) -> None:
        """Nobody is told."""

    def computed(self, step: RunStep) -> None:
        job = self._jobs[step.step]
        drawn = []
        for piece in job.pieces:
            if piece.last:
                index = len(piece.drawn) // 4
                ends = index + 1 == piece.sampling.max_tokens
                token = self._words.token(index)
                reason = "length" if ends else None
                drawn.append(
                    TokenDrawn(rid=piece.rid, index=index, token=token, finish_reason=reason)
                )
        if drawn:
            self.ranks.ranks[job.group[-1]].tell("tokens", Tokens.of(drawn))

    def arrived(self, sequence: int, instance: int, tokens: int) -> None:
        self._landing.arrived(sequence, index_of(instance), tokens)

    def step_done(self, step: int, instance: int, took_ns: int) -> None:
        rank = index_of(instance)
        self.ranks.ranks[rank].tell(
            "prefill_done",
            PrefillDone(
                job_id=step,
                rank=rank,
                cancelled=took_ns == 0,
                queue_s=0.0,
                compute_s=took_ns / 1e9,
                communication_s=0.0,
                transfer_s=0.0,
                yielded_s=0.0,
            ),
        )


def _shares(shares: tuple[KvShare, ...]) -> tuple[Share, ...]:
    return tuple(Share.of(instance_id(PREFILL, it.instance), it.span) for it in shares)


def _step(job: PrefillJob) -> RunStep:
    return RunStep(
        step=job.job_id,
        group=tuple(instance_id(PREFILL, it) for it in job.group),
        bounds=job.bounds,
        pieces=tuple(
            Piece(it.rid, it.start, it.length, _shares(it.rows), _shares(it.placement))
            for it in job.pieces
        ),
        history=tuple(_shares(it.history) for it in job.pieces),
        strategy=job.strategy,
        cls="exact",
        urgent=job.urgent,
        ends_ns=0,
    )

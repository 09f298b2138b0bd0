"""The router's commands to a rank: each goes to the rank's loop, and on rank 0 to the sequencer.

In a gang that decodes what it prefills, steps send no KV: their chunks are placed where they are
decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.choice import check_step
from csps.actors.engine.log_end import LogEnd, SequencerEnd
from csps.actors.engine.loop import EngineLoop
from csps.actors.engine.move_run import leader_of, move_points
from csps.actors.engine.step_run import step_points_of
from csps.actors.sampling.token_sampler import compile_ahead
from csps.actors.worker.rank_config import RankConfig
from csps.actors.worker.router_connection import RouterAttachment
from csps.actors.worker.saved_kv import SavedKv
from csps.actors.worker.startup import DECODE_BATCH
from csps.protocols.core.errors import ConfigError, ProtocolError
from csps.protocols.gang.messages import (
    CancelSequence,
    EvictKv,
    FirstTokenSampler,
    JoinBatch,
    ReserveKv,
    RestoreKv,
    RetainKv,
    SaveKv,
)
from csps.protocols.gang.step_messages import MoveSequence, PrefillStep, rebalanced, stored_in_place
from csps.protocols.rpc import schema
from csps.protocols.rpc.server import Handler, Peer
from csps.protocols.sequencer.sequencer import Sequencer
from csps.protocols.sequencer.steps import StepSpec


class RankCommands:
    """Commands of a started rank, on its RPC loop."""

    def __init__(
        self,
        config: RankConfig,
        engine: Engine,
        loop: EngineLoop,
        log: LogEnd,
        attachment: RouterAttachment,
        saved: SavedKv | None = None,
    ) -> None:
        """Args:
        saved: writes KV to files and reads it back; None: the rank has no files.
        """
        self._config, self._engine, self._loop, self._saved = config, engine, loop, saved
        self._attachment = attachment
        self._sequencer = log if isinstance(log, SequencerEnd) else None
        self._layout = engine.layout
        self._samplers: dict[int, bytes] = {}
        """Sampler inputs by sequence, until the step that samples its first token comes."""

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by name; only the attached router may call any."""
        return {
            name: self._attached(handler)
            for name, handler in {
                "sampler": self._sampler,
                "prefill": self._submit,
                "reserve": self._reserve,
                "join": self._join,
                "move": self._move,
                "cancel": self._cancel,
                "retain": self._retain,
                "evict": self._evict,
                **({} if self._saved is None else self._file_handlers(self._saved)),
            }.items()
        }

    @staticmethod
    def _file_handlers(saved: SavedKv) -> dict[str, Callable[[Any], None]]:
        return {
            "list_saved": lambda _payload: saved.list_saved(),
            "save": lambda payload: saved.save(schema.unpack(SaveKv, payload)),
            "restore": lambda payload: saved.restore(schema.unpack(RestoreKv, payload)),
        }

    def _attached(self, command: Callable[[Any], None]) -> Handler:
        def handle(payload: Any, peer: Peer) -> None:
            self._attachment.require(peer)
            command(payload)

        return handle

    def end(self, owner: int) -> None:
        """Drop the work of a router that is gone."""
        self._samplers.clear()
        self._loop.cancel_all()
        self._post(lambda sequencer: sequencer.end_owner(owner))

    def _post(self, event: Callable[[Sequencer], None]) -> None:
        if self._sequencer is not None:
            self._sequencer.post(event)

    def _sampler(self, payload: Any) -> None:
        self._require_prefill()
        message = schema.unpack(FirstTokenSampler, payload)
        compile_ahead(message.inputs, self._engine.grammars)
        self._samplers[message.sequence_id] = message.inputs

    def _require_prefill(self) -> None:
        if not self._config.may_prefill:
            raise ProtocolError("a decode rank runs no prefill steps")

    def _with_samplers(self, step: PrefillStep) -> PrefillStep:
        """Return the step with the sampler inputs that have come ahead of it."""
        ended = {chunk.sequence_id for chunk in step.chunks if chunk.last}
        ahead = {
            sequence_id: self._samplers.pop(sequence_id)
            for sequence_id in ended & self._samplers.keys()
        }
        return step.with_samplers(ahead) if ahead else step

    def _submit(self, payload: Any) -> None:
        self._require_prefill()
        step = self._with_samplers(schema.unpack(PrefillStep, payload))
        try:
            step.check()
            check_step(step, self._engine.spec, in_place=self._config.may_decode)
        except ConfigError as error:
            # Steps come as notifications, which have no answer.
            self._loop.refuse(step, error)
            raise
        if self._config.may_decode:
            step = stored_in_place(step)
        owner = self._attachment.owner
        self._loop.submit(step, owner)
        if self._sequencer is None:
            return
        spec = StepSpec(
            id=step.step_id,
            ranks=self._layout.ranks_of_all(step.group),
            high_priority=step.high_priority,
            yield_points=step_points_of(self._engine, rebalanced(step)).total,
            sequences=tuple(chunk.sequence_id for chunk in step.chunks),
            rows=step.bounds[-1],
            owner=owner,
        )
        self._sequencer.post(lambda sequencer: sequencer.submit(spec))

    def _reserve(self, payload: Any) -> None:
        self._require_decoding()
        self._loop.reserve(schema.unpack(ReserveKv, payload), self._attachment.owner)

    def _join(self, payload: Any) -> None:
        self._require_decoding()
        message, owner = schema.unpack(JoinBatch, payload), self._attachment.owner
        ranks = self._layout.ranks_of_all(message.instances)
        self._post(
            lambda sequencer: sequencer.join(
                DECODE_BATCH,
                message.sequence_id,
                message.first_token,
                owner,
                budget=message.budget,
                ranks=ranks,
            )
        )

    def _require_decoding(self) -> None:
        if not self._config.may_decode:
            raise ProtocolError("a prefill rank does not decode")

    def _move(self, payload: Any) -> None:
        if self._config.role != "elastic":
            raise ProtocolError(
                f"a {self._config.role} rank moves no sequences; only elastic ranks do"
            )
        move, owner = schema.unpack(MoveSequence, payload), self._attachment.owner
        self._loop.move(move, owner)
        spec = StepSpec(
            id=move.step_id,
            ranks=self._layout.ranks_of_all(move.instances),
            high_priority=True,
            yield_points=move_points(move, self._engine.spec.layers),
            sequences=(move.sequence_id,),
            owner=owner,
            led_by=leader_of(move, self._layout),
            places=self._layout.ranks_of_all(move.after.instances),
            master=move.after.master,
        )
        self._post(lambda sequencer: sequencer.submit(spec))

    def _cancel(self, payload: Any) -> None:
        sequence_id = schema.unpack(CancelSequence, payload).sequence_id
        self._samplers.pop(sequence_id, None)
        self._loop.cancel(sequence_id)
        self._post(lambda sequencer: sequencer.cancel(sequence_id))

    def _retain(self, payload: Any) -> None:
        message = schema.unpack(RetainKv, payload)
        self._post(lambda sequencer: sequencer.retain(message.sequence_id, message.released))

    def _evict(self, payload: Any) -> None:
        message = schema.unpack(EvictKv, payload)
        self._post(lambda sequencer: sequencer.evict(message.sequence_id, message.released))

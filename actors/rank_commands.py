"""What a router has a rank do: every command goes to the rank's loop, and those that the gang's log
carries to the conductor, if this rank hosts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from csps.actors.engine.choice import check_job
from csps.actors.engine.engine import Engine
from csps.actors.engine.in_place import kept_in_place
from csps.actors.engine.log_end import ConductorEnd, LogEnd
from csps.actors.engine.loop import EngineLoop
from csps.actors.engine.move_run import leader_of, move_parts
from csps.actors.engine.open_log import STREAM
from csps.actors.engine.step_run import parts_of
from csps.actors.rank_config import RankConfig
from csps.actors.router_attachment import RouterAttachment
from csps.protocols import schema
from csps.protocols.balance import balanced
from csps.protocols.conducting.steps import StepTask
from csps.protocols.conductor import Conductor
from csps.protocols.errors import ConfigError, ProtocolError
from csps.protocols.messages import CancelRequest, JoinBatch, Keep, Release, Reserve
from csps.protocols.prefill_job import PrefillJob
from csps.protocols.row_move import MoveRow
from csps.protocols.rpc_server import Handler, Peer


class RankCommands:
    """Of one rank that was started; on its RPC loop."""

    def __init__(
        self,
        config: RankConfig,
        engine: Engine,
        loop: EngineLoop,
        log: LogEnd,
        attachment: RouterAttachment,
    ) -> None:
        self._config, self._engine, self._loop = config, engine, loop
        self._attachment = attachment
        self._conductor = log if isinstance(log, ConductorEnd) else None
        self._layout = engine.layout

    def handlers(self) -> dict[str, Handler]:
        """By name; only the attached router may call any."""
        return {
            name: self._attached(handler)
            for name, handler in {
                "prefill": self._submit,
                "reserve": self._reserve,
                "join": self._join,
                "move": self._move,
                "cancel": self._cancel,
                "keep": self._keep,
                "release": self._release,
            }.items()
        }

    def _attached(self, command: Callable[[Any], None]) -> Handler:
        def handle(payload: Any, peer: Peer) -> None:
            self._attachment.require(peer)
            command(payload)

        return handle

    def end(self, owner: int) -> None:
        """Drop the work of a router that is gone."""
        self._loop.cancel_all()
        self._conduct(lambda conductor: conductor.end_owner(owner))

    def _conduct(self, event: Callable[[Conductor], None]) -> None:
        if self._conductor is not None:
            self._conductor.tell(event)

    def _submit(self, payload: Any) -> None:
        job = schema.unpack(PrefillJob, payload)
        if not self._config.may_prefill:
            raise ProtocolError("a decode rank runs no prefill jobs")
        try:
            check_job(job, self._engine.spec, in_place=self._config.may_decode)
        except ConfigError as error:
            # jobs come as notifications, which have no answer
            self._loop.refuse(job, error)
            raise
        if self._config.may_decode:
            job = kept_in_place(job)
        owner = self._attachment.owner
        self._loop.submit(job, owner)
        if self._conductor is None:
            return
        task = StepTask(
            id=job.job_id,
            ranks=self._layout.ranks_of_all(job.group),
            urgent=job.urgent,
            parts=parts_of(self._engine, balanced(job)).total,
            sequences=tuple(piece.rid for piece in job.pieces),
            rows=job.bounds[-1],
            owner=owner,
        )
        self._conductor.tell(lambda conductor: conductor.submit(task))

    def _reserve(self, payload: Any) -> None:
        self._require_decoding()
        self._loop.reserve(schema.unpack(Reserve, payload), self._attachment.owner)

    def _join(self, payload: Any) -> None:
        self._require_decoding()
        row, owner = schema.unpack(JoinBatch, payload), self._attachment.owner
        ranks = self._layout.ranks_of_all(row.instances)
        self._conduct(
            lambda conductor: conductor.join(
                STREAM, row.rid, row.first_token, owner, budget=row.budget, ranks=ranks
            )
        )

    def _require_decoding(self) -> None:
        if not self._config.may_decode:
            raise ProtocolError("a prefill rank decodes nothing")

    def _move(self, payload: Any) -> None:
        if self._config.role != "elastic":
            raise ProtocolError("rows are moved where their prompts are computed")
        move, owner = schema.unpack(MoveRow, payload), self._attachment.owner
        self._loop.move(move, owner)
        task = StepTask(
            id=move.job_id,
            ranks=self._layout.ranks_of_all(move.instances),
            urgent=True,
            parts=move_parts(move, self._engine.spec.layers),
            sequences=(move.rid,),
            owner=owner,
            led_by=leader_of(move, self._layout),
            places=self._layout.ranks_of_all(move.after.instances),
        )
        self._conduct(lambda conductor: conductor.submit(task))

    def _cancel(self, payload: Any) -> None:
        rid = schema.unpack(CancelRequest, payload).rid
        self._loop.cancel(rid)
        self._conduct(lambda conductor: conductor.cancel(rid))

    def _keep(self, payload: Any) -> None:
        message = schema.unpack(Keep, payload)
        self._conduct(lambda conductor: conductor.keep(message.rid, message.released))

    def _release(self, payload: Any) -> None:
        message = schema.unpack(Release, payload)
        self._conduct(lambda conductor: conductor.release(message.rid, message.spans))

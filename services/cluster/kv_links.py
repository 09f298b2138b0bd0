"""The KV-transfer link from the gang that prefills to the gang that decodes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from csps.protocols.core.errors import ConfigError, GangLost
from csps.protocols.gang.client import GangClient, together
from csps.protocols.gang.messages import ConnectKv, LinkBroken
from csps.protocols.rpc.schema import pack

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KvLink:
    """The KV-transfer connection from a prefill gang to a decode gang, while it stands.

    An elastic gang is linked to itself, without a connection, as long as it lives.
    """

    prefill: GangClient
    decode: GangClient
    epoch: str
    """`generation.counter`, never reused; ranks refuse KV of another epoch."""

    @property
    def to_itself(self) -> bool:
        """Return whether the link is an elastic gang's to itself."""
        return self.prefill is self.decode


class KvLinks:
    """Links two gangs, and again whenever their connection breaks: one link at a time.

    Args:
        up: called when a link stands.
        down: called when a link no longer stands, with the reason.
        deadline_s: deadline for all ranks of both gangs to form their common process group.
    """

    def __init__(
        self,
        up: Callable[[KvLink], None],
        down: Callable[[KvLink, str], None],
        *,
        deadline_s: float,
    ) -> None:
        self._up, self._down, self._deadline_s = up, down, deadline_s
        self._made = 0
        self.current: KvLink | None = None

    async def connect(self, prefill: GangClient, decode: GangClient, *, generation: int) -> None:
        """Link two gangs under a new epoch; link an elastic gang to itself without a message.

        Raises:
            ConfigError: KV of one gang means nothing to the other.
            FaultError: the gangs do not connect, or one of them is lost.
        """
        self._made += 1
        epoch = f"{generation}.{self._made}"
        if prefill is not decode:
            _check_agree(prefill, decode)
            message = pack(_link_message(prefill, decode, epoch))
            await together(
                gang.call_all("connect_kv", message, deadline_s=self._deadline_s)
                for gang in (prefill, decode)
            )
        if prefill.lost.done() or decode.lost.done():
            raise GangLost(
                f"gang {prefill.gang_id} or {decode.gang_id} was lost while they were linked"
            )
        self.current = KvLink(prefill=prefill, decode=decode, epoch=epoch)
        _log.info("linked gangs %s and %s, epoch %s: ready", prefill.gang_id, decode.gang_id, epoch)
        self._up(self.current)

    def broken(self, gang: GangClient, message: LinkBroken) -> str | None:
        """Drop the link after a rank lost its connection; both gangs may be well.

        Returns:
            The reason; None if the message is about an earlier link.
        """
        if self.current is None or message.epoch != self.current.epoch:
            return None
        reason = f"rank {message.rank} of {gang.role} gang {gang.gang_id} lost {message.reason}"
        _log.warning(
            "KV-transfer link of epoch %s is broken, reconnecting: %s", message.epoch, reason
        )
        self.disconnect(reason)
        return reason

    def disconnect(self, reason: str) -> None:
        """Drop the current link, if there is one."""
        link, self.current = self.current, None
        if link is not None:
            self._down(link, reason)


def _check_agree(prefill: GangClient, decode: GangClient) -> None:
    """Raise ConfigError unless KV of one gang means the same to the other."""
    ours, theirs = prefill.descriptions[0], decode.descriptions[0]
    for name in ("model_fingerprint", "layers"):
        if getattr(ours, name) != getattr(theirs, name):
            raise ConfigError(
                f"prefill and decode serve different models: {name} "
                f"{getattr(ours, name)} against {getattr(theirs, name)}"
            )


def _link_message(prefill: GangClient, decode: GangClient, epoch: str) -> ConnectKv:
    host = decode.descriptions[0]
    return ConnectKv(
        epoch=epoch,
        store_host=host.store_host,
        store_port=host.store_port,
        prefill_ranks=prefill.world_size,
        decode_ranks=decode.world_size,
        prefill_tp=prefill.tp,
        decode_tp=decode.tp,
    )

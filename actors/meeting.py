"""Where the members of a prefill job wait until all of them have come to it.

One may still be busy for as long as a whole prefill takes, with a job that the others have no part
in. Nothing can be begun without it, but a rank that knows this can do other things meanwhile, which
it could not in the middle of an exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from csps.actors.mesh import PEER_DEADLINE, ControlTag, Mesh, Pending


class Meeting:
    """One member's view of one job's; all must meet for the same jobs, in the same order."""

    def __init__(
        self, mesh: Mesh, others: Sequence[int], on_complete: Callable[[], None] = lambda: None
    ) -> None:
        """Tell the others that this member has come.

        Args:
            others: ranks of the other members.
            on_complete: told when `complete` becomes true, in another thread.
        """
        # What is in the words does not matter.
        sends = [mesh.tell(torch.zeros(1), rank, ControlTag.MEETING) for rank in others]
        recvs = [mesh.hear(torch.empty(1), rank, ControlTag.MEETING) for rank in others]
        self._met: Future[None] = Future()
        self._met.add_done_callback(lambda _: on_complete())
        # gloo tells nobody that a message has come but who waits for it. A daemon: a peer that
        # hangs must not keep a rank from ending.
        exchange = Pending.all([*sends, *recvs])
        threading.Thread(target=self._wait, args=(exchange,), name="meeting", daemon=True).start()

    @property
    def complete(self) -> bool:
        """All members have come, or one never will."""
        return self._met.done()

    def wait(self) -> None:
        """Block until all members have come; raises PeerLost when one died or is too late."""
        self._met.result()

    def _wait(self, exchange: Pending) -> None:
        try:
            exchange.wait(PEER_DEADLINE)
        except BaseException as exc:
            self._met.set_exception(exc)
        else:
            self._met.set_result(None)

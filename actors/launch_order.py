"""One host order of launches, over all communicators of a device."""

from __future__ import annotations

import threading


class LaunchOrder:
    """Says which thread begins what goes through a device's communicators: gang and instance.

    NCCL runs the kernels of several communicators in the order of the host's calls, which has to be
    the same on every rank. Two threads have no common order: two ranks would wait for each other,
    now and then.
    """

    def __init__(self) -> None:
        self._thread: int | None = None

    def take(self) -> None:
        """From now on this thread begins everything."""
        self._thread = threading.get_ident()

    def check(self) -> None:
        """To be called where something begins."""
        assert self._thread in (None, threading.get_ident()), (
            f"thread {threading.current_thread().name} begins an exchange beside the engine's"
        )

"""Breaks connections of other processes, as a network does: neither of the two is asked."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator, Sequence

import psutil

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def break_between(ones: Sequence[int], others: Sequence[int], *, keep: Sequence[int]) -> int:
    """Shut all TCP connections between two sets of processes down; returns how many there were.

    Args:
        keep: ports whose connections stay.
    """
    theirs = {(it.laddr, it.raddr) for pid in others for it in _connections(pid)}
    broken = 0
    for pid in ones:
        for it in _connections(pid):
            if (it.raddr, it.laddr) in theirs and not {it.laddr.port, it.raddr.port} & set(keep):
                _shut_down(pid, it.fd)
                broken += 1
    return broken


def _connections(pid: int) -> Iterator[psutil._common.pconn]:
    found = psutil.Process(pid).net_connections("tcp")
    return (it for it in found if it.status == psutil.CONN_ESTABLISHED)


def _shut_down(pid: int, fd: int) -> None:
    """A socket that two processes share is shut down for both."""
    process = os.pidfd_open(pid)
    try:
        copied = _libc.syscall(_PIDFD_GETFD, process, fd, 0)
        if copied < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        with socket.socket(fileno=copied) as shared:
            shared.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(process)

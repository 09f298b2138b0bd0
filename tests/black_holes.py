"""Packets that vanish, without a firewall: a filter that the kernel runs for a socket drops
whatever arrives at it, acknowledgements too. The other end learns nothing, as if a cable were cut.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""The only instruction: return 0 bytes of the packet."""
_PIDFD_GETFD = 438


def swallow(sock: socket.socket) -> None:
    """Drop all packets that arrive at a socket from now on; a listening one answers no SYN."""
    program = ctypes.create_string_buffer(_DROP)
    sock.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program))
    )


def sockets_of(pid: int) -> dict[int, str]:
    """Return the inodes of a process' sockets by their file descriptors."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:  # closed since
            continue
        if target.startswith("socket:["):
            found[int(name)] = target.removeprefix("socket:[").removesuffix("]")
    return found


def borrowed(pid: int, descriptor: int) -> socket.socket:
    """Return another process' socket; closing it leaves the other's open."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        duplicate = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
        if duplicate < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        return socket.socket(fileno=duplicate)
    finally:
        os.close(process)

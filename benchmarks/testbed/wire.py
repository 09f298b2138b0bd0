"""A wire with a length: frames come out at the other end after a fixed delay.

`tc qdisc … netem delay` is the usual means, but the kernels of small virtual machines are built
without it. This one needs /dev/net/tun only: a process with one TAP device on each of two bridges
that hands frames across when they are due. TCP's offloads are on, so that frames are up to 64 KiB
and a gigabit is some two thousand of them a second.

    python wire.py BRIDGE BRIDGE SECONDS     (inside the namespace of the bridges)
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

READY_S = 10.0
"""Time limit for the wire's process to report that it is ready."""
QUEUED_BYTES = 64 * 1024 * 1024
"""Bytes in flight in one direction: 6 ms at 80 Gbit/s. Further frames are dropped, like on any
wire.
"""

# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04
_VNET_HEADER = 10
_LARGEST = _VNET_HEADER + 14 + 65_536


def start_wire(namespace: str, bridges: Sequence[str], delay_s: float) -> None:
    """Join two bridges of a namespace; the wire lasts until its process is killed."""
    command = [sys.executable, __file__, *bridges, str(delay_s)]
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as output:
        ready, _, _ = select.select([output], [], [], READY_S)
        if not ready or not output.readline():
            raise RuntimeError(f"the wire did not come up (exit status {process.poll()})")


@dataclass
class _Direction:
    """Frames on their way from one TAP to the other."""

    source: int
    sink: int
    delay_s: float
    frames: deque[tuple[float, bytes]] = field(default_factory=deque)
    """(when it is due, frame), oldest first."""
    queued: int = 0

    def take_in(self) -> None:
        frame = os.read(self.source, _LARGEST)
        if self.queued + len(frame) <= QUEUED_BYTES:
            self.frames.append((time.monotonic() + self.delay_s, frame))
            self.queued += len(frame)

    def hand_out(self) -> None:
        """Write every frame that is due."""
        while self.frames and self.frames[0][0] <= time.monotonic():
            _, frame = self.frames.popleft()
            self.queued -= len(frame)
            os.write(self.sink, frame)

    @property
    def due_s(self) -> float | None:
        """Return the seconds until the next frame is due, or None."""
        return max(0.0, self.frames[0][0] - time.monotonic()) if self.frames else None


def main(arguments: Sequence[str]) -> None:
    """Carry frames until killed."""
    left, right = (_tap(f"wire{end}", bridge) for end, bridge in enumerate(arguments[:2]))
    delay_s = float(arguments[2])
    directions = [_Direction(left, right, delay_s), _Direction(right, left, delay_s)]
    print("carrying", flush=True)
    while True:
        waits = [d.due_s for d in directions if d.due_s is not None]
        ready, _, _ = select.select([left, right], [], [], min(waits, default=None))
        for direction in directions:
            if direction.source in ready:
                direction.take_in()
            direction.hand_out()


def _tap(name: str, bridge: str) -> int:
    """Return a TAP device on a bridge; its frames begin with a virtio-net header."""
    fd = os.open("/dev/net/tun", os.O_RDWR)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(fd, _TUNSETVNETHDRSZ, struct.pack("i", _VNET_HEADER))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    subprocess.run(["ip", "link", "set", name, "master", bridge, "up"], check=True)
    return fd


if __name__ == "__main__":
    main(sys.argv[1:])

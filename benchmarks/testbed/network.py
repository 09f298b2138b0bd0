"""Two servers: their namespaces, the switch between them, and taking it all down again.

    server 0                     switch                      server 1
    10.77.0.1 eth0 ====tbf====== port0  bridge  port1 ======tbf==== eth0 10.77.0.2

Each server is a network namespace; ranks inside one reach each other by its address over its
loopback device, at memory speed, and the other server over `eth0`, which a token bucket holds to
the link's rate. The switch is a namespace too: nothing is added to the machine's own network, and
three deleted namespaces take every device with them. A delay comes from a `wire` process between
two bridges, one for each port.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from testbed import iproute
from testbed.claim import Claim, claimed
from testbed.link import Link
from testbed.traffic import Traffic
from testbed.wire import start_wire

SERVERS = 2
BURST_S = 1e-3
"""Time for which the token bucket may run ahead at full rate."""
LEAST_BURST_BYTES = 256 * 1024
"""Least size of the bucket, which must hold several of TCP's 64 KiB packets for a virtual
device.
"""
QUEUE_S = 0.05
"""Longest queue of the shaper before it drops."""
KILL_S = 10.0
"""Time limit for killed processes to leave a namespace."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """One of the two servers."""

    index: int
    namespace: str
    address: str

    def command(self, *command: str) -> list[str]:
        """Return the command that runs another one on this server."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def locations(self, ranks: int) -> list[str]:
        """Return the Rack-Server-GPU ids of so many ranks on this server."""
        return [f"0-{self.index}-{gpu}" for gpu in range(ranks)]


class Testbed:
    """An existing bed, by its name; `build` makes it and `remove` removes it."""

    __test__ = False  # pytest takes the name for a test class

    def __init__(self, name: str) -> None:
        self.name = name
        self.servers = tuple(
            Server(index=index, namespace=f"{name}-{index}", address=f"10.77.0.{index + 1}")
            for index in range(SERVERS)
        )
        self._switch = f"{name}-switch"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Return all namespaces of the bed."""
        return (*(server.namespace for server in self.servers), self._switch)

    def build(self, link: Link) -> None:
        """Make the namespaces and join them; `remove` clears what a failure leaves."""
        for namespace in self.namespaces:
            iproute.run("ip", "netns", "add", namespace)
            iproute.run("ip", "-n", namespace, "link", "set", "lo", "up")
        for server in self.servers:
            self._plug_in(server)
        self._join_ports(link.delay_s)
        self.set_rate(link.rate_bits)

    def _plug_in(self, server: Server) -> None:
        port, bridge, there = f"port{server.index}", f"bridge{server.index}", server.namespace
        switch = ("ip", "-n", self._switch, "link")
        iproute.run(*switch, "add", bridge, "type", "bridge")
        iproute.run(*switch, "set", bridge, "up")
        iproute.run(*switch, "add", port, "type", "veth", "peer", "name", "eth0", "netns", there)
        iproute.run(*switch, "set", port, "master", bridge, "up")
        iproute.run("ip", "-n", there, "address", "add", f"{server.address}/24", "dev", "eth0")
        iproute.run("ip", "-n", there, "link", "set", "eth0", "up")

    def _join_ports(self, delay_s: float) -> None:
        if delay_s:
            start_wire(self._switch, ("bridge0", "bridge1"), delay_s)
        else:
            iproute.run("ip", "-n", self._switch, "link", "set", "port1", "master", "bridge0")

    def set_rate(self, rate_bits: float | None) -> None:
        """Change the rate of both directions, also under traffic."""
        for server in self.servers:
            qdisc = ("tc", "-n", server.namespace, "qdisc")
            if rate_bits is None:
                with suppress(RuntimeError):  # there was no limit before
                    iproute.run(*qdisc, "delete", "dev", "eth0", "root")
            else:
                iproute.run(*qdisc, "replace", "dev", "eth0", "root", *_token_bucket(rate_bits))

    def traffic(self) -> Traffic:
        """Return the bytes so far, to be subtracted from later ones."""
        return Traffic.of(self.namespaces[:SERVERS])

    def remove(self) -> None:
        """Kill the processes inside and delete the namespaces; does nothing if they are gone."""
        present = [namespace for namespace in self.namespaces if iproute.exists(namespace)]
        _end_processes(present)
        for namespace in present:
            iproute.run("ip", "netns", "delete", namespace)


def _token_bucket(rate_bits: float) -> tuple[str, ...]:
    burst = max(LEAST_BURST_BYTES, round(rate_bits / 8 * BURST_S))
    limit = round(rate_bits / 8 * QUEUE_S) + burst
    return ("tbf", "rate", f"{round(rate_bits)}bit", "burst", f"{burst}b", "limit", f"{limit}b")


def _end_processes(namespaces: Sequence[str]) -> None:
    """Kill every process in the namespaces except this one; all belong to the bed."""
    deadline = time.monotonic() + KILL_S
    while inside := {pid for n in namespaces for pid in iproute.pids(n)} - {os.getpid()}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(inside)} survive SIGKILL after {KILL_S:g} s")
        for pid in inside:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def up(link: Link) -> Testbed:
    """Make a bed that stays until `down`, also after this process ends."""
    claim, bed = _claim_new()
    try:
        bed.build(link)
    except BaseException:
        with signals_held():
            bed.remove()
            claim.release()
        raise
    claim.abandon()
    return bed


def down(name: str) -> None:
    """Remove a bed that has no living owner.

    Raises:
        BedInUseError: the bed has an owner.
        ValueError: the bed does not exist.
    """
    if name not in claimed():
        raise ValueError(f"there is no testbed {name}")
    claim = Claim(name)
    with signals_held():
        Testbed(name).remove()
        claim.release()


@contextmanager
def two_servers(link: Link) -> Iterator[Testbed]:
    """Run a block with a bed, and remove it also on failure, Ctrl-C and SIGTERM."""
    with termination_raises():
        claim, bed = _claim_new()
        try:
            bed.build(link)
            yield bed
        finally:
            with signals_held():
                bed.remove()
                claim.release()


def _claim_new() -> tuple[Claim, Testbed]:
    iproute.require()
    bed = Testbed(f"csps-{secrets.token_hex(3)}")
    for namespace in bed.namespaces:
        # Deleting by name is safe only for names that this process has made.
        assert not iproute.exists(namespace), f"{namespace} is not ours"
    return Claim(bed.name), bed


_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def termination_raises() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, like Ctrl-C, instead of ending the process."""

    def unwind(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = [(number, signal.signal(number, unwind)) for number in _ENDINGS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals back until the block is through, so that a removal is never interrupted."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDINGS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

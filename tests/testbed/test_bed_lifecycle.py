"""A bed is there, works, and leaves nothing behind, however its owner ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import claim, iproute, network
from testbed.claim import BedInUseError, claimed
from testbed.link import Link
from testbed.network import Testbed, down, two_servers, up

pytestmark = pytest.mark.testbed

BENCHMARKS = Path(network.__file__).parents[1]
WAIT_S = 60.0
FOREVER = ("sleep", "3600")


class Mishap(Exception):
    """A failure inside a test."""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = _machine()
    yield
    assert _machine() == before
    assert list(claimed()) == []


def _machine() -> tuple[set[str], set[str]]:
    """Return namespaces, and devices of the machine's own network."""
    devices = json.loads(iproute.run("ip", "-j", "link", "show"))
    namespaces = json.loads(iproute.run("ip", "-j", "netns", "list") or "[]")
    return {namespace["name"] for namespace in namespaces}, {device["ifname"] for device in devices}


def _alive(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process runs; a killed child is reaped."""
    try:
        process.wait(WAIT_S if process.returncode is None else 0)
    except subprocess.TimeoutExpired:
        return True
    return False


def test_servers_are_namespaces_that_reach_each_other() -> None:
    with two_servers(Link()) as bed:
        here, there = bed.servers
        script = (
            "import socket; s=socket.create_server(('10.77.0.2', 7000)); print('up', flush=True);"
            "c,_=s.accept(); c.sendall(c.getpeername()[0].encode())"
        )
        listener = subprocess.Popen(
            there.command(sys.executable, "-c", script), stdout=subprocess.PIPE
        )
        assert listener.stdout is not None
        assert listener.stdout.readline() == b"up\n"
        ask = (
            "import socket; print(socket.create_connection(('10.77.0.2', 7000)).recv(99).decode())"
        )
        answer = iproute.run(*here.command(sys.executable, "-c", ask))
        assert answer.strip() == here.address
        listener.wait(WAIT_S)
        listener.stdout.close()


def test_processes_inside_end_with_the_bed() -> None:
    with two_servers(Link()) as bed:
        # A session of its own, as daemons have: not the owner's process group ends it.
        inside = subprocess.Popen(bed.servers[1].command(*FOREVER), start_new_session=True)
        assert _appears(inside.pid, bed.servers[1].namespace)
    assert not _alive(inside)


def _appears(pid: int, namespace: str) -> bool:
    """Return whether a process enters a namespace, within a while."""
    deadline = os.times().elapsed + WAIT_S
    while os.times().elapsed < deadline:
        if pid in iproute.pids(namespace):
            return True
    return False


def test_a_failure_inside_takes_the_bed_down() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def fail_on(bed: Testbed) -> None:
        started.append(subprocess.Popen(bed.servers[0].command(*FOREVER)))
        assert _appears(started[0].pid, bed.servers[0].namespace)
        raise Mishap

    with pytest.raises(Mishap), two_servers(Link.parse("1gbit")) as bed:
        fail_on(bed)
    assert not _alive(started[0])


@pytest.mark.parametrize("step", ["_plug_in", "_join_ports", "set_rate"])
def test_a_failure_while_building_takes_down_what_there_is(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Mishap

    monkeypatch.setattr(Testbed, step, fail)
    with pytest.raises(Mishap), two_servers(Link()):
        pytest.fail("was built")
    with pytest.raises(Mishap):
        up(Link())


def test_a_bed_stays_up_until_taken_down() -> None:
    bed = up(Link())
    assert list(claimed()) == [bed.name]
    assert all(iproute.exists(namespace) for namespace in bed.namespaces)
    down(bed.name)


def test_a_running_owners_bed_cannot_be_taken_down() -> None:
    with two_servers(Link()) as bed:
        with pytest.raises(BedInUseError):
            down(bed.name)
        assert iproute.exists(bed.servers[0].namespace)


def test_an_unknown_bed_cannot_be_taken_down() -> None:
    with pytest.raises(ValueError, match="no testbed"):
        down("csps-nobody")


OWNER = """
import signal
import sys
from pathlib import Path
from testbed import claim
from testbed.link import Link
from testbed.network import two_servers

# What a shell starts in the background ignores it, and so would all of its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
claim.CLAIMS = Path(sys.argv[1])
with two_servers(Link()) as bed:
    print(bed.name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """Yield another process that has a bed and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(claim.CLAIMS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
    )
    with process:
        yield process
        process.kill()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_bed_with_its_owner(
    owner: subprocess.Popen[str], ending: signal.Signals
) -> None:
    assert owner.stdout is not None
    bed = Testbed(owner.stdout.readline().strip())
    assert iproute.exists(bed.servers[0].namespace)
    owner.send_signal(ending)
    assert owner.wait(WAIT_S) != 0
    assert not any(iproute.exists(namespace) for namespace in bed.namespaces)


def test_the_bed_of_a_killed_owner_is_removed(owner: subprocess.Popen[str]) -> None:
    assert owner.stdout is not None
    bed = Testbed(owner.stdout.readline().strip())
    left = subprocess.Popen(bed.servers[0].command(*FOREVER), start_new_session=True)
    assert _appears(left.pid, bed.servers[0].namespace)
    owner.kill()
    owner.wait(WAIT_S)
    assert list(claimed()) == [bed.name]
    down(bed.name)
    assert not _alive(left)

"""Processes that are killed or frozen, in every state of a request."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import cycle, product

import httpx
from campaign_bench import Bench
from campaign_states import PADDING
from campaign_trial import Outcome, Trial
from deployed_server import DEADLINE_S, MODEL, Deployed, name_of

from csps.services.launch.ray_head import session_of

KILLED_S, FROZEN_S, ANY_S = 8.0, 15.0, 20.0
POLL_S = 0.05
RECOVERING_S = 2.0
"""Time after which a killed process is noticed and not yet replaced."""

RANKS = [("PrefillGang", 0), ("PrefillGang", 1), ("DecodeGang", 0), ("DecodeGang", 1)]
ELASTIC_RANKS = [("ElasticGang", 0), ("ElasticGang", 1)]


def replica(deployment: str, index: int = 0) -> Callable[[Deployed], int]:
    """Return what finds a replica's process, as soon as Serve knows of one that runs."""

    def find(server: Deployed) -> int:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with suppress(IndexError):
                return int(server.replicas(deployment)[index]["pid"])
            assert time.monotonic() < deadline, f"{deployment} has no running replica {index}"
            time.sleep(POLL_S)

    return find


def program(text: str) -> Callable[[Deployed], int]:
    """Return what finds a process of the server by a part of its command line or its name."""

    def find(server: Deployed) -> int:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for pid in session_of(server.head.pid):
                with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read().replace(b"\0", b" ").decode(errors="replace")
                    if name_of(pid) == text or text in words:
                        return pid
            assert time.monotonic() < deadline, f"no process is {text}"
            time.sleep(POLL_S)

    return find


def parser(server: Deployed) -> int:
    """Return the id of a parser's process. One that an earlier trial has ended runs again once a
    body needs it.
    """
    body = {"model": MODEL, "prompt": [1], "max_tokens": 1, "user": PADDING}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S).raise_for_status()
    return program("parser_process")(server)


PROCESSES: dict[str, Callable[[Deployed], int]] = {
    **{f"{gang} {index}": replica(gang, index) for gang, index in (*RANKS, *ELASTIC_RANKS)},
    "Router": replica("Router"),
    "Registry": replica("Registry"),
    "Configurator": replica("Configurator"),
    "HAProxy": program("haproxy"),
    "parser": parser,
    "Serve controller": program("ray::ServeController"),
    "Serve proxy": program("ray::ProxyActor"),
}
ENDS_REQUESTS = ("Router", "HAProxy")
"""Processes whose requests fail with them (docs/operations.md)."""


@contextmanager
def signalled(pid: int, number: signal.Signals) -> Iterator[None]:
    """Send a process a signal; one that is stopped goes on in the end, if it still lives."""
    os.kill(pid, number)
    try:
        yield
    finally:
        if number == signal.SIGSTOP:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def run(bench: Bench, trial: Trial) -> Outcome:
    """Kill or freeze one process."""
    number = signal.SIGKILL if trial.fault == "kill" else signal.SIGSTOP

    def aimed(server: Deployed) -> AbstractContextManager[object]:
        return signalled(PROCESSES[trial.target](server), number)

    return bench.disturbed(trial, aimed, may_fail=trial.target in ENDS_REQUESTS)


@contextmanager
def killed_both(first: int, second: int, wait_s: float) -> Iterator[None]:
    """Kill two processes, the second one while the first is being replaced if there is a wait."""
    os.kill(first, signal.SIGKILL)
    time.sleep(wait_s)
    with suppress(ProcessLookupError):  # ranks of one gang end together
        os.kill(second, signal.SIGKILL)
    yield


def run_two(bench: Bench, trial: Trial) -> Outcome:
    """Kill two processes at once, or one during the other's recovery."""
    targets = trial.target.split(" and ")
    wait_s = 0.0 if trial.fault == "kill two" else RECOVERING_S

    def aimed(server: Deployed) -> AbstractContextManager[object]:
        first, second = (PROCESSES[target](server) for target in targets)
        return killed_both(first, second, wait_s)

    may_fail = any(target in ENDS_REQUESTS for target in targets)
    return bench.disturbed(trial, aimed, may_fail=may_fail)


PAIR_STATES = ("idle", "queued", "prefill", "transfer", "decode")
QUICK = ("kill", "DecodeGang 1", "decode")
"""A frozen rank is in test_server.py."""


TWO = [
    ("PrefillGang 0 and DecodeGang 1", "decode"),
    ("PrefillGang 1 and PrefillGang 0", "prefill"),
    ("DecodeGang 0 and Router", "decode"),
    ("Router and PrefillGang 0", "prefill"),
    ("Router and Registry", "decode"),
    ("HAProxy and Router", "idle"),
    ("Registry and DecodeGang 1", "transfer"),
    ("Serve controller and DecodeGang 0", "decode"),
    ("Serve controller and Router", "queued"),
    ("Configurator and PrefillGang 1", "prefill"),
]
"""Each kind of process with some other."""


def _one(fault: str, target: str, state: str, seed: int, server: str) -> Trial:
    quick = (fault, target, state) == QUICK and not seed
    return Trial(
        fault=fault,
        target=target,
        state=state,
        seed=seed,
        server=server,
        run=run,
        recovery_limit_s=KILLED_S if fault == "kill" else FROZEN_S,
        about_s=22.0,
        quick=quick,
    )


def _all() -> list[Trial]:
    ranks = [f"{gang} {index}" for gang, index in RANKS]
    others = ["Router", "Registry", "Configurator", "HAProxy", "parser"]
    others += ["Serve controller", "Serve proxy"]
    faults = ("kill", "freeze")
    trials = [
        _one(fault, target, state, 0, "pair")
        for fault, target, state in product(faults, [*ranks, "Router"], PAIR_STATES)
    ]
    # The second seed covers pairs: each process with each signal, each with each state.
    states = cycle(PAIR_STATES[::-1])
    trials += [
        _one(fault, target, next(states), 1, "pair")
        for target in [*ranks, *others]
        for fault in faults
    ]
    trials += [
        _one("kill", target, state, 0, "pair")
        for target in others[1:]
        for state in ("idle", "decode")
    ]
    trials += [
        _one(fault, f"{gang} {index}", state, 0, "piggybacking")
        for fault in faults
        for gang, index in ELASTIC_RANKS
        for state in ("piggybacked", "decode")
    ]
    trials += [
        Trial(
            fault=fault,
            target=target,
            state=state,
            server="pair",
            run=run_two,
            recovery_limit_s=ANY_S,
            about_s=25.0,
        )
        for fault in ("kill two", "kill during recovery")
        for target, state in TWO
    ]
    # Of the two parsers, the bodies that come next go to the other one, or wait.
    trials += [_one(fault, "parser", "parsing", 0, "pair") for fault in faults]
    return trials


TRIALS = _all()

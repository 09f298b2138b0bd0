"""Run `csps profile phases`: measure the phases of a layer on one rank, and the CPU time of steps.

The first part runs one rank. The second, `measure_overheads`, runs strategies with few and with
many exchanges, and some that drop keys, on the ranks of the configured gang. It needs CPU ranks: on
GPUs, attention does not compete for the cores on which a rank waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

from csps.actors.phase_probe import PhaseTime
from csps.configurator.model.phase_times import LinearTime
from csps.configurator.model.scaling_information_base import PhaseRow, ScalingInformationBase
from csps.configurator.plan.profiles import BESIDE, CROWDING, STEP, STRATEGY, crowding, fit_phases
from csps.models.network.spec import read_spec
from csps.protocols.attention.csa import Architecture, CsaSettings
from csps.protocols.attention.plan import ENGINE_NAMES, EXACT, option_name
from csps.protocols.core.errors import ConfigError, DeadlineExceeded, FaultError
from csps.services.planning.memory import kv_slots
from csps.services.profiling.local_gangs import open_local_gangs
from csps.services.profiling.step_profile import Say
from csps.services.profiling.steps import StepWork, measure_work
from csps.services.settings.devices import resolve_device
from csps.services.settings.settings import Settings

TOKENS = (16, 64, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)
QUICK_TOKENS = (16, 256, 1_024, 4_096)
ROUNDS = 5
QUICK_ROUNDS = 2
PROBE_S = 600.0
"""Limit for the rank to load its weights and measure everything."""


async def measure_phases(base: ScalingInformationBase, settings: Settings, *, quick: bool) -> None:
    """Measure all phases once more, and store the measurements.

    Raises:
        FaultError: the rank failed.
        DeadlineExceeded: the rank does not end in time.
    """
    gang, load = settings.prefilling, os.getloadavg()[0]
    longest = read_spec(settings.model_dir, settings.model_overrides).max_positions
    sizes = [size for size in (QUICK_TOKENS if quick else TOKENS) if size <= longest]
    arguments = (
        str(settings.model_dir),
        settings.dtype,
        settings.kv_dtype,
        settings.weight_dtype,
        resolve_device(settings.device, gang.num_gpus),
        str(gang.threads),
        str(gang.tp),
        ",".join(map(str, sizes)),
        str(QUICK_ROUNDS if quick else ROUNDS),
        json.dumps(settings.model_overrides),
    )
    date = datetime.now(UTC).isoformat(timespec="seconds")
    for phase, tokens, keys, size, seconds in await _probed(arguments, gang.threads):
        base.add(
            PhaseRow(
                strategy=STRATEGY,
                group_shape="1",
                tp=gang.tp,
                phase=phase,
                tokens=tokens,
                keys=keys,
                bytes=size,
                seconds=seconds,
                load=load,
                date=date,
            )
        )


async def _probed(arguments: Iterable[str], threads: int) -> list[PhaseTime]:
    probe = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "csps.actors.phase_probe", *arguments),
        stdout=PIPE,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(PROBE_S):
            output, _ = await probe.communicate()
    except TimeoutError:
        raise DeadlineExceeded("measuring phases", PROBE_S) from None
    finally:
        with suppress(ProcessLookupError):
            probe.kill()
        await probe.wait()
    if probe.returncode:
        raise FaultError(f"the phase probe ended with status {probe.returncode}")
    return [PhaseTime(*row) for row in json.loads(output)]


def phase_lines(base: ScalingInformationBase, settings: Settings) -> Iterator[str]:
    """Yield lines with the fit to all measurements."""
    spec, tp = read_spec(settings.model_dir, settings.model_overrides), settings.prefilling.tp
    try:
        times = fit_phases(base.rows(PhaseRow), heads=spec.heads, kv_heads=spec.kv_heads, tp=tp)
    except ConfigError as error:
        yield str(error)
        return
    yield ""
    yield f"phases of a layer on a rank of an instance of {tp}"
    for name, line, unit in (
        ("qkv", times.qkv, "token"),
        ("linear", times.linear, "token"),
        ("mlp", times.rest, "token"),
        ("select", times.select, "token and KV head"),
        ("importance", times.importance, "pair and head"),
        ("merge", times.merge, "row and head"),
        ("copy", times.copy, "byte"),
    ):
        yield _line(name, line, unit)
    cost = times.attention
    yield (
        f"  {'attention':<11}{cost.call * 1e6:>9.1f} us a call, {cost.row * 1e9:.3g} ns a row and "
        f"head, {cost.pair * 1e9:.3g} ns a pair and head"
    )
    crowded = crowding(base.rows(PhaseRow), settings.prefilling.instances, tp)
    if crowded > 1:
        yield f"  {'crowding':<11}{crowded:>9.2f} s of cores that ranks share for each that is used"


def _line(name: str, line: LinearTime, unit: str) -> str:
    return f"  {name:<11}{line.fixed * 1e6:>9.1f} us and {line.each * 1e9:.3g} ns a {unit}"


OVERHEAD_TOKENS = (1_024, 4_096, 12_288)
QUICK_OVERHEAD_TOKENS = (512, 2_048)
MICRO_PARTITIONS = (1, 8)
DROPPED = 0.5
OVERHEAD_ROUNDS = 3
QUICK_OVERHEAD_ROUNDS = 1


async def measure_overheads(
    base: ScalingInformationBase, settings: Settings, say: Say, *, quick: bool
) -> None:
    """Measure the overheads of whole steps once more, and store the least of the rounds.

    Raises:
        FaultError: a rank failed.
        DeadlineExceeded: a step does not end in time.
    """
    gang = settings.prefilling
    if gang.instances < 2 or resolve_device(settings.device, gang.num_gpus) != "cpu":
        return
    longest = min(
        settings.max_positions
        or read_spec(settings.model_dir, settings.model_overrides).max_positions,
        gang.instances * (kv_slots(settings.prefilling_role, settings) - 1),
    )
    candidates = QUICK_OVERHEAD_TOKENS if quick else OVERHEAD_TOKENS
    lengths = [tokens for tokens in candidates if tokens <= longest]
    say(f"{len(lengths) * len(_options())} kinds of steps; starting ranks ...")
    slots = -(-max(lengths, default=0) // gang.instances) + 1
    computing, cores = gang.instances * gang.tp * gang.threads, os.cpu_count() or 1
    async with open_local_gangs(_with_slots(settings, slots)) as gangs:
        await measure_steps(
            base,
            partial(measure_work, gangs, gang.instances, gang.threads),
            lengths,
            group_shape=str(gang.instances),
            tp=gang.tp,
            rounds=QUICK_OVERHEAD_ROUNDS if quick else OVERHEAD_ROUNDS,
            crowded=cores if computing > cores else None,
        )


async def measure_steps(
    base: ScalingInformationBase,
    run: Callable[[int, str], Awaitable[StepWork]],
    lengths: Iterable[int],
    *,
    group_shape: str,
    tp: int,
    rounds: int,
    crowded: int | None,
) -> None:
    """Run steps of every kind, and store the round of each that took least.

    Args:
        run: runs a step of some tokens by an option.
        group_shape, tp: shape of the group that runs it.
        crowded: number of cores if threads that compute outnumber them, else None.
    """
    load, date = os.getloadavg()[0], datetime.now(UTC).isoformat(timespec="seconds")
    for tokens in lengths:
        for option in _options():
            # The first one connects and warms up.
            taken = [await run(tokens, option) for _ in range(1 + rounds)][1:]
            for phase, seconds in _phase_seconds(taken, crowded):
                base.add(
                    PhaseRow(
                        strategy=option,
                        group_shape=group_shape,
                        tp=tp,
                        phase=phase,
                        tokens=tokens,
                        keys=0,
                        bytes=0,
                        seconds=seconds,
                        load=load,
                        date=date,
                    )
                )


def _phase_seconds(taken: list[StepWork], crowded: int | None) -> Iterator[tuple[str, float]]:
    """Yield phases and their seconds; arguments are those of `measure_steps`."""
    least = min(taken, key=lambda work: work.processor_s)
    yield STEP, least.processor_s
    yield BESIDE, least.processor_s - least.computing_s
    if crowded is not None:
        yield CROWDING, min(crowded * work.took_s / work.processor_s for work in taken)


def _with_slots(settings: Settings, slots: int) -> Settings:
    """Shrink the gangs to one prompt: a server that profiles when idle runs beside them."""
    if settings.elastic is not None:
        elastic = settings.elastic.model_copy(update={"kv_slots": slots})
        return settings.model_copy(update={"elastic": elastic})
    prefill = settings.prefill.model_copy(update={"kv_slots": slots})
    decode = settings.decode.model_copy(update={"instances": 1, "kv_slots": slots})
    return settings.model_copy(update={"prefill": prefill, "decode": decode})


def _options() -> list[str]:
    """Return exact options, which do the same work beside attention, and options that drop."""
    both: tuple[Architecture, ...] = ("ntp", "tp")
    exact = [
        (strategy, CsaSettings(levels=1, micro_partitions=((micro,),), strategy=strategy))
        for strategy in both
        for micro in MICRO_PARTITIONS
    ]
    sparse = [
        (
            strategy,
            CsaSettings(
                levels=2,
                micro_partitions=((1, 1),),
                drop_ratios=((DROPPED,),),
                importance_layer="same",
                strategy=strategy,
            ),
        )
        for strategy in both
    ]
    return [
        EXACT,
        *(option_name(ENGINE_NAMES[strategy], csa) for strategy, csa in (*exact, *sparse)),
    ]

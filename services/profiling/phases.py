"""`csps profile phases`: what one rank takes for each phase of a layer."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime

from csps.actors.phase_probe import Row
from csps.configurator.phase_times import Line
from csps.configurator.profiles import STRATEGY, fit_phases
from csps.configurator.scaling_information_base import PhaseRow, ScalingInformationBase
from csps.configurator.step_overheads import crowding
from csps.models.spec import read_spec
from csps.protocols.errors import ConfigError, DeadlineExceeded, FaultError
from csps.services.cluster.gangs import resolve_device
from csps.services.launch.settings import Settings

TOKENS = (16, 64, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)
QUICK_TOKENS = (16, 256, 1_024, 4_096)
ROUNDS = 5
QUICK_ROUNDS = 2
PROBE_S = 600.0
"""For the rank to load its weights and measure everything."""


async def measure_phases(base: ScalingInformationBase, settings: Settings, *, quick: bool) -> None:
    """Measure once more, and keep it.

    Raises:
        FaultError: the rank failed.
        DeadlineExceeded: it does not end.
    """
    gang, load = settings.prefilling, os.getloadavg()[0]
    longest = read_spec(settings.model_dir).max_positions
    sizes = [size for size in (QUICK_TOKENS if quick else TOKENS) if size <= longest]
    arguments = (
        str(settings.model_dir),
        settings.dtype,
        resolve_device(settings.device, gang.num_gpus),
        str(gang.threads),
        str(gang.tp),
        ",".join(map(str, sizes)),
        str(QUICK_ROUNDS if quick else ROUNDS),
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


async def _probed(arguments: Iterable[str], threads: int) -> list[Row]:
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
        raise FaultError(f"the rank that measures stopped with status {probe.returncode}")
    return [Row(*row) for row in json.loads(output)]


def phase_lines(base: ScalingInformationBase, settings: Settings) -> Iterator[str]:
    """What was fitted to all that was measured."""
    spec, tp = read_spec(settings.model_dir), settings.prefilling.tp
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
    it = times.attention
    yield (
        f"  {'attention':<11}{it.call * 1e6:>9.1f} us a call, {it.row * 1e9:.3g} ns a row and "
        f"head, {it.pair * 1e9:.3g} ns a pair and head"
    )
    crowded = crowding(base.rows(PhaseRow), settings.prefilling.instances, tp)
    if crowded > 1:
        yield f"  {'crowding':<11}{crowded:>9.2f} s of cores that ranks share for each that is used"


def _line(name: str, line: Line, unit: str) -> str:
    return f"  {name:<11}{line.fixed * 1e6:>9.1f} us and {line.each * 1e9:.3g} ns a {unit}"

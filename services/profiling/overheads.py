"""`csps profile phases`, second part: what whole steps take of the ranks' cores.

Strategies that cut their exchanges into few parts and into many, and some that drop, on the ranks
of the configured gang. Only on processors: on GPUs no core that a rank waits on is what attention
is computed on.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial

from csps.configurator.scaling_information_base import PhaseRow, ScalingInformationBase
from csps.configurator.step_overheads import BESIDE, CROWDING, STEP
from csps.models.spec import read_spec
from csps.protocols.csa_settings import Architecture, CsaSettings
from csps.protocols.options import option_name
from csps.protocols.plans import ENGINE_NAMES, EXACT
from csps.services.cluster.gangs import resolve_device
from csps.services.launch.settings import Settings
from csps.services.profiling.cell import open_cell
from csps.services.profiling.step_profile import Say
from csps.services.profiling.steps import Work, measure_work

TOKENS = (1_024, 4_096, 12_288)
QUICK_TOKENS = (512, 2_048)
MICRO_PARTITIONS = (1, 8)
DROPPED = 0.5
ROUNDS = 3
QUICK_ROUNDS = 1


async def measure_overheads(
    base: ScalingInformationBase, settings: Settings, say: Say, *, quick: bool
) -> None:
    """Measure once more, and keep the least of the rounds.

    Raises:
        FaultError: a rank failed.
        DeadlineExceeded: a step does not end.
    """
    gang = settings.prefilling
    if gang.instances < 2 or resolve_device(settings.device, gang.num_gpus) != "cpu":
        return
    longest = min(
        settings.max_positions or read_spec(settings.model_dir).max_positions,
        gang.instances * (gang.kv_slots - 1),
    )
    lengths = [it for it in (QUICK_TOKENS if quick else TOKENS) if it <= longest]
    say(f"{len(lengths) * len(_options())} kinds of steps; starting ranks ...")
    slots = -(-max(lengths, default=0) // gang.instances) + 1
    computing, cores = gang.instances * gang.tp * gang.threads, os.cpu_count() or 1
    async with open_cell(_with_slots(settings, slots)) as cell:
        await measure_steps(
            base,
            partial(measure_work, cell, gang.instances, gang.threads),
            lengths,
            group_shape=str(gang.instances),
            tp=gang.tp,
            rounds=QUICK_ROUNDS if quick else ROUNDS,
            crowded=cores if computing > cores else None,
        )


async def measure_steps(
    base: ScalingInformationBase,
    run: Callable[[int, str], Awaitable[Work]],
    lengths: Iterable[int],
    *,
    group_shape: str,
    tp: int,
    rounds: int,
    crowded: int | None,
) -> None:
    """Run steps of every kind, and keep of each the round that took least.

    Args:
        run: a step of so many tokens by an option.
        group_shape, tp: of those who run it.
        crowded: cores, where there are fewer than threads that compute and links hold nobody up.
    """
    load, date = os.getloadavg()[0], datetime.now(UTC).isoformat(timespec="seconds")
    for tokens in lengths:
        for option in _options():
            # The first one connects and warms up.
            taken = [await run(tokens, option) for _ in range(1 + rounds)][1:]
            for phase, seconds in _kept(taken, crowded):
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


def _kept(taken: list[Work], crowded: int | None) -> Iterator[tuple[str, float]]:
    """Phases and seconds. Arguments as for `measure_steps`."""
    least = min(taken, key=lambda it: it.processor_s)
    yield STEP, least.processor_s
    yield BESIDE, least.processor_s - least.computing_s
    if crowded is not None:
        yield CROWDING, min(crowded * it.took_s / it.processor_s for it in taken)


def _with_slots(settings: Settings, slots: int) -> Settings:
    """Gangs with room for one prompt: the server may run beside them, if it profiles when idle."""
    if settings.elastic is not None:
        elastic = settings.elastic.model_copy(update={"kv_slots": slots})
        return settings.model_copy(update={"elastic": elastic})
    prefill = settings.prefill.model_copy(update={"kv_slots": slots})
    decode = settings.decode.model_copy(update={"instances": 1, "kv_slots": slots})
    return settings.model_copy(update={"prefill": prefill, "decode": decode})


def _options() -> list[str]:
    """Exact ones, whose work beside attention is the same, and ones that drop."""
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

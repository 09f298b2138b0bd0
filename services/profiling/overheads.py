"""`csps profile phases`, second part: what whole steps take of the ranks' cores.

Strategies that cut their exchanges into few parts and into many, on the ranks of the configured
gang. Only on processors: on GPUs no core that a rank waits on is what attention is computed on.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime

from csps.configurator.scaling_information_base import PhaseRow, ScalingInformationBase
from csps.configurator.step_overheads import STEP
from csps.models.spec import read_spec
from csps.protocols.csa_settings import Architecture, CsaSettings
from csps.protocols.options import option_name
from csps.protocols.plans import ENGINE_NAMES, EXACT
from csps.services.cluster.gangs import resolve_device
from csps.services.launch.settings import Settings
from csps.services.profiling.cell import open_cell
from csps.services.profiling.step_profile import Say
from csps.services.profiling.steps import measure_work

TOKENS = (1_024, 4_096, 12_288)
QUICK_TOKENS = (512, 2_048)
MICRO_PARTITIONS = (1, 8)
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
    load, date = os.getloadavg()[0], datetime.now(UTC).isoformat(timespec="seconds")
    say(f"{len(lengths) * len(_options())} kinds of steps; starting ranks ...")
    slots = -(-max(lengths, default=0) // gang.instances) + 1
    async with open_cell(_with_slots(settings, slots)) as cell:
        for tokens in lengths:
            for option in _options():
                taken = [
                    await measure_work(cell, tokens, gang.instances, option)
                    for _ in range(1 + (QUICK_ROUNDS if quick else ROUNDS))
                ]
                base.add(
                    PhaseRow(
                        strategy=option,
                        group_shape=str(gang.instances),
                        tp=gang.tp,
                        phase=STEP,
                        tokens=tokens,
                        keys=0,
                        bytes=0,
                        seconds=min(taken[1:]),  # the first one connects and warms up
                        load=load,
                        date=date,
                    )
                )


def _with_slots(settings: Settings, slots: int) -> Settings:
    """Gangs with room for one prompt: the server may run beside them, if it profiles when idle."""
    if settings.elastic is not None:
        elastic = settings.elastic.model_copy(update={"kv_slots": slots})
        return settings.model_copy(update={"elastic": elastic})
    prefill = settings.prefill.model_copy(update={"kv_slots": slots})
    decode = settings.decode.model_copy(update={"instances": 1, "kv_slots": slots})
    return settings.model_copy(update={"prefill": prefill, "decode": decode})


def _options() -> list[str]:
    """Exact ones, whose work beside attention is the same."""
    cut: tuple[Architecture, ...] = ("ntp", "tp")
    return [
        EXACT,
        *(
            option_name(
                ENGINE_NAMES[strategy],
                CsaSettings(levels=1, micro_partitions=((micro,),), strategy=strategy),
            )
            for strategy in cut
            for micro in MICRO_PARTITIONS
        ),
    ]

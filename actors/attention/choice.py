"""From the name in a job to the strategy that runs it."""

from __future__ import annotations

from contextlib import AbstractContextManager

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.levels import DropSchedule
from csps.actors.attention.base.strategy import Strategy
from csps.actors.attention.csa.strategy import Csa
from csps.actors.attention.ring.ring_kv import RingKv
from csps.actors.attention.ring.ring_q import RingQ
from csps.actors.attention.sp_tp.gathered_weights import GatheredWeights
from csps.actors.attention.sp_tp.sp_tp import SpTp
from csps.actors.attention.ulysses import Ulysses
from csps.models.network.spec import ModelSpec
from csps.protocols.core.errors import ConfigError, abridged, nearest
from csps.protocols.gang.step_messages import PrefillStep

WITHOUT_PLAN = frozenset({"ulysses", "gathered_weights", "ring_kv", "ring_q"})
"""Exact, in one way."""
WITH_PLAN = frozenset({"levels", "csa", "sp_tp", "sp_tp_flat"})
"""Take a `CsaPlan`; SP-TP can do without one."""

ANY_ROWS = frozenset({"ulysses", "gathered_weights", "ring_kv", "ring_q"})
"""Need nothing of rows but their positions; the others take rows that are cut at the bounds."""


def check_step(step: PrefillStep, spec: ModelSpec, *, in_place: bool = False) -> None:
    """Refuse a job that `strategy_of` cannot run, when it arrives: an exception of the thread that
    runs it would take the gang along. All ranks of the gang judge alike.

    Args:
        in_place: the gang decodes what it computes where it lies.

    Raises:
        ConfigError: an unknown strategy, rows that it does not take, a plan for one that takes
            none, ratios per KV head that are not those of the model, or KV to be narrowed on its
            way to decode that stays where it is.
    """
    known = WITHOUT_PLAN | WITH_PLAN
    if step.strategy not in known:
        hint = nearest(step.strategy, known)
        raise ConfigError(f"unknown strategy {abridged(step.strategy)}{hint}")
    if not step.contiguous and step.strategy not in ANY_ROWS:
        raise ConfigError(
            f"strategy '{step.strategy}' takes contiguous rows, cut at the job's bounds; those that "
            f"take any others are {', '.join(sorted(ANY_ROWS))}"
        )
    if step.csa is None:
        return
    if step.strategy in WITHOUT_PLAN:
        raise ConfigError(
            f"strategy '{step.strategy}' is exact and takes no sparse attention plan; allowed with "
            f"one are {', '.join(sorted(WITH_PLAN))}"
        )
    step.csa.check_kv_heads(spec.kv_heads)
    if in_place and step.csa.decode_kept_only:
        raise ConfigError(
            "decode_kept_only narrows KV on its way to another gang; an elastic gang decodes where "
            "the prompt's KV lies, whole"
        )


def strategy_of(group: SpGroup, engine: Engine) -> AbstractContextManager[Strategy]:
    """The strategy of the group's job, to be entered for the job's duration."""
    name = group.step.strategy
    if name == "ulysses":
        return _ulysses(group, engine)
    if name == "gathered_weights":
        return GatheredWeights(group, engine)
    if name == "ring_kv":
        return _ring_kv(group, engine)
    if name == "ring_q":
        return RingQ(group, engine.pool, scale=engine.spec.scale)
    if name in ("sp_tp", "sp_tp_flat"):
        return SpTp(group, engine, group.step.csa, hierarchical=name == "sp_tp")
    assert name in ("levels", "csa"), "the job has been checked"
    return _csa(group, engine)


def _ulysses(group: SpGroup, engine: Engine) -> Ulysses:
    return Ulysses(
        group,
        engine.pool,
        heads=engine.heads,
        kv_heads=len(engine.kv_heads),
        scale=engine.spec.scale,
    )


def _ring_kv(group: SpGroup, engine: Engine) -> RingKv:
    return RingKv(
        group,
        engine.pool,
        heads=engine.heads,
        kv_heads=len(engine.kv_heads),
        scale=engine.spec.scale,
    )


def _csa(group: SpGroup, engine: Engine) -> Csa:
    assert group.step.csa is not None, "the job has been checked"
    schedule = DropSchedule(
        plan=group.step.csa,
        layers=engine.spec.layers,
        kv_heads=engine.kv_heads,
        total_kv_heads=engine.spec.kv_heads,
    )
    return Csa(group, schedule, engine.pool, heads=engine.heads, scale=engine.spec.scale)

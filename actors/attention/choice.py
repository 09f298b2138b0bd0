"""Selection and validation of a step's attention strategy, by the name in the step."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.levels import DropSchedule
from csps.actors.attention.base.strategy import Strategy
from csps.actors.attention.csa.strategy import Csa
from csps.actors.attention.near_keys import WindowAttention, WindowedModel
from csps.actors.attention.ring.ring_kv import RingKv
from csps.actors.attention.ring.ring_q import RingQ
from csps.actors.attention.sp_tp.gathered_weights import GatheredWeights
from csps.actors.attention.sp_tp.sp_tp import SpTp
from csps.actors.attention.step_points import SP_TP
from csps.actors.attention.ulysses import Ulysses
from csps.models.network.spec import ModelSpec
from csps.protocols.core.errors import ConfigError, abridged, nearest
from csps.protocols.gang.step_messages import PrefillStep

_log = logging.getLogger(__name__)

WITHOUT_PLAN = frozenset({"ulysses", "gathered_weights", "ring_kv", "ring_q"})
"""Exact strategies, which take no `CsaPlan`."""
WITH_PLAN = frozenset({"levels", "csa", "sp_tp", "sp_tp_flat"})
"""Strategies that take a `CsaPlan`; it is optional for SP-TP."""

ANY_ROWS = frozenset({"ulysses", "gathered_weights", "ring_kv", "ring_q"})
"""Strategies that take rows at any positions; the others need contiguous rows of each member."""


def check_step(step: PrefillStep, spec: ModelSpec, *, in_place: bool = False) -> None:
    """Refuse a step that `strategy_of` cannot run; all ranks of the gang decide the same.

    Args:
        in_place: the gang decodes with the KV where prefill stored it (elastic gang).

    Raises:
        ConfigError: the strategy is unknown, does not take such rows or takes no plan, the plan
            has ratios for another number of KV heads, or `decode_kept_only` is set for an
            elastic gang.
    """
    # Checked on arrival: an exception in the thread that runs the step would end the gang.
    known = WITHOUT_PLAN | WITH_PLAN
    if step.strategy not in known:
        hint = nearest(step.strategy, known)
        raise ConfigError(f"unknown strategy {abridged(step.strategy)}{hint}")
    if not step.contiguous and step.strategy not in ANY_ROWS:
        raise ConfigError(
            f"strategy '{step.strategy}' needs contiguous rows, cut at the bounds of the step; "
            f"strategies that take any rows are {', '.join(sorted(ANY_ROWS))}"
        )
    if step.csa is None:
        return
    if step.strategy in WITHOUT_PLAN:
        raise ConfigError(
            f"strategy '{step.strategy}' is exact and takes no sparse attention plan; strategies "
            f"that take one are {', '.join(sorted(WITH_PLAN))}"
        )
    step.csa.check_kv_heads(spec.kv_heads)
    if in_place and step.csa.decode_kept_only:
        raise ConfigError(
            "decode_kept_only needs separate prefill and decode gangs: it drops KV during the "
            "transfer, and an elastic gang decodes without a transfer"
        )


def strategy_of(group: SpGroup, engine: Engine) -> AbstractContextManager[Strategy]:
    """Return the strategy of the group's step, to be entered for the duration of the step."""
    name, spec = group.step.strategy, engine.spec
    _log.debug(
        "step %d: member %d of group %s attends by %s",
        group.step.step_id,
        group.member,
        group.step.group,
        name,
    )
    if name == "gathered_weights":
        return GatheredWeights(group, engine)
    if name in SP_TP:
        return SpTp(group, engine, group.step.csa, hierarchical=name == "sp_tp")
    strategy = _of_own_rows(group, engine)
    if spec.window is None:
        return strategy
    near = WindowAttention(
        group, engine.pool, window=spec.window, scale=spec.scale, sinks=engine.sinks
    )
    return WindowedModel(strategy, near, spec.near_layers)


def _of_own_rows(group: SpGroup, engine: Engine) -> AbstractContextManager[Strategy]:
    """Return a strategy in which members begin with own rows of all heads."""
    name = group.step.strategy
    if name in ("ulysses", "ring_kv"):
        by_heads: type[Ulysses] | type[RingKv] = Ulysses if name == "ulysses" else RingKv
        return by_heads(
            group,
            engine.pool,
            heads=engine.heads,
            kv_heads=len(engine.kv_heads),
            scale=engine.spec.scale,
            sinks=engine.sinks,
        )
    if name == "ring_q":
        return RingQ(group, engine.pool, scale=engine.spec.scale, sinks=engine.sinks)
    assert name in ("levels", "csa"), f"check_step let strategy {name!r} pass"
    return _csa(group, engine)


def _csa(group: SpGroup, engine: Engine) -> Csa:
    assert group.step.csa is not None, f"check_step let {group.step.strategy!r} pass without a plan"
    schedule = DropSchedule(
        plan=group.step.csa,
        layers=engine.spec.layers,
        kv_heads=engine.kv_heads,
        total_kv_heads=engine.spec.kv_heads,
        windowed=engine.spec.near_layers,
    )
    return Csa(
        group,
        schedule,
        engine.pool,
        heads=engine.heads,
        scale=engine.spec.scale,
        sinks=engine.sinks,
    )

"""Builds the scheduler, its cost table and its decision log from the settings."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from csps.configurator.costs.cost_table import Costs, CostTable
from csps.protocols.core.errors import ConfigError
from csps.services.measured.scheduler_inputs import latency_table, ring_rules, scheduling_options
from csps.services.router.decision_log import DecisionLog
from csps.services.scheduling.core.decision_log import DecisionLogHeader
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.deciding.decisions import digest_of
from csps.services.scheduling.events.limits import (
    SECOND_NS,
    QueueLimits,
    ReuseSettings,
    SchedulerDeadlines,
)
from csps.services.scheduling.policies.registry import make_policy
from csps.services.settings.settings import Settings

_log = logging.getLogger(__name__)
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""Errors of a disk, which come and go; all others are mistakes in the settings."""


def make_scheduler(settings: Settings, costs: Costs) -> Scheduler:
    """Return the scheduler with the policy from the settings."""
    scheduling = settings.scheduling
    return Scheduler(
        make_policy(scheduling.policy, scheduling_options(settings)),
        costs,
        limits=QueueLimits(**settings.queue.model_dump()),
        deadlines=make_deadlines(settings),
        reuse=make_reuse(settings),
    )


def make_reuse(settings: Settings) -> ReuseSettings:
    """Return how much KV of finished requests is retained."""
    given = settings.kv_reuse
    return ReuseSettings(
        enabled=given.enabled,
        max_share=given.max_share,
        files_bytes=0 if given.files is None else given.files.bytes,
        decode_rest_tokens=settings.decode.prefill_tokens_max if settings.elastic is None else 0,
    )


def initial_costs(settings: Settings) -> CostTable:
    """Return the first cost table: no bucket is filled in yet.

    Its latencies were profiled here, or else are the ones included with csps.
    """
    latencies = latency_table(settings)
    return CostTable(latencies=latencies, rings=ring_rules(settings, latencies))


def open_log(settings: Settings, table: CostTable) -> DecisionLog | None:
    """Open the decision log if the settings name one; do without it if the disk is full or broken.

    Args:
        table: in force at the start.

    Raises:
        ConfigError: the file cannot be written there.
    """
    scheduling = settings.scheduling
    if scheduling.log is None:
        return None
    options = scheduling_options(settings)
    policy = make_policy(scheduling.policy, options)
    header = DecisionLogHeader(
        policy=scheduling.policy,
        policy_digest=digest_of(policy),
        table_digest=table.digest,
        options=options,
        limits=QueueLimits(**settings.queue.model_dump()),
        deadlines=make_deadlines(settings),
        reuse=make_reuse(settings),
    )
    try:
        return DecisionLog(Path(scheduling.log), header, table)
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            _log.warning("no decision log is written: %s: %s", error.strerror, scheduling.log)
            return None
        raise ConfigError(f"scheduling.log: {error.strerror}: {scheduling.log}") from None


def make_deadlines(settings: Settings) -> SchedulerDeadlines:
    """Return the scheduler's deadlines, of which the settings may change some."""
    given = settings.deadlines
    return SchedulerDeadlines(
        reserve_ns=_ns(given.reserve_s),
        reserve_token_ns=_ns(given.reserve_s_per_1k_tokens / 1000),
        transfer_ns=_ns(given.landing_s),
        transfer_token_ns=_ns(given.landing_s_per_1k_tokens / 1000),
        prefill_liveness_ns=_ns(settings.prefilling.progress_deadline_s),
        decode_liveness_ns=_ns(settings.decoding.silence_deadline_s),
        gang_recovery_ns=_ns(given.gang_recovery_s),
    )


def _ns(seconds: float) -> int:
    return round(seconds * SECOND_NS)

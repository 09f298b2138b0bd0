"""The scheduler's parts as the settings have them."""

from __future__ import annotations

from pathlib import Path

from csps.protocols.errors import ConfigError
from csps.services.launch.settings import Settings
from csps.services.profiling.improvement_source import scheduling_options
from csps.services.profiling.latency_source import latency_table
from csps.services.profiling.ring_source import ring_rules
from csps.services.router.decision_log import DecisionLog
from csps.services.scheduling.cost import Costs, CostTable
from csps.services.scheduling.decisions import digest_of
from csps.services.scheduling.limits import SECOND_NS, DeadlineSettings, QueueLimits
from csps.services.scheduling.log import Header
from csps.services.scheduling.policies.choice import make_policy
from csps.services.scheduling.prefix.settings import ReuseSettings
from csps.services.scheduling.scheduler import Scheduler


def make_scheduler(settings: Settings, costs: Costs) -> Scheduler:
    """The scheduler with the policy that the operator named."""
    scheduling = settings.scheduling
    return Scheduler(
        make_policy(scheduling.policy, scheduling_options(settings)),
        costs,
        limits=QueueLimits(**settings.queue.model_dump()),
        deadlines=make_deadlines(settings),
        reuse=make_reuse(settings),
    )


def make_reuse(settings: Settings) -> ReuseSettings:
    """What is kept of requests that are over."""
    given = settings.kv_reuse
    return ReuseSettings(enabled=given.enabled, max_share=given.max_share)


def first_costs(settings: Settings) -> CostTable:
    """What strategies and groups are compared by at first: the times that were profiled here, or
    those that come with csps, and no bucket filled in yet."""
    latencies = latency_table(settings)
    return CostTable(latencies=latencies, rings=ring_rules(settings, latencies))


def open_log(settings: Settings, table: CostTable) -> DecisionLog | None:
    """The log that the operator wants, if so.

    Args:
        table: in force at the start.

    Raises:
        ConfigError: the file cannot be written.
    """
    scheduling = settings.scheduling
    if scheduling.log is None:
        return None
    options = scheduling_options(settings)
    policy = make_policy(scheduling.policy, options)
    header = Header(
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
        raise ConfigError(f"scheduling.log: {error.strerror}: {scheduling.log}") from None


def make_deadlines(settings: Settings) -> DeadlineSettings:
    """The scheduler's deadlines, of which the operator may have set some."""
    given = settings.deadlines
    return DeadlineSettings(
        reserve_ns=_ns(given.reserve_s),
        reserve_token_ns=_ns(given.reserve_s_per_1k_tokens / 1000),
        landing_ns=_ns(given.landing_s),
        landing_token_ns=_ns(given.landing_s_per_1k_tokens / 1000),
        prefill_silence_ns=_ns(settings.prefilling.progress_deadline_s),
        decode_silence_ns=_ns(settings.decoding.silence_deadline_s),
        gang_recovery_ns=_ns(given.gang_recovery_s),
    )


def _ns(seconds: float) -> int:
    return round(seconds * SECOND_NS)

"""When it is better to wait for more instances (LoongServe App. A)."""

from __future__ import annotations

from collections.abc import Sequence

from csps.services.scheduling.policies.loongserve.jobs import Decoding, Prompt
from csps.services.scheduling.policies.loongserve.prefill_model import PrefillModel


def wait_ns(decoding: Sequence[Decoding], average_decode_ns: int) -> int:
    """Until the instances of a batch are free, as roughly estimated: AvgLat_d - min(exec_time)."""
    executed_ns = min((it.executed_ns for it in decoding), default=average_decode_ns)
    return max(0, average_decode_ns - executed_ns)


def spared_ns(waited_ns: int, decoding: Sequence[Decoding], average_decode_ns: int) -> int:
    """What a prompt need not wait if a batch gives way to it now (Eq. 2). A batch that goes on for
    longer than was estimated may do so for any time: what the prompt has waited for it since then
    counts, as whoever rents has paid enough when he might have bought."""
    executed_ns = min((it.executed_ns for it in decoding), default=average_decode_ns)
    over_ns = max(0, executed_ns - average_decode_ns)
    return wait_ns(decoding, average_decode_ns) or min(waited_ns, over_ns)


def worth_waiting(
    prompts: Sequence[Prompt], dop: int, all_dop: int, wait: int, model: PrefillModel
) -> bool:
    """Whether an iteration on all instances, begun after the wait, ends before one that begins now
    on those that are available."""
    if dop >= all_dop:
        return False
    lengths = [it.tokens for it in prompts]
    return wait < model.ns(lengths, dop) - model.ns(lengths, all_dop)

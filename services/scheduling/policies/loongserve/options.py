"""Options of the policy `loongserve`."""

from __future__ import annotations

from dataclasses import dataclass

from csps.protocols.errors import ConfigError, nearest
from csps.services.scheduling.policies.option_checks import check_least

OBJECTIVES = ("normalised", "sum")
BATCHINGS = ("plain", "pruned")


@dataclass(frozen=True, kw_only=True)
class LoongServeOptions:
    """What the four steps need to know besides times."""

    max_num_ooe: int = 8
    """Rounds in which a request that finds no slots may be passed by younger ones."""
    objective: str = "normalised"
    """What batching minimises: the sum of latencies, or of these divided by the prompts' lengths.
    """
    batching: str = "plain"
    """Batching by the whole search, or by the pruned one of the paper, which is no exact one."""
    tipping_tokens: int = 0
    """A prefill of so many tokens is compute-bound; 0: where Eq. 7 says."""
    scale_up_batch: int = 0
    """Rows that a master draws before others share them; 0: as many as it is predicted to draw at
    least as fast as two instances would."""
    decode_iterations: int = 10
    """Iterations that a decode group has, at least, between two preemptions."""
    migrate: bool = True
    """KV of what decodes moves where that gains more than it costs; false: it stays."""
    max_delay_s: float = 0.0
    """How long requests that could start on some instances may be delayed in the hope for all;
    0: not at all."""
    static_dop: int = 0
    """Always groups of so many instances, for comparison; 0: elastic."""

    def __post_init__(self) -> None:
        check_least(self, 0, "max_num_ooe", "tipping_tokens", "decode_iterations", "static_dop")
        check_least(self, 0, "max_delay_s", "scale_up_batch")
        for name, known in (("objective", OBJECTIVES), ("batching", BATCHINGS)):
            if (value := getattr(self, name)) not in known:
                words, hint = " or ".join(known), nearest(value, known)
                raise ConfigError(f"option {name} must be {words}, not {value}{hint}")

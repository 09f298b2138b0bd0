"""What a rank is told at birth."""

from __future__ import annotations

from dataclasses import dataclass

from csps.protocols.gang.messages import Role


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """Of one rank; the gang's ranks differ in `rank` and `location` alone."""

    model_dir: str
    role: Role
    rank: int
    world_size: int
    """Ranks of the gang."""
    tp: int = 1
    gang_id: str
    """New for every incarnation of a gang."""
    kv_slots: int
    """Tokens that the rank's KV pool can hold."""
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    """Torch threads of this process."""
    host: str = "127.0.0.1"
    """Address that peers and the router reach this rank at."""
    location: str = "0-0-0"
    """Rack-Server-GPU id."""
    max_positions: int | None = None
    """Limit of prompt and answer; None takes the checkpoint's."""
    kv_in_flight_bytes: int = 32 * 2**20
    """Host memory for KV on its way to or from another gang."""
    kv_receiving_backends: int = 16
    """Steps of prefill ranks that may send KV here at a time."""
    kv_checksum: float = 0.0
    """Share of messages of KV whose bytes are compared where they land, 0 to 1."""
    quantum_ms: float = 50.0
    """About how long a step computes before something else may have the rank."""

    @property
    def may_prefill(self) -> bool:
        """It runs steps."""
        return self.role != "decode"

    @property
    def may_decode(self) -> bool:
        """It has a stream."""
        return self.role != "prefill"

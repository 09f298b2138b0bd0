"""The configuration of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from csps.protocols.gang.messages import Role
from csps.protocols.rpc.tls import TlsFiles


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """Configuration of one rank; the gang's ranks differ in `rank` and `location` alone."""

    model_dir: str
    model_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values that replace those of the checkpoint's config.json."""
    role: Role
    rank: int
    world_size: int
    """Ranks of the gang."""
    tp: int = 1
    gang_id: str
    """Id that is new for every incarnation of a gang."""
    kv_slots: int
    """Tokens that the rank's KV pool can hold."""
    window_slots: int = 0
    """Tokens that it can hold in layers with a sliding window; 0: as many as in other layers."""
    dtype: str = "float32"
    kv_dtype: str = "auto"
    """Form of KV in the pool: that of `dtype`, or int8 (8 bits with a scale per token and head)."""
    weight_dtype: str = "auto"
    """Form of the matrices of feed-forward layers: that of `dtype`, or fp8."""
    device: str = "cpu"
    threads: int = 1
    """Torch threads of this process."""
    host: str = "127.0.0.1"
    """Address that peers and the router reach this rank at."""
    location: str = "0-0-0"
    """Rack-server-GPU id."""
    max_positions: int | None = None
    """Limit of prompt and answer together; None takes the checkpoint's."""
    kv_in_flight_bytes: int = 32 * 2**20
    """Host memory for KV on its way to or from another gang."""
    kv_receiving_backends: int = 16
    """Steps of prefill ranks that may send KV here at a time."""
    kv_checksum: float = 0.0
    """Fraction of KV messages whose bytes the receiver checks, 0 to 1."""
    kv_files_path: str | None = None
    """Folder in which KV survives this process; None: it does not."""
    kv_files_bytes: int = 0
    """Limit of all files in that folder, whoever writes them."""
    release: str = ""
    """Release of the code: KV in files is for the same one."""
    tls: TlsFiles | None = None
    """Files for encrypted connections to the router and the rendezvous store; None: plain."""
    quantum_ms: float = 50.0
    """Approximate time that a step computes before the rank may turn to something else."""

    @property
    def may_prefill(self) -> bool:
        """Return whether the rank runs steps."""
        return self.role != "decode"

    @property
    def eight_bit_kv(self) -> bool:
        """Return whether KV is kept in 8 bits."""
        return self.kv_dtype == "int8"

    @property
    def may_decode(self) -> bool:
        """Return whether the rank has a decode batch."""
        return self.role != "prefill"

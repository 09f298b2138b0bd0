"""What the settings say reaches the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.serve.gang import GangContext

from csps.protocols.gang.members import GangRole
from csps.services.deployments.gang_rank import rank_config
from csps.services.settings.settings import Settings


@pytest.mark.parametrize("role", ["prefill", "decode", "elastic"])
def test_a_rank_is_told_what_the_settings_say(tiny_llama: Path, role: GangRole) -> None:
    policy = "chunked_prefill" if role == "elastic" else "csps"
    gang = {"instances": 3, "tp": 2, "kv_slots": 77, "threads": 4}
    settings = Settings.model_validate(
        {
            "model": str(tiny_llama),
            "model_overrides": {"rope_theta": 5e6},
            "max_positions": 99,
            "quantum_ms": 12.5,
            "kv_transfer": {"in_flight_mib": 3, "receiving_backends": 5, "checksum": 0.25},
            "scheduling": {"policy": policy},
            # Otherwise the rank would ask its Ray node.
            "topology": {role: [f"0-{rank // 2}-{rank}" for rank in range(6)]},
            role: gang,
        }
    )
    context = GangContext(gang_id="g", rank=5, world_size=6, member_replica_ids=[])
    got = rank_config(role, settings, context, host="127.0.0.9")
    assert (got.may_prefill, got.may_decode) == (role != "decode", role != "prefill")
    assert (got.rank, got.world_size, got.tp) == (5, 6, 2)
    assert (got.kv_slots, got.threads, got.max_positions) == (77, 4, 99)
    assert (got.quantum_ms, got.kv_checksum, got.kv_in_flight_bytes) == (12.5, 0.25, 3 * 2**20)
    assert got.kv_receiving_backends == 5
    assert got.model_overrides == {"rope_theta": 5e6}
    assert (got.host, got.location) == ("127.0.0.9", "0-2-5")

"""The choice of a backend, and that importing the public functions needs no Triton."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from dense_reference import dense_attention
from token_layouts import random_qkv

from csps.kernels import cpu_attention, flash_attention
from csps.kernels.attention import attention_backend


def test_cpu_tensors_select_the_cpu_backend() -> None:
    assert attention_backend(torch.zeros(1, 1, 8), None, None, None) is cpu_attention.attention


def test_cpu_attention_works_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from csps.kernels import attention, importance, merge\n"
        "x = torch.ones(3, 1, 8)\n"
        "out, lse = attention.attention(x, x, x, q_positions=range(3), k_positions=range(3))\n"
        "merge.merge([out], [lse])\n"
        "score = importance.importance(x, x, lse, q_positions=None, k_positions=None)\n"
        "importance.select(score, 2)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("q_positions", "k_positions", "applies"),
    [
        (None, None, True),
        (range(8), range(8), True),
        (range(6, 8), range(8), True),
        (range(6, 8), range(4, 8), True),
        (range(6, 8), range(9), False),  # a key after the last query
        (range(6, 8), range(7), False),
        (range(8), range(4, 8), False),  # queries before every key
        (range(0, 16, 2), range(0, 16, 2), False),
        (torch.arange(8), torch.arange(8), False),  # not known without waiting for the device
    ],
)
def test_flash_attn_applies_only_to_masks_it_can_express(
    q_positions: range | torch.Tensor | None,
    k_positions: range | torch.Tensor | None,
    applies: bool,
) -> None:
    q = torch.zeros(8, 2, 64, dtype=torch.bfloat16)
    assert flash_attention.applies(q, q_positions, k_positions, None) is applies
    assert not flash_attention.applies(q, q_positions, k_positions, [0, 8])
    assert not flash_attention.applies(q.float(), q_positions, k_positions, None)
    assert not flash_attention.applies(
        torch.zeros(8, 2, 512, dtype=torch.bfloat16), q_positions, k_positions, None
    )


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """Follow the library's contract: batch first, causal from the bottom right, lse in fp32."""
    ends = torch.arange(k.shape[1] - q.shape[1], k.shape[1]), torch.arange(k.shape[1])
    q_positions, k_positions = ends if options["causal"] else (None, None)
    out, lse = dense_attention(
        q[0],
        k[0],
        v[0],
        q_positions=q_positions,
        k_positions=k_positions,
        scale=options["softmax_scale"],
    )
    assert options["return_attn_probs"]
    return out[None].to(q.dtype), lse[None].float(), None


@pytest.mark.parametrize("positions", [None, (range(30, 50), range(50))])
def test_flash_attn_is_called_by_its_contract(
    positions: tuple[range, range] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = ModuleType("flash_attn")
    library.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    q, k, v = random_qkv(1, 20, 50, dtype=torch.bfloat16)
    q_positions, k_positions = positions or (None, None)
    got = flash_attention.attention(q, k, v, q_positions, k_positions, 0.3, None, None)
    want = cpu_attention.attention(q, k, v, q_positions, k_positions, 0.3, None, None)
    assert got[0].dtype == got[1].dtype == torch.float32
    torch.testing.assert_close(got, want, atol=2e-2, rtol=1e-2)

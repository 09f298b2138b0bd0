"""The forward pass of every family against transformers, whole and split by tensor parallelism."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_reference import dense_attention
from tiny_checkpoints import FAMILIES, make_checkpoint, random_tokens, reference_logits
from torch import Tensor

from csps.kernels import cpu_product
from csps.models.checkpoints.loading import load_network
from csps.models.network import network as network_module
from csps.models.network.network import Layer, Network

TOKENS = 37
NEAR_FIRST = ["sliding_attention", "full_attention"]
BIASED = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"attention_bias": True},
    "glm": {"attention_bias": True},
    "qwen3_moe": {"attention_bias": True},
    "glm4": {"attention_bias": True},
    "glm4_moe": {"attention_bias": True},
    "internlm2": {"bias": True},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Create each checkpoint once."""
    made: dict[str, Path] = {}

    def make(family: str, **config: Any) -> Path:
        key = f"{family}{config}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(family), family, **config)
        return made[key]

    return make


def forward(
    network: Network,
    token_ids: list[int],
    positions_t: Tensor | None = None,
    chunks: Sequence[int] = (),
) -> Tensor:
    """Compute logits of one sequence whose tokens may lie in any order, with exact attention.

    Args:
        chunks: numbers of tokens that are computed together, after the KV of those before them is
            kept; all of them if there are none.
    """
    positions_t = torch.arange(len(token_ids)) if positions_t is None else positions_t
    kept: list[tuple[Tensor, Tensor]] = []
    logits = []
    with torch.inference_mode():
        for start, stop in pairwise(accumulate(chunks or [len(token_ids)], initial=0)):
            rotary = network.rotary(positions_t[start:stop])
            x_td = network.embed(torch.tensor(token_ids[start:stop], dtype=torch.int64))
            for index, layer in enumerate(network.layers):
                q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
                assert q_thd.is_contiguous()
                assert k_thd.is_contiguous()
                assert v_thd.is_contiguous()
                if start:
                    k_thd = torch.cat((kept[index][0], k_thd))
                    v_thd = torch.cat((kept[index][1], v_thd))
                kept[index : index + 1] = [(k_thd, v_thd)]
                out_thd, _ = dense_attention(
                    q_thd,
                    k_thd,
                    v_thd,
                    q_positions=positions_t[start:stop],
                    k_positions=positions_t[:stop],
                    scale=network.spec.scale,
                    window=network.spec.window_of(index),
                    sinks_h=_sinks(layer),
                )
                x_td = layer.finish(x_td, out_thd.float())
            logits.append(network.logits(x_td))
    return torch.cat(logits)


def _sinks(layer: Layer) -> Tensor | None:
    """Return the sinks of a rank's query heads."""
    heads, sinks_h = layer.shard.query_heads, layer.weights.sinks
    return None if sinks_h is None else sinks_h[heads.start : heads.stop]


def forward_in_parallel(
    model_dir: Path,
    tp_size: int,
    token_ids: list[int],
    chunks: Sequence[int] = (),
    **options: bool,
) -> list[Tensor]:
    """Compute each rank's logits; the ranks are threads that meet in every all-reduce.

    Args:
        options: of `load_network`.
    """
    parts: list[Tensor] = [torch.empty(0)] * tp_size
    barrier = threading.Barrier(tp_size, timeout=30)

    def run(rank: int) -> Tensor:
        def all_reduce(part: Tensor) -> Tensor:
            parts[rank] = part
            barrier.wait()
            total = torch.stack(parts).sum(0)
            barrier.wait()
            return total

        return forward(
            load_network(
                model_dir, tp_rank=rank, tp_size=tp_size, all_reduce=all_reduce, **options
            ),
            token_ids,
            chunks=chunks,
        )

    with ThreadPoolExecutor(tp_size) as pool:
        return list(pool.map(run, range(tp_size)))


def assert_logits(actual: Tensor, expected: Tensor) -> None:
    """Allow differences of 25 roundings of the largest logit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(checkpoint: Callable[..., Path], family: str) -> None:
    model_dir, token_ids = checkpoint(family), random_tokens(TOKENS)
    assert_logits(
        forward(load_network(model_dir), token_ids), reference_logits(model_dir, token_ids)
    )


CHUNKS = (5, 1, 20, 11)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_with_kept_kv(checkpoint: Callable[..., Path], family: str) -> None:
    model_dir, token_ids = checkpoint(family), random_tokens(TOKENS)
    assert sum(CHUNKS) == TOKENS
    logits = forward(load_network(model_dir), token_ids, chunks=CHUNKS)
    assert_logits(logits, reference_logits(model_dir, token_ids))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"mlp_only_layers": [1], "num_experts_per_tok": 8}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("glm4_moe", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
        ("glm4_moe", {"first_k_dense_replace": 0, "use_qk_norm": False}),
        ("glm4_moe", {"first_k_dense_replace": 2, "partial_rotary_factor": 1.0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_mixtures_of_experts(
    checkpoint: Callable[..., Path], family: str, config: dict[str, Any], tp_size: int
) -> None:
    model_dir, token_ids = checkpoint(family, **config), random_tokens(TOKENS)
    expected = reference_logits(model_dir, token_ids)
    for logits in forward_in_parallel(model_dir, tp_size, token_ids, CHUNKS):
        assert_logits(logits, expected)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("phi3", {"max_position_embeddings": 64, "original_max_position_embeddings": 64}),
        ("phi3", {"rope_parameters": None}),
        ("mistral", {"sliding_window": 32_768}),
        ("mistral", {"sliding_window": 8}),
        ("ministral3", {"sliding_window": 8}),
        ("mixtral", {"sliding_window": 8}),
        ("phi3", {"sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": NEAR_FIRST}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
        ("gemma3_text", {"attention_bias": True, "query_pre_attn_scalar": 12}),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("gpt_oss", {"rope_parameters": None, "num_experts_per_tok": 1}),
        ("glm4", {"partial_rotary_factor": 1.0}),
    ],
    ids=str,
)
def test_other_settings(
    checkpoint: Callable[..., Path], family: str, config: dict[str, Any]
) -> None:
    model_dir, token_ids = checkpoint(family, **config), random_tokens(TOKENS)
    assert_logits(
        forward(load_network(model_dir), token_ids), reference_logits(model_dir, token_ids)
    )


def test_overrides_are_those_of_transformers(checkpoint: Callable[..., Path]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    rope = {"rope_theta": 10_000.0, **yarn}
    plain, edited = checkpoint("qwen3_moe"), checkpoint("qwen3_moe", rope_parameters=rope)
    token_ids = random_tokens(TOKENS)
    logits = forward(load_network(plain, overrides={"rope_scaling": yarn}), token_ids)
    assert_logits(logits, reference_logits(edited, token_ids))


@pytest.mark.parametrize("family", BIASED)
def test_biases(checkpoint: Callable[..., Path], family: str) -> None:
    model_dir, token_ids = checkpoint(family, **BIASED[family]), random_tokens(TOKENS)
    assert_logits(
        forward(load_network(model_dir), token_ids), reference_logits(model_dir, token_ids)
    )


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("family", [*FAMILIES, *(f"{family} biased" for family in BIASED)])
def test_packed_matrices_give_the_logits_of_transformers(
    checkpoint: Callable[..., Path], family: str, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, biased = family.partition(" ")
    model_dir = checkpoint(name, **(BIASED[name] if biased else {}))
    token_ids = random_tokens(TOKENS)
    monkeypatch.setattr(network_module, "PACKED_NUMBERS", 1)
    monkeypatch.setattr(network_module, "SHORT_INNER", 0)
    expected = reference_logits(model_dir, token_ids)
    for logits in forward_in_parallel(model_dir, tp_size, token_ids, CHUNKS, packed=True):
        assert_logits(logits, expected)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("family", [*FAMILIES, *(f"{family} biased" for family in BIASED)])
def test_products_of_few_rows_give_the_logits_of_transformers(
    checkpoint: Callable[..., Path], family: str, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(cpu_product, "_prepared", {})
    assert cpu_product.prepare(torch.float32)
    monkeypatch.setattr(cpu_product, "LEAST_BYTES", 0)
    computed: list[int] = []

    def few_row_product(x_ti: Tensor, *others: Any) -> Tensor | None:
        product_to = cpu_product.few_row_product(x_ti, *others)
        if product_to is not None:
            computed.append(len(x_ti))
        return product_to

    monkeypatch.setattr(network_module, "few_row_product", few_row_product)
    name, _, biased = family.partition(" ")
    model_dir = checkpoint(name, **(BIASED[name] if biased else {}))
    token_ids = random_tokens(TOKENS)
    expected = reference_logits(model_dir, token_ids)
    for logits in forward_in_parallel(model_dir, tp_size, token_ids, CHUNKS):
        assert_logits(logits, expected)
    assert set(computed) >= set(CHUNKS), "torch has computed them"


def test_packed_matrices_in_bf16_round_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "PACKED_NUMBERS", 1)
    generator = torch.Generator().manual_seed(4)
    weight, x = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (96, TOKENS))
    exact, plain = x.double() @ weight.double().T, F.linear(x, weight)
    with torch.inference_mode():
        packed = network_module._linear(x, network_module._packed(weight))
    assert (packed - exact).abs().max() <= 1.1 * (plain - exact).abs().max()


def test_large_matrices_are_packed_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(cpu_product, "_prepared", {})
    wide = network_module.SHORT_INNER + 1
    long = -(-network_module.PACKED_NUMBERS // wide)
    large, small = torch.rand(long, wide), torch.rand(long - 1, wide)
    packed = network_module._packed(large)
    assert packed.is_mkldnn
    assert large.untyped_storage().nbytes() == 0
    assert network_module._packed(small) is small
    wide = network_module.SHORT_INNER
    narrow, other = torch.rand(2 * long, wide), torch.rand(2 * long, wide)
    assert cpu_product.prepare(torch.float32)
    assert network_module._packed(narrow) is narrow
    monkeypatch.setattr(cpu_product, "_prepared", {})
    assert network_module._packed(other).is_mkldnn, "there is no code for it"
    double = torch.rand(2 * long, wide, dtype=torch.float64)
    assert network_module._packed(double) is double


def test_a_head_that_is_the_embedding_is_not_packed(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_module, "PACKED_NUMBERS", 1)
    monkeypatch.setattr(network_module, "SHORT_INNER", 0)
    tied = load_network(checkpoint("llama", tie_word_embeddings=True), packed=True)
    assert not tied.head_vd.is_mkldnn
    assert load_network(checkpoint("llama"), packed=True).head_vd.is_mkldnn


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings(checkpoint: Callable[..., Path], family: str) -> None:
    model_dir = checkpoint(family, tie_word_embeddings=True)
    network, token_ids = load_network(model_dir), random_tokens(TOKENS)
    assert network.head_vd is network.embedding_vd
    assert_logits(forward(network, token_ids), reference_logits(model_dir, token_ids))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_scaled_rope(checkpoint: Callable[..., Path], rope: dict[str, Any]) -> None:
    model_dir = checkpoint("llama", rope_parameters={"rope_theta": 10_000.0, **rope})
    token_ids = random_tokens(TOKENS)
    assert_logits(
        forward(load_network(model_dir), token_ids), reference_logits(model_dir, token_ids)
    )


def test_head_dim_of_its_own(checkpoint: Callable[..., Path]) -> None:
    model_dir = checkpoint("mistral", head_dim=24, num_key_value_heads=1)
    token_ids = random_tokens(TOKENS)
    assert_logits(
        forward(load_network(model_dir), token_ids), reference_logits(model_dir, token_ids)
    )


@pytest.mark.parametrize(
    ("family", "tp_size"),
    [
        *((family, 2) for family in FAMILIES),
        ("llama", 4),
        ("glm", 4),
        ("internlm2", 4),
        ("phi3", 4),
        ("glm4_moe", 4),
    ],
)
def test_tensor_parallel_ranks_agree_with_transformers(
    checkpoint: Callable[..., Path], family: str, tp_size: int
) -> None:
    """Let two of 4 ranks share each of 2 KV heads. Biases must be added once."""
    model_dir, token_ids = checkpoint(family, **BIASED.get(family, {})), random_tokens(TOKENS)
    expected = reference_logits(model_dir, token_ids)
    for logits in forward_in_parallel(model_dir, tp_size, token_ids):
        assert_logits(logits, expected)


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])
@pytest.mark.parametrize("block_tokens", [1, 7, TOKENS])
def test_blocks_change_nothing(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    block_tokens: int,
) -> None:
    model_dir, token_ids = checkpoint(family), random_tokens(TOKENS)
    monkeypatch.setattr(network_module, "CPU_BLOCK_TOKENS", block_tokens)
    monkeypatch.setattr(network_module, "EXPERT_BLOCK_TOKENS", block_tokens)
    assert_logits(
        forward(load_network(model_dir), token_ids), reference_logits(model_dir, token_ids)
    )


@pytest.mark.parametrize("family", ["llama", "glm"])
def test_tokens_may_lie_in_any_order(checkpoint: Callable[..., Path], family: str) -> None:
    model_dir, token_ids = checkpoint(family), random_tokens(TOKENS)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    shuffled = [token_ids[index] for index in order.tolist()]
    logits = forward(load_network(model_dir), shuffled, positions_t=order)
    assert_logits(logits, reference_logits(model_dir, token_ids)[order])


def test_a_rank_without_tokens_computes_nothing(checkpoint: Callable[..., Path]) -> None:
    network = load_network(checkpoint("qwen3"))
    with torch.inference_mode():
        x_td = network.embed(torch.empty(0, dtype=torch.int64))
        q_thd, k_thd, _ = network.layers[0].qkv(x_td, network.rotary(torch.empty(0)))
        assert q_thd.shape == (0, 4, 16)
        assert k_thd.shape == (0, 2, 16)
        assert network.logits(network.layers[0].finish(x_td, q_thd)).shape == (0, 272)


def test_inputs_are_left_alone(checkpoint: Callable[..., Path]) -> None:
    network = load_network(checkpoint("llama"))
    layer, x_td = network.layers[0], torch.randn(5, 64)
    attention_thd, before = torch.randn(5, 4, 16), x_td.clone()
    with torch.inference_mode():
        layer.qkv(x_td, network.rotary(torch.arange(5)))
        finished = layer.finish(x_td, attention_thd)
        in_steps = layer.mlp(layer.attention_output(x_td, attention_thd))
    torch.testing.assert_close(x_td, before, rtol=0, atol=0)
    torch.testing.assert_close(finished, in_steps, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_stays_near_fp32(checkpoint: Callable[..., Path], family: str) -> None:
    model_dir, token_ids = checkpoint(family), random_tokens(TOKENS)
    logits = forward(load_network(model_dir, dtype=torch.bfloat16), token_ids)
    assert logits.dtype == torch.float32
    error = logits - reference_logits(model_dir, token_ids)
    assert error.square().mean().sqrt() < 0.05  # the logits' own deviation is 1

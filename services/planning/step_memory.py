"""Predict the bytes of temporaries that a prefill step has at once on one rank.

Each phase of a layer keeps some tensors for all tokens, and others for one block of them. The
formulas follow the code that allocates them (`models/network/network.py`, `actors/attention/`) for
exact attention of the whole group; `tests/services/test_step_memory.py` holds them to what torch
allocates. A loop's variables keep what they name until the next round has replaced it, so that two
blocks are there at once. Positions and log-sum-exps are left out: less than a hundredth.
"""

from __future__ import annotations

from dataclasses import dataclass

from csps.actors.attention.base.yield_points import block_rows
from csps.actors.attention.step_points import MLP_ROWS
from csps.kernels.quantized_kv import INT8, row_width
from csps.models.network.network import CPU_BLOCK_TOKENS, EXPERT_BLOCK_TOKENS, GPU_BLOCK_TOKENS
from csps.models.network.spec import ModelSpec, TpShard, tp_shard_of

_FP32 = 4
"""Bytes of a number of attention's output before it is rounded."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Temporaries of a step, by the number of tokens that one rank computes."""

    spec: ModelSpec
    instances: int
    """Instances that compute a prompt together."""
    tp: int
    element: int
    """Bytes of a number."""
    on_gpu: bool
    eight_bit_kv: bool = False
    fp8: bool = False
    """True if tokens are multiplied in FP8 in feed-forward layers."""

    def bytes(self, tokens: int) -> int:
        """Return the bytes that a step of so many tokens has at once, in its largest phase."""
        phases = (
            self._projection(tokens),
            self._storing(tokens),
            self._exchange(tokens),
            self._attention(tokens),
            self._output(tokens),
            self._mlp(tokens),
        )
        return max(phases)

    @property
    def _shard(self) -> TpShard:
        return tp_shard_of(self.spec, 0, self.tp)

    @property
    def _kept(self) -> int:
        """Bytes that a token has throughout: its residual stream, and the angles of its position,
        twice if layers with a window have others."""
        rotations = 1 if self.spec.windowed_rope is None else 2
        return self._stream + rotations * self.element * self.spec.head_dim

    @property
    def _stream(self) -> int:
        """Bytes of a token's residual stream."""
        return self.element * self.spec.hidden

    @property
    def _queries(self) -> int:
        """Bytes of a token's queries, or of attention's result in the same dtype."""
        return self.element * len(self._shard.query_heads) * self.spec.head_dim

    @property
    def _qkv(self) -> int:
        """Bytes of a token's queries, keys and values."""
        return self._queries + 2 * self.element * self._keys

    @property
    def _keys(self) -> int:
        """Numbers of a token's keys, or of its values."""
        return len(self._shard.kv_heads) * self.spec.head_dim

    @property
    def _gathered(self) -> int:
        """Bytes of queries, keys and values that an exchange of heads brings for each own token:
        those of all tokens, and of this rank's part of the heads. With fewer KV heads than
        instances, several have the same one."""
        if self.instances == 1:
            return 0
        keys = max(self.instances, len(self._shard.kv_heads))
        return self._queries + 2 * self.element * keys * self.spec.head_dim

    @property
    def _exact_output(self) -> int:
        """Bytes of attention's result in fp32."""
        return self._queries * _FP32 // self.element

    def _norm(self, numbers: int) -> int:
        """Return the bytes of a token while so many numbers are normalized (`rms_norm`)."""
        if self.on_gpu:
            return self.element * numbers
        # On a CPU torch keeps three copies in fp32 of shorter numbers.
        return _FP32 * numbers * (1 if self.element == _FP32 else 3)

    def _block(self, tokens: int) -> int:
        return min(tokens, GPU_BLOCK_TOKENS if self.on_gpu else CPU_BLOCK_TOKENS)

    def _projection(self, tokens: int) -> int:
        """Count queries, keys and values of all tokens, beside those of a block as one tensor."""
        last = self._qkv if tokens > self._block(tokens) else 0
        normed = max(self._norm(self.spec.hidden), self._stream + self._qkv)
        normed_heads = self._norm(self._queries // self.element) if self.spec.qk_norm else 0
        rounded = 2 * self._divided(self._keys) if self.eight_bit_kv else 0
        block = max(last + normed, self._qkv + max(normed_heads, rounded))
        return tokens * (self._kept + self._qkv) + self._block(tokens) * block

    def _storing(self, tokens: int) -> int:
        """Count int8 keys, and values while they are quantized."""
        if not self.eight_bit_kv:
            return 0
        stored = len(self._shard.kv_heads) * row_width(self.spec.head_dim, INT8)
        return tokens * (self._kept + self._qkv + 2 * stored + self._divided(self._keys))

    def _divided(self, numbers: int) -> int:
        """Return the bytes of so many numbers while they are divided by scales in fp32."""
        # On a CPU torch copies shorter numbers to fp32 first.
        return _FP32 * numbers * (1 if self.on_gpu or self.element == _FP32 else 2)

    def _exchange(self, tokens: int) -> int:
        """Count own rows with all heads, those that leave, and all rows that arrive."""
        if self.instances == 1:
            return 0
        return tokens * (self._kept + self._qkv + 2 * self._gathered)

    def _attention(self, tokens: int) -> int:
        """Count the result in fp32, beside that of a block of queries."""
        held = self._kept + self._qkv + self._gathered + self._exact_output
        # All tokens of the group and a part of the heads, if heads are exchanged.
        rows = tokens * self.instances
        heads = max(1, len(self._shard.query_heads) // self.instances)
        if not self.on_gpu:
            rows = min(rows, block_rows(heads, self.spec.head_dim, rows))
        # Keys before a block and those within it give two results, which are merged.
        rounded = self.element if self.element != _FP32 else 0
        block = rows * (rounded + _FP32)
        if not self.on_gpu:
            others = min(rows, tokens * self.instances - rows)
            block = max(block, others * (rounded + 2 * _FP32))
        return tokens * held + heads * self.spec.head_dim * block

    def _output(self, tokens: int) -> int:
        """Count the result as it is rounded, travels back to its rows, and is projected."""
        held = self._kept + self._qkv + self._queries
        rounded = self._gathered + (self._exact_output if self.element != _FP32 else 0)
        # Parts of the others' heads arrive, those for the others leave, and all are put together.
        others = 2 * self._queries * (self.instances - 1) // self.instances
        exchanged = self._gathered + others + self._queries if self.instances > 1 else 0
        projected = self._stream + (self._norm(self.spec.hidden) if self.spec.post_norms else 0)
        return tokens * (held + max(rounded, exchanged, projected))

    def _mlp(self, tokens: int) -> int:
        """Count the new residual stream beside the old one, and the widest product of a block."""
        whole = self.on_gpu or self.tp > 1
        rows = tokens if whole else min(tokens, MLP_ROWS)
        post_norm = self._norm(self.spec.hidden) if self.spec.post_norms else 0
        blocks = []
        experts = self.spec.experts
        if experts is None or experts.dense_layers:
            blocks.append(min(rows, self._block(tokens)) * self._dense(self._shard.intermediate))
        if experts is not None:
            blocks.append(min(rows, EXPERT_BLOCK_TOKENS) * self._experts())
        return tokens * self._kept + rows * (self._stream + post_norm) + max(blocks)

    def _dense(self, width: range) -> int:
        """Return the bytes of a token in an MLP: its normalized input, gate, up, and a copy of the
        gate where the activation needs one."""
        products = 2 if self.spec.activation == "silu" else 3
        product = products * self.element * len(width)
        quantized = 0
        if self.fp8:
            # In fp32 on the way to FP8, and on a CPU back again.
            most, later = _FP32 + 1, 1 if self.on_gpu else _FP32
            gate_up = 2 * self.element * len(width)
            quantized = max(
                most * self.spec.hidden,
                later * self.spec.hidden + gate_up,
                gate_up + most * len(width),
                gate_up + later * len(width) + self._stream,
            )
        return self._stream + max(self._norm(self.spec.hidden), product, quantized)

    def _experts(self) -> int:
        """Return the bytes of a token in a layer of experts.

        On a CPU they come one after the other, and each may get all tokens. On a GPU all are
        computed at once.
        """
        experts, hidden = self.spec.experts, self.spec.hidden
        assert experts is not None, "a model without experts"
        gate_up = 2 * self.element * len(self._shard.expert_intermediate)
        if self.on_gpu:
            chosen = gate_up + 2 * self._stream + _FP32 * hidden
            return self._stream + experts.per_token * chosen
        exact = _FP32 * hidden if self.element != _FP32 else 0
        two_experts = 2 * (gate_up + self._stream)
        shared = self._dense(self._shard.shared_intermediate)
        return max(self._stream + exact + two_experts, shared)

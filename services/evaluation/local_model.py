"""Run a model in this process, and keep the KV that it answers from."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from csps.kernels.attention import attention
from csps.kernels.merge import merge, merge_sink
from csps.models.checkpoints.loading import load_network
from csps.models.network.checkpoint_json import read_eos_token_ids
from csps.models.network.network import Network
from csps.services.evaluation.cases import MAX_ANSWER_TOKENS

Span = tuple[int, int]
"""Characters ``start:end`` of a text, or tokens of it."""
SPACES = "\u0120\u010a\u0109\u2581"
"""Characters by which vocabularies write a space, a new line and a tab, and SentencePiece's
space."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """KV of computed tokens, of each layer; shape suffixes as in `csps.models.network.network`."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    positions: Tensor
    """Positions of these tokens, ascending."""
    end: int
    """Position of the next token."""

    def without(self, spans: Iterable[Span]) -> Context:
        """Return the context without some tokens; all others keep their positions."""
        mask = torch.ones(len(self.keys[0]), dtype=torch.bool)
        for start, end in spans:
            mask[start:end] = False
        return Context(
            keys=tuple(k_thd[mask] for k_thd in self.keys),
            values=tuple(v_thd[mask] for v_thd in self.values),
            positions=self.positions[mask],
            end=self.end,
        )


class LocalModel:
    """A model in this process: exact attention, greedy, one sequence."""

    def __init__(self, network: Network, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self.network = network
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        overrides: Mapping[str, Any] | None = None,
        *,
        rounds_kv: bool = False,
        fp8: bool = False,
    ) -> LocalModel:
        """Load a checkpoint folder.

        Args:
            overrides: values that replace those of its config.json.
            rounds_kv: whether keys and values are rounded to what 8 bits hold.
            fp8: whether feed-forward layers have weights in FP8.
        """
        # The tokenizers library's own class, because it returns the offsets of tokens in the text.
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        network = load_network(
            folder, overrides=overrides, dtype=dtype, rounds_kv=rounds_kv, fp8=fp8
        )
        return cls(network, tokenizer, frozenset(read_eos_token_ids(folder)))

    @cached_property
    def word_starts(self) -> frozenset[int]:
        """Tokens that continue no word: they begin with a space or a mark."""
        entries = self.tokenizer.get_vocab(with_added_tokens=True).items()
        return frozenset(
            id_ for entry, id_ in entries if entry[:1] in SPACES or not entry[:1].isalnum()
        )

    @torch.inference_mode()
    def read(self, text: str) -> Context:
        """Compute a text from position 0, with the special tokens that begin it."""
        ids = self.tokenizer.encode(text).ids
        return self._forward(ids, past=None)[1]

    @torch.inference_mode()
    def answer(self, past: Context, text: str) -> str:
        """Generate the text that follows the past and `text`, greedily; the past is not changed."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        reply: list[int] = []
        logits_v, own = self._forward(ids, past)
        for _ in range(MAX_ANSWER_TOKENS):
            token = int(logits_v.argmax())
            if token in self.stop_ids:
                break
            reply.append(token)
            logits_v, own = self._forward([token], past, own)
        return str(self.tokenizer.decode(reply))

    def count(self, text: str) -> int:
        """Count the tokens of a text, without special ones."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def tokens_of(self, text: str, spans: Sequence[Span]) -> list[Span]:
        """Return the token spans, special tokens counted, that cover character spans of a text."""
        starts, ends = zip(*self.tokenizer.encode(text).offsets, strict=True)
        return [(bisect_right(ends, start), bisect_left(starts, end)) for start, end in spans]

    def _forward(
        self, ids: Sequence[int], past: Context | None, own: Context | None = None
    ) -> tuple[Tensor, Context]:
        """Return next-token logits, and the KV of the tokens behind the past."""
        begin = own.end if own else past.end if past else 0
        end, spec = begin + len(ids), self.network.spec
        rotary = self.network.rotary(torch.arange(begin, end))
        x_td = self.network.embed(torch.tensor(ids))
        positions_t = torch.arange(begin, end)
        if own:
            positions_t = torch.cat((own.positions, positions_t))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for index, layer in enumerate(self.network.layers):
            q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
            if own:
                k_thd = torch.cat((own.keys[index], k_thd))
                v_thd = torch.cat((own.values[index], v_thd))
            rows, window = range(begin, end), spec.window_of(index)
            attend = partial(attention, q_thd, scale=spec.scale, window=window)
            own_rows = range(end - len(k_thd), end)
            parts = [attend(k_thd, v_thd, q_positions=rows, k_positions=own_rows)]
            # The past is attended to in place and merged: a decode step copies none of it.
            if past:
                precede = window is None
                parts.append(
                    attend(
                        past.keys[index],
                        past.values[index],
                        q_positions=None if precede else rows,
                        k_positions=None if precede else past.positions,
                    )
                )
            outs, lses = zip(*parts, strict=True)
            out_thd, lse_ht = merge(outs, lses)
            if layer.weights.sinks is not None:
                merge_sink(out_thd, lse_ht, layer.weights.sinks)
            x_td = layer.finish(x_td, out_thd)
            keys.append(k_thd)
            values.append(v_thd)
        context = Context(keys=tuple(keys), values=tuple(values), positions=positions_t, end=end)
        return self.network.logits(x_td[-1:])[0], context

"""Parses and tokenizes the body of a request: the part of reading it that takes time and memory.

It needs the body and the served model, and nothing of the cluster, so that it can also run in
another process. CPU work, no I/O. `services.http.request_parser` makes a `RequestSpec` of the
result.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np

from csps.models.tokenizers.chat_template import ChatTemplate, read_chat_template
from csps.models.tokenizers.tokenizer import Tokenizer, TooManyTokens
from csps.protocols.attention.csa import ALL_QUERIES, CsaSettings
from csps.protocols.attention.plan import AskedRing, Attention, Objective
from csps.protocols.core.errors import InvalidRequest, ModelNotFound
from csps.protocols.gang.messages import Sampling
from csps.protocols.openai.csps_options import CspsRequestOptions
from csps.protocols.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    parse_request,
)
from csps.services.requests.request_spec import PrefixKey
from csps.services.scheduling.events.limits import BLOCK_TOKENS

Endpoint = Literal["completion", "chat"]


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Facts about the served model that parsing depends on."""

    folder: str
    """Checkpoint directory."""
    name: str
    """Name in the API."""
    vocab: int
    """Token ids that the model embeds."""
    max_positions: int
    """Longest prompt plus answer."""
    reuses_kv: bool
    """Prompts get prefix-cache keys."""
    chat_template: str | None = None
    """File with a template that replaces the checkpoint's."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How a client wants its answer: all that is kept of its request besides the `RequestSpec`."""

    chat: bool
    stream: bool
    include_usage: bool
    """Streams end with the usage."""
    continuous_usage: bool
    """Every chunk has the usage so far, too."""
    stop: tuple[str, ...]
    skip_special_tokens: bool
    explain: bool


@dataclass(slots=True, kw_only=True)  # a frozen one takes three times as long to create
class ParsedBody:
    """What a body asks for. A message of `csps.protocols.rpc.schema`."""

    prompt: bytes
    """Token ids, 4 bytes each, in this machine's order; empty if they are more than the model has
    positions."""
    prompt_tokens: int
    more_tokens: bool
    """The prompt has too many tokens, more than were counted."""
    sampling: Sampling
    """Sampling parameters; `max_tokens` is 0 if the client asked for no length."""
    objective: Objective
    attention: Attention
    csa: CsaSettings | None
    open: bool
    given: tuple[str, ...]
    refuse_unmet: bool
    strategy: AskedRing | None
    prefix: PrefixKey | None
    hashes: tuple[bytes, ...]
    answer: AnswerOptions


class BodyParser:
    """Parses bodies for one model, with its tokenizer and chat template. Thread-safe.

    Raises:
        CheckpointError: the model directory lacks what is needed to parse requests.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.tokenizer = Tokenizer(Path(model.folder))
        self._template: ChatTemplate | None = read_chat_template(
            Path(model.folder), model.chat_template
        )

    def parse(self, endpoint: Endpoint, body: bytes, owner: bytes) -> ParsedBody:
        """Parse the body of `POST /v1/completions` or `POST /v1/chat/completions`.

        Args:
            owner: digest of the API key; empty if the server needs no key.

        Raises:
            RequestError, InvalidTextError: the client's mistake.
        """
        if endpoint == "completion":
            completion = parse_request(CompletionRequest, body)
            self._check_model(completion.model)
            return self._parsed(completion, completion.prompt, completion.alternatives, owner)
        chat = parse_request(ChatCompletionRequest, body)
        self._check_model(chat.model)
        return self._parsed(chat, self._rendered(chat), chat.alternatives, owner)

    def _parsed(
        self,
        request: GenerationRequest,
        text: str | list[int],
        alternatives: int | None,
        owner: bytes,
    ) -> ParsedBody:
        prompt, count, more = self._tokens(text, special=isinstance(request, CompletionRequest))
        if not count:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        # An array: numpy takes twice as long to make one of a list.
        packed = array("i", prompt).tobytes()
        ids = np.frombuffer(packed, np.int32)
        # For text as well: a tokenizer may have more tokens than the model, such as "<pad>", and
        # an id without an embedding would crash the ranks, not only fail the request.
        if (highest := int(ids.max(initial=0))) >= self.model.vocab:
            raise self._no_such_token(highest, "prompt")
        options = request.csps
        wanted, given = objective(options), given_of_csa(options)
        is_open = leaves_open(options, given)
        prefix = self._prefix(request, owner, wanted if is_open else None)
        by_configurator = options.attention != "csa" or (is_open and not given)
        return ParsedBody(
            prompt=packed,
            prompt_tokens=count,
            more_tokens=more,
            sampling=self._sampling(request, alternatives),
            objective=wanted,
            attention=options.attention,
            csa=None if by_configurator else csa_settings(options),
            open=is_open,
            given=given if is_open else (),
            refuse_unmet=options.unmet == "refuse",
            strategy=options.ring,
            prefix=prefix,
            hashes=() if prefix is None else prefix.hashes(ids),
            answer=AnswerOptions(
                chat=isinstance(request, ChatCompletionRequest),
                stream=request.stream,
                include_usage=request.stream_options.include_usage,
                continuous_usage=request.stream_options.continuous_usage_stats,
                stop=request.stop,
                skip_special_tokens=request.skip_special_tokens,
                explain=options.explain,
            ),
        )

    def _tokens(self, prompt: str | list[int], *, special: bool) -> tuple[list[int], int, bool]:
        """Return a prompt's tokens, their number, and whether there are even more.

        No tokens are returned if they are more than the model has positions.

        Args:
            special: text gets the beginning-of-sequence token and the like.
        """
        limit = self.model.max_positions
        if isinstance(prompt, str):
            try:
                prompt = self.tokenizer.encode(prompt, special, limit)
            except TooManyTokens as error:
                return [], error.at_least, True
        return (prompt if len(prompt) <= limit else []), len(prompt), False

    def _prefix(
        self, request: GenerationRequest, owner: bytes, bounds: Objective | None
    ) -> PrefixKey | None:
        """Return the prefix-cache key of a request, or None if it may not reuse KV.

        Args:
            bounds: bounds within which the request's KV may be inexact; None for exact KV.
        """
        # Sparse attention changes the KV of later layers: it must not be reused.
        if not self.model.reuses_kv or request.csps.attention == "csa":
            return None
        return PrefixKey.of(
            owner=owner,
            salt=request.cache_salt,
            block=BLOCK_TOKENS,
            bounds="" if bounds is None else bounds.key,
        )

    def _check_model(self, model: str) -> None:
        if model != self.model.name:
            raise ModelNotFound(model=model, served=self.model.name)

    def _rendered(self, request: ChatCompletionRequest) -> str:
        if self._template is None:
            raise InvalidRequest(
                f"the model '{self.model.name}' has no chat template; use /v1/completions"
            )
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        text = self._template.render(messages, add_generation_prompt=request.add_generation_prompt)
        if not text:
            raise InvalidRequest("the messages make an empty prompt", param="messages")
        return text

    def _sampling(self, request: GenerationRequest, alternatives: int | None) -> Sampling:
        self._check_tokens(request.stop_token_ids, "stop_token_ids")
        self._check_tokens(request.logit_bias, "logit_bias")
        ends = () if request.ignore_eos else self.tokenizer.eos_token_ids
        return Sampling(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(request.top_k, 0),
            min_p=request.min_p,
            seed=secrets.randbits(63) if request.seed is None else request.seed,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=request.logit_bias,
            logprobs=alternatives,
            max_tokens=request.output_limit or 0,
            min_tokens=request.min_tokens,
            stop_token_ids=tuple(dict.fromkeys((*request.stop_token_ids, *ends))),
        )

    def _check_tokens(self, tokens: Iterable[int], param: str) -> None:
        for token in tokens:
            if token >= self.model.vocab:
                raise self._no_such_token(token, param)

    def _no_such_token(self, token: int, param: str) -> InvalidRequest:
        return InvalidRequest(
            f"{param}: token id {token} is outside of the vocabulary of {self.model.vocab}",
            param=param,
        )


def objective(options: CspsRequestOptions) -> Objective:
    """Return what to optimize; with a bound on TTFT alone that is accuracy."""
    only_ttft_bound = options.max_ttft_ms is not None and options.max_accuracy_loss is None
    return Objective(
        kind=options.objective or ("accuracy" if only_ttft_bound else "ttft"),
        max_accuracy_loss=options.max_accuracy_loss,
        max_ttft_ms=options.max_ttft_ms,
    )


def leaves_open(options: CspsRequestOptions, given: tuple[str, ...]) -> bool:
    """Return whether the configurator may choose, within bounds, which keys attention drops.

    It may for a request with bounds and no attention of its own, and for sparse attention without a
    drop ratio.

    Args:
        given: result of `given_of_csa`.
    """
    if options.attention == "csa":
        by_hand = {"drop_ratios", "nested", "decode_kept_only"}
        return not by_hand & set(given)
    return options.attention == "auto" and options.ring is None and objective(options).bounded


_CSA_OPTIONS = {field.name: field.name for field in fields(CsaSettings)} | {
    "drop_ratios": "drop_ratio"
}
"""Names of options by field of `CsaSettings`."""


def given_of_csa(options: CspsRequestOptions) -> tuple[str, ...]:
    """Return the fields of `CsaSettings` that the client fixed."""
    return tuple(
        name for name, option in _CSA_OPTIONS.items() if getattr(options, option) is not None
    )


def csa_settings(options: CspsRequestOptions) -> CsaSettings:
    """Return the settings of sparse attention; keys are dropped only as the client asked.

    With an importance window the default `importance_layer` is "same".
    """
    given = {
        name: getattr(options, name) for name in given_of_csa(options) if name != "drop_ratios"
    }
    settings = CsaSettings(**given)
    if options.drop_ratio is not None:
        settings = replace(settings, drop_ratios=options.drop_ratio)
    if "importance_layer" in given or settings.importance_window == ALL_QUERIES:
        return settings
    # The layer before may look at other keys than this one, which models of few layers show
    # (benchmarks/results/two-servers-2026-11-21.md).
    return replace(settings, importance_layer="same")

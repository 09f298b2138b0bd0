"""Turns the bytes of a request into a validated, tokenized `RequestSpec`. CPU work, no I/O.

`RequestParser` knows the served model; the functions below it translate the `csps` options.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from csps.models.network.spec import ModelSpec, read_spec
from csps.models.tokenizers.chat_template import ChatTemplate, read_chat_template
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.attention.csa import ALL_QUERIES, CsaSettings
from csps.protocols.attention.plan import Objective
from csps.protocols.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    abridged,
)
from csps.protocols.gang.messages import Sampling
from csps.protocols.openai.csps_options import CspsRequestOptions
from csps.protocols.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    parse_request,
)
from csps.services.requests.request_spec import NO_KEY, ApiKey, PrefixKey, RequestSpec, SloBounds
from csps.services.scheduling.deciding.decisions import CapacityCheck
from csps.services.scheduling.events.limits import BLOCK_TOKENS
from csps.services.settings.settings import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RequestMetadata:
    """Facts about a request besides its body."""

    client_request_id: str
    asked: SloBounds = field(default_factory=SloBounds)
    """Objectives from the request's headers."""
    capacity_check: CapacityCheck | None = None
    """Capacity of the gangs; None before the first ones."""
    api_key: ApiKey = NO_KEY
    may_explain: bool = True
    """True if the client may ask for `explain`; otherwise it is ignored."""


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A request that is ready to be submitted."""

    request: GenerationRequest
    spec: RequestSpec


class RequestParser:
    """Parses requests for one model: its tokenizer, chat template and limits. Thread-safe.

    Raises:
        CheckpointError: the model directory lacks what is needed to parse requests.
    """

    def __init__(self, settings: Settings) -> None:
        model_dir: Path = settings.model_dir
        self.model = settings.model_name
        self.tokenizer = Tokenizer(model_dir)
        self._template: ChatTemplate | None = read_chat_template(model_dir)
        model_spec: ModelSpec = read_spec(model_dir)
        self._vocab = model_spec.vocab
        self._warn_of_tokens_without_embedding()
        self.max_positions = min(
            model_spec.max_positions, settings.max_positions or model_spec.max_positions
        )
        self._default_max_tokens = settings.default_max_tokens
        self.deadlines = settings.http
        """Deadlines for reading bodies."""
        self._deadline_s = settings.deadlines.request_s
        self._reuses = settings.kv_reuse.enabled
        self._slo = settings.slo

    def slo(self, asked: SloBounds, *, prompt_tokens: int = 0) -> SloBounds:
        """Return a request's objectives: the server's, unless its headers set their own.

        Args:
            asked: objectives from the headers.
            prompt_tokens: length of the prompt; 0 before it is read.
        """
        own = self._slo
        longer_ms = own.ttft_ms_per_1k_tokens * prompt_tokens / 1000
        ttft_ms = None if own.ttft_ms is None else own.ttft_ms + longer_ms
        return SloBounds(
            ttft_ms=ttft_ms if asked.ttft_ms is None else asked.ttft_ms,
            tpot_ms=own.tpot_ms if asked.tpot_ms is None else asked.tpot_ms,
            e2e_ms=own.e2e_ms,
        )

    def completion(self, body: bytes, metadata: RequestMetadata) -> ParsedRequest:
        """Parse the body of `POST /v1/completions`.

        Raises:
            RequestError, InvalidTextError: the client's mistake.
        """
        request = parse_request(CompletionRequest, body)
        self._check_model(request.model)
        prompt = self._prompt_tokens(request.prompt)
        return self._parsed(request, prompt, request.alternatives, metadata)

    def chat(self, body: bytes, metadata: RequestMetadata) -> ParsedRequest:
        """Parse the body of `POST /v1/chat/completions`.

        Raises:
            RequestError, InvalidTextError: the client's mistake.
        """
        request = parse_request(ChatCompletionRequest, body)
        self._check_model(request.model)
        prompt = self.tokenizer.encode(self._rendered(request), add_special_tokens=False)
        return self._parsed(request, prompt, request.alternatives, metadata)

    def _parsed(
        self,
        request: GenerationRequest,
        prompt: list[int],
        alternatives: int | None,
        metadata: RequestMetadata,
    ) -> ParsedRequest:
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        ids = np.asarray(prompt, np.int32)
        self._check_prompt(ids)
        max_tokens = self._max_tokens(request, len(prompt), metadata.capacity_check)
        wanted, given = objective(request.csps), given_of_csa(request.csps)
        is_open = leaves_open(request.csps, given)
        prefix = self._prefix(request, metadata, wanted if is_open else None)
        spec = RequestSpec(
            client_request_id=metadata.client_request_id,
            api_key=metadata.api_key,
            prompt=ids,
            sampling=self._sampling(request, max_tokens, alternatives),
            objective=wanted,
            attention=request.csps.attention,
            csa=None
            if request.csps.attention != "csa" or (is_open and not given)
            else csa_settings(request.csps),
            open=is_open,
            given=given if is_open else (),
            refuse_unmet=request.csps.unmet == "refuse",
            strategy=request.csps.ring,
            slo=self.slo(metadata.asked, prompt_tokens=len(prompt)),
            deadline_s=self._deadline_s,
            prefix=prefix,
            hashes=() if prefix is None else prefix.hashes(ids),
        )
        if not metadata.may_explain:
            options = request.csps.model_copy(update={"explain": False})
            request = request.model_copy(update={"csps": options})
        return ParsedRequest(request=request, spec=spec)

    def _prefix(
        self, request: GenerationRequest, metadata: RequestMetadata, bounds: Objective | None
    ) -> PrefixKey | None:
        """Return the prefix-cache key of a request, or None if it may not reuse KV.

        Args:
            bounds: bounds within which the request's KV may be inexact; None for exact KV.
        """
        # Sparse attention changes the KV of later layers: it must not be reused.
        if not self._reuses or request.csps.attention == "csa":
            return None
        return PrefixKey.of(
            owner=metadata.api_key.digest,
            salt=request.cache_salt,
            block=BLOCK_TOKENS,
            bounds="" if bounds is None else bounds.key,
        )

    def _check_model(self, model: str) -> None:
        if model != self.model:
            raise ModelNotFound(model=model, served=self.model)

    def _prompt_tokens(self, prompt: str | list[int]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _check_prompt(self, ids: NDArray[np.int32]) -> None:
        # For text as well: a tokenizer may have more tokens than the model, such as "<pad>", and
        # an id without an embedding would crash the ranks, not only fail the request.
        if (highest := int(ids.max())) >= self._vocab:
            raise self._no_such_token(highest, "prompt")

    def _warn_of_tokens_without_embedding(self) -> None:
        if (highest := self.tokenizer.highest_id) >= self._vocab:
            _log.warning(
                "the tokenizer has token ids up to %d, the model embeds only %d tokens: "
                "prompts with other tokens are refused", highest, self._vocab,
            )  # fmt: skip

    def _rendered(self, request: ChatCompletionRequest) -> str:
        if self._template is None:
            raise InvalidRequest(
                f"the model '{self.model}' has no chat template; use /v1/completions"
            )
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        text = self._template.render(messages, add_generation_prompt=request.add_generation_prompt)
        if not text:
            raise InvalidRequest("the messages make an empty prompt", param="messages")
        return text

    def _max_tokens(
        self, request: GenerationRequest, prompt_tokens: int, capacity_check: CapacityCheck | None
    ) -> int:
        """Return the answer's limit: as the client asked, or as much as fits."""
        room = self.max_positions - prompt_tokens
        wanted = request.output_limit
        if wanted is None:
            longest = (
                room if capacity_check is None else capacity_check.longest_answer(prompt_tokens)
            )
            wanted = max(1, min(self._default_max_tokens, room, longest))
        if wanted > room:
            # The gangs' slots may be a lower limit than the model's positions.
            here = (
                None if capacity_check is None else capacity_check.rejection(prompt_tokens, wanted)
            )
            raise here or ContextLengthExceeded(
                prompt_tokens=prompt_tokens, output_tokens=wanted, limit=self.max_positions
            )
        if request.min_tokens > wanted:
            raise InvalidRequest(
                f"min_tokens: must not exceed the answer's limit of {wanted} tokens; "
                "set max_tokens",
                param="min_tokens",
            )
        return wanted

    def _sampling(
        self, request: GenerationRequest, max_tokens: int, alternatives: int | None
    ) -> Sampling:
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
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=tuple(dict.fromkeys((*request.stop_token_ids, *ends))),
        )

    def _check_tokens(self, tokens: Iterable[int], param: str) -> None:
        for token in tokens:
            if token >= self._vocab:
                raise self._no_such_token(token, param)

    def _no_such_token(self, token: int, param: str) -> InvalidRequest:
        return InvalidRequest(
            f"{param}: token id {token} is outside of the vocabulary of {self._vocab}", param=param
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


def given_of_csa(options: CspsRequestOptions) -> tuple[str, ...]:
    """Return the fields of `CsaSettings` that the client fixed."""
    named = {field.name: field.name for field in fields(CsaSettings)} | {
        "drop_ratios": "drop_ratio"
    }
    return tuple(name for name, option in named.items() if getattr(options, option) is not None)


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


def read_slo(headers: Mapping[str, str]) -> SloBounds:
    """Return the objectives from the `x-slo-*` headers.

    Raises:
        InvalidRequest: a header is not a positive number of milliseconds.
    """
    return SloBounds(
        ttft_ms=_milliseconds(headers, "x-slo-ttft-ms"),
        tpot_ms=_milliseconds(headers, "x-slo-tpot-ms"),
    )


def _milliseconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise InvalidRequest(
            f"{name}: must be a positive number of milliseconds, got {abridged(text)}", param=name
        )
    return value

"""Makes a `RequestSpec` of a parsed body, the request's headers and what the gangs can take.

`RequestParser` knows the served model and the settings.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from csps.models.network.spec import ModelSpec, read_spec
from csps.protocols.core.errors import ContextLengthExceeded, InvalidRequest, abridged
from csps.services.http.body_parser import (
    AnswerOptions,
    BodyParser,
    ParsedBody,
    ParsedPrompt,
    ServedModel,
)
from csps.services.requests.request_spec import NO_KEY, ApiKey, RequestSpec, SloBounds
from csps.services.scheduling.deciding.decisions import CapacityCheck
from csps.services.settings.settings import Settings

_log = logging.getLogger(__name__)

LONGEST_DEFAULT = 4096
"""Most tokens of an answer whose request sets no limit."""


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
    """A request that is ready to be submitted. Nothing else is kept of its body."""

    specs: tuple[RequestSpec, ...]
    """One request to the scheduler for each answer: all of the first prompt, then of the next."""
    samples: int
    """Answers to each prompt."""
    answer: AnswerOptions
    echoes: tuple[str, ...]
    """Text with which each answer begins."""


class RequestParser:
    """Makes requests of what `body_parser` has parsed, for one model.

    Raises:
        CheckpointError: the model directory lacks what is needed to parse requests.
    """

    def __init__(self, settings: Settings) -> None:
        model_dir: Path = settings.model_dir
        spec: ModelSpec = read_spec(model_dir, settings.model_overrides)
        self.model = settings.model_name
        self.max_positions = min(spec.max_positions, settings.max_positions or spec.max_positions)
        self.body_parser = BodyParser(
            ServedModel(
                folder=str(model_dir),
                name=self.model,
                vocab=spec.vocab,
                max_positions=self.max_positions,
                reuses_kv=settings.kv_reuse.enabled,
                chat_template=settings.chat_template,
                tool_format=settings.tool_format,
                reasoning=settings.reasoning,
                request_templates=settings.http.request_templates,
            )
        )
        self.tokenizer = self.body_parser.tokenizer
        self._warn_of_tokens_without_embedding(spec.vocab)
        self._default_max_tokens: int | None = settings.default_max_tokens
        self.deadlines = settings.http
        """Deadlines for reading bodies."""
        self._deadline_s = settings.deadlines.request_s
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
            e2e_ms=own.e2e_ms if asked.e2e_ms is None else asked.e2e_ms,
            refuse=asked.refuse,
        )

    def finish(self, body: ParsedBody, metadata: RequestMetadata) -> ParsedRequest:
        """Return the request for a body that `body_parser` has parsed; takes microseconds.

        Raises:
            RequestError: prompt and answer do not fit the model or the gangs.
        """
        specs: list[RequestSpec] = []
        for prompt in body.prompts:
            first = self._spec(body, prompt, metadata)
            specs += [_sample(first, number) for number in range(body.samples)]
        echoes = tuple(prompt.echo for prompt in body.prompts for _ in range(body.samples))
        explain = body.answer.explain and metadata.may_explain
        answer = replace(body.answer, explain=explain)
        return ParsedRequest(specs=tuple(specs), samples=body.samples, answer=answer, echoes=echoes)

    def _spec(
        self, body: ParsedBody, prompt: ParsedPrompt, metadata: RequestMetadata
    ) -> RequestSpec:
        max_tokens = self._max_tokens(body, prompt, metadata.capacity_check)
        return RequestSpec(
            client_request_id=metadata.client_request_id,
            api_key=metadata.api_key,
            prompt=np.frombuffer(prompt.ids, np.int32),
            sampling=replace(body.sampling, max_tokens=max_tokens),
            objective=body.objective,
            attention=body.attention,
            csa=body.csa,
            open=body.open,
            given=body.given,
            refuse_unmet=body.refuse_unmet,
            priority=body.priority,
            strategy=body.strategy,
            slo=self.slo(metadata.asked, prompt_tokens=prompt.tokens),
            deadline_s=self._deadline_s,
            prefix=body.prefix,
            hashes=prompt.hashes,
            session=body.session,
            prompt_logprobs=body.prompt_logprobs,
        )

    def _warn_of_tokens_without_embedding(self, vocab: int) -> None:
        if (highest := self.tokenizer.highest_id) >= vocab:
            _log.warning(
                "the tokenizer has token ids up to %d, the model embeds only %d tokens: "
                "prompts with other tokens are refused", highest, vocab,
            )  # fmt: skip

    def default_max_tokens(
        self, capacity_check: CapacityCheck | None, prompt_tokens: int = 0
    ) -> int:
        """Return the limit of an answer whose request sets none, as long as it fits.

        Four such answers have room side by side on a gang that decodes, with their prompts, each
        on one instance, unless the prompts are longer than half of such a part.
        """
        if self._default_max_tokens is not None:
            return self._default_max_tokens
        if capacity_check is None:
            return LONGEST_DEFAULT
        quarter = capacity_check.decode_share(4)
        return max(1, min(LONGEST_DEFAULT, max(quarter - prompt_tokens, quarter // 2)))

    def _max_tokens(
        self, body: ParsedBody, prompt: ParsedPrompt, capacity_check: CapacityCheck | None
    ) -> int:
        """Return the answer's limit: as the client asked, or as much as fits."""
        wanted = body.sampling.max_tokens
        room = self.max_positions - prompt.tokens
        if not wanted:
            longest = (
                room if capacity_check is None else capacity_check.longest_answer(prompt.tokens)
            )
            default = self.default_max_tokens(capacity_check, prompt.tokens)
            wanted = max(1, min(max(default, body.sampling.min_tokens), room, longest))
        if wanted > room:
            # The gangs' slots may be a lower limit than the model's positions.
            here = (
                None if capacity_check is None else capacity_check.rejection(prompt.tokens, wanted)
            )
            raise ContextLengthExceeded(
                prompt_tokens=prompt.tokens,
                output_tokens=wanted,
                limit=self.max_positions if here is None else here.limit,
                at_least=prompt.more_tokens,
            )
        if body.sampling.min_tokens > wanted:
            remedy = "; set max_tokens" if body.sampling.max_tokens else ""
            raise InvalidRequest(
                f"min_tokens: must not exceed the answer's limit of {wanted} tokens{remedy}",
                param="min_tokens",
            )
        return wanted


def _sample(spec: RequestSpec, number: int) -> RequestSpec:
    """Return the request for another answer to the same prompt, with random numbers of its own."""
    if not number:
        return spec
    seed = (spec.sampling.seed + number + 2**63) % 2**64 - 2**63
    sampling = replace(spec.sampling, seed=seed)
    return replace(spec, sampling=sampling, prompt_logprobs=None)  # the first one finds them


def read_slo(headers: Mapping[str, str]) -> SloBounds:
    """Return the objectives from the `x-slo-*` headers.

    Raises:
        InvalidRequest: a header is not a positive number of milliseconds, or `x-slo-unmet` is
            unknown.
    """
    unmet = headers.get("x-slo-unmet", "serve")
    if unmet not in ("serve", "refuse"):
        raise InvalidRequest(
            f"x-slo-unmet: must be serve or refuse, got {abridged(unmet)}", param="x-slo-unmet"
        )
    return SloBounds(
        ttft_ms=_milliseconds(headers, "x-slo-ttft-ms"),
        tpot_ms=_milliseconds(headers, "x-slo-tpot-ms"),
        e2e_ms=_milliseconds(headers, "x-slo-e2e-ms"),
        refuse=unmet == "refuse",
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

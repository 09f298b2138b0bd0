"""Parses and tokenizes the body of a request: the part of reading it that takes time and memory.

It needs the body and the served model, and nothing of the cluster, so that it can also run in
another process. CPU work, no I/O. `services.http.request_parser` makes a `RequestSpec` of the
result.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from csps.models.network.checkpoint_json import InvalidTextError, read_sampling_defaults
from csps.models.tokenizers.chat_template import ChatTemplate, read_chat_template
from csps.models.tokenizers.grammar import (
    Grammars,
    after_reasoning,
    any_grammar,
    choice_grammar,
    json_grammar,
    regex_grammar,
)
from csps.models.tokenizers.tokenizer import Tokenizer, TooManyTokens
from csps.protocols.anthropic.messages import MessagesRequest
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import AskedRing, Attention, Objective
from csps.protocols.core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from csps.protocols.gang.messages import Sampling
from csps.protocols.openai.csps_options import (
    csa_settings,
    given_of_csa,
    leaves_open,
    objective,
)
from csps.protocols.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    chat_of,
    parse_request,
    tokenizing,
)
from csps.protocols.openai.responses_api import ResponsesRequest
from csps.protocols.openai.structured import StructuredOutput
from csps.services.http.answer_parts import (
    Reasoning,
    ToolFormat,
    calls_grammar,
    reasoning_after,
    reasons,
    tool_format_of,
)
from csps.services.http.harmony_parts import in_final_channel, with_thinking, writes_harmony
from csps.services.requests.request_spec import PrefixKey
from csps.services.scheduling.events.limits import BLOCK_TOKENS

Endpoint = Literal["completion", "chat", "messages", "responses"]
"""Kinds of requests that are answered by the model."""
Question = Literal["count_tokens", "tokenize", "detokenize"]
"""Kinds of requests that the tokenizer answers."""


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
    tool_format: Literal["auto", "hermes", "llama3", "harmony", "none"] = "auto"
    """Format of the model's calls of tools; "auto": as its chat template shows."""
    reasoning: Literal["auto", "think", "harmony", "none"] = "auto"
    """Format of the model's reasoning."""
    request_templates: bool = False
    """Requests may bring a chat template of their own."""


MAX_PROMPT_ENTRIES = 1_048_576
"""Limit of log-probabilities of all of a request's prompts: some 8 MiB, and 80 MiB as JSON."""


class NeedsProcess(Exception):
    """What a body asks for may take long, and nothing but the end of a process could stop it."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How a client wants its answer: all that is kept of its request besides the `RequestSpec`."""

    endpoint: Endpoint
    answers: int
    """Answers to return for each prompt, the likeliest of those generated."""
    stream: bool
    include_usage: bool
    """Streams end with the usage."""
    continuous_usage: bool
    """Every chunk has the usage so far, too."""
    stop: tuple[str, ...]
    include_stop: bool
    """The text ends with the stop string that ended it."""
    skip_special_tokens: bool
    explain: bool
    logprobs: bool
    """Log-probabilities are shown; without, they may be needed to choose an answer."""
    echo_logprobs: int | None = None
    """Alternatives to show beside the log-probability of each echoed token; None shows none."""
    prompt_logprobs: int | None = None
    """Alternatives to show in the field `prompt_logprobs`; None leaves it out."""
    begins_with: str = ""
    """Text before each answer of a chat."""
    tool_format: ToolFormat | None = None
    """Format in which calls of tools are looked for; None: in none."""
    namespaces: dict[str, str] = field(default_factory=dict)
    """Namespace of each function that has one, by the name that the model writes."""
    parallel_calls: bool = True
    reasoning: Reasoning = "none"
    include_reasoning: bool = True
    progress: bool = False
    """A stream says how far the prompt is."""


@dataclass(slots=True, kw_only=True)
class ParsedPrompt:
    """One prompt of a body."""

    ids: bytes
    """Token ids, 4 bytes each, in this machine's order; empty if they are more than the model has
    positions."""
    tokens: int
    more_tokens: bool
    """The prompt has too many tokens, more than were counted."""
    hashes: tuple[bytes, ...]
    """Hashes of its whole blocks for the prefix cache."""
    echo: str = ""
    """Text with which its answers begin."""


@dataclass(slots=True, kw_only=True)  # a frozen one takes three times as long to create
class ParsedBody:
    """What a body asks for. A message of `csps.protocols.rpc.schema`."""

    prompts: tuple[ParsedPrompt, ...]
    samples: int
    """Answers to generate for each prompt."""
    sampling: Sampling
    """Sampling parameters; `max_tokens` is 0 if the client asked for no length."""
    objective: Objective
    attention: Attention
    csa: CsaSettings | None
    open: bool
    given: tuple[str, ...]
    refuse_unmet: bool
    priority: int
    strategy: AskedRing | None
    prefix: PrefixKey | None
    prompt_logprobs: int | None
    """Alternatives to find for each prompt token; None for no log-probabilities."""
    answer: AnswerOptions
    session: str | None = None
    """Name of the conversation, if the client gives it one."""


class BodyParser:
    """Parses bodies for one model, with its tokenizer and chat template. Thread-safe.

    Args:
        alone: it runs in a process of its own, where it may take long.

    Raises:
        CheckpointError: the model directory lacks what is needed to parse requests.
    """

    def __init__(self, model: ServedModel, *, alone: bool = False) -> None:
        folder = Path(model.folder)
        self.model, self._alone = model, alone
        self.tokenizer = Tokenizer(folder)
        self._grammars = Grammars(folder, model.vocab)
        self._defaults = read_sampling_defaults(folder)
        self._template: ChatTemplate | None = read_chat_template(folder, model.chat_template)
        source = "" if self._template is None else self._template.source
        self._reasons = model.reasoning == "think" or (
            model.reasoning == "auto" and reasons(source)
        )
        self._harmony = model.reasoning == "harmony" or (
            model.reasoning == "auto" and writes_harmony(source)
        )
        self._tool_format: ToolFormat | None = None
        if model.tool_format == "auto":
            self._tool_format = tool_format_of(source)
        elif model.tool_format != "none":
            self._tool_format = model.tool_format

    def parse(self, endpoint: Endpoint, body: bytes, owner: bytes) -> ParsedBody:
        """Parse the body of a request that the model answers.

        Args:
            owner: digest of the API key; empty if the server needs no key.

        Raises:
            RequestError, InvalidTextError: the client's mistake.
            NeedsProcess: it is not `alone`, and this body may take long.
        """
        namespaces: dict[str, str] = {}
        match endpoint:
            case "completion":
                completion = parse_request(CompletionRequest, body)
                self._check_model(completion.model)
                return self._completion(completion, owner)
            case "chat":
                chat = parse_request(ChatCompletionRequest, body)
            case "messages":
                messages = parse_request(MessagesRequest, body)
                if messages.max_tokens is None:
                    raise InvalidRequest("max_tokens: required", param="max_tokens")
                chat = chat_of(messages)
            case "responses":
                responses = parse_request(ResponsesRequest, body)
                chat, namespaces = chat_of(responses), responses.tools.namespaces
        self._check_model(chat.model)
        return self._chat(chat, endpoint, owner, namespaces)

    def answer(self, question: Question, body: bytes) -> bytes:
        """Answer a request for the tokenizer: return the body of the answer.

        Raises:
            RequestError, InvalidTextError: the client's mistake.
            NeedsProcess: it is not `alone`, and this body may take long.
        """
        match question:
            case "detokenize":
                asked = parse_request(DetokenizeRequest, body)
                self._check_model(asked.model or self.model.name)
                return json.dumps({"prompt": self._text_of(asked.tokens)}).encode()
            case "count_tokens":
                chat = chat_of(parse_request(MessagesRequest, body))
                self._check_model(chat.model)
                tokens = self._all_tokens(chat, self._rendered(chat))
                return json.dumps({"input_tokens": len(tokens)}).encode()
            case "tokenize":
                request, spelled = tokenizing(body, self.model.name)
                self._check_model(request.model)
                text = (
                    self._rendered(request)
                    if isinstance(request, ChatCompletionRequest)
                    else request.prompt[0]
                )
                return self._tokenized(self._all_tokens(request, text), spelled)

    def _all_tokens(
        self, request: CompletionRequest | ChatCompletionRequest, text: str | list[int]
    ) -> list[int]:
        special = request.add_special_tokens
        tokens, count, more = self._tokens(text, special=special, cut=self._cut(request))
        if count > self.model.max_positions:
            raise ContextLengthExceeded(
                prompt_tokens=count,
                output_tokens=0,
                limit=self.model.max_positions,
                at_least=more,
            )
        return tokens

    def _tokenized(self, tokens: list[int], spelled: bool) -> bytes:
        spell = self.tokenizer.token_bytes
        names: list[str] | None = None
        if spelled:
            names = [spell(token).decode(errors="backslashreplace") for token in tokens]
        found = {
            "count": len(tokens),
            "max_model_len": self.model.max_positions,
            "tokens": tokens,
            "token_strs": names,
        }
        return json.dumps(found).encode()

    def _text_of(self, tokens: list[int]) -> str:
        if any(token >= self.model.vocab for token in tokens):
            raise self._no_such_token(max(tokens), "tokens")
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    # --- both kinds of requests ---

    def _completion(self, request: CompletionRequest, owner: bytes) -> ParsedBody:
        prefix = self._prefix(request, owner)
        prompts = [
            self._prompt(request, text, prefix, special=request.add_special_tokens)
            for text in request.prompt
        ]
        chooses = request.samples > request.n
        if request.echo:
            for prompt, text in zip(prompts, request.prompt, strict=True):
                prompt.echo = text if isinstance(text, str) else self.tokenizer.decode(text)
        return self._parsed(
            request,
            prompts,
            prefix,
            samples=request.samples,
            sampling=self._sampling(
                request,
                0 if chooses and request.alternatives is None else request.alternatives,
                self._grammar(request, "none"),
            ),
            answer=replace(
                self._answer(request, "completion"),
                echo_logprobs=request.logprobs if request.echo else None,
            ),
        )

    def _chat(
        self,
        request: ChatCompletionRequest,
        endpoint: Endpoint,
        owner: bytes,
        namespaces: dict[str, str],
    ) -> ParsedBody:
        tool_format = self._format_for(request)
        text = self._rendered(request)
        reasoning: Reasoning = "harmony" if self._harmony else "none"
        if self._reasons and not self._harmony:
            reasoning = reasoning_after(text)
        prefix = self._prefix(request, owner)
        prompt = self._prompt(request, text, prefix, special=request.add_special_tokens)
        grammar = self._grammar(request, reasoning)
        bounded = request.choice.mode in ("required", "named") and tool_format is not None
        if bounded and tool_format is not None:
            allowed = _calls(request, tool_format)
            # The grammar of calls in harmony's channels has the reasoning in it.
            before: Reasoning = "none" if tool_format == "harmony" else reasoning
            grammar = self._checked(allowed, before, "tools")
        last = request.messages[-1]
        return self._parsed(
            request,
            [prompt],
            prefix,
            samples=request.n,
            sampling=self._sampling(request, request.alternatives, grammar),
            answer=replace(
                self._answer(request, endpoint),
                begins_with=last.content if request.echo and last.role == "assistant" else "",
                tool_format=tool_format,
                namespaces=namespaces,
                # A grammar ends an answer itself, with a token that the router would cut off.
                parallel_calls=request.parallel_tool_calls or bounded,
                reasoning=reasoning,
                # The marks between the messages of an answer are special tokens.
                skip_special_tokens=request.skip_special_tokens and not self._harmony,
                include_reasoning=request.include_reasoning,
            ),
        )

    def _parsed(
        self,
        request: GenerationRequest,
        prompts: list[ParsedPrompt],
        prefix: PrefixKey | None,
        *,
        samples: int,
        sampling: Sampling,
        answer: AnswerOptions,
    ) -> ParsedBody:
        options = request.csps
        wanted, given = objective(options), given_of_csa(options)
        is_open = leaves_open(options, given)
        if (logprobs := request.prompt_alternatives) is not None:
            logprobs = min(logprobs, self.model.vocab)
            self._check_prompt_logprobs(
                prompts, logprobs, sparse=is_open or options.attention == "csa"
            )
        by_configurator = options.attention != "csa" or (is_open and not given)
        return ParsedBody(
            prompts=tuple(prompts),
            samples=samples,
            sampling=sampling,
            objective=wanted,
            attention=options.attention,
            csa=None if by_configurator else csa_settings(options),
            open=is_open,
            given=given if is_open else (),
            refuse_unmet=options.unmet == "refuse",
            priority=request.priority,
            strategy=options.ring,
            prefix=prefix,
            prompt_logprobs=logprobs,
            answer=answer,
            session=request.session_id,
        )

    def _answer(self, request: GenerationRequest, endpoint: Endpoint) -> AnswerOptions:
        return AnswerOptions(
            endpoint=endpoint,
            answers=request.n,
            stream=request.stream,
            include_usage=request.stream_options.include_usage,
            continuous_usage=request.stream_options.continuous_usage_stats,
            stop=request.stop,
            include_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            explain=request.csps.explain,
            logprobs=request.alternatives is not None,
            prompt_logprobs=request.prompt_logprobs,
            progress=request.return_progress,
        )

    def _check_prompt_logprobs(
        self, prompts: list[ParsedPrompt], count: int, *, sparse: bool
    ) -> None:
        if sparse:
            raise InvalidRequest(
                "prompt_logprobs: needs exact attention, and so do 'echo' and 'logprobs' together",
                param="prompt_logprobs",
            )
        entries = sum(prompt.tokens for prompt in prompts) * (count + 1)
        if entries > MAX_PROMPT_ENTRIES:
            raise InvalidRequest(
                f"prompt_logprobs: {entries} log-probabilities of prompt tokens are too many; at "
                f"most {MAX_PROMPT_ENTRIES} are supported",
                param="prompt_logprobs",
            )

    # --- prompts ---

    def _prompt(
        self,
        request: GenerationRequest,
        text: str | list[int],
        prefix: PrefixKey | None,
        *,
        special: bool,
    ) -> ParsedPrompt:
        tokens, count, more = self._tokens(text, special=special, cut=self._cut(request))
        if not count:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        # An array: numpy takes twice as long to make one of a list.
        packed = array("i", tokens).tobytes()
        ids = np.frombuffer(packed, np.int32)
        # For text as well: a tokenizer may have more tokens than the model, such as "<pad>", and
        # an id without an embedding would crash the ranks, not only fail the request.
        if (highest := int(ids.max(initial=0))) >= self.model.vocab:
            raise self._no_such_token(highest, "prompt")
        hashes = () if prefix is None else prefix.hashes(ids)
        return ParsedPrompt(ids=packed, tokens=count, more_tokens=more, hashes=hashes)

    def _cut(self, request: GenerationRequest) -> slice | None:
        """Return which of a prompt's tokens a request wants; None for all."""
        most = request.truncate_prompt_tokens
        if most is None:
            return None
        if most == -1:
            most = max(1, self.model.max_positions - (request.output_limit or 1))
        if most == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens: must be -1 or at least 1, got 0",
                param="truncate_prompt_tokens",
            )
        return slice(-most, None) if request.truncation_side == "left" else slice(most)

    def _tokens(
        self, prompt: str | list[int], *, special: bool, cut: slice | None
    ) -> tuple[list[int], int, bool]:
        """Return a prompt's tokens, their number, and whether there are even more.

        No tokens are returned if they are more than the model has positions.

        Args:
            special: text gets the beginning-of-sequence token and the like.
            cut: tokens to use; None for all.
        """
        limit = self.model.max_positions
        if isinstance(prompt, str):
            try:
                prompt = self.tokenizer.encode(prompt, special, limit if cut is None else None)
            except TooManyTokens as error:
                return [], error.at_least, True
        if cut is not None:
            prompt = prompt[cut]
        return (prompt if len(prompt) <= limit else []), len(prompt), False

    def _rendered(self, request: ChatCompletionRequest) -> str:
        template = self._template_for(request)
        messages = [message.for_template() for message in request.messages]
        if self._harmony:
            messages = list(map(with_thinking, messages))
        text = template.render(
            messages,
            add_generation_prompt=request.add_generation_prompt,
            tools=request.tools or None,
            documents=request.documents,
            **request.template_variables,
        )
        if request.continue_final_message:
            text = _up_to(text, request.messages[-1].content)
        if not text:
            raise InvalidRequest("the messages make an empty prompt", param="messages")
        return text

    def _template_for(self, request: ChatCompletionRequest) -> ChatTemplate:
        template = self._template
        if request.chat_template is not None:
            if not self.model.request_templates:
                raise InvalidRequest(
                    "chat_template: not allowed by this server", param="chat_template"
                )
            if not self._alone:
                raise NeedsProcess
            template = (template or ChatTemplate("", {})).by(request.chat_template)
        if template is None:
            raise InvalidRequest(
                f"the model '{self.model.name}' has no chat template; use /v1/completions"
            )
        return template

    # --- what an answer may be ---

    def _format_for(self, request: ChatCompletionRequest) -> ToolFormat | None:
        """Return the format of the calls that a request allows; None if it allows none."""
        if not request.tools or request.choice.mode == "none":
            return None
        if self._tool_format is None:
            raise InvalidRequest(
                f"tools: the chat template of '{self.model.name}' shows no format of calls that "
                "this server knows",
                param="tools",
            )
        return self._tool_format

    def _grammar(self, request: GenerationRequest, reasoning: Reasoning) -> str:
        """Return the grammar that a request asks for; empty for none."""
        if (form := request.structured) is None:
            return ""
        param = "structured_outputs" if request.structured_outputs else "response_format"
        return self._checked(form, reasoning, param)

    def _checked(self, form: StructuredOutput | str, reasoning: Reasoning, param: str) -> str:
        """Return a form, or a grammar, as a grammar that the ranks can follow."""
        if not self._alone:
            raise NeedsProcess
        try:
            grammar = form if isinstance(form, str) else _grammar_of(form)
            if reasoning == "harmony":
                grammar = in_final_channel(grammar)
            elif reasoning != "none":
                grammar = after_reasoning(grammar, begun=reasoning == "open")
            self._grammars.check(grammar)
        except InvalidTextError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None
        return grammar

    def _prefix(self, request: GenerationRequest, owner: bytes) -> PrefixKey | None:
        """Return the prefix-cache key of a request, or None if it may not reuse KV."""
        # Sparse attention changes the KV of later layers: it must not be reused. Where cached KV
        # is, nothing is computed that has log-probabilities.
        whole = request.prompt_alternatives is not None
        if not self.model.reuses_kv or request.csps.attention == "csa" or whole:
            return None
        options = request.csps
        # Bounds within which its KV may be inexact; None for exact KV.
        bounds = objective(options) if leaves_open(options, given_of_csa(options)) else None
        return PrefixKey.of(
            owner=owner,
            salt=request.cache_salt,
            block=BLOCK_TOKENS,
            bounds="" if bounds is None else bounds.key,
        )

    def _check_model(self, model: str) -> None:
        if model != self.model.name:
            raise ModelNotFound(model=model, served=self.model.name)

    def _sampling(
        self, request: GenerationRequest, alternatives: int | None, grammar: str
    ) -> Sampling:
        self._check_tokens(request.stop_token_ids, "stop_token_ids")
        self._check_tokens(request.allowed_token_ids, "allowed_token_ids")
        self._check_tokens(request.logit_bias, "logit_bias")
        ends = () if request.ignore_eos else self.tokenizer.eos_token_ids
        own = self._defaults
        return Sampling(
            temperature=_given(request.temperature, own.temperature),
            top_p=_given(request.top_p, own.top_p),
            top_k=max(_given(request.top_k, own.top_k), 0),
            min_p=_given(request.min_p, own.min_p),
            seed=secrets.randbits(63) if request.seed is None else request.seed,
            repetition_penalty=_given(request.repetition_penalty, own.repetition_penalty),
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=request.logit_bias,
            logprobs=alternatives,
            max_tokens=request.output_limit or 0,
            min_tokens=request.min_tokens,
            stop_token_ids=tuple(dict.fromkeys((*request.stop_token_ids, *ends))),
            allowed_token_ids=request.allowed_token_ids,
            bad_words=self._bad_words(request.bad_words),
            grammar=grammar,
        )

    def _bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, at the beginning of a text and within it."""
        spelled = (
            tuple(self.tokenizer.encode(text, add_special_tokens=False))
            for word in words
            for text in (word.lstrip(), f" {word.lstrip()}")
        )
        return tuple(dict.fromkeys(tokens for tokens in spelled if tokens))

    def _check_tokens(self, tokens: Iterable[int], param: str) -> None:
        for token in tokens:
            if token >= self.model.vocab:
                raise self._no_such_token(token, param)

    def _no_such_token(self, token: int, param: str) -> InvalidRequest:
        return InvalidRequest(
            f"{param}: token id {token} is outside of the vocabulary of {self.model.vocab}",
            param=param,
        )


T = TypeVar("T")


def _given(asked: T | None, own: T) -> T:
    return own if asked is None else asked


def _up_to(text: str, content: str) -> str:
    """Return a rendered conversation up to the end of its last message's content."""
    for last in (content, content.strip()):
        if last and (at := text.rfind(last)) >= 0:
            return text[: at + len(last)]
    raise InvalidRequest(
        "continue_final_message: the chat template does not show the last message's content",
        param="continue_final_message",
    )


def _calls(request: ChatCompletionRequest, tool_format: ToolFormat) -> str:
    functions = [tool["function"] for tool in request.tools]
    if request.choice.mode == "named":
        functions = [each for each in functions if each["name"] == request.choice.name]
    parallel = request.parallel_tool_calls and request.choice.mode != "named"
    return calls_grammar(tool_format, functions, parallel=parallel)


def _grammar_of(form: StructuredOutput) -> str:
    match form.kind:
        case "json":
            return json_grammar(json.loads(form.text), form.whitespace)
        case "regex":
            return regex_grammar(form.text)
        case "choice":
            return choice_grammar(json.loads(form.text))
        case "grammar":
            return any_grammar(form.text)

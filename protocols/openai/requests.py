"""The OpenAI requests that this server accepts, with all fields validated.

`parse_request` converts the bytes of a body to a model or raises `InvalidRequest`. Every field of
OpenAI's and of vLLM's schema is known here, and accepted at its default. A field that does not
apply to this server is ignored where that does no harm (`user`), and refused where the answer would
differ from what was asked for (`modalities`). What is ignored must be JSON and is not looked at:
objects of Python take 24 times the memory of their bytes. An unknown field is refused with the name
that it resembles. JSON null means "not given", as for OpenAI.

Tools and structured output are in `tools` and `structured` beside this file, the object `csps` in
`csps_options`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

import msgspec
from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from csps.protocols.core.errors import InvalidRequest, nearest
from csps.protocols.openai.csps_options import (
    CspsRequestOptions,
    JsonModel,
    above,
    between,
    fail,
    only,
    shown,
)
from csps.protocols.openai.structured import (
    StructuredOutput,
    read_response_format,
    read_structured_outputs,
)
from csps.protocols.openai.tools import (
    MAX_TOOL_CALLS,
    ToolCall,
    ToolChoice,
    read_tool_choice,
    read_tools,
)

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
"""Limit of one stop string: an answer's last characters are withheld while they may begin one."""
MAX_LISTED_TOKENS = 1024
"""Limit of `logit_bias` and of `stop_token_ids`. A batch's sampling parameters travel in one
message to each rank: with lists as long as a vocabulary, thirty requests exceeded its limit."""
MAX_MESSAGES = 8192
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_PROMPT_LOGPROBS = 20
"""Limit of the likeliest tokens beside each token of a prompt; vLLM's."""
MAX_CHOICES = 128
"""Limit of the answers to one request: each is a request to the scheduler."""
MAX_TEMPLATE_CHARACTERS = 64 * 1024
COMPLETION_TOKENS = 16
"""OpenAI's limit of a completion that sets none."""
MAX_TOKEN_ID = 2**31 - 1
MAX_COUNT = 2**31 - 1
"""Limit of integers without a closer limit: they fit a message, and their sums 64 bits."""

# --- fields that come in several shapes -----------------------------------------------------


def _is_token_ids(value: object) -> bool:
    # A set of types is fast enough for a prompt of a million ids.
    return (
        isinstance(value, list)
        and set(map(type, value)) == {int}
        and min(value) >= 0
        and max(value) <= MAX_TOKEN_ID
    )


def _token_ids(value: Any) -> list[int]:
    if value != [] and not _is_token_ids(value):
        fail(f"must be an array of token ids, got {shown(value)}")
    ids: list[int] = value
    return ids


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    """Parse one prompt or several, in any of OpenAI's four shapes."""
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    prompts = value if several else [value]
    if len(prompts) > MAX_CHOICES:
        fail(f"at most {MAX_CHOICES} prompts are supported, got {len(prompts)}")
    for prompt in prompts:
        if prompt in ("", []):
            fail("must not be empty")
        if not isinstance(prompt, str) and not _is_token_ids(prompt):
            fail(f"must be a string or an array of token ids, got {shown(prompt)}")
    return tuple(prompts)


def _content(value: Any) -> str:
    """Return a message's text; parts are joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        fail(f"must be a string or an array of text parts, got {shown(value)}")
    return "\n".join(_part_text(part) for part in value)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        fail(f"only parts of type 'text' are supported, got {shown(kind or part)}")
    text = part.get(kind)
    if not isinstance(text, str):
        fail(f"'{kind}' of a part must be a string, got {shown(text)}")
    return text


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list) and len(strings) > MAX_STOP_STRINGS:
        fail(f"at most {MAX_STOP_STRINGS} strings are supported, got {len(strings)}")
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        fail(f"must be a string or an array of strings, got {shown(value)}")
    if (longest := max(map(len, strings), default=0)) > MAX_STOP_CHARACTERS:
        fail(f"strings of at most {MAX_STOP_CHARACTERS} characters are supported, got {longest}")
    if "" in strings:
        fail("must not contain an empty string")
    return tuple(strings)


def _listed_tokens(value: Any) -> tuple[int, ...]:
    if value != [] and not _is_token_ids(value):
        fail(f"must be an array of token ids, got {shown(value)}")
    _check_listed(len(value))
    return tuple(value)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        fail(f"must be an object of token ids and biases, got {shown(value)}")
    _check_listed(len(value))
    return {_bias_token(token): _bias(bias) for token, bias in value.items()}


def _check_listed(count: int) -> None:
    if count > MAX_LISTED_TOKENS:
        fail(f"at most {MAX_LISTED_TOKENS} tokens are supported, got {count}")


def _bias_token(token: str) -> int:
    # isdecimal() alone would accept the digits of every script.
    if not (token.isascii() and token.isdecimal() and len(token) <= 10):
        fail(f"keys must be token ids, got {shown(token)}")
    return int(token)


def _bias(bias: Any) -> float:
    if type(bias) not in (int, float) or not -100 <= bias <= 100:
        fail(f"biases must be numbers between -100 and 100, got {shown(bias)}")
    return float(bias)


def _bad_words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        fail(f"must be an array of strings, got {shown(value)}")
    if len(value) > MAX_BAD_WORDS:
        fail(f"at most {MAX_BAD_WORDS} words are supported, got {len(value)}")
    if max(map(len, value), default=0) > MAX_BAD_WORD_CHARACTERS:
        fail(f"words of at most {MAX_BAD_WORD_CHARACTERS} characters are supported")
    if not all(word.strip() for word in value):
        fail("must not contain an empty word")
    return tuple(value)


def _salt(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        fail(f"must be a string that is not empty, got {shown(value)}")
    return value


def _nothing(value: Any) -> None:
    if value not in ([], "", {}):
        fail("not supported by this server")


def _no_budget(value: Any) -> None:
    if value != -1:  # which means that there is none
        fail("not supported by this server")


def _template_variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        fail(f"must be an object, got {shown(value)}")
    for name in _TEMPLATES_OWN & value.keys():
        fail("not allowed here: it has a field of its own", name)
    return value


_TEMPLATES_OWN = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables of a template that `chat_template_kwargs` must not replace."""


def _documents(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(document, dict) for document in value):
        fail(f"must be an array of objects, got {shown(value)}")
    return value


def _template(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEMPLATE_CHARACTERS:
        fail(f"must be a string of at most {MAX_TEMPLATE_CHARACTERS} characters")
    return value


def _few_calls(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_TOOL_CALLS:
        fail(f"at most {MAX_TOOL_CALLS} calls are supported, got {len(value)}")
    return value


def joined_texts(
    content: Any, text_of: Callable[[Any], str], parts: str, field: str | None = None
) -> str:
    """Return the text of a string, or of what an API calls the parts of a text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fail(f"must be a string or an array of {parts}, got {shown(content)}", field)
    return "\n".join(map(text_of, content))


def few_messages(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        fail(f"at most {MAX_MESSAGES} messages are supported, got {len(value)}")
    return value


def _text_only(value: Any) -> list[str]:
    if value != ["text"]:
        fail("only ['text'] is supported")
    return ["text"]


MAX_SESSION_CHARACTERS = 256
"""Characters of a conversation's name that count."""


def _session(value: Any) -> str | None:
    """Return a conversation's name. It cannot change the answer, so nothing is wrong about one."""
    return str(value)[:MAX_SESSION_CHARACTERS] if isinstance(value, str | int) else None


_IGNORE = PlainValidator(lambda value: None)
Ignored = Annotated[Any, _IGNORE]
"""Type of fields that cannot change the answer: any value, read as None."""
_Empty = (
    Literal[""]
    | Annotated[list[Any], Field(max_length=0)]
    | Annotated[dict[str, Any], Field(max_length=0)]
)
Refused = Annotated[None, PlainValidator(_nothing, json_schema_input_type=_Empty)]
"""Type of fields that would change the answer, and are not supported: only an empty value."""
Tokens = Annotated[
    tuple[int, ...], PlainValidator(_listed_tokens, json_schema_input_type=list[int])
]

# --- models ---------------------------------------------------------------------------------


class StreamOptions(JsonModel):
    """Options of how a stream reports usage."""

    include_usage: bool = False
    """True adds a last chunk with the usage and no choices."""
    continuous_usage_stats: bool = False
    """vLLM's option: with `include_usage`, every chunk carries the usage so far."""
    include_obfuscation: bool = False
    """Ignored."""


class GenerationRequest(JsonModel):
    """Fields that both endpoints have in common."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Annotated[int, between(1, MAX_COUNT)] | None = None
    max_completion_tokens: Annotated[int, between(1, MAX_COUNT)] | None = None
    """Newer name of `max_tokens`; it takes precedence."""
    # None in these and some of vLLM's fields: as the model's generation_config.json has it.
    temperature: Annotated[float, between(0, 2)] | None = None
    top_p: Annotated[float, above(0, 1)] | None = None
    frequency_penalty: Annotated[float, between(-2, 2)] = 0.0
    presence_penalty: Annotated[float, between(-2, 2)] = 0.0
    seed: Annotated[int, between(-(2**63), 2**63 - 1)] | None = None
    stop: Annotated[
        tuple[str, ...], PlainValidator(_stop, json_schema_input_type=str | list[str])
    ] = ()
    logit_bias: Annotated[
        dict[int, float], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float])
    ] = Field(default_factory=dict)
    n: Annotated[int, between(1, MAX_CHOICES)] = 1
    response_format: Annotated[
        StructuredOutput | None,
        PlainValidator(read_response_format, json_schema_input_type=dict[str, Any]),
    ] = None
    user: Ignored = None

    # vLLM's
    top_k: Annotated[int, between(-1, MAX_COUNT)] | None = None
    """Number of likeliest tokens to sample from; 0 and -1 mean the whole vocabulary."""
    min_p: Annotated[float, between(0, 1)] | None = None
    # Beyond these bounds logits overflow to infinity, and no token can be sampled.
    repetition_penalty: Annotated[float, between(0.01, 100)] | None = None
    min_tokens: Annotated[int, between(0, MAX_COUNT)] = 0
    ignore_eos: bool = False
    priority: Annotated[int, between(-(2**31), 2**31 - 1)] = 0
    """Lower ones come first (`services.scheduling.core.promises`)."""
    stop_token_ids: Tokens = ()
    allowed_token_ids: Tokens = ()
    """Tokens of which the answer consists; empty: any."""
    bad_words: Annotated[
        tuple[str, ...], PlainValidator(_bad_words, json_schema_input_type=list[str])
    ] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: Annotated[
        StructuredOutput | None,
        PlainValidator(read_structured_outputs, json_schema_input_type=dict[str, Any]),
    ] = None
    truncate_prompt_tokens: Annotated[int, between(-1, MAX_COUNT)] | None = None
    """Tokens of the prompt to use; -1: as many as fit before the answer."""
    truncation_side: Literal["left", "right"] = "left"
    """Side on which tokens are left out."""
    prompt_logprobs: Annotated[int, between(0, MAX_PROMPT_LOGPROBS)] | None = None
    """Number of likeliest tokens to report beside the log-probability of each prompt token."""
    cache_salt: Annotated[str | None, PlainValidator(_salt, json_schema_input_type=str)] = None
    """Salt of the prefix cache: requests reuse KV only of requests with the same salt."""

    # vLLM's, at their defaults only
    ec_transfer_params: Refused = None
    kv_transfer_params: Refused = None
    length_penalty: Annotated[float, only(1.0)] = 1.0
    logprob_token_ids: Refused = None
    repetition_detection: Refused = None
    return_token_ids: Annotated[bool, only(False)] = False
    return_token_offsets: Annotated[bool, only(False)] = False
    return_tokens_as_token_ids: Annotated[bool, only(False)] = False
    routed_experts_prompt_start: Annotated[int, only(0)] = 0
    spaces_between_special_tokens: Annotated[bool, only(True)] = True
    thinking_token_budget: Annotated[
        None, PlainValidator(_no_budget, json_schema_input_type=Literal[-1])
    ] = None
    use_beam_search: Annotated[bool, only(False)] = False
    vllm_xargs: Refused = None
    watermarking: Annotated[bool, only(False)] = False

    # vLLM's, ignored
    request_id: Ignored = None
    return_mm_kwargs: Ignored = None
    session_id: Annotated[
        str | None, PlainValidator(_session, json_schema_input_type=str | int | None)
    ] = None
    """Name of the conversation, for traces of requests."""
    stream_interval: Ignored = None

    return_progress: bool = False
    """llama.cpp's: a stream says how far the prompt is."""
    csps: CspsRequestOptions = CspsRequestOptions()

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives to report beside each sampled token; None reports no logprobs."""
        raise NotImplementedError

    @property
    def prompt_alternatives(self) -> int | None:
        """Number of alternatives to find for each prompt token; None if nothing shows any."""
        return self.prompt_logprobs

    @property
    def structured(self) -> StructuredOutput | None:
        """Form that the answer must have; None for any."""
        return self.structured_outputs or self.response_format

    @property
    def output_limit(self) -> int | None:
        """Largest number of tokens to generate; None means as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        limit = self.max_completion_tokens or self.max_tokens
        if limit is not None and self.min_tokens > limit:
            fail(f"must not exceed max_tokens ({shown(limit)})", "min_tokens")
        if not self.stream and "stream_options" in self.model_fields_set:
            fail("only allowed when 'stream' is true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            fail("not supported with 'stream'", "prompt_logprobs")
        if self.structured_outputs and self.response_format:
            fail("not allowed beside 'response_format'", "structured_outputs")
        if self.structured and self.ignore_eos:
            fail(
                "not allowed with structured output, which says where the answer ends", "ignore_eos"
            )
        return self


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[
        tuple[str | list[int], ...],
        PlainValidator(
            _prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
        ),
    ]
    """Texts or token ids."""
    logprobs: Annotated[int, between(0, 5)] | None = None
    """Number of alternatives to report beside each sampled token."""
    best_of: Annotated[int, between(1, MAX_CHOICES)] | None = None
    """Answers of which the `n` likeliest are returned."""
    echo: bool = False
    """The answer begins with the prompt."""
    suffix: Refused = None

    # vLLM's
    add_special_tokens: bool = True
    prompt_embeds: Refused = None

    @property
    def output_limit(self) -> int:
        """Largest number of tokens to generate; OpenAI's default for completions is 16."""
        return super().output_limit or COMPLETION_TOKENS

    @property
    def samples(self) -> int:
        """Number of answers to generate for each prompt."""
        return self.best_of or self.n

    @model_validator(mode="after")
    def _completion_fields_agree(self) -> Self:
        if self.samples < self.n:
            fail(f"must be at least n ({self.n})", "best_of")
        if self.stream and self.samples > self.n:
            fail("must be n for a stream: all answers are needed to choose from", "best_of")
        if (count := self.samples * len(self.prompt)) > MAX_CHOICES:
            fail(f"at most {MAX_CHOICES} answers are supported, got {count}", "n")
        if self.stream and self.echo and self.logprobs is not None:
            fail("not supported with 'echo' and 'stream'", "logprobs")
        return self

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives to report beside each sampled token; None reports no logprobs."""
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        """Number of alternatives to find for each prompt token; None if nothing shows any."""
        shown = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in shown if count is not None), default=None)


class Message(JsonModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str, PlainValidator(_content, json_schema_input_type=str | list[dict[str, Any]] | None)
    ] = ""
    name: str | None = None
    tool_call_id: str | None = None

    tool_calls: Annotated[list[ToolCall], FailFast(), BeforeValidator(_few_calls)] = Field(
        default_factory=list
    )
    reasoning: str | None = None
    """vLLM's newer name of `reasoning_content`."""
    reasoning_content: str | None = None

    # Clients send back messages of answers, with these fields empty.
    refusal: str | None = None
    annotations: Ignored = None
    audio: Refused = None
    function_call: Refused = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Self:
        if self.role != "assistant" and "content" not in self.model_fields_set:
            fail("required", "content")
        if self.role != "assistant" and self.tool_calls:
            fail("only an assistant calls tools", "tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates read it."""
        values: dict[str, Any] = {"role": self.role, "content": self.content}
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "refusal": self.refusal,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        values |= {name: value for name, value in optional.items() if value is not None}
        if self.tool_calls:
            values["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return values


class ChatCompletionRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    # Without FailFast a body with a million invalid messages would collect a million errors.
    messages: Annotated[list[Message], FailFast(), BeforeValidator(few_messages)]
    logprobs: bool = False
    top_logprobs: Annotated[int, between(0, 20)] | None = None
    """Number of alternatives to report beside each sampled token, with `logprobs`."""

    tools: Annotated[
        tuple[dict[str, Any], ...],
        PlainValidator(read_tools, json_schema_input_type=list[dict[str, Any]]),
    ] = ()
    tool_choice: Annotated[
        ToolChoice | None,
        PlainValidator(read_tool_choice, json_schema_input_type=str | dict[str, Any]),
    ] = None
    """None: "auto" if there are tools, else "none"."""
    parallel_tool_calls: bool = True
    """False ends the answer after its first call."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )

    # vLLM's
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template: Annotated[str | None, PlainValidator(_template, json_schema_input_type=str)] = (
        None
    )
    chat_template_kwargs: Annotated[
        dict[str, Any], PlainValidator(_template_variables, json_schema_input_type=dict[str, Any])
    ] = Field(default_factory=dict)
    continue_final_message: bool = False
    documents: Annotated[
        list[dict[str, Any]] | None,
        PlainValidator(_documents, json_schema_input_type=list[dict[str, Any]]),
    ] = None
    echo: bool = False
    """The answer begins with the last message, if that is the assistant's."""
    include_reasoning: bool = True
    """False leaves the reasoning out of the answer."""

    # Refused unless empty, or the default
    audio: Refused = None
    functions: Refused = None
    function_call: Literal["none", "auto"] = "none"
    media_io_kwargs: Refused = None
    mm_processor_kwargs: Refused = None
    modalities: Annotated[
        list[str], PlainValidator(_text_only, json_schema_input_type=list[Literal["text"]])
    ] = Field(default_factory=lambda: ["text"])
    return_prompt_text: Annotated[bool, only(False)] = False

    # Ignored
    metadata: Ignored = None
    moderation: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    verbosity: Ignored = None
    web_search_options: Ignored = None

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives to report beside each sampled token; None reports no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def choice(self) -> ToolChoice:
        """Whether the answer calls tools."""
        return self.tool_choice or ToolChoice("auto" if self.tools else "none")

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template besides messages and tools."""
        variables = dict(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
            variables.setdefault("enable_thinking", self.reasoning_effort != "none")
        return variables

    @model_validator(mode="after")
    def _chat_fields_agree(self) -> Self:
        if not self.messages:
            fail("must not be empty", "messages")
        # vLLM's default, which means nothing without log-probabilities
        if self.top_logprobs and not self.logprobs:
            fail("needs 'logprobs': true", "top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            fail("needs 'add_generation_prompt': false", "continue_final_message")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        choice, names = self.choice, {tool["function"]["name"] for tool in self.tools}
        if choice.mode in ("required", "named") and not names:
            fail("needs 'tools'", "tool_choice")
        if choice.mode == "named" and choice.name not in names:
            fail(f"no tool is called {shown(choice.name)}", "tool_choice")
        if choice.mode in ("required", "named") and self.structured:
            fail(f"not allowed with structured output: must not be {choice.mode}", "tool_choice")
        if choice.mode in ("required", "named") and self.ignore_eos:
            fail("not allowed where tools must be called", "ignore_eos")


# --- from bytes -----------------------------------------------------------------------------


class HasChat(Protocol):
    """A request of another API that a chat can answer."""

    csps: CspsRequestOptions

    def chat(self) -> dict[str, Any]:
        """Return the fields of a chat."""
        ...


R = TypeVar("R", bound=JsonModel)


def parse_request(cls: type[R], body: bytes) -> R:
    """Parse a request.

    Raises
    ------
    InvalidRequest
        `body` is not JSON (NaN, lone surrogates and nesting deeper than 200 count as such), not an
        object, or not a `cls`. The message names the first field at fault.
    """
    try:
        return cls.model_validate(_values(cls, body))
    except ValidationError as exc:
        raise _explained(exc.errors(include_url=False)[0]) from None


def chat_of(request: HasChat) -> ChatCompletionRequest:
    """Return another API's request as a chat.

    Raises
    ------
    InvalidRequest
        The chat is not valid; the message names the field of the chat.
    """
    try:
        return ChatCompletionRequest.model_validate({**request.chat(), "csps": request.csps})
    except ValidationError as exc:
        raise _explained(exc.errors(include_url=False)[0]) from None
    except PydanticCustomError as exc:
        context = exc.context or {}
        field = context.get("field")
        raise InvalidRequest(f"{field or 'body'}: {context['text']}", param=field) from None


def tokenizing(body: bytes, model: str) -> tuple[CompletionRequest | ChatCompletionRequest, bool]:
    """Return what a body of `POST /tokenize` would ask for, and whether tokens are spelled out.

    It has the fields of a chat or of a completion, of which it needs no model.

    Raises
    ------
    InvalidRequest
        As `parse_request`.
    """
    fields = _raw_fields(body)
    spelled = fields.pop("return_token_strs", b"false")
    if bytes(spelled) not in (b"true", b"false", b"null"):
        raise InvalidRequest("return_token_strs: must be a boolean", param="return_token_strs")
    fields.setdefault("model", msgspec.Raw(json.dumps(model).encode()))
    told = msgspec.json.encode(fields)
    if "messages" in fields:
        return parse_request(ChatCompletionRequest, told), bytes(spelled) == b"true"
    return parse_request(CompletionRequest, told), bytes(spelled) == b"true"


class DetokenizeRequest(JsonModel):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], PlainValidator(_token_ids, json_schema_input_type=list[int])]


def _raw_fields(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _OBJECT.decode(body)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(_no_object(str(exc))) from None
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"The request body is not valid JSON: {exc}") from None


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _values(cls: type[R], body: bytes) -> dict[str, Any]:
    """Return the fields of a body that are given and not ignored."""
    used, fields = _used_fields(cls), _raw_fields(body)
    try:
        values = {
            name: from_json(bytes(fields[name]), allow_inf_nan=False)
            for name in fields
            if name in used
        }
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"The request body is not valid JSON: {exc}") from None
    if len(values) < len(fields):
        _refuse_unknown(cls, fields)
    return values


def _refuse_unknown(cls: type[JsonModel], names: Iterable[str]) -> None:
    for name in names:
        if name not in cls.model_fields:
            hint = nearest(name, cls.model_fields)
            raise InvalidRequest(f"{name[:64]}: unknown field{hint}", param=name[:64])


@functools.cache
def _used_fields(cls: type[JsonModel]) -> frozenset[str]:
    """Return the names of the fields that are not ignored."""
    fields = cls.model_fields.items()
    return frozenset(name for name, field in fields if _IGNORE not in field.metadata)


_KINDS = {"array": "an array", "str": "a string", "null": "null", "bool": "a boolean"}


def _no_object(error: str) -> str:
    """Convert an error of msgspec, such as "Expected `object`, got `array`"."""
    got = _KINDS.get(error.partition("got `")[2][:-1], "a number")
    return f"The request body must be a JSON object, got {got}"


_EXPECTED: dict[str, str] = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "an array",
    "model_type": "an object",
    "string_type": "a string",
}
"""Expected types by pydantic's name of the error."""


def _explained(error: ErrorDetails) -> InvalidRequest:
    """Convert an error of pydantic to the words of the API."""
    context = error.get("ctx", {})
    path = _path((*error["loc"], *([context["field"]] if context.get("field") else [])))
    return InvalidRequest(f"{path}: {_complaint(error, context)}", param=path)


def _complaint(error: ErrorDetails, context: dict[str, Any]) -> str:
    kind, got = error["type"], shown(error["input"])
    if kind == "csps":
        return str(context["text"])
    if kind == "missing":
        return "required"
    if kind == "literal_error":
        return f"must be {context['expected']}, got {got}"
    if kind in _EXPECTED:
        return f"must be {_EXPECTED[kind]}, got {got}"
    return f"{error['msg']}, got {got}"


def _path(steps: tuple[int | str, ...]) -> str:
    """Format a path: `("messages", 0, "role")` becomes `messages[0].role`."""
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step[:64]}"
    return path.removeprefix(".")

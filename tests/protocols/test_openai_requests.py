"""Requests as clients may send them, and everything else."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionMessage
from openai.types.chat import completion_create_params as chat_params
from property_examples import examples

from csps.protocols.attention.plan import option_name, parse_option
from csps.protocols.core.errors import InvalidRequest
from csps.protocols.openai.csps_options import request_class
from csps.protocols.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    parse_request,
)

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_request(ChatCompletionRequest, json.dumps({**CHAT, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({**COMPLETION, **fields}).encode())


# --- what is accepted -----------------------------------------------------------------------


def test_defaults() -> None:
    request = chat()
    assert (request.temperature, request.top_p, request.top_k) == (None, None, None)
    assert (request.output_limit, request.alternatives, request.stop) == (None, None, ())
    assert (request.csps.attention, request.csps.objective) == ("auto", None)
    assert completion().output_limit == 16


@pytest.mark.parametrize(
    ("cls", "params"),
    [
        (ChatCompletionRequest, chat_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
    ],
)
def test_every_field_of_the_official_client_is_known(
    cls: type[GenerationRequest], params: Any
) -> None:
    assert set(typing.get_type_hints(params)) <= set(cls.model_fields)


def test_every_field_of_an_answer_may_be_sent_back() -> None:
    assert set(ChatCompletionMessage.model_fields) <= set(Message.model_fields)
    answer = ChatCompletionMessage(role="assistant", content="hello").model_dump()
    assert chat(messages=[answer, CHAT["messages"][0]]).messages[0].content == "hello"


@pytest.mark.parametrize("name", sorted(ChatCompletionRequest.model_fields))
def test_null_means_not_given(name: str) -> None:
    required = name in CHAT
    if required:
        with pytest.raises(InvalidRequest, match=f"{name}: required"):
            chat(**{name: None})
    else:
        assert chat(**{name: None}) == chat()


def test_fields_that_do_not_apply_are_accepted() -> None:
    chat(
        user="u",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        tools=[],
        tool_choice="auto",
        function_call="none",
        functions=[],
        modalities=["text"],
        prediction={"type": "content", "content": "x"},
        reasoning_effort="low",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        verbosity="low",
        web_search_options={},
        n=1,
    )
    completion(n=1, best_of=1, echo=False, suffix="", user="u")


@pytest.mark.parametrize("value", [5, "x", [1, {"a": []}], {"a": {"b": None}}])
def test_fields_that_are_ignored_are_not_looked_at(value: Any) -> None:
    ignored = ("user", "metadata", "prediction", "store", "web_search_options")
    assert chat(**dict.fromkeys(ignored, value)) == chat()
    annotated = [{"role": "user", "content": "hi", "annotations": value}]
    assert chat(messages=annotated).messages[0].annotations is None


def test_fields_of_load_generators_are_accepted() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    request = chat(ignore_eos=True, max_completion_tokens=7, stream=True, stream_options=options)
    assert request.ignore_eos
    assert request.output_limit == 7
    assert request.stream_options.continuous_usage_stats


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ("text",)),
        (["text", "more"], ("text", "more")),
        ([1, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
        ("\U0001f600\u0000", ("\U0001f600\u0000",)),
    ],
)
def test_prompt_shapes(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


def test_content_as_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "a\nb"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": False}, None),
    ],
)
def test_chat_logprobs(fields: dict[str, Any], expected: int | None) -> None:
    assert chat(**fields).alternatives == expected


def test_completion_logprobs() -> None:
    assert completion(logprobs=0).alternatives == 0
    assert completion(logprobs=5).alternatives == 5


def test_sampling_fields() -> None:
    request = completion(
        temperature=0,
        top_k=-1,
        stop="x",
        stop_token_ids=[3],
        logit_bias={"5": -100, "6": 1.5},
        seed=-(2**63),
    )
    assert request.stop == ("x",)
    assert request.stop_token_ids == (3,)
    assert request.logit_bias == {5: -100.0, 6: 1.5}
    assert completion(stop=["a", "b"]).stop == ("a", "b")
    assert completion(stop=[], stop_token_ids=[]).stop == ()


def test_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).output_limit == 7
    assert completion(max_tokens=10**9).output_limit == 10**9


def test_csps_options() -> None:
    options = {"attention": "csa", "levels": 3, "drop_ratio": 0.5, "explain": True}
    told = {**options, "drop_ratio": ((0.5,),)}
    assert chat(csps=options).csps.model_dump(exclude_unset=True) == told
    by_hand = {
        "attention": "csa", "levels": 1, "drop_ratio": 0.0, "micro_partitions": 64,
        "strategy": "ntp", "nested": True, "drop_queries": False, "importance_window": 0,
        "importance_layer": "previous", "sinks": 0, "tail": 0, "pipelined": False,
        "decode_kept_only": True,
    }  # fmt: skip
    told = {**by_hand, "drop_ratio": ((0.0,),), "micro_partitions": ((64,),)}
    assert chat(csps=by_hand).csps.model_dump(exclude_unset=True) == told
    for attention in ({}, {"attention": "exact"}, {"attention": "auto"}):
        assert chat(csps={**attention, "strategy": "ring_kv"}).csps.ring == "ring_kv"
    assert chat(csps=by_hand).csps.ring is None
    bound = {"objective": "ttft", "max_accuracy_loss": 0.1, "max_ttft_ms": 500}
    assert chat(csps=bound).csps.max_ttft_ms == 500


@pytest.mark.parametrize(
    ("drop_ratio", "by_layer_and_head"),
    [
        ([0, 0, 0.9], ((0.0,), (0.0,), (0.9,))),
        ([[0.5, 0.9]], ((0.5, 0.9),)),
        ([0, [0.5, 0.9], [0]], ((0.0,), (0.5, 0.9), (0.0,))),
    ],
)
def test_drop_ratios_by_layer_and_head(drop_ratio: Any, by_layer_and_head: Any) -> None:
    options = {"attention": "csa", "drop_ratio": drop_ratio}
    assert chat(csps=options).csps.drop_ratio == by_layer_and_head


def test_coverages_by_layer_and_head() -> None:
    options = {"attention": "csa", "coverage": [1, [0.9, 0.5]]}
    assert chat(csps=options).csps.coverage == ((1.0,), (0.9, 0.5))
    asked = request_class(chat(csps=options).csps)
    assert asked.csa is not None
    assert asked.csa.coverages == ((1.0,), (0.9, 0.5))
    assert asked.objective is None  # nothing is left to the configurator
    assert parse_option(option_name("csa", asked.csa)) == ("csa", asked.csa)


@pytest.mark.parametrize(
    ("micro_partitions", "by_layer_and_level"),
    [
        ([1, 1, 2], ((1, 1, 2),)),
        ([[1, 1, 2]], ((1, 1, 2),)),
        ([4, [1, 2]], ((4,), (1, 2))),
    ],
)
def test_micro_partitions_by_layer_and_level(
    micro_partitions: Any, by_layer_and_level: Any
) -> None:
    options = {"attention": "csa", "micro_partitions": micro_partitions}
    assert chat(csps=options).csps.micro_partitions == by_layer_and_level


def test_last_of_duplicate_keys_wins() -> None:
    body = b'{"model": "a", "prompt": "x", "model": "b"}'
    assert parse_request(CompletionRequest, body).model == "b"


# --- what is refused, and how ---------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 7}, "temperature: must be between 0 and 2, got 7"),
    ({"temperature": -0.1}, "temperature: must be between 0 and 2, got -0.1"),
    ({"temperature": "1"}, "temperature: must be a number, got '1'"),
    ({"temperature": True}, "temperature: must be a number, got true"),
    ({"temperature": 10**400}, "temperature: must be a number, got 1000"),
    ({"top_p": 0}, "top_p: must be greater than 0 and at most 1, got 0"),
    ({"top_p": 1.1}, "top_p: must be greater than 0 and at most 1, got 1.1"),
    ({"top_k": -2}, "top_k: must be between -1 and 2147483647, got -2"),
    ({"top_k": 1.5}, "top_k: must be an integer, got 1.5"),
    ({"frequency_penalty": 2.1}, "frequency_penalty: must be between -2 and 2"),
    ({"presence_penalty": -3}, "presence_penalty: must be between -2 and 2"),
    ({"repetition_penalty": 0}, "repetition_penalty: must be between 0.01 and 100"),
    ({"min_p": 2}, "min_p: must be between 0 and 1"),
    ({"max_tokens": 0}, "max_tokens: must be between 1 and 2147483647, got 0"),
    ({"max_tokens": -1}, "max_tokens: must be between 1 and 2147483647, got -1"),
    ({"max_tokens": "12"}, "max_tokens: must be an integer, got '12'"),
    ({"max_tokens": 2.0}, "max_tokens: must be an integer, got 2"),
    ({"max_tokens": True}, "max_tokens: must be an integer, got true"),
    ({"max_completion_tokens": 0}, "max_completion_tokens: must be between 1 and"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: must not exceed max_tokens (8)"),
    ({"seed": 2**63}, "seed: must be between"),
    ({"n": 129}, "n: must be between 1 and 128, got 129"),
    ({"priority": 2**31}, "priority: must be between -2147483648 and 2147483647"),
    ({"priority": 0.5}, "priority: must be an integer, got 0.5"),
    ({"use_beam_search": True}, "use_beam_search: only false is supported, got true"),
    ({"length_penalty": 2}, "length_penalty: only 1 is supported, got 2"),
    ({"thinking_token_budget": 9}, "thinking_token_budget: not supported by this server"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params: not supported by this server"),
    ({"return_token_ids": True}, "return_token_ids: only false is supported, got true"),
    ({"bad_words": [""]}, "bad_words: must not contain an empty word"),
    ({"bad_words": ["x"] * 129}, "bad_words: at most 128 words are supported, got 129"),
    ({"bad_words": ["x" * 257]}, "bad_words: words of at most 256 characters are supported"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids: must be an array of token ids"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens: must be between -1 and"),
    ({"truncation_side": "middle"}, "truncation_side: must be 'left' or 'right', got 'middle'"),
    ({"response_format": 1}, "response_format: must be an object with a type, got 1"),
    (
        {"response_format": {"type": "xml"}},
        "response_format.type: must be 'text', 'json_object' or 'json_schema', got 'xml'",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
        "response_format.json_schema.schema: must be a JSON schema, got 1",
    ),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs: only one of them is allowed, got regex and choice",
    ),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp: unknown field; did"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag: not"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: must be an array of str"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json: is not JSON"),
    (
        {"structured_outputs": {"regex": "a" * 131_073}},
        "structured_outputs.regex: at most 131072 characters are supported, got 131073",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
        "ignore_eos: not allowed with structured output",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs: not allowed beside 'response_format'",
    ),
    ({"stop": [""]}, "stop: must not contain an empty string"),
    ({"stop": ["x"] * 17}, "stop: at most 16 strings are supported, got 17"),
    ({"stop": "x" * 1025}, "stop: strings of at most 1024 characters are supported, got 1025"),
    ({"stop": [1]}, "stop: must be a string or an array of strings, got an array"),
    ({"stop": 1}, "stop: must be a string or an array of strings, got 1"),
    ({"stop_token_ids": [-1]}, "stop_token_ids: must be an array of token ids"),
    (
        {"stop_token_ids": list(range(1025))},
        "stop_token_ids: at most 1024 tokens are supported, got 1025",
    ),
    (
        {"logit_bias": {str(token): 1 for token in range(1025)}},
        "logit_bias: at most 1024 tokens are supported, got 1025",
    ),
    ({"logit_bias": {"x": 1}}, "logit_bias: keys must be token ids, got 'x'"),
    ({"logit_bias": {"\u0663": 1}}, "logit_bias: keys must be token ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias: biases must be numbers between -100 and 100"),
    ({"logit_bias": {"1": True}}, "logit_bias: biases must be numbers"),
    ({"logit_bias": [1]}, "logit_bias: must be an object"),
    ({"stream": 1}, "stream: must be a boolean, got 1"),
    ({"stream_options": {}}, "stream_options: only allowed when 'stream' is true"),
    ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage: unknown field"),
    ({"model": 1}, "model: must be a string, got 1"),
    ({"max_token": 1}, "max_token: unknown field; did you mean 'max_tokens'?"),
    ({"max_token": None}, "max_token: unknown field"),
    ({"csps": []}, "csps: must be an object, got []"),
    ({"csps": {"atention": "csa"}}, "csps.atention: unknown field; did you mean 'attention'?"),
    ({"csps": {"objective": "speed"}}, "csps.objective: must be 'ttft' or 'accuracy'"),
    ({"csps": {"max_accuracy_loss": 1.1}}, "csps.max_accuracy_loss: must be between 0 and 1"),
    ({"csps": {"max_ttft_ms": 0}}, "csps.max_ttft_ms: must be greater than 0"),
    ({"csps": {"attention": "csa", "levels": 5}}, "csps.levels: must be between 1 and 4"),
    ({"csps": {"attention": "csa", "drop_ratio": 1}}, "csps.drop_ratio: must be at least 0 and le"),
    ({"csps": {"attention": "csa", "drop_ratio": -0.1}}, "csps.drop_ratio: must be at least 0 and"),
    (
        {"csps": {"attention": "csa", "drop_ratio": [0.1, "half"]}},
        "csps.drop_ratio: must be at least 0 and less than 1, got 'half'",
    ),
    (
        {"csps": {"attention": "csa", "drop_ratio": []}},
        "csps.drop_ratio: must be a number, or an array of 1 to 1024 by layer, got 0",
    ),
    (
        {"csps": {"attention": "csa", "drop_ratio": [0, []]}},
        "csps.drop_ratio: must be a number, or an array of 1 to 1024 by KV head, got 0",
    ),
    (
        {"csps": {"attention": "csa", "drop_ratio": [0, [0.5, 1]]}},
        "csps.drop_ratio: must be at least 0 and less than 1, got 1",
    ),
    (
        {"csps": {"attention": "csa", "drop_ratio": [[[0.5]]]}},
        "csps.drop_ratio: must be at least 0 and less than 1, got an array",
    ),
    (
        {"csps": {"attention": "csa", "drop_ratio": [[0.5] * 1024] * 17}},
        "csps.drop_ratio: at most 16384 numbers are supported, got 17408",
    ),
    (
        {"csps": {"attention": "csa", "coverage": 0}},
        "csps.coverage: must be more than 0 and at most 1, got 0",
    ),
    (
        {"csps": {"attention": "csa", "coverage": [0.5, "most"]}},
        "csps.coverage: must be more than 0 and at most 1, got 'most'",
    ),
    (
        {"csps": {"attention": "csa", "coverage": 0.9, "drop_ratio": 0.5}},
        "csps.coverage: excludes 'drop_ratio'",
    ),
    ({"csps": {"coverage": 0.9}}, "csps.coverage: needs 'attention': 'csa'"),
    ({"csps": {"attention": "csa", "drop_ratio": True}}, "csps.drop_ratio: must be at least 0"),
    ({"csps": {"drop_ratio": 0.5}}, "csps.drop_ratio: needs 'attention': 'csa'"),
    (
        {"csps": {"attention": "csa", "micro_partitions": [1, 65]}},
        "csps.micro_partitions: must be between 1 and 64, got 65",
    ),
    (
        {"csps": {"attention": "csa", "micro_partitions": [1, 1, 1, 1, 1]}},
        "csps.micro_partitions: must be a number, or an array of 1 to 4 by level, got 5",
    ),
    (
        {"csps": {"attention": "csa", "levels": 2, "micro_partitions": [1, 1, 2]}},
        "csps.micro_partitions: must be at most 2 by level, as 'levels' says, got 3",
    ),
    (
        {"csps": {"attention": "csa", "levels": 2, "micro_partitions": [4, [1, 1, 2]]}},
        "csps.micro_partitions: must be at most 2 by level, as 'levels' says, got 3",
    ),
    (
        {"csps": {"attention": "csa", "micro_partitions": [1, [1, 1, 1, 1, 1]]}},
        "csps.micro_partitions: must be a number, or an array of 1 to 4 by level, got 5",
    ),
    (
        {"csps": {"attention": "csa", "micro_partitions": [[1]] * 1025}},
        "csps.micro_partitions: must be a number, or an array of 1 to 1024 by layer, got 1025",
    ),
    ({"csps": {"attention": "exact", "nested": False}}, "csps.nested: needs 'attention': 'csa'"),
    ({"csps": {"attention": "csa", "micro_partitions": 0}}, "csps.micro_partitions: must be betwe"),
    (
        {"csps": {"attention": "csa", "micro_partition": 4}},
        "csps.micro_partition: unknown field; d",
    ),
    (
        {"csps": {"attention": "csa", "strategy": "sp"}},
        "csps.strategy: must be 'ntp', 'tp', 'tp_flat', 'ring_kv', 'ring_q' or 'ring'",
    ),
    (
        {"csps": {"attention": "csa", "strategy": "ring_q"}},
        "csps.strategy: must be 'ntp', 'tp' or 'tp_flat' with 'attention': 'csa', got 'ring_q'",
    ),
    ({"csps": {"strategy": "ntp"}}, "csps.strategy: needs 'attention': 'csa'"),
    ({"csps": {"strategy": "ring_kv", "sinks": 1}}, "csps.sinks: needs 'attention': 'csa'"),
    (
        {"csps": {"attention": "csa", "strategy": "tp", "nested": True}},
        "csps.strategy: must be 'ntp' with 'nested', not 'tp'",
    ),
    (
        {"csps": {"attention": "csa", "strategy": "tp", "decode_kept_only": True}},
        "csps.strategy: must be 'ntp' with 'decode_kept_only', not 'tp'",
    ),
    (
        {"csps": {"attention": "csa", "importance_layer": "same", "importance_window": 0}},
        "csps.importance_window: must be 1 or more",
    ),
    ({"csps": {"attention": "csa", "nested": 1}}, "csps.nested: must be a boolean, got 1"),
    ({"csps": {"attention": "csa", "sinks": -1}}, "csps.sinks: must be between 0 and 16777216"),
    ({"csps": {"attention": "csa", "tail": 10**30}}, "csps.tail: must be"),
]

REFUSED_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: must not be empty"),
    ({"messages": "hi"}, "messages: must be an array, got 'hi'"),
    ({"messages": ["hi"]}, "messages[0]: must be an object, got 'hi'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: required"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content: required"),
    ({"messages": [{"content": "x"}]}, "messages[0].role: required"),
    ({"messages": [{"role": "usr", "content": ""}]}, "messages[0].role: must be 'system', "),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: must be a string or"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content: only parts of type 'text' are supported, got 'image_url'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content: 'text' of a part must be a string, got null",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function: required",
    ),
    (
        {"messages": [{"role": "user", "content": "", "tool_calls": [CALL]}]},
        "messages[0].tool_calls: only an assistant calls tools",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL] * 513}]},
        "messages[0].tool_calls: at most 512 calls are supported, got 513",
    ),
    ({"prompt": "x"}, "prompt: unknown field"),
    ({"logprobs": 5}, "logprobs: must be a boolean, got 5"),
    ({"top_logprobs": 3}, "top_logprobs: needs 'logprobs': true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: must be between 0 and 20"),
    ({"tools": [{"type": "function"}]}, "tools: 'function' of a tool must be an object, got null"),
    ({"tools": [{"type": "custom"}]}, "tools: only tools of type 'function' are supported, got"),
    ({"tools": [TOOL] * 2}, "tools: two functions have one name"),
    ({"tools": [TOOL] * 513}, "tools: at most 512 tools are supported, got 513"),
    ({"tools": [{"function": {"name": "a b"}}]}, "tools: a function's name must match"),
    ({"tool_choice": "required"}, "tool_choice: needs 'tools'"),
    ({"tool_choice": "any"}, "tool_choice: must be 'none', 'auto', 'required' or"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice: no tool is called 'g'",
    ),
    (
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice: not allowed with structured output",
    ),
    ({"chat_template": 1}, "chat_template: must be a string of at most 65536 characters"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools: not allowed here"),
    ({"documents": ["x"]}, "documents: must be an array of objects"),
    ({"reasoning_effort": "some"}, "reasoning_effort: must be 'none', "),
    ({"functions": [{}]}, "functions: not supported"),
    ({"modalities": ["text", "audio"]}, "modalities: only ['text'] is supported"),
    ({"continue_final_message": True}, "continue_final_message: needs 'add_generation_prompt'"),
]

REFUSED_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt: must not be empty"),
    ({"prompt": []}, "prompt: must not be empty"),
    ({"prompt": [[]]}, "prompt: must not be empty"),
    ({"prompt": [""]}, "prompt: must not be empty"),
    ({"prompt": ["a"] * 129}, "prompt: at most 128 prompts are supported, got 129"),
    ({"prompt": ["a"] * 65, "n": 2}, "n: at most 128 answers are supported, got 130"),
    ({"prompt": ["a", [1], ""]}, "prompt: must not be empty"),
    ({"prompt": [1, "a"]}, "prompt: must be a string or an array of token ids"),
    ({"prompt": [1, True]}, "prompt: must be a string or an array of token ids"),
    ({"prompt": [1.0]}, "prompt: must be a string or an array of token ids"),
    ({"prompt": [-1]}, "prompt: must be a string or an array of token ids"),
    ({"prompt": [2**31]}, "prompt: must be a string or an array of token ids"),
    ({"prompt": {"text": "x"}}, "prompt: must be a string or an array of token ids, got an obj"),
    ({"prompt": None}, "prompt: required"),
    ({"logprobs": 6}, "logprobs: must be between 0 and 5, got 6"),
    ({"logprobs": True}, "logprobs: must be an integer, got true"),
    ({"best_of": 1, "n": 2}, "best_of: must be at least n (2)"),
    ({"best_of": 2, "stream": True}, "best_of: must be n for a stream"),
    (
        {"echo": True, "logprobs": 1, "stream": True},
        "logprobs: not supported with 'echo' and 'stream'",
    ),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: not supported with 'stream'"),
    ({"prompt_logprobs": -1}, "prompt_logprobs: must be"),
    ({"suffix": "x"}, "suffix: not supported"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED + REFUSED_CHAT)
def test_refused_by_chat(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert str(caught.value).startswith(message)
    assert caught.value.param == message.split(":")[0]


@pytest.mark.parametrize(("fields", "message"), REFUSED + REFUSED_COMPLETION)
def test_refused_by_completions(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert str(caught.value).startswith(message)
    assert caught.value.param == message.split(":")[0]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b"\xff\xfe{}",
        b'{"model": "m", "prompt": "\xff"}',
        b'{"model": "m", "prompt": "\xed\xa0\x80"}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "\\udc00x"}',
        b'{"model": "m", "prompt": "x", "user": "\\ud83d\\u0041"}',
        b'{"\\ud800": 1}',
        b'{"model": "m", "prompt": "x", "temperature": NaN}',
        b'{"model": "m", "prompt": "x", "temperature": Infinity}',
        b'{"model": "m", "prompt": "x", "temperature": -Infinity}',
        b'{"model": "m", "prompt": "x",}',
        b'{"model": "m"} trailing',
        b'{"model": "m", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":' * 100_000,
        b'{"seed": ' + b"9" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON") as caught:
        parse_request(CompletionRequest, body)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("body", "got"),
    [
        (b"[]", "an array"),
        (b"null", "null"),
        (b"3", "a number"),
        (b'"x"', "a string"),
        (b"true", "a boolean"),
        (b"1e999", "a number"),
    ],
)
def test_a_body_that_is_no_object_is_refused(body: bytes, got: str) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object, got") as caught:
        parse_request(CompletionRequest, body)
    assert str(caught.value).endswith(got)


@pytest.mark.parametrize("field", ["temperature", "top_p", "repetition_penalty", "min_p"])
def test_numbers_too_large_for_a_float_are_out_of_range(field: str) -> None:
    body = b'{"model": "m", "prompt": "x", "%s": 1e999}' % field.encode()
    with pytest.raises(InvalidRequest, match=f"{field}: must be .*, got inf"):
        parse_request(CompletionRequest, body)


def test_messages_stay_short_whatever_is_wrong() -> None:
    for fields in ({"x" * 10**6: 1}, {"model": ["y"] * 10**6}, {"stop": "z" * 10**6, "n": 2}):
        with pytest.raises(InvalidRequest) as caught:
            chat(**fields)
        assert len(str(caught.value)) < 2000


def test_a_million_bad_messages_cost_one_error() -> None:
    with pytest.raises(InvalidRequest, match="messages: at most 8192 messages are supported, got"):
        chat(messages=[1] * 1_000_000)
    with pytest.raises(InvalidRequest, match=r"messages\[0\]: must be an object, got 1"):
        chat(messages=[1] * 8192)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
known = st.sampled_from(
    sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields})
)
endpoints = st.sampled_from([ChatCompletionRequest, CompletionRequest])


@settings(max_examples=examples(300))
@given(endpoints, st.dictionaries(known, anything, max_size=4), anything)
def test_arbitrary_json_raises_invalid_request_or_nothing(
    cls: type[GenerationRequest], fields: dict[str, Any], message: Any
) -> None:
    base = CHAT if cls is ChatCompletionRequest else COMPLETION
    for body in ({**base, **fields}, {**CHAT, "messages": [message]}, message):
        try:
            parse_request(cls, json.dumps(body).encode())
        except InvalidRequest as exc:
            str(exc).encode()  # an error message must be expressible, too


@given(endpoints, st.binary(max_size=100))
def test_arbitrary_bytes_raise_invalid_request(cls: type[GenerationRequest], body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_request(cls, body)

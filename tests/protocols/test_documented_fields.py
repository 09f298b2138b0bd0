"""Every field that OpenAI and vLLM document is accepted at its default, and as null.

The lists are those of vLLM's pages and sources of November 2026 (`ChatCompletionRequest`,
`CompletionRequest`); OpenAI's come from its client.
"""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params

from csps.protocols.core.errors import InvalidRequest
from csps.protocols.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    parse_request,
)

BOTH: dict[str, Any] = {
    "allowed_token_ids": None,
    "bad_words": [],
    "cache_salt": None,
    "ec_transfer_params": None,
    "echo": False,
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "kv_transfer_params": None,
    "length_penalty": 1.0,
    "logit_bias": None,
    "logprob_token_ids": None,
    "max_tokens": None,
    "min_p": None,
    "min_tokens": 0,
    "n": 1,
    "presence_penalty": 0.0,
    "priority": 0,
    "prompt_logprobs": None,
    "repetition_detection": None,
    "repetition_penalty": None,
    "request_id": "a-uuid",
    "response_format": None,
    "return_mm_kwargs": True,
    "return_token_ids": None,
    "return_token_offsets": False,
    "return_tokens_as_token_ids": None,
    "routed_experts_prompt_start": 0,
    "seed": None,
    "session_id": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop": [],
    "stop_token_ids": [],
    "stream": False,
    "stream_interval": None,
    "stream_options": None,
    "structured_outputs": None,
    "temperature": None,
    "thinking_token_budget": None,
    "top_k": None,
    "top_p": None,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "use_beam_search": False,
    "user": None,
    "vllm_xargs": None,
    "watermarking": None,
}
CHAT: dict[str, Any] = {
    **BOTH,
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "chat_template": None,
    "chat_template_kwargs": None,
    "continue_final_message": False,
    "documents": None,
    "include_reasoning": True,
    "logprobs": False,
    "max_completion_tokens": None,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "parallel_tool_calls": True,
    "reasoning_effort": None,
    "return_prompt_text": None,
    "tool_choice": "none",
    "tools": None,
    "top_logprobs": 0,
}
COMPLETION: dict[str, Any] = {
    **BOTH,
    "add_special_tokens": True,
    "logprobs": None,
    "max_tokens": 16,
    "prompt_embeds": None,
    "suffix": None,
}
REQUIRED: dict[type[GenerationRequest], dict[str, Any]] = {
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"model": "m", "prompt": "hi"},
}
ENDPOINTS = [(ChatCompletionRequest, CHAT), (CompletionRequest, COMPLETION)]
CASES = [(cls, name, value) for cls, fields in ENDPOINTS for name, value in fields.items()]


def parsed(cls: type[GenerationRequest], **fields: Any) -> GenerationRequest:
    return parse_request(cls, json.dumps({**REQUIRED[cls], **fields}).encode())


@pytest.mark.parametrize(("cls", "fields"), ENDPOINTS)
def test_all_fields_at_their_defaults_are_accepted_together(
    cls: type[GenerationRequest], fields: dict[str, Any]
) -> None:
    parsed(cls, **fields)


@pytest.mark.parametrize(("cls", "name", "default"), CASES)
def test_a_field_at_its_default_or_null_changes_nothing(
    cls: type[GenerationRequest], name: str, default: Any
) -> None:
    expected = parsed(cls).model_dump()
    told = {"max_tokens": default} if name == "max_tokens" else {}
    if name == "tool_choice":  # vLLM's own default; without tools it means the same
        assert parsed(cls, tool_choice=default).choice == parsed(cls).choice  # type: ignore[attr-defined]
        return
    assert parsed(cls, **{name: default}).model_dump() == {**expected, **told} | (
        {"top_logprobs": 0} if name == "top_logprobs" else {}
    )
    assert parsed(cls, **{name: None}).model_dump() == expected


@pytest.mark.parametrize(
    ("cls", "params"),
    [
        (ChatCompletionRequest, chat_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
    ],
)
def test_every_field_of_the_official_client_may_be_null(
    cls: type[GenerationRequest], params: Any
) -> None:
    optional = set(typing.get_type_hints(params)) - REQUIRED[cls].keys()
    assert parsed(cls, **dict.fromkeys(optional)).model_dump() == parsed(cls).model_dump()


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (cls, name, value)
        for cls in REQUIRED
        for name, value in {
            "ec_transfer_params": {"a": 1},
            "kv_transfer_params": {"a": 1},
            "length_penalty": 0.5,
            "logprob_token_ids": [1],
            "prompt_logprobs": 21,
            "repetition_detection": {"max_pattern_size": 3},
            "return_token_ids": True,
            "return_token_offsets": True,
            "return_tokens_as_token_ids": True,
            "routed_experts_prompt_start": 4,
            "spaces_between_special_tokens": False,
            "thinking_token_budget": 100,
            "use_beam_search": True,
            "vllm_xargs": {"a": 1},
            "watermarking": True,
        }.items()
    ],
)
def test_what_would_change_the_answer_and_is_not_supported_is_refused_by_name(
    cls: type[GenerationRequest], name: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parsed(cls, **{name: value})
    assert refused.value.param == name

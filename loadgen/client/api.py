"""Requests in the words of the OpenAI API."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from csps.loadgen.workloads.request import Request

Backend = Literal["openai", "openai-chat", "vllm", "csps"]
ENDPOINTS: dict[str, str] = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "vllm": "/v1/completions",
    "csps": "/v1/completions",
}


@dataclass(frozen=True, kw_only=True)
class Api:
    """How requests are worded."""

    model: str
    endpoint: str = ENDPOINTS["openai"]
    ignore_eos: bool = False
    temperature: float | None = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        """Whether prompts are messages."""
        return self.endpoint.rstrip("/").endswith("/chat/completions")

    def body(self, request: Request, said: Said | None = None) -> bytes:
        """The JSON of a request; of a later turn, what was said goes before it."""
        said = said or Said()
        prompt = request.prompt or ""
        fields: dict[str, Any] = {
            "model": self.model,
            **(
                {"messages": said.messages(prompt)} if self.chat else {"prompt": said.text + prompt}
            ),
            "max_completion_tokens" if self.chat else "max_tokens": request.output_length,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if request.objective is not None:
            fields["csps"] = request.objective.body()
        return json.dumps(fields | self.extra_body).encode()


@dataclass(kw_only=True)
class Said:
    """A conversation so far."""

    turns: list[tuple[str, str]] = field(default_factory=list)
    """Prompts and the answers to them."""

    @property
    def text(self) -> str:
        """Of all turns, for completions."""
        return "".join(f"{prompt}{answer}\n" for prompt, answer in self.turns)

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """Of all turns and of the next one, for chats."""
        roles = [
            {"role": role, "content": text}
            for turn in self.turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        return [*roles, {"role": "user", "content": prompt}]

"""Run `csps demo`: one long question to a running server, with its answer and its times."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from csps.models.needle_prompts.haystack import is_correct
from csps.models.needle_prompts.prompt import NeedleConfig, NeedlePrompt, generate
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.services.launch.ask_command import Client
from csps.services.launch.deploy_config import DeployConfig
from csps.services.launch.ray_head import command_for

PROMPT_TOKENS = 16_384
MAX_ANSWER_TOKENS = 32


@dataclass
class StreamedAnswer:
    """An answer, and the time of each of its tokens."""

    text: str = ""
    stamps: list[float] = field(default_factory=list)
    """Times (`time.perf_counter()`) of the chunks that carried a token."""
    usage: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    """Content of the `csps` extension: plan, placement, timings."""


def demo(config: DeployConfig, name: str = "request") -> None:
    """Hide a fact in 16K tokens of text, ask for it, stream the answer, print the times.

    The text is always the same. A server that retains KV reuses it the second time, and the output
    says so.
    """
    prompt = question(config)
    depths = ", ".join(f"{needle.depth:.0%}" for needle in prompt.asked)
    print(
        f"\n{name}: {prompt.tokens} tokens of text with {len(prompt.haystack.needles)} "
        f"facts hidden in it; those asked for lie at {depths}"
    )
    print(f"  ...{prompt.text[-160:].strip()!r}")
    print("  answer: ", end="", flush=True)
    started = time.perf_counter()
    streamed = ask(config, prompt.text)
    print("\n" + "\n".join(f"  {line}" for line in summary(prompt, streamed, started)))
    print(usage_hints(config))


def question(config: DeployConfig) -> NeedlePrompt:
    """Generate English prose with facts, at most `PROMPT_TOKENS` by the served model's
    tokenizer."""
    tokenizer = Tokenizer(config.settings.model_dir)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    # The text of this seed ends in prose.
    wanted = NeedleConfig(length=PROMPT_TOKENS, kind="multi", filler="english", seed=8)
    return generate(wanted, count)


def ask(config: DeployConfig, prompt: str) -> StreamedAnswer:
    """Stream a greedy completion, echoing it to the terminal.

    Raises:
        FaultError: there is no server, or it answered with an error.
    """
    body = {
        "prompt": prompt,
        "max_tokens": MAX_ANSWER_TOKENS,
        "temperature": 0,
        "stop": ["\n"],
        "stream_options": {"include_usage": True},
        "csps": {"explain": True},
    }
    streamed = StreamedAnswer()
    for chunk in Client.of(config).stream("/v1/completions", body):
        _record(streamed, chunk)
    return streamed


def _record(streamed: StreamedAnswer, chunk: dict[str, Any]) -> None:
    streamed.usage = chunk.get("usage") or streamed.usage
    streamed.report = chunk.get("csps") or streamed.report
    for choice in chunk["choices"]:
        streamed.stamps.append(time.perf_counter())
        streamed.text += choice["text"]
        sys.stdout.write(choice["text"])
        sys.stdout.flush()


def summary(prompt: NeedlePrompt, streamed: StreamedAnswer, started: float) -> list[str]:
    """Return the lines about a finished answer: correctness, times, tokens, plan."""
    stamps = streamed.stamps
    ttft_s = stamps[0] - started
    tbt_ms = 1000 * (stamps[-1] - stamps[0]) / max(1, len(stamps) - 1)
    verdict = "right" if is_correct(prompt.answer, streamed.text) else "wrong"
    return [
        f"expected: {prompt.answer} ({verdict})",
        f"time to first token: {ttft_s:.2f} s; between tokens: {tbt_ms:.1f} ms",
        *reuse_lines(streamed.usage),
        f"tokens: {streamed.usage['prompt_tokens']} in, {streamed.usage['completion_tokens']} out",
        *plan_lines(streamed.report),
    ]


def reuse_lines(usage: dict[str, Any]) -> list[str]:
    """Return a line about the reused KV, which the time to the first token does not contain."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    if not cached:
        return []
    return [
        f"  reused the KV of {cached} tokens from an earlier request; only the rest was computed"
    ]


def plan_lines(report: dict[str, Any]) -> list[str]:
    """Describe the plan and the placement in words; nothing if the key may not ask for them
    (`auth.diagnostics`)."""
    if not report:
        return []
    plan, placement = report["plan"], report["placement"]
    bounds = placement["bounds"]
    chunks = ", ".join(str(stop - start) for start, stop in pairwise(bounds))
    slices = [
        f"{kv_slice['span']['stop'] - kv_slice['span']['start']} on {kv_slice['instance']}"
        for kv_slice in placement["shares"]
    ]
    return [
        f"plan: {plan['attention']} attention, {plan['strategy']} ({plan['reason']})",
        f"prefill on instances {placement['group']} ({chunks} tokens), "
        f"KV cache: {', '.join(slices)}, decoded by {placement['master']}",
    ]


def usage_hints(config: DeployConfig) -> str:
    """Return lines to copy: further requests, metrics, traces."""
    settings, url = config.settings, config.url
    model, telemetry = settings.model_name, settings.telemetry
    traces = telemetry.otlp_endpoint or f"{telemetry.spans_dir} (csps trace list)"
    key = ' -H "Authorization: Bearer $KEY"' if Client.of(config).key else ""
    body = json.dumps({"model": model, "prompt": "The password of", "max_tokens": 16})
    return f"""
the server keeps running. Ask it more:

  curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d '{body}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{"KEY" if key else "none"}")
  print(client.completions.create(model="{model}", prompt="The password of").choices[0].text)

metrics: {url}/metrics    traces: {traces}
again:   {command_for("demo")}    stop it: {command_for("stop")}"""

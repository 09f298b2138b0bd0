"""The requests that the arguments of a load test ask for."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from csps.loadgen.workloads.generate import Arrivals, Ramp, Size, generate
from csps.loadgen.workloads.named import Workload, random_lengths, workload
from csps.loadgen.workloads.request import (
    ConversationTurns,
    FittedRequests,
    RequestObjective,
    WorkloadRequest,
    converse,
    fit,
)
from csps.loadgen.workloads.text import Writer
from csps.loadgen.workloads.traces import (
    TraceRules,
    at_rate,
    read_sharegpt,
    read_trace,
    write_trace,
)
from csps.models.needle_prompts.words import Count
from csps.protocols.core.errors import ConfigError

DEFAULT_PROMPTS = 1000
RANDOM_OUTPUT = 128
SHORTEST_SCALED = 32
"""Shortest scaled prompt: it has room for a question, so that answers can be checked."""
OWN_ATTENTION = {"cls": "a name does not say which attention the request set"}
"""Reasons why fields of a trace cannot be sent to a server."""
SPECIAL_TOKENS = 8
"""Positions left for special tokens that a server adds to a prompt."""


@dataclass(frozen=True, kw_only=True)
class LoadRequests:
    """Requests to send, and facts about their origin."""

    requests: tuple[WorkloadRequest, ...]
    facts: dict[str, Any]
    """Fields for the result."""


def load_requests(
    arguments: argparse.Namespace, *, chat: bool, positions: int | None
) -> LoadRequests:
    """Return requests with prompts.

    Args:
        arguments: the workload and load options.
        chat: whether prompts are messages.
        positions: the model's positions; None: unknown.

    Raises:
        ConfigError: the arguments contradict each other, or a file is malformed.
    """
    from_file = arguments.dataset_path is not None
    try:
        fitted = (
            _read_from_file(arguments, positions) if from_file else _generated(arguments, positions)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    requests: Sequence[WorkloadRequest] = fitted.requests
    turns = ConversationTurns(
        count=arguments.turns,
        added_tokens=arguments.turn_len,
        delay_ns=round(arguments.turn_delay * 1e9),
    )
    requests = _with_objectives(converse(requests, turns), arguments.objective)
    if not requests:
        raise ConfigError("there are no requests to send")
    writer = Writer(seed=arguments.seed, chat=chat, count=token_count(arguments.tokenizer))
    written = tuple(writer.write(requests))
    if prefix := prefix_tokens(arguments):
        if arguments.save_trace:
            raise ConfigError("--save-trace: a trace cannot hold the text of --random-prefix-len")
        written = tuple(writer.begin_alike(written, prefix))
    if arguments.save_trace:
        write_trace(requests, arguments.save_trace)
    return LoadRequests(requests=written, facts=_facts(arguments, fitted))


def prefix_tokens(arguments: argparse.Namespace) -> int:
    """Return the tokens with which all prompts of `random` begin."""
    is_random = arguments.dataset_name == "random" and arguments.dataset_path is None
    tokens: int = arguments.random_prefix_len if is_random else 0
    return tokens


PROBE_TOKENS = 8
"""Length of a probe's prompt, which no cache has."""


def probe_request(number: int, *, seed: int, chat: bool, count: Count | None) -> WorkloadRequest:
    """Return a request of `--probe-request-rate`: a few tokens in, one out."""
    writer = Writer(seed=seed, needles=0, chat=chat, count=count)
    one = WorkloadRequest(arrival_ns=0, input_length=PROBE_TOKENS, output_length=1)
    return writer.write_numbered(one, number)


def arrivals_of(arguments: argparse.Namespace) -> Arrivals:
    """Return the arrival process: rate, burstiness and ramp.

    Raises:
        ConfigError: a ramp lacks a rate.
    """
    ramp = None
    if arguments.ramp_up_strategy:
        ends = arguments.ramp_up_start_rps, arguments.ramp_up_end_rps
        if None in ends:
            raise ConfigError("a ramp needs --ramp-up-start-rps and --ramp-up-end-rps")
        try:
            ramp = Ramp(strategy=arguments.ramp_up_strategy, start_rps=ends[0], end_rps=ends[1])
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return Arrivals(rate=arguments.request_rate, burstiness=arguments.burstiness, ramp=ramp)


def named(arguments: argparse.Namespace) -> Workload:
    """Return the workload of `--dataset-name`.

    Raises:
        ConfigError: the name is unknown, or `custom` without a file.
    """
    if arguments.dataset_name == "random":
        return random_lengths(
            arguments.input_len, arguments.output_len or RANDOM_OUTPUT, arguments.random_range_ratio
        )
    if arguments.dataset_name == "custom":
        raise ConfigError("--dataset-name custom needs --dataset-path")
    return workload(arguments.dataset_name)


def _generated(arguments: argparse.Namespace, positions: int | None) -> FittedRequests:
    size = Size(
        longest_input=arguments.max_input_len,
        shortest_input=SHORTEST_SCALED,
        longest_output=None if arguments.dataset_name == "random" else arguments.output_len,
        positions=(
            None if positions is None else positions - SPECIAL_TOKENS - prefix_tokens(arguments)
        ),
    )
    return generate(
        named(arguments),
        arguments.num_prompts or DEFAULT_PROMPTS,
        arrivals=arrivals_of(arguments),
        seed=arguments.seed,
        size=size,
    )


def _read_from_file(arguments: argparse.Namespace, positions: int | None) -> FittedRequests:
    if arguments.dataset_name == "sharegpt":
        requests = _sharegpt(arguments)
    else:
        rules = TraceRules(refused=OWN_ATTENTION, ignored=arguments.ignore_fields)
        requests = read_trace(
            arguments.dataset_path, speedup=arguments.arrival_speedup_ratio, rules=rules
        )
        requests = requests[: arguments.num_prompts]
        if arguments.request_rate < float("inf"):
            requests = at_rate(requests, arguments.request_rate)
    if arguments.output_len is not None:
        most = arguments.output_len
        requests = [
            replace(request, output_length=min(request.output_length, most)) for request in requests
        ]
    if positions is None:
        return FittedRequests(requests=tuple(requests), cut=0)
    texts = [request for request in requests if request.prompt is not None]
    lengths = fit(
        [request for request in requests if request.prompt is None], positions - SPECIAL_TOKENS
    )
    together = sorted([*texts, *lengths.requests], key=lambda request: request.arrival_ns)
    return FittedRequests(requests=tuple(together), cut=lengths.cut)


def _sharegpt(arguments: argparse.Namespace) -> list[WorkloadRequest]:
    """Return conversations of a file in a random order, with times of their own."""
    read = read_sharegpt(arguments.dataset_path, token_count(arguments.tokenizer))
    chosen = random.Random(f"sharegpt/{arguments.seed}").sample(read, len(read))
    chosen = chosen[: arguments.num_prompts]
    times = arrivals_of(arguments).draw(len(chosen), np.random.default_rng(arguments.seed))
    if (length := arguments.sharegpt_output_len) is not None:
        chosen = [replace(request, output_length=length) for request in chosen]
    return [
        replace(request, arrival_ns=time)
        for request, time in zip(chosen, times.tolist(), strict=True)
    ]


def _with_objectives(
    requests: Sequence[WorkloadRequest], bodies: list[dict[str, Any]]
) -> list[WorkloadRequest]:
    if not bodies:
        return list(requests)
    try:
        objectives = [RequestObjective(**body) for body in bodies]
    except TypeError as error:
        raise ConfigError(f"--objective: {error}") from None
    return [
        request
        if request.objective
        else replace(request, objective=objectives[number % len(objectives)])
        for number, request in enumerate(requests)
    ]


def token_count(folder: Path | None) -> Count | None:
    """Return the token count of a tokenizer. None: words count, as in the included model.

    Raises:
        ConfigError: the folder has no tokenizer.
    """
    if folder is None:
        return None
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"no tokenizer.json in '{folder}'")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _facts(arguments: argparse.Namespace, fitted: FittedRequests) -> dict[str, Any]:
    path = arguments.dataset_path
    source = f"requests of {path.name}" if path else named(arguments).source
    return {
        "workload": path.name if path else arguments.dataset_name,
        "workload_source": source,
        "max_input_len": arguments.max_input_len,
        "prompts_cut": fitted.cut,
        "turns": arguments.turns,
        "random_prefix_len": prefix_tokens(arguments),
        "seed": arguments.seed,
        "ramp_up_strategy": arguments.ramp_up_strategy,
        "ramp_up_start_rps": arguments.ramp_up_start_rps,
        "ramp_up_end_rps": arguments.ramp_up_end_rps,
    }

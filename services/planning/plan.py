"""Say what a configuration comes to: bytes of each rank, longest prompt, how many at once, times.

Times are a roofline: products, attention, exchanges and reading of weights at the speeds of a
device, one after the other. A server whose times were measured has better ones (`csps profile`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from csps.kernels.rowwise_fp8 import unsupported_capability
from csps.models.checkpoints.loading import without_fp8
from csps.models.network.spec import ModelSpec, read_spec
from csps.protocols.core.errors import ConfigError
from csps.protocols.gang.members import GangRole
from csps.services.measured.scheduler_inputs import latency_table
from csps.services.planning.hardware import Device, Hardware, measured_core
from csps.services.planning.machine import GIB
from csps.services.planning.memory import RankNeed, rank_need
from csps.services.settings.settings import Settings

LENGTHS = (2**13, 2**15, 2**17, 2**20)
"""Lengths of prompts for which times are shown, up to the longest."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A configuration on some hardware."""

    ranks: Mapping[GangRole, RankNeed]
    device: Device
    positions: int
    """Longest prompt plus answer by the model or `max_positions`."""
    prefill_tokens: int
    """Tokens that fit into the slots for computing prompts."""
    decode_tokens: int
    """Tokens that fit into the slots for decoding."""
    ttft_s: Mapping[int, float]
    """Predicted time to the first token by length of the prompt, with nothing else running."""
    token_s: float
    """Predicted time of a further token behind the longest of these prompts."""
    fp8_on_cores: bool = False
    """True if the times leave out that cores expand weights in FP8 in every product."""

    @property
    def longest_prompt(self) -> int:
        """Longest prompt, with an answer of one token."""
        return min(self.positions - 1, self.prefill_tokens, self.decode_tokens - 1)

    def at_once(self, tokens: int) -> int:
        """Return how many requests of this length can decode at a time."""
        return self.decode_tokens // tokens


def make_plan(settings: Settings, hardware: Hardware | None) -> Plan:
    """Plan a configuration.

    Args:
        hardware: GPUs; None for the cores of this machine.

    Raises:
        ConfigError: it does not fit.
    """
    dtype = getattr(torch, settings.dtype)
    device = measured_core(dtype) if hardware is None else hardware.device
    if hardware is not None:
        _check_gpus(settings, hardware)
    ranks = {role: rank_need(role, settings, gpu_bytes=device.gpu_bytes) for role in settings.gangs}
    if device.gpu_bytes is not None:
        for role, need in ranks.items():
            _check_fits(role, need, settings, device)
    spec = read_spec(settings.model_dir, settings.model_overrides)
    positions = min(settings.max_positions or spec.max_positions, spec.max_positions)
    prefilling = ranks[settings.prefilling_role]
    decoding = ranks[settings.decoding_role]
    plan = Plan(
        ranks=ranks,
        device=device,
        positions=positions,
        prefill_tokens=prefilling.slots * settings.prefilling.instances,
        decode_tokens=decoding.slots * settings.decoding.instances,
        ttft_s={},
        token_s=0.0,
        fp8_on_cores=hardware is None and settings.weight_dtype == "fp8",
    )
    longest = plan.longest_prompt
    lengths = [length for length in LENGTHS if length < longest] + [longest]
    times = {length: _ttft_s(length, settings, spec, ranks, device) for length in lengths}
    token_s = _token_s(longest, settings, spec, decoding, device)
    if hardware is None and Path(settings.scaling_information_base).is_file():
        step = latency_table(settings).step(settings.prefilling.instances, settings.prefilling.tp)
        times = {length: step.predict_ns(length) / 1e9 for length in lengths}
        plan = replace(plan, device=replace(device, origin="prompts as csps profile measured them"))
    return replace(plan, ttft_s=times, token_s=token_s)


def _check_gpus(settings: Settings, hardware: Hardware) -> None:
    ranks = sum(gang.ranks for gang in settings.gangs.values())
    for role, gang in settings.gangs.items():
        if not gang.num_gpus:
            raise ConfigError(
                f"{role}.num_gpus is 0, and --hardware plans for GPUs: set num_gpus to 1"
            )
    device = hardware.device
    if settings.weight_dtype == "fp8" and device.capability is not None:
        reason = unsupported_capability(device.name, device.capability)
        if reason is not None:
            raise ConfigError(without_fp8(reason))
    if ranks > hardware.count:
        shape = ", ".join(
            f"{role}.instances {gang.instances} x tp {gang.tp}"
            for role, gang in settings.gangs.items()
        )
        raise ConfigError(
            f"--hardware: {ranks} ranks need {ranks} GPUs ({shape}), there are {hardware.count}: "
            "lower instances or tp"
        )


def _check_fits(role: GangRole, need: RankNeed, settings: Settings, device: Device) -> None:
    assert device.gpu_bytes is not None, "a core has no memory of its own"
    if need.total <= device.gpu_bytes:
        return
    fitting = need.fitting(device.gpu_bytes - need.without_slots)
    remedy = f"at most {fitting} fit" if fitting > 0 else f"raise {role}.tp, the weights do not fit"
    raise ConfigError(
        f"{role}.kv_slots is {settings.gangs[role].kv_slots}: a rank needs "
        f"{need.total / GIB:.1f} GiB, and {device.name} has {device.gpu_bytes / GIB:.1f}: {remedy}"
    )


def _ttft_s(
    tokens: int,
    settings: Settings,
    spec: ModelSpec,
    ranks: Mapping[GangRole, RankNeed],
    device: Device,
) -> float:
    """Predict the first token of a prompt that all instances compute."""
    gang, need = settings.prefilling, ranks[settings.prefilling_role]
    instances, tp, element = gang.instances, gang.tp, settings.element_bytes
    products = 2 * _active_parameters(spec) * tokens
    attended = 4 * spec.heads * spec.head_dim * _pairs(spec, tokens)
    computing = products / device.product_flops + attended / device.attention_flops
    own, near = tokens / instances, len(spec.near_layers)
    # Queries, keys, values and outputs of other instances' heads (Ulysses), in every layer without
    # a window; in the others the keys and values in the window of the first row.
    heads = 2 * (spec.heads + spec.kv_heads) * spec.head_dim / tp
    exchanged = own * heads * element * (spec.layers - near) * (instances - 1) / instances
    if instances > 1:
        in_reach = 2 * spec.kv_heads * spec.head_dim / tp * element
        exchanged += near * min(own, spec.window or 0) * in_reach
    # Two sums over the ranks of an instance in every layer, as rings.
    summed = own * 2 * 2 * spec.hidden * element * spec.layers * (tp - 1) / tp
    last_layer = own * need.layer
    moved = (exchanged + summed + last_layer) / device.link_bytes_s
    first = need.weights / device.memory_bytes_s
    return float(computing / (instances * tp) + moved + first)


def _token_s(
    context: int, settings: Settings, spec: ModelSpec, need: RankNeed, device: Device
) -> float:
    """Predict one further token: the weights that it passes and the KV that it sees are read, both
    at all instances."""
    near = len(spec.near_layers)
    # What lies in a window lies at the master.
    in_windows = min(context, spec.window or 0) * near
    seen = in_windows + context * (spec.layers - near) / settings.decoding.instances
    parameters = _active_parameters(spec) + spec.vocab * spec.hidden
    passed = parameters * settings.element_bytes / settings.decoding.tp
    read = min(need.weights, passed) + seen * need.layer
    return float(read / device.memory_bytes_s)


def _pairs(spec: ModelSpec, tokens: int) -> float:
    """Count the queries and keys of a prompt that see each other, in all layers."""
    near, window = len(spec.near_layers), min(tokens, spec.window or tokens)
    in_window = tokens * window - window * window / 2
    return (spec.layers - near) * tokens * tokens / 2 + near * in_window


def _active_parameters(spec: ModelSpec) -> float:
    """Count the weights of one token's products."""
    attention = spec.hidden * spec.head_dim * 2 * (spec.heads + spec.kv_heads)
    total = 0.0
    for layer in range(spec.layers):
        experts = spec.experts_of(layer)
        width = spec.intermediate
        if experts is not None:
            width = experts.per_token * experts.intermediate + experts.shared_intermediate
        total += attention + 3 * spec.hidden * width
    return total


def lines(plan: Plan) -> Iterator[str]:
    """Yield the plan in words."""
    yield f"{'one rank':<10}{'weights':>11}{'KV':>11}{'step':>11}{'rest':>11}{'in all':>11}   slots"
    for role, need in plan.ranks.items():
        sizes = (need.weights, need.kv_cache, need.activations, need.fixed, need.total)
        yield f"{role:<10}" + "".join(f"{_size(size):>11}" for size in sizes) + f"   {need.slots}"
    for role, need in plan.ranks.items():
        if need.window_slots:
            yield (
                f"{_size(need.near)} of the KV of {role} are {need.window_slots} slots in layers "
                f"with a window; in the others a slot takes {need.slot} bytes"
            )
    slots = ", ".join(f"{role} {need.slot}" for role, need in plan.ranks.items())
    yield f"KV of a token on one rank, in bytes: {slots}"
    transfers = max(need.kv_transfer for need in plan.ranks.values())
    if transfers:
        yield f"and {_size(transfers)} of main memory for KV in transfer to or from each rank"
    longest = plan.longest_prompt
    why = "positions" if longest == plan.positions - 1 else "kv_slots"
    yield f"longest prompt: {longest} tokens, by {why} (the model has {plan.positions} positions)"
    short = min(LENGTHS[0], longest)
    yield (
        f"at once: {plan.at_once(longest + 1)} requests of that length, {plan.at_once(short)} of "
        f"{short} tokens"
    )
    times = ", ".join(f"{length}: {_seconds(s)}" for length, s in plan.ttft_s.items())
    yield f"predicted time to the first token by prompt: {times}"
    yield f"predicted time of a further token behind the longest: {_seconds(plan.token_s)}"
    yield f"speeds: {plan.device.origin}"
    if plan.fp8_on_cores:
        yield "these times do not count weight_dtype: fp8, which costs time on CPUs"


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"

"""Apply rotary position embedding (RoPE) at true positions, and read it from a configuration.

Supported scalings are those of the supported families: default, linear, dynamic NTK, YaRN, LongRoPE
and Llama 3. transformers 5 writes one object, `rope_parameters`; older checkpoints have
`rope_theta`, `partial_rotary_factor` and an object `rope_scaling` whose type may be called `type`.

Shape suffixes: t tokens, h heads, d head dim, r half of the rotated dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from csps.models.network.checkpoint_json import (
    CheckpointError,
    CheckpointJson,
    UnsupportedModelError,
)


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotation of a model's queries and keys, with any scaling of its frequencies worked out."""

    inverse_frequencies: tuple[float, ...]
    """Radians per position, for each pair of rotated dims. These are the leading dims of each head;
    the rest pass unchanged."""

    amplitude: float = 1.0
    """Factor on cos and sin: YaRN's attention temperature."""

    interleaved: bool = False
    """True if pairs are (0, 1), (2, 3), ... as in GLM; else they are (0, r), (1, r + 1), ... as in
    Llama."""

    query_growth: float = 0.0
    """Factor on the logarithm of the position by which queries grow; 0: they do not."""
    query_growth_step: int = 1
    """Positions after which queries are longer."""


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotation of each token of one forward pass, computed once and used by every layer."""

    cos_t1r: Tensor
    sin_t1r: Tensor
    interleaved: bool
    query_scale_t11: Tensor | None = None
    """Factor on rotated queries; None is 1."""
    windowed: Rotary | None = None
    """Rotation in layers with a window, if it is another one."""

    def __getitem__(self, tokens: slice) -> Rotary:
        """Return the rotation of some of the tokens."""
        scale_t11 = self.query_scale_t11
        return Rotary(
            cos_t1r=self.cos_t1r[tokens],
            sin_t1r=self.sin_t1r[tokens],
            interleaved=self.interleaved,
            query_scale_t11=None if scale_t11 is None else scale_t11[tokens],
            windowed=None if self.windowed is None else self.windowed[tokens],
        )


def rotary_at(spec: RopeSpec, positions_t: Tensor, dtype: torch.dtype) -> Rotary:
    """Compute cosines and sines for tokens at `positions_t` (t,), on its device, as `dtype`."""
    # Angles are fp32 whatever the dtype: bf16 cannot tell position 300 from 301.
    frequencies_r = torch.tensor(spec.inverse_frequencies, device=positions_t.device)
    angles_t1r = (positions_t.float()[:, None] * frequencies_r)[:, None, :]
    return Rotary(
        cos_t1r=angles_t1r.cos().mul_(spec.amplitude).to(dtype),
        sin_t1r=angles_t1r.sin().mul_(spec.amplitude).to(dtype),
        interleaved=spec.interleaved,
        query_scale_t11=_query_scale(spec, positions_t, dtype) if spec.query_growth else None,
    )


def _query_scale(spec: RopeSpec, positions_t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor that keeps attention sharp among many keys: Llama 4's, by steps."""
    steps_t = positions_t.float().div(spec.query_growth_step).floor()
    return (1 + spec.query_growth * torch.log1p(steps_t)).to(dtype)[:, None, None]


def rotate(x_thd: Tensor, rotary: Rotary, out_thd: Tensor) -> None:
    """Write `x_thd`, rotated, to `out_thd` of the same shape; the two may not overlap."""
    # Out of place, because x is a strided slice of the fused QKV product and must become contiguous
    # anyway: the rotation costs no pass of its own.
    rotated = 2 * rotary.cos_t1r.shape[-1]
    x1_thr, x2_thr = _pairs(x_thd[..., :rotated], rotary.interleaved)
    out1_thr, out2_thr = _pairs(out_thd[..., :rotated], rotary.interleaved)
    torch.mul(x1_thr, rotary.cos_t1r, out=out1_thr).addcmul_(x2_thr, rotary.sin_t1r, value=-1)
    torch.mul(x2_thr, rotary.cos_t1r, out=out2_thr).addcmul_(x1_thr, rotary.sin_t1r)
    out_thd[..., rotated:].copy_(x_thd[..., rotated:])


def _pairs(x_thd: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second dim of each rotated pair."""
    if interleaved:
        return x_thd[..., 0::2], x_thd[..., 1::2]
    first, second = x_thd.chunk(2, dim=-1)
    return first, second


@dataclass(frozen=True, kw_only=True)
class RopeSource:
    """RoPE parameters of config.json, old and new style brought together."""

    parameters: CheckpointJson
    theta: float
    dims: int
    """Rotated dims of a head."""
    max_positions: int
    original_positions: int
    """Context that the model was trained on before its frequencies were scaled."""


def read_rope(
    config: CheckpointJson,
    *,
    head_dim: int,
    max_positions: int,
    theta: float = 10_000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    growing_queries: bool = False,
) -> RopeSpec:
    """Return the rotation that `config` describes.

    Args:
        theta: the family's base of frequencies if config.json gives none.
        partial: the family's fraction of rotated dims if config.json gives none.
        growing_queries: the family scales queries by their position.

    Raises:
        UnsupportedModelError: a rope type not listed above.
        CheckpointError: a parameter that is missing or makes no sense.
    """
    source = _source(config, head_dim, max_positions, theta, partial)
    rope_type = _rope_type(source.parameters)
    if rope_type not in SCALINGS:
        known = ", ".join(sorted(SCALINGS))
        raise UnsupportedModelError(
            f"{config.path}: rope type {rope_type!r} is not supported; supported: {known}"
        )
    frequencies_r, amplitude = SCALINGS[rope_type](source)
    beta = source.parameters.number("llama_4_scaling_beta", 0.0) if growing_queries else 0.0
    return RopeSpec(
        inverse_frequencies=tuple(frequencies_r.tolist()),
        amplitude=amplitude,
        interleaved=interleaved,
        query_growth=beta,
        query_growth_step=source.original_positions if beta else 1,
    )


def scaled_max_positions(config: CheckpointJson, max_positions: int) -> int:
    """Return the context in tokens that config.json promises.

    YaRN checkpoints such as Qwen2.5 give the unscaled context in `max_position_embeddings`; for the
    other types that figure is the context itself.
    """
    parameters = _parameters(config)
    if _rope_type(parameters) != "yarn":
        # Dynamic NTK could go beyond it, but its frequencies then depend on the length of the
        # sequence: cached keys would have to be rotated anew with each token.
        return max_positions
    original = _original_positions(config, parameters, max_positions)
    return max(max_positions, int(original * parameters.number("factor", 1.0)))


def _parameters(config: CheckpointJson) -> CheckpointJson:
    return config.object("rope_parameters" if config.has("rope_parameters") else "rope_scaling")


def _rope_type(parameters: CheckpointJson) -> str:
    named = parameters.text("rope_type", parameters.text("type", "default"))
    # Phi-3's first files call it by its first name, or yarn.
    return "longrope" if named == "su" or parameters.has("long_factor") else named


def _source(
    config: CheckpointJson, head_dim: int, max_positions: int, theta: float, partial: float
) -> RopeSource:
    parameters = _parameters(config)
    partial = config.number("partial_rotary_factor", partial)
    dims = int(head_dim * parameters.number("partial_rotary_factor", partial))
    if dims < 2 or dims % 2 or dims > head_dim:
        raise CheckpointError(
            f"{config.path}: RoPE rotates {dims} of {head_dim} dims of a head; "
            "it must be an even number of them"
        )
    theta = parameters.number("rope_theta", config.number("rope_theta", theta))
    if theta <= 1 or parameters.number("factor", 1.0) <= 0:
        raise CheckpointError(f"{config.path}: RoPE needs a theta above 1 and a factor above 0")
    return RopeSource(
        parameters=parameters,
        theta=theta,
        dims=dims,
        max_positions=max_positions,
        original_positions=_original_positions(config, parameters, max_positions),
    )


def _original_positions(config: CheckpointJson, parameters: CheckpointJson, default: int) -> int:
    """Return the original context; the field beside the RoPE parameters wins, as in
    transformers."""
    key = "original_max_position_embeddings"
    return config.integer(key, parameters.integer(key, default))


def _unscaled(source: RopeSource) -> Tensor:
    exponents_r = torch.arange(0, source.dims, 2, dtype=torch.float32) / source.dims
    return 1.0 / source.theta**exponents_r


def _default(source: RopeSource) -> tuple[Tensor, float]:
    return _unscaled(source), 1.0


def _linear(source: RopeSource) -> tuple[Tensor, float]:
    """Divide all positions by the factor: position interpolation (arXiv 2306.15595)."""
    return _unscaled(source) / source.parameters.number("factor"), 1.0


def _dynamic(source: RopeSource) -> tuple[Tensor, float]:
    """Return unscaled frequencies: dynamic NTK is the identity inside `max_positions`."""
    return _unscaled(source), 1.0


def _llama3(source: RopeSource) -> tuple[Tensor, float]:
    """Stretch long waves by the factor, keep short ones and blend those between (Llama 3.1)."""
    parameters = source.parameters
    factor = parameters.number("factor")
    low = parameters.number("low_freq_factor")
    high = parameters.number("high_freq_factor")
    frequencies_r = _unscaled(source)
    turns_r = source.original_positions * frequencies_r / (2 * math.pi)
    unscaled_r = ((turns_r - low) / (high - low)).clamp(0, 1)
    return (1 - unscaled_r) * frequencies_r / factor + unscaled_r * frequencies_r, 1.0


def _yarn(source: RopeSource) -> tuple[Tensor, float]:
    """Scale frequencies by YaRN (arXiv 2309.00071): NTK by parts and an attention temperature."""
    factor = source.parameters.number("factor", source.max_positions / source.original_positions)
    low, high = _yarn_blended_dims(source)
    ramp_r = ((torch.arange(source.dims // 2) - low) / (high - low)).clamp(0, 1)
    frequencies_r = _unscaled(source)
    scaled_r = ramp_r * frequencies_r / factor + (1 - ramp_r) * frequencies_r
    return scaled_r, _yarn_amplitude(source.parameters, factor)


def _yarn_blended_dims(source: RopeSource) -> tuple[float, float]:
    """Return the pairs between which YaRN blends from unscaled to interpolated frequencies.

    Both beta_fast and beta_slow count turns over the original context.
    """

    def dim_of(turns: float) -> float:
        wavelength = source.original_positions / (turns * 2 * math.pi)
        return source.dims * math.log(wavelength) / (2 * math.log(source.theta))

    low = dim_of(source.parameters.number("beta_fast", 32.0))
    high = dim_of(source.parameters.number("beta_slow", 1.0))
    if source.parameters.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, source.dims - 1)
    return low, high if high != low else high + 0.001


def _yarn_amplitude(parameters: CheckpointJson, factor: float) -> float:
    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.has("attention_factor"):
        return parameters.number("attention_factor")
    mscale, all_dims = parameters.number("mscale", 0.0), parameters.number("mscale_all_dim", 0.0)
    if mscale and all_dims:
        return temperature(mscale) / temperature(all_dims)
    return temperature(1.0)


def _longrope(source: RopeSource) -> tuple[Tensor, float]:
    """Divide each frequency by a factor of its own (arXiv 2402.13753): the long factors if the
    context is longer than the original one."""
    # transformers takes the short factors for a sequence as long as it is short. Its cached keys
    # would have to be rotated anew once it grows beyond, so one set serves all, as in vLLM.
    parameters, original = source.parameters, source.original_positions
    key = "long_factor" if source.max_positions > original else "short_factor"
    factors_r = parameters.numbers(key)
    if len(factors_r) != source.dims // 2:
        raise CheckpointError(
            f"{parameters.path}: {key} must have {source.dims // 2} numbers, not {len(factors_r)}"
        )
    stretch = parameters.number("factor", source.max_positions / original)
    temperature = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    amplitude = parameters.number("attention_factor", temperature)
    return _unscaled(source) / torch.tensor(factors_r), amplitude


SCALINGS: Mapping[str, Callable[[RopeSource], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""Frequencies and amplitude by rope type."""

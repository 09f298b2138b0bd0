"""Where GLM-4 checkpoints (`GlmForCausalLM`) keep their tensors: as Llama, but with the gates and
ups of the MLP in one tensor."""

from dataclasses import replace

from csps.models.families import llama
from csps.models.parameters import LayerParameters, ModelParameters, Place, rows
from csps.models.spec import ModelSpec, Share


def places(spec: ModelSpec, share: Share) -> ModelParameters[Place]:
    """The places of every parameter that a rank with this share needs."""
    layers = tuple(_layer_places(spec, share, layer) for layer in range(spec.layers))
    return replace(llama.places(spec, share), layers=layers)


def _layer_places(spec: ModelSpec, share: Share, layer: int) -> LayerParameters[Place]:
    tensor, width = f"model.layers.{layer}.mlp.gate_up_proj.weight", spec.intermediate
    shape, gates = (2 * width, spec.hidden), share.intermediate
    ups = range(width + gates.start, width + gates.stop)
    gate_up = (*rows(tensor, shape, gates), *rows(tensor, shape, ups))
    return replace(llama.layer_places(spec, share, layer), gate_up=gate_up)

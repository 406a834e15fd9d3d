"""The weights that a basis of V belongs to: which models it is folded into, and a digest that tells them.

A basis is folded into the rows of the projection that makes V and the columns of the one that attention's
output goes through, where both are plain floats with nothing between them. Elsewhere weights stay as they
are, and the runtime rotates V into the basis as it is stored, and the output back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import FLOAT_DTYPES, Checkpoint
from leank_convert.errors import LeanKError, shorten
from leank_convert.families import attention_tensor
from leank_convert.mask_provenance import MaskProvenance
from leank_convert.safetensors_file import TensorInfo


def is_folded_into(checkpoint: Checkpoint, facts: ModelFacts) -> bool:
    """Whether a basis of V is folded into a model's weights: floats, with no gates between them."""
    return not facts.architecture.gated and _find_quantized(checkpoint, facts) is None


def check_measurable(checkpoint: Checkpoint, facts: ModelFacts) -> None:
    """Refuse, by a LeanKError, to measure a basis of V on a model whose V or O is quantized or missing."""
    if (name := _find_quantized(checkpoint, facts)) is not None:
        raise LeanKError(
            f"no basis of V is measured on model `{checkpoint.folder}`, whose `{name}` is quantized",
            hint="measure it on the model that it was quantized from, whose `channel_mask.safetensors` "
            "prunes this one's V too (`--mask`), or leave V as it is: a `value_pruning_ratio` of 0",
        )


def _find_quantized(checkpoint: Checkpoint, facts: ModelFacts) -> str | None:
    """The first weight of V or O that is no plain floats; LeanKError if one is missing."""
    for layer in facts.layers:
        for name in (_values_of(checkpoint, layer), attention_tensor(layer, "o_proj.weight")):
            found = checkpoint.find(name)
            if stored_in(checkpoint, name) - {"weight"} or (
                found is not None and found.dtype not in FLOAT_DTYPES
            ):
                return name
            if found is None:
                raise LeanKError(f"`{checkpoint.folder}`: tensor `{name}` is missing")
    return None


def stored_in(checkpoint: Checkpoint, weight: str) -> set[str]:
    """Names within a weight's module of all that it is stored in."""
    stem = weight.removesuffix(".weight")
    names = (*checkpoint.names_in(stem), *checkpoint.names_in(weight))
    return {name[len(stem) + 1 :] for name in names} - {"bias"}


def check_values_belong(
    known: MaskProvenance,
    checkpoint: Checkpoint,
    facts: ModelFacts,
    *,
    name: str | None,
    mask_origin: str,
    model_origin: str,
) -> None:
    """Check that a mask's basis of V is of a model's weights; LeanKError if not.

    Any basis serves any weights exactly, and one of weights that differ by rounding nearly as well as their
    own. So nothing is asked of quantized weights, nor where a mask that names no weights, as packaged ones
    do, meets a model of the name that it gives.
    """
    if _find_quantized(checkpoint, facts) is not None:
        return
    if known.value_weights is None:
        if name == known.model:
            return
        raise LeanKError(
            f"mask `{mask_origin}` has a basis of V for copies of {shorten(known.model)}, and nothing says "
            f"that model `{model_origin}` is one",
            hint="measure one for it by `leank-convert export --value-pruning-ratio`, with a mask without",
        )
    if known.value_weights != digest_values(checkpoint, facts):
        raise LeanKError(
            f"mask `{mask_origin}` has a basis of V for other weights of `v_proj` and `o_proj` than those of "
            f"model `{model_origin}`",
            hint=f"name the weights that it was measured on, {shorten(known.model)}, or measure one for "
            "these by `leank-convert export --value-pruning-ratio`, with a mask without",
        )


def digest_values(checkpoint: Checkpoint, facts: ModelFacts) -> str:
    """SHA-256, in hexadecimal, of the stored bytes of all pruned layers' weights and biases of V, and of O.

    Layer by layer: rows of V, its bias where there is one, the whole weight of `o_proj`.

    Raises:
        LeanKError: As `check_measurable`.
    """
    check_measurable(checkpoint, facts)
    digest = hashlib.sha256()
    for layer in facts.layers:
        for tensor, start in _parts(checkpoint, facts, layer):
            header = checkpoint.shards[checkpoint.shard_of(tensor.name) or ""]
            first, stop = (header.data_start + place for place in (tensor.start + start, tensor.stop))
            digest.update(np.memmap(header.path, np.uint8, "r", first, stop - first).data)
    return digest.hexdigest()


def _values_of(checkpoint: Checkpoint, layer: int) -> str:
    """The weight that makes V, alone or behind Q and K."""
    fused = attention_tensor(layer, "qkv_proj.weight")
    return attention_tensor(layer, "v_proj.weight") if checkpoint.find(fused) is None else fused


def _parts(checkpoint: Checkpoint, facts: ModelFacts, layer: int) -> Iterator[tuple[TensorInfo, int]]:
    """A layer's tensors, and where in each V begins, in bytes."""
    weight = _values_of(checkpoint, layer)
    before = facts.num_attention_heads + facts.num_key_value_heads if "qkv_proj" in weight else 0
    blocks = before + facts.num_key_value_heads
    for name in (weight, f"{weight.removesuffix('weight')}bias"):
        tensor = checkpoint.find(name)
        if tensor is not None:
            yield tensor, tensor.num_bytes // blocks * before
    output = checkpoint.find(attention_tensor(layer, "o_proj.weight"))
    assert output is not None  # checked above
    yield output, 0

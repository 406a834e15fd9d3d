"""Plan of an export, made before anything is written: config + mask + architecture → tensor edits.

Pure data. Every tensor the model must have is looked up in the headers here, so that what follows can only
fail for want of a disk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import CONFIG_NAME, FLOAT_DTYPES, Checkpoint
from leank_convert.config_class import build_config, refused_by_transformers
from leank_convert.errors import LeanKError, cut
from leank_convert.export.quantized import (
    check_cache_scales,
    check_quantization,
    check_scaled,
    find_moving,
    is_quantized,
)
from leank_convert.families import attention_tensor
from leank_convert.head_layout import HeadLayout, plan_head_layout
from leank_convert.kv_scales import KVScales, name_scale_tensors
from leank_convert.mask import MASK_FILE_NAME, ChannelMask
from leank_convert.value_weights import is_folded_into

_HEAD = "lm_head.weight"
# Tensors of a layer's attention that heads have parts of.
_ATTENTION_TENSOR = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"((?P<of_input>[qkv]_proj|(?P<fused>qkv_proj))\.(weight|bias)|(?P<norm>[qk]_norm)\.weight|sinks"
    r"|(?P<of_output>o_proj)\.weight)"
)


@dataclass(frozen=True)
class TensorEdit:
    """One tensor whose heads are put in another order, and whose channels of V may be folded."""

    dim: int  # that runs over heads: 0 for rows, 1 for columns
    permutation: tuple[int, ...]  # [new] = old over the blocks of that dimension, which are of one size
    runs: int | None = None  # of such blocks, where the tensor's shape does not tell
    # What is folded into every block, by its old place: float64 [D, D], or None for nothing.
    bases: tuple[Tensor | None, ...] | None = field(default=None, compare=False)

    def count_runs(self, shape: Sequence[int]) -> int:
        """How many runs of blocks, one behind the other, a tensor of a shape is."""
        return self.runs or math.prod(shape[: self.dim])


@dataclass(frozen=True)
class ExportPlan:
    """Everything that an export does to weights."""

    layout: HeadLayout
    edits: Mapping[str, TensorEdit]  # by tensor; every other one is copied as it is
    added: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # by file and name

    @property
    def folds_values(self) -> bool:
        """Whether a basis of V is folded into the weights."""
        return any(edit.bases is not None for edit in self.edits.values())

    @property
    def num_added_bytes(self) -> int:
        """Size of the tensors that the source has not."""
        return sum(tensor.nbytes for tensors in self.added.values() for tensor in tensors.values())


def plan_export(
    checkpoint: Checkpoint, mask: ChannelMask, facts: ModelFacts, scales: KVScales | None = None
) -> ExportPlan:
    """Plan an export by a mask that fits the model, and check the source's headers against it.

    Raises:
        LeanKError: If a tensor is missing or has another shape, quantized weights cannot be permuted, or
            scales are another model's.
    """
    layout = plan_head_layout(mask.widths)
    edits = plan_edits(checkpoint, facts, layout.head_permutation, mask.value_basis)
    _refuse_own_names(checkpoint, facts)
    return ExportPlan(
        layout, edits, {} if scales is None else _plan_scales(checkpoint, facts, layout, scales, edits)
    )


def _plan_scales(
    checkpoint: Checkpoint, facts: ModelFacts, layout: HeadLayout, scales: KVScales, edits: Iterable[str]
) -> dict[str, dict[str, Tensor]]:
    """Scales by the file that holds what is edited of their layer's output projection."""
    shape = facts.mask_shape
    if scales.keys.shape != shape or scales.values.shape != shape:
        raise LeanKError(
            f"scales are {list(scales.keys.shape)} and {list(scales.values.shape)}, the model has "
            f"{list(shape)} (layers, KV heads, channels)",
            hint="measure them on this model",
        )
    added: dict[str, dict[str, Tensor]] = {}
    for layer, tensors in zip(facts.layers, scales.tensors(facts, layout.head_permutation), strict=True):
        output = attention_tensor(layer, "o_proj.")
        shard = checkpoint.shard_of(next(name for name in edits if name.startswith(output)))
        assert shard is not None  # or it would have been missed above
        added.setdefault(shard, {}).update(tensors)
    return added


def plan_edits(
    checkpoint: Checkpoint,
    facts: ModelFacts,
    head_permutation: Sequence[Sequence[int]] | None = None,
    value_basis: Tensor | None = None,
) -> dict[str, TensorEdit]:
    """Plan the edits of a new order of heads, by tensor, and check all of a model's tensors.

    Rows of Q, K and V, their biases and norms over all heads, and columns of O move in one block per KV head
    each; of Q, K and V in one projection, rows move in blocks of D. O's bias is added after the heads are
    mixed, and a norm `[D]` is shared by all heads: both stay. Scales of a quantized projection move with what
    they belong to.

    The order is `[pruned layer][new] = old`, of KV heads, by default the model's own; a basis of V
    [L, H_kv, D, D], in the old order, is folded into V and O where it can be. LeanKError if a tensor is
    missing or of another shape or dtype, or cannot be permuted.
    """
    check_quantization(checkpoint)
    if value_basis is not None:
        value_basis = value_basis.double() if is_folded_into(checkpoint, facts) else None
    for layer in range(facts.num_hidden_layers):
        check_cache_scales(checkpoint, layer)
    shapes = list_stock_tensors(facts, origin=str(checkpoint.folder / CONFIG_NAME))
    if facts.tie_word_embeddings and checkpoint.find(_HEAD) is None:
        shapes.pop(_HEAD, None)
    edits: dict[str, TensorEdit] = {}
    for name, shape in {**_find_more_biases(checkpoint, shapes), **shapes}.items():
        edit = plan_edit(name, shape, facts, head_permutation, value_basis)
        if not is_quantized(checkpoint, name):
            _expect(checkpoint, name, shape)
            edits.update({} if edit is None else {name: edit})
            continue
        check_scaled(checkpoint, name)
        if edit is not None:  # where it stays, any layout will do
            moving = find_moving(checkpoint, name, shape, edit.dim, len(edit.permutation))
            edits.update((each, replace(edit, runs=runs)) for each, runs in moving.items())
    return edits


def list_stock_tensors(facts: ModelFacts, *, origin: str) -> dict[str, tuple[int, ...]]:
    """List the shapes of a model's tensors, by the names that they have in files.

    The model is built without memory for its weights. `origin` is its config.json, for messages.

    Raises:
        LeanKError: If transformers makes no model of its config.json.
    """
    # Imported here: it takes more than a second, which an import of the toolkit need not.
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    config = build_config(facts.config, facts.architecture, origin=origin)
    with refused_by_transformers(origin), torch.device("meta"):
        model: Any = getattr(transformers, facts.architecture.causal_lm_class)(config)
        # In memory, experts lie in one tensor that files hold in parts.
        tensors = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def plan_edit(
    name: str,
    shape: tuple[int, ...],
    facts: ModelFacts,
    head_permutation: Sequence[Sequence[int]] | None = None,
    value_basis: Tensor | None = None,
) -> TensorEdit | None:
    """Plan the edit of one of a model's tensors, as `plan_edits`; None for one that stays as it is.

    The basis is in float64.
    """
    match = _ATTENTION_TENSOR.fullmatch(name)
    layer = -1 if match is None else int(match["layer"])
    if match is None or layer not in facts.layers or (match["norm"] and shape == (facts.head_dim,)):
        return None
    place, folded = facts.layers.index(layer), None
    order = tuple(range(facts.num_key_value_heads) if head_permutation is None else head_permutation[place])
    folds = match["of_output"] or match["fused"] or match["of_input"] == "v_proj"
    if value_basis is not None and folds:
        before = facts.num_attention_heads + facts.num_key_value_heads if match["fused"] else 0
        folded = (*(None,) * before, *value_basis[place])
    permutation = _fused_order(facts, order) if match["fused"] else order
    return TensorEdit(1 if match["of_output"] else 0, permutation, bases=folded)


def _find_more_biases(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Biases of Q, K and V that the config does not ask for, and that are there: engines may read them."""
    found = {}
    for name, shape in shapes.items():
        match, bias = _ATTENTION_TENSOR.fullmatch(name), f"{name.removesuffix('weight')}bias"
        if match and match["of_input"] and bias not in shapes and checkpoint.find(bias) is not None:
            found[bias] = shape[:1]
    return found


def _fused_order(facts: ModelFacts, permutation: tuple[int, ...]) -> tuple[int, ...]:
    """`[new] = old` over the heads of q, k and v, one behind the other."""
    groups, queries = facts.num_key_value_groups, facts.num_attention_heads
    order = [old * groups + query for old in permutation for query in range(groups)]
    for start in (queries, queries + facts.num_key_value_heads):
        order += [start + old for old in permutation]
    return tuple(order)


def _refuse_own_names(checkpoint: Checkpoint, facts: ModelFacts) -> None:
    """Refuse a source with the names that a checkpoint has for its mask and scales."""
    if MASK_FILE_NAME in checkpoint.shards:
        raise LeanKError(
            f"`{checkpoint.folder}`: a shard is named `{MASK_FILE_NAME}`, as a checkpoint's mask file is",
            hint="rename it, and in its index",
        )
    for name in (name for layer in name_scale_tensors(facts) for name in layer):
        if checkpoint.find(name) is not None:
            raise LeanKError(f"`{checkpoint.folder}` has a tensor `{name}`, which is a checkpoint's")


def _expect(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """Check a tensor that is not quantized."""
    found = checkpoint.find(name)
    if found is None:
        files = ", ".join(f"`{shard}`" for shard in list(checkpoint.shards)[:3])
        more = len(checkpoint.shards) - 3
        raise LeanKError(
            f"`{checkpoint.folder}`: tensor `{name}` is missing, which config.json asks for; looked in "
            + files
            + (f" and {more} more" if more > 0 else ""),
            hint="compare config.json with that of the original model",
        )
    what = f"`{checkpoint.folder / (checkpoint.shard_of(name) or '')}`: tensor `{name}` has"
    if found.dtype not in FLOAT_DTYPES:
        raise LeanKError(
            f"{what} dtype {found.dtype}, and config.json no `quantization_config` that says what that means",
            hint="convert the model it was quantized from",
        )
    if found.shape != shape:
        raise LeanKError(f"{what} shape {cut(list(found.shape))}; config.json asks for {list(shape)}")

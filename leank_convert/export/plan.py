"""Plan of an export, made before anything is written: config + mask + architecture → tensor edits.

Pure data. Every tensor the model must have is looked up in the headers here, so that what follows can only
fail for want of a disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import Checkpoint
from leank_convert.errors import LeanKError, cut
from leank_convert.export.quantized import (
    FLOAT_DTYPES,
    check_cache_scales,
    check_quantization,
    check_scaled,
    find_moving_scales,
    is_quantized,
)
from leank_convert.families import MODEL_TENSORS, Shapes, evaluate_size, find_size_keys
from leank_convert.head_layout import HeadLayout, plan_head_layout
from leank_convert.kv_scales import KVScales, name_scale_tensors
from leank_convert.mask import MASK_FILE_NAME, ChannelMask


@dataclass(frozen=True)
class TensorEdit:
    """One tensor whose heads are put in another order.

    Attributes:
        tensor: Its name.
        dim: The dimension that runs over heads: 0 for rows, 1 for columns.
        permutation: `[new] = old` over the blocks of that dimension, which are of one size.
    """

    tensor: str
    dim: int
    permutation: tuple[int, ...]


@dataclass(frozen=True)
class ExportPlan:
    """Everything that an export does to weights.

    Attributes:
        layout: The heads' order and widths.
        edits: Permuted tensors by name; every other tensor is copied as it is.
        added: Tensors that the source has not, by file and name.
    """

    layout: HeadLayout
    edits: Mapping[str, TensorEdit]
    added: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def num_added_bytes(self) -> int:
        """Size of the tensors that the source has not."""
        return sum(tensor.nbytes for tensors in self.added.values() for tensor in tensors.values())


def plan_export(
    checkpoint: Checkpoint, mask: ChannelMask, facts: ModelFacts, scales: KVScales | None = None
) -> ExportPlan:
    """Plan an export and check the source's headers against it.

    Args:
        checkpoint: The source.
        mask: A mask that fits the model.
        facts: The source's facts.
        scales: Of an FP8 cache, to be written beside each layer's keys.

    Raises:
        LeanKError: If a tensor is missing or has another shape, quantized weights cannot be permuted, or
            scales are another model's.
    """
    layout = plan_head_layout(mask.widths)
    edits: dict[str, TensorEdit] = {}
    check_unedited(checkpoint, facts)
    _refuse_own_names(checkpoint, facts)
    for layer, permutation in zip(facts.layers, layout.head_permutation, strict=True):
        for edit in plan_layer(checkpoint, facts, layer, permutation):
            edits[edit.tensor] = edit
    return ExportPlan(
        layout, edits, {} if scales is None else _plan_scales(checkpoint, facts, layout, scales)
    )


def _plan_scales(
    checkpoint: Checkpoint, facts: ModelFacts, layout: HeadLayout, scales: KVScales
) -> dict[str, dict[str, Tensor]]:
    """Scales by the file of their layer's attention."""
    shape = facts.mask_shape
    if scales.keys.shape != shape or scales.values.shape != shape:
        raise LeanKError(
            f"scales are {list(scales.keys.shape)} and {list(scales.values.shape)}, the model has "
            f"{list(shape)} (layers, KV heads, channels)",
            hint="measure them on this model",
        )
    added: dict[str, dict[str, Tensor]] = {}
    for layer, tensors in zip(facts.layers, scales.tensors(facts, layout.head_permutation), strict=True):
        shard = checkpoint.shard_of(facts.architecture.attention_tensor(layer, "o_proj.weight"))
        assert shard is not None  # or it would have been missed above
        added.setdefault(shard, {}).update(tensors)
    return added


def plan_layer(
    checkpoint: Checkpoint, facts: ModelFacts, layer: int, permutation: tuple[int, ...]
) -> list[TensorEdit]:
    """Plan the edits of one layer, none without a permutation, and check its attention tensors.

    Q rows move in blocks of G·D, K and V rows in blocks of D, biases and norms over all heads likewise, O
    columns in blocks of G·D: one block per KV head each. Of Q, K and V in one projection, rows move in blocks
    of D. O's bias is added after the heads are mixed, and a norm `[D]` is shared by all heads: both stay.
    Scales of a quantized projection move where they belong to what moves.

    Raises:
        LeanKError: If a tensor is missing or has another shape, or quantized weights cannot be permuted.
    """
    queries, keys = facts.num_attention_heads * facts.head_dim, facts.num_key_value_heads * facts.head_dim
    family = facts.architecture
    edits: list[TensorEdit] = []

    def expect(tensor: str, shape: tuple[int, ...], order: tuple[int, ...] = (), dim: int = 0) -> None:
        name = family.attention_tensor(layer, tensor)
        moving = [name]
        if not order or not is_quantized(checkpoint, name):
            _expect(checkpoint, name, shape)
        else:
            check_scaled(checkpoint, name)
            moving += find_moving_scales(checkpoint, name, shape, dim, len(order))
            _check_shape(checkpoint, name, shape)
        if order:
            edits.extend(TensorEdit(each, dim, order) for each in moving)

    check_cache_scales(checkpoint, family.attention_prefix.format(layer=layer))
    gated = 2 if family.gated_query else 1
    projections, order = [("q_proj", gated * queries), ("k_proj", keys), ("v_proj", keys)], permutation
    if family.fused_qkv:
        projections, order = [("qkv_proj", queries + 2 * keys)], _fused_order(facts, permutation)
    expect("o_proj.weight", (facts.hidden_size, queries), permutation, dim=1)
    for projection, rows in projections:
        expect(f"{projection}.weight", (rows, facts.hidden_size), order)
        bias = f"{projection}.bias"
        if facts.qkv_bias or checkpoint.find(family.attention_tensor(layer, bias)) is not None:
            expect(bias, (rows,), order)
    if facts.o_bias:
        expect("o_proj.bias", (facts.hidden_size,))
    if family.sinks:
        expect("sinks", (facts.num_attention_heads,), permutation)
    for norm, rows in (("q_norm.weight", queries), ("k_norm.weight", keys)):
        if facts.qk_norm == "heads":
            expect(norm, (rows,), permutation)
        elif facts.qk_norm == "head":
            expect(norm, (facts.head_dim,))
    return edits


def _fused_order(facts: ModelFacts, permutation: tuple[int, ...]) -> tuple[int, ...]:
    """`[new] = old` over the heads of q, k and v, one behind the other."""
    groups, queries = facts.num_key_value_groups, facts.num_attention_heads
    order = [old * groups + query for old in permutation for query in range(groups)]
    for start in (queries, queries + facts.num_key_value_heads):
        order += [start + old for old in permutation]
    return tuple(order)


def check_unedited(checkpoint: Checkpoint, facts: ModelFacts) -> None:
    """Check that every tensor outside pruned attention is there, and what config.json says of quantization.

    Raises:
        LeanKError: If one is missing or has another shape, or a dtype of quantized weights in a model that
            is not quantized.
    """
    check_quantization(checkpoint)
    _check_kinds_of_mlps(checkpoint, facts)
    for name, shape in _unedited(checkpoint, facts).items():
        _expect(checkpoint, name, shape)
    family = facts.architecture
    for layer in sorted({*range(facts.num_hidden_layers)} - {*facts.layers}):
        if not family.other_tensors:
            plan_layer(checkpoint, facts, layer, ())
        for tensor, sizes in family.other_tensors.items():
            _expect_other(checkpoint, facts, f"{family.layer_prefix.format(layer=layer)}.{tensor}", sizes)
    head = facts.architecture.head_tensor
    if not facts.tie_word_embeddings or checkpoint.find(head) is not None:
        _expect(checkpoint, head, (facts.vocab_size, facts.hidden_size))


def _unedited(checkpoint: Checkpoint, facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors outside attention, but for the language-modelling head."""
    family, experts = facts.architecture, facts.architecture.experts
    sizes: dict[str, tuple[int, ...]] = {}

    def add(prefix: str, tensors: Shapes) -> None:
        for name, shape in tensors.items():
            sizes[prefix + name] = tuple(getattr(facts, size) for size in shape)
            if facts.mlp_bias and name.startswith("mlp."):
                sizes[f"{prefix}{name.removesuffix('weight')}bias"] = (getattr(facts, shape[0]),)

    add("", MODEL_TENSORS)
    for layer in range(facts.num_hidden_layers):
        prefix = family.layer_prefix.format(layer=layer) + "."
        tensors = dict(family.layer_tensors)
        if experts and layer in facts.expert_layers:
            sizes[prefix + experts.router] = (facts.num_experts, facts.hidden_size)
            tensors = {name: shape for name, shape in tensors.items() if not name.startswith("mlp.")}
            tensors.update(experts.beside)
            for expert in range(facts.num_experts):
                tensors.update((name.format(expert=expert), shape) for name, shape in experts.tensors.items())
        add(prefix, tensors)
    return sizes


def _check_kinds_of_mlps(checkpoint: Checkpoint, facts: ModelFacts) -> None:
    """Refuse a layer with experts where config.json asks for a plain MLP, or the reverse.

    transformers would go on with an MLP of random values.
    """
    family, experts = facts.architecture, facts.architecture.experts
    if experts is None:
        return
    plain = [name for name in family.layer_tensors if name.startswith("mlp.") and name != experts.router]
    if not plain:
        return  # all layers have experts, and the router is asked for by name
    of_kind = {"a mixture of experts": experts.router, "a plain MLP": plain[0]}
    for layer in range(facts.num_hidden_layers):
        asked, other = of_kind if layer in facts.expert_layers else reversed(of_kind)
        wanted, name = (
            f"{family.layer_prefix.format(layer=layer)}.{of_kind[kind]}" for kind in (asked, other)
        )
        found = checkpoint.find(name)
        if found is None or checkpoint.find(wanted) is not None or is_quantized(checkpoint, wanted):
            continue
        raise LeanKError(
            f"`{_file_of(checkpoint, name)}`: tensor `{name}` has shape {cut(list(found.shape))}, of {other};"
            f" config.json asks for {asked} in layer {layer}{_stated(checkpoint, facts, experts.plain_keys)}",
            hint="compare config.json with that of the model that it was made of",
        )


def _stated(checkpoint: Checkpoint, facts: ModelFacts, keys: Iterable[str]) -> str:
    """Keys of config.json with their values, for a message; without those that are nowhere."""
    values = {**facts.other_sizes, **checkpoint.config}
    stated = [f"`{key}`: {cut(values[key])}" for key in dict.fromkeys(keys) if key in values]
    return f" ({', '.join(stated)})" if stated else ""


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


def _expect_other(checkpoint: Checkpoint, facts: ModelFacts, name: str, sizes: tuple[str, ...]) -> None:
    """Check a tensor of a layer that has none of attention's, and name the keys of sizes that differ."""
    shape = tuple(evaluate_size(size, facts.other_sizes) for size in sizes)
    found = checkpoint.find(name)
    held = found.shape if found is not None and len(found.shape) == len(shape) else [None] * len(shape)
    wrong = [size for size, count, has in zip(sizes, shape, held, strict=True) if count != has]
    keys = (key for size in wrong for key in find_size_keys(size))
    _expect(checkpoint, name, shape, _stated(checkpoint, facts, keys))


def _expect(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], stated: str = "") -> None:
    """Check a tensor that stays as it is, or is plain; of a quantized one any layout will do."""
    if is_quantized(checkpoint, name):
        check_scaled(checkpoint, name)
        return
    found = checkpoint.find(name)
    if found is None:
        raise _missing(checkpoint, name)
    if found.dtype not in FLOAT_DTYPES:
        raise LeanKError(
            f"`{_file_of(checkpoint, name)}`: tensor `{name}` has dtype {found.dtype}, and config.json no "
            "`quantization_config` that says what that means",
            hint="convert the model it was quantized from",
        )
    _check_shape(checkpoint, name, shape, stated)


def _check_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], stated: str = "") -> None:
    found = checkpoint.find(name)
    assert found is not None
    if found.shape != shape:
        raise LeanKError(
            f"`{_file_of(checkpoint, name)}`: tensor `{name}` has shape {cut(list(found.shape))}; "
            f"config.json asks for {list(shape)}{stated}"
        )


def _file_of(checkpoint: Checkpoint, name: str) -> Path:
    return checkpoint.folder / (checkpoint.shard_of(name) or "")


def _missing(checkpoint: Checkpoint, name: str) -> LeanKError:
    files = ", ".join(f"`{shard}`" for shard in list(checkpoint.shards)[:3])
    more = len(checkpoint.shards) - 3
    return LeanKError(
        f"`{checkpoint.folder}`: tensor `{name}` is missing; looked in {files}"
        + (f" and {more} more" if more > 0 else "")
    )

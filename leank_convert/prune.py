"""A model that transformers has loaded, pruned in memory for as long as a `with` block runs.

Nothing is written and no weight changes: an export sorts heads by their widths, and the runtime reads them in
any order. So adapters of the model fit as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from torch import nn

from leank_convert._runtime import modeling_leank
from leank_convert._runtime.attention_leank import ATTENTION_NAME
from leank_convert._runtime.capture_leank import GraphMemory
from leank_convert._runtime.fused_step_leank import own_storages
from leank_convert.architectures import ModelFacts, read_model_facts
from leank_convert.errors import LeanKError
from leank_convert.export.config_json import build_leank_facts
from leank_convert.export.packaged import find_packaged
from leank_convert.head_layout import HeadLayout
from leank_convert.mask import ChannelMask, check_mask_fits, load_mask, resolve_mask
from leank_convert.mask_provenance import MaskProvenance
from leank_convert.windows import Windows

MaskSource = ChannelMask | str | os.PathLike[str] | None


@contextmanager
def prune_model(
    model: Any,
    mask: ChannelMask | str | os.PathLike[str] | None = None,
    *,
    sink_size: int | None = None,
    recent_size: int | None = None,
    flush_size: int | None = None,
) -> Iterator[Any]:
    """Let a loaded model decode from a pruned cache within a `with` block; behind it, it is as it was.

    Args:
        model: A causal language model of transformers' own class, adapters in place or not. Its `generate`
            takes what that of a checkpoint takes, `kv_dtype` among it.
        mask: A mask, its file, the folder of a training run or checkpoint, a hub id, or the name of a
            packaged mask; None for the packaged one of the model, of several that for 0.7. If it prunes V,
            its basis has to be of this model's weights, which nothing in memory tells.
        sink_size: First tokens that keep every channel; by default the mask's, else 128.
        recent_size: Last tokens that keep every channel; by default the mask's, else 1024.
        flush_size: Tokens that leave the recent window at once; by default the mask's, else 32.

    Yields:
        The model itself.

    Raises:
        LeanKError: If it is no such model, is pruned already, is spread over devices, or the mask cannot be
            read or is not made for it.
    """
    undo = apply_mask(model, mask, sink_size=sink_size, recent_size=recent_size, flush_size=flush_size)
    try:
        yield model
    finally:
        undo()


def apply_mask(model: Any, mask: MaskSource, **sizes: int | None) -> Callable[[], None]:
    """Prune a loaded model, as `prune_model`; return what undoes it. After an error it is as it was."""
    stock, facts = _check_model(model)
    name = model.config.name_or_path or stock.__name__
    mask, origin = find_mask(mask, name)
    check_mask_fits(mask, facts, mask_origin=origin, model_origin=name)
    known = mask.provenance or MaskProvenance.for_model(name, facts, method="imported", **Windows().sizes)
    given = {key: size for key, size in sizes.items() if size is not None}
    windows = Windows(**{**{key: getattr(known, key) for key in Windows().sizes}, **given})
    orders = tuple(tuple(range(facts.num_key_value_heads)) for _ in facts.layers)
    layout = HeadLayout(orders, tuple(map(tuple, mask.widths)))
    block = build_leank_facts(mask, known, layout, windows, {}, folds_values=False)
    means = None if mask.key_mean is None else [own.float()[None] for own in mask.key_mean]
    bases = None if mask.value_basis is None else list(mask.value_basis)

    joined, attention = _joined(model), model.config._attn_implementation
    configs = [(config, config._attn_implementation) for config in _configs(model)]
    model.__class__ = getattr(modeling_leank, f"LeanK{stock.__name__}")
    model.graph_memory, model.key_means, model.value_bases = GraphMemory(), means, bases
    for config, _ in configs:
        config.leank, config._attn_implementation = block, ATTENTION_NAME
    hook = model.register_state_dict_post_hook(own_storages)

    def undo() -> None:
        # Whatever became of them in between, such as another config in the place of this one.
        hook.remove()
        model.__class__ = stock
        for config, own in [*((config, attention) for config in _configs(model)), *configs]:
            config.__dict__.pop("leank", None)
            config._attn_implementation = own
        for name in ("key_means", "value_bases", "graph_memory"):
            model.__dict__.pop(name, None)
        for parameter in _joined(model) - joined:  # which decoding laid side by side
            parameter.data = parameter.data.clone()

    return undo


def _check_model(model: Any) -> tuple[type[Any], ModelFacts]:
    """Return a model's class and facts; LeanKError if it cannot be pruned as it stands in memory."""
    stock, name = type(model), type(model).__name__
    if getattr(getattr(model, "config", None), "leank", None) is not None:
        raise LeanKError(f"`{name}` is pruned already", hint="load the original, or leave the other block")
    if not isinstance(model, transformers.PreTrainedModel) or getattr(transformers, name, None) is not stock:
        raise LeanKError(
            f"`{name}` is no causal language model of transformers' own class",
            hint="load it by `AutoModelForCausalLM`; of a PEFT model pass `get_base_model()`",
        )
    facts = read_model_facts(model.config.to_dict(), origin=model.config.name_or_path or name)
    if name != facts.architecture.causal_lm_class:
        raise LeanKError(
            f"`{name}` is not `{facts.architecture.causal_lm_class}`", hint="load the causal language model"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise LeanKError(f"weights of `{name}` are not in memory", hint="load it without offloading")
    if "forward" in vars(model):
        raise LeanKError(
            f"`{name}` has a forward pass of its own, as models over several devices and compiled ones have",
            hint="load it on one device, and compile it within the block",
        )
    return stock, facts


def find_mask(mask: MaskSource, name: str) -> tuple[ChannelMask, str]:
    """Return a mask, and what messages call it."""
    if isinstance(mask, ChannelMask):
        return mask, "mask"
    path = find_packaged(name, None) if mask is None else resolve_mask(mask)
    if path is None:
        raise LeanKError(f"no packaged mask for `{name}`", hint="pass one as `mask`")
    return load_mask(path), str(path)


def _configs(model: nn.Module) -> list[Any]:
    """Return the configs that modules read: the model's, and those of modules that PEFT copied."""
    found = (getattr(module, "config", None) for module in model.modules())
    return [config for config in found if isinstance(config, transformers.PreTrainedConfig)]


def _joined(model: nn.Module) -> set[nn.Parameter]:
    """Return parameters that share their memory with others; of quantized weights not all tell."""
    return {
        parameter
        for parameter in model.parameters()
        if type(parameter) is nn.Parameter and parameter.untyped_storage().nbytes() != parameter.nbytes
    }

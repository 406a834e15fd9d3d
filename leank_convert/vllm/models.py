"""vLLM model classes with LeanK attention in place of their own, for every family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModel
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_layout import KVCacheLayout

from leank_convert._runtime.configuration_leank import read_settings
from leank_convert._runtime.files_leank import find_mask_file
from leank_convert._runtime.fp8_leank import SCALE_NAMES
from leank_convert._runtime.model_constants_leank import check_scales, load_mask_tensors
from leank_convert.families import ARCHITECTURES, LEANK_PREFIX
from leank_convert.vllm import BACKEND, configs
from leank_convert.vllm.ahead import compile_ahead
from leank_convert.vllm.backend import LeanKBackend
from leank_convert.vllm.beside import check_kinds, lay_beside_states, lay_beside_windows
from leank_convert.vllm.fused_step import FUSED, FusedModel
from leank_convert.vllm.later_loads import check_later_loads
from leank_convert.vllm.layers import LeanKAttention
from leank_convert.vllm.pages import ModelPages, coming_block_size, settle_block_size
from leank_convert.vllm.refusals import check_options, choose_cache_dtype, has_drafter

# Tensors of files beside the weights, which vLLM loads with them.
_NO_WEIGHTS = ("channel_mask", "key_mean", "scaling_factors", "value_basis", "value_widths")
# What has heads, and whose: those of queries, or those of K and V.
_HEADS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "q",
    "qkv_proj": "qkv",
    "q_norm": "q",
    "k_norm": "k",
    "sinks": "q",
}
# Beside a weight of one byte an element: a number for all of it, for rows, or for blocks of rows and columns.
_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv", "weight_zero_point")


class _LeanKForCausalLM:
    """Replaces the attention layers of a stock model, and deals the heads of weights to ranks."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_options(vllm_config)
        check_later_loads()
        # Pages that lie by blocks let layers of a model that drafts lie beside.
        by_blocks = KVCacheLayout.BLHNC, KVCacheLayout.LBHNC
        cache, drafts = vllm_config.cache_config, has_drafter(vllm_config)
        LeanKBackend.layouts = by_blocks if drafts else None
        if drafts:  # their backend may prefer pages that our kernels do not read
            settle_block_size(cache, coming_block_size(cache))
        cache.cache_dtype = choose_cache_dtype(vllm_config)
        config = vllm_config.model_config.hf_config
        settings = read_settings(config)
        # GPUs look for a backend of the stock layers, too, one that takes prompts' lengths. Layers that draft
        # are built from the same options later, and look for their own.
        attention = vllm_config.attention_config
        asked, own_type = attention.backend_per_kind, config.model_type
        family = ARCHITECTURES[own_type.removeprefix(LEANK_PREFIX)]
        attention.backend_per_kind = {**asked, "full_attention": AttentionBackendEnum[BACKEND]}
        config.model_type = family.model_type  # some models choose layers by it
        try:
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        finally:
            attention.backend_per_kind, config.model_type = asked, own_type
        self._vllm_config = vllm_config
        self._config, self._settings, self._num_heads = config, settings, config.num_attention_heads
        self._source = vllm_config.model_config.model, {"revision": vllm_config.model_config.revision}
        self._layers_differ = family.experts or "linear_attention" in family.other_layers
        self._quantized = vllm_config.quant_config is not None
        context = vllm_config.compilation_config.static_forward_context
        modules = [module for module in self.modules() if type(getattr(module, "attn", None)) is Attention]  # type: ignore[attr-defined]
        check_kinds([module.attn for module in modules], settings.layers)
        others = [module.attn for module in modules if module.attn.sliding_window is not None]
        modules = [module for module in modules if module.attn.sliding_window is None]
        num_layers, num_stages = len(settings.widths), get_pp_group().world_size
        pages = ModelPages(
            settings.widths,
            settings.head_dim,
            get_tensor_model_parallel_world_size(),
            tuple(get_pp_indices(num_layers, stage, num_stages) for stage in range(num_stages)),
            value_widths=settings.value_widths,
        )
        if others:
            pages = lay_beside_windows(pages, others, cache)
        if states := [layer for layer in context.values() if isinstance(layer, MambaBase)]:
            pages = lay_beside_states(pages, states, modules[0].attn, cache)
        stage = pages.stages[get_pp_group().rank_in_group]
        firsts: dict[int, LeanKAttention] = {}
        parts = pages.layout(get_tensor_model_parallel_rank(), stage).parts
        for module, part in zip(modules, parts, strict=True):
            del context[module.attn.layer_name]
            module.attn = LeanKAttention(module.attn, settings, pages, vllm_config, firsts.get(part))
            firsts.setdefault(part, module.attn)
        self._pages = pages
        self._attentions = [module.attn for module in modules]
        if isinstance(self, FusedModel) and self.can_fuse(vllm_config):
            for attention in self._attentions:
                attention.is_fused = True
        keys = dict.fromkeys(key for attention in self._attentions for key in attention.kernel_keys)
        compile_ahead(keys, has_ranks=get_tensor_model_parallel_world_size() > 1)
        self._has_output_bias = modules[0].o_proj.bias is not None
        self._has_gate = getattr(modules[0], "attn_output_gate", False)

    def get_model_state_cls(self) -> type[Any]:
        """Return what the newer of vLLM's runners keeps of requests, which here tells prompts' lengths, too.

        The runner has them on the device alone, where reading them waits for the steps before.
        """
        from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

        lengths: dict[int, int] = {}
        told = self._attentions[0].told_prompts

        class State(resolve_model_state_cls(self._vllm_config, nn.Module())):  # type: ignore[misc]
            def add_request(self, req_index: int, new_req_data: Any) -> None:
                super().add_request(req_index, new_req_data)
                lengths[req_index] = new_req_data.prompt_len

            def prepare_attn(self, input_batch: Any, *given: Any, **options: Any) -> Any:
                told[:] = [lengths.get(place, 0) for place in input_batch.idx_mapping_np.tolist()]
                return super().prepare_attn(input_batch, *given, **options)

        return State

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights; heads of attention are put in the order of ranks.

        Raises:
            ValueError: If a layer lacks one that another layer has, heads are of another size, or the mean of
                keys or scales make no sense.
        """
        scales: dict[str, torch.Tensor] = {}
        loaded: set[str] = super().load_weights(self._in_rank_order(weights, scales))  # type: ignore[misc]
        self.set_mask_tensors()
        if self._attentions[0].key_scale is not None:
            self.set_scales(scales)
        for attention in self._attentions:
            attention.lacks_constants = False
        return loaded

    def set_mask_tensors(self) -> None:
        """Give the stage's layers what comes off keys and rotates V, from the file beside the weights."""
        source, options = self._source
        path = find_mask_file(source, self._config, options)
        means, bases = load_mask_tensors(self._config.leank, self._settings, path, source)
        for attention in self._attentions:
            if means is not None:
                attention.key_mean.copy_(means[attention.row][:, attention.heads])
            if bases is not None:
                attention.value_basis.copy_(bases[attention.row][attention.heads])

    def set_scales(self, scales: Mapping[str, torch.Tensor]) -> None:
        """Give the stage's layers what a cache in FP8 is multiplied by."""
        shape = [self._settings.num_key_value_heads, self._settings.head_dim]
        found: list[list[torch.Tensor]] = []
        for attention in self._attentions:
            found.append([])
            for kind in SCALE_NAMES:
                name = f"{attention.layer_name.rpartition('.')[0]}.{kind}"
                if name not in scales:
                    raise ValueError(f"the checkpoint's weights lack `{name}`; export it again")
                if list(scales[name].shape) != shape:
                    raise ValueError(f"`{name}` is of shape {list(scales[name].shape)}, not {shape}")
                found[-1].append(scales[name])
                getattr(attention, kind).copy_(scales[name][attention.heads])
        check_scales(found)

    @cached_property
    def _head_orders(self) -> list[torch.Tensor]:
        """Each pruned layer's KV heads, in the order in which vLLM gives ranks equal parts."""
        hands = dict.fromkeys(self._pages.heads)  # several ranks may have the same
        return [
            torch.tensor([head for hand in hands for head in hand[layer]])
            for layer in range(len(self._pages.widths))
        ]

    def _in_rank_order(
        self, weights: Iterable[tuple[str, torch.Tensor]], scales: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Put heads of weights in the order of ranks; `scales` of a cache in FP8, no weights, go there."""
        names = set()
        for name, tensor in weights:
            kind = name.rpartition(".")[2]
            if kind in SCALE_NAMES:
                scales[name] = tensor
            if kind in (*_NO_WEIGHTS, *SCALE_NAMES):
                continue
            names.add(name)
            yield name, self.with_ordered_heads(name, tensor)
        if not self._quantized:  # some formats leave single layers as they are
            # Layers may be without experts, or without heads.
            _check_layers(name for name in names if not self._layers_differ or ".self_attn." in name)

    def with_ordered_heads(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Put heads of a weight in the order of ranks, where it has some."""
        part = next((part for part in name.split(".") if part in _HEADS), "")
        layers, head_dim = self._settings.layers, self._settings.head_dim
        if not part or extract_layer_index(name) not in layers:
            return tensor
        if "norm" in part and len(tensor) == head_dim:  # heads share it
            return tensor
        dim = 1 if part == "o_proj" else 0
        if dim and name.endswith(".bias"):  # the output's, which has no heads
            if not self._has_output_bias:
                raise ValueError(f"`{name}`: vLLM's model has no such bias and would leave it out")
            return tensor
        order = self._head_orders[layers.index(extract_layer_index(name))].to(tensor.device)
        is_ordered = bool((order.diff() > 0).all())
        if is_ordered and self._quantized:  # in whichever layout
            return tensor
        counts = [self._num_heads if states == "q" else len(order) for states in _HEADS[part]]
        # A query head's rows are followed by those of its gate.
        size = 1 if part == "sinks" else 2 * head_dim if part == "q_proj" and self._has_gate else head_dim
        expected = sum(counts) * size
        if self._quantized and part != "sinks":
            size = _count_of_head(name, tensor, dim, sum(counts), size)
        elif tensor.shape[dim] != expected:
            raise ValueError(
                f"`{name}` is of shape {list(tensor.shape)}, dimension {dim} should be {expected}: "
                f"{sum(counts)} heads of {size}; export the checkpoint again"
            )
        if is_ordered or size is None:  # without a copy
            return tensor
        blocks = tensor.split([count * size for count in counts], dim)
        heads = [block.unflatten(dim, (len(order), -1)).index_select(dim, order) for block in blocks]
        return torch.cat([block.flatten(dim, dim + 1) for block in heads], dim)


def _count_of_head(name: str, tensor: torch.Tensor, dim: int, num_heads: int, head_dim: int) -> int | None:
    """Count a head's numbers along `dim`, in which heads lie, in a tensor of a quantized projection.

    None if all heads share one; ValueError if two share a number and others do not, or the layout is not
    known.
    """
    kind = name.rpartition(".")[2]
    if tensor.numel() == 1:
        return None
    if kind in _WEIGHT_SCALES:
        if tensor.ndim <= dim or tensor.shape[dim] == 1:
            return None
        count, rest = divmod(tensor.shape[dim], num_heads)
        rows = head_dim // max(count, 1)
        # Blocks are a power of two of rows. Others follow from a last block that is cut short.
        if not rest and count * rows == head_dim and not rows & (rows - 1):
            return count
    elif kind in ("weight", "bias") and tensor.shape[dim] == num_heads * head_dim:
        return head_dim
    raise ValueError(
        f"`{name}` is of shape {list(tensor.shape)}, and tensor parallelism deals {num_heads} heads of "
        f"{head_dim} to ranks: it is packed, or parts of two heads share a scale; serve it on one GPU, or "
        "quantize it with a scale for each row"
    )


def _check_layers(names: Iterable[str]) -> None:
    """Raise unless all layers have the same weights: vLLM does not notice where q, k or v is missing."""
    found: dict[str, set[str]] = {}
    for name in names:
        if "layers." in name:
            layer, _, weight = name.partition("layers.")[2].partition(".")
            found.setdefault(layer, set()).add(weight)
    every = set().union(*found.values())
    for layer, own in found.items():
        if missing := every - own:
            raise ValueError(
                f"the checkpoint's weights lack `model.layers.{layer}.{min(missing)}`; export it again"
            )


def __getattr__(name: str) -> Any:
    """Make `LeanK<X>ForCausalLM` of vLLM's `<X>ForCausalLM` when it is first asked for."""
    stock = ModelRegistry.models.get(name.removeprefix("LeanK"))
    if stock is None or not name.startswith("LeanK"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    model_class = stock.load_model_cls()
    bases = _LeanKForCausalLM, *((FusedModel,) if model_class.__name__ in FUSED else ()), model_class
    if issubclass(model_class, TransformersForCausalLM):
        _register_transformers_model(name)
    return globals().setdefault(name, type(name, bases, {"__module__": __name__}))


def _register_transformers_model(name: str) -> None:
    """Have transformers build its own model from our config of a family: vLLM runs that of some."""
    (family,) = (row for row in ARCHITECTURES.values() if f"LeanK{row.causal_lm_class}" == name)
    config_class = getattr(configs, f"LeanK{family.config_class}")
    stock = getattr(transformers, family.base_class)
    # A class of this module: transformers prefers it to code that the checkpoint names.
    fields = {"__module__": __name__, "config_class": config_class}
    AutoModel.register(config_class, type(stock.__name__, (stock,), fields), exist_ok=True)

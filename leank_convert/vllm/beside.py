"""Layers beside the pruned ones: vLLM's own attention and cache, in pages of the pruned layers' size."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm.config import CacheConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.warmup import qwen_triton_warmup
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from leank_convert.families import LEANK_PREFIX
from leank_convert.vllm.configs import LINEAR
from leank_convert.vllm.pages import STEP, ModelPages, coming_block_size, settle_block_size

# By `model_type` vLLM knows for whose states it compiles kernels before the first request.
qwen_triton_warmup._QWEN_MODEL_TYPES |= {LEANK_PREFIX + family for family in LINEAR}


def check_kinds(attentions: Sequence[Attention], pruned: Sequence[int]) -> None:
    """Raise unless vLLM's model has a window in those layers that are not pruned, and in no other.

    Raises:
        ValueError: If it has not.
    """
    for attention in attentions:
        layer = extract_layer_index(attention.layer_name)
        if (attention.sliding_window is None) != (layer in pruned):
            raise ValueError(
                f"config.json: layer {layer} is of another kind than in vLLM's model, which attends to "
                f"{attention.sliding_window or 'all'} tokens there; decode with transformers"
            )


def lay_beside_windows(
    pages: ModelPages, others: Sequence[Attention], cache_config: CacheConfig
) -> ModelPages:
    """Have layers with a window keep tokens in pages of the pruned layers' size, and return the latter."""
    block_size = settle_block_size(cache_config, coming_block_size(cache_config))
    first = others[0]
    numbers = 2 * first.num_kv_heads * first.head_size
    # Hits of the prefix cache end at multiples of all sizes; kernels cannot split a page that is padded.
    sizes = [
        size
        for size in range(STEP, 16 * block_size + 1, STEP)
        if (block_size % size == 0 or size % block_size == 0) and _takes(first.attn_backend, size)
    ]
    pages = pages.beside(len(others), numbers * sizes[0], block_size)
    page = pages.numbers_per_page(block_size)
    size = max(size for size in sizes if size * numbers <= page)
    for attention in others:
        bytes_of = page * get_dtype_size(attention.kv_cache_torch_dtype)
        attention.attn_backend = _backend_beside(attention.attn_backend, size, bytes_of)
    return pages


def lay_beside_states(
    pages: ModelPages, others: Sequence[MambaBase], pruned: Attention, cache_config: CacheConfig
) -> ModelPages:
    """Make pages of the pruned layers so large that each holds a state, and return them."""
    shapes, dtypes = tuple(others[0].get_state_shape()), others[0].get_state_dtype()
    state = MambaSpec(block_size=1, shapes=shapes, dtypes=dtypes).page_size_bytes
    # As vLLM will have it: as many tokens as a dense layer keeps in a state's bytes.
    numbers = 2 * pruned.num_kv_heads * pruned.head_size
    # vLLM makes pages multiples of the tokens after which kernels of prompts leave a state (since 0.33).
    steps = [getattr(layer, "get_prefill_checkpoint_alignment", int)() or 1 for layer in others]
    step = math.lcm(coming_block_size(cache_config), *steps)
    step_bytes = step * numbers * get_dtype_size(pruned.kv_cache_torch_dtype)
    block_size = settle_block_size(cache_config, step * cdiv(state, step_bytes))
    # The scheduler ends chunks of a prompt at multiples of the smallest page, where states are kept.
    pages = replace(pages, window_step=block_size)
    return pages.beside(len(others), numbers * block_size, block_size)


def _takes(backend: type[AttentionBackend], block_size: int) -> bool:
    """Whether kernels take pages of so many tokens as they are."""
    sizes = backend.get_supported_kernel_block_sizes()
    return any(block_size == s if isinstance(s, int) else block_size % s.base == 0 for s in sizes)


def hide_prompts(layers: Iterable[Any]) -> None:
    """Have vLLM's own layers attend as where it hands over no prompts' lengths, which a LeanK cache needs."""
    for layer in layers:
        if type(layer) is Attention:
            layer.attn_backend = _without_prompts(layer.attn_backend)


@functools.cache
def _without_prompts(stock: type[AttentionBackend]) -> type[AttentionBackend]:
    """A backend of vLLM's own that would take prompts' lengths for those before a window of its own."""
    if hasattr(stock, "hides_prompts"):  # vLLM asks for specs more than once
        return stock

    class Builder(stock.get_builder_cls()):  # type: ignore[misc]
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            common = replace(common_attn_metadata, rswa_prefix_lens=None)
            return super().build(common_prefix_len, common, fast_build)

    class WithoutPrompts(stock):
        hides_prompts = True

        @staticmethod
        def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
            return Builder

    return WithoutPrompts


@functools.cache
def _backend_beside(
    stock: type[AttentionBackend], block_size: int, page_bytes: int
) -> type[AttentionBackend]:
    """A backend of vLLM's own, with such pages."""

    class Beside(_without_prompts(stock)):  # type: ignore[misc]
        @classmethod
        def customize_spec(cls, spec: Any) -> Any:
            return replace(super().customize_spec(spec), block_size=block_size, page_size_padded=page_bytes)

    return Beside

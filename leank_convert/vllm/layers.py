"""Attention layers of a model in vLLM whose K and V lie in the pages of a LeanK cache."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import get_dtype_size, set_default_torch_dtype
from vllm.v1.kv_cache_interface import KVCacheSpec

from leank_convert._runtime.configuration_leank import LeanKSettings
from leank_convert._runtime.decode_kernels_leank import DecodeKernels
from leank_convert._runtime.find_kernels_leank import find_kernels, kernel_key
from leank_convert._runtime.fp8_leank import FP8, SCALE_NAMES
from leank_convert._runtime.kernel_key_leank import MAX_DRAFT, KernelKey
from leank_convert._runtime.layout_leank import order_channels
from leank_convert.vllm import FP8_NAMES
from leank_convert.vllm.ahead import wait_for_kernels
from leank_convert.vllm.backend import LeanKBackend
from leank_convert.vllm.beside import hide_prompts
from leank_convert.vllm.cache import LeanKKeptSpec, LeanKWindowSpec
from leank_convert.vllm.page_copies import PageKernels, find_page_kernels
from leank_convert.vllm.pages import ModelPages, coming_block_size
from leank_convert.vllm.refusals import has_drafter


class LeanKWindow(nn.Module, AttentionLayerBase):
    """The window's pages of all layers: vLLM gives a layer one cache, so these have a layer of their own."""

    def __init__(self, attention: LeanKAttention, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.layer_name = f"{attention.layer_name}.window"
        self.num_heads = attention.num_heads  # vLLM builds metadata of layers alike in it together
        self.kv_cache = torch.tensor([])
        self._spec = attention.window_spec
        vllm_config.compilation_config.static_forward_context[self.layer_name] = self

    def get_attn_backend(self) -> type[LeanKBackend]:
        """Return the backend whose metadata the pages have."""
        return LeanKBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Return what vLLM is to allocate."""
        return self._spec(vllm_config)


class LeanKAttention(Attention):
    """Attention of a layer whose K and V lie in the pages of two cache groups.

    The first layer of a page has the cache of all that lie in it, the others share it: it holds all layers'
    part of its tokens, or that of some where layers of other kinds lie beside. vLLM knows no shared caches
    in a group with others, such as those of layers that draft: with them the other layers have a cache of
    one number a token, which is not used.

    Attributes:
        sizes: Of the window.
        row: The layer's place among those that are pruned.
        heads: The rank's KV heads of all that the layer has.
        layout: How the channels of the rank's heads are cut.
        start: Where the layer begins in a token's numbers of its page.
        window: Whose cache the window's pages are; None where no layer drops a channel.
        told_prompts: Of the first layer, tokens of a step's prompts, where vLLM's newer runner tells them.
        is_fused: Whether there are decode steps that run fused.
        takes_over: Whether another engine reads the prompts.
        most_keys: Tokens put together at once, of prompts with earlier chunks; one prompt has no more.
        key_mean: What comes off keys before they are stored `[1, H_kv, D]`; None without.
        value_basis: What V is rotated into before it is stored `[H_kv, D, D]`; None: as it comes.
        key_scale: In a cache in FP8, what its keys are multiplied by `[1, H_kv, D]`; else None.
        value_scale: The same of values.
        lacks_constants: Whether one of these is what it was made as, not the checkpoint's.
    """

    def __init__(
        self,
        stock: Attention,
        settings: LeanKSettings,
        pages: ModelPages,
        vllm_config: VllmConfig,
        first: LeanKAttention | None,
    ) -> None:
        super().__init__(
            stock.num_heads,
            stock.head_size,
            stock.impl.scale,
            num_kv_heads=stock.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=stock.quant_config,
            prefix=stock.layer_name,
            kv_sharing_target_layer_name=first.layer_name if first and not has_drafter(vllm_config) else None,
            attn_backend=LeanKBackend,
            sinks=getattr(stock.impl, "sinks", None),
        )
        if self.head_size != settings.head_dim:  # vLLM's Qwen2 takes hidden_size / heads whatever is stated
            raise ValueError(
                f"config.json: `head_dim` is {settings.head_dim}, vLLM's model has heads of {self.head_size}"
            )
        self.sizes = settings.windows
        self.pages = pages
        self.told_prompts: list[int] = []
        self.is_fused = False
        self.takes_over = _has_role(vllm_config, "kv_consumer")
        self.most_keys = vllm_config.model_config.max_model_len
        drafts = vllm_config.speculative_config
        self._num_columns = 1 + (drafts.num_speculative_tokens if drafts else 0)
        self._load_tokens = _load_tokens(pages, coming_block_size(vllm_config.cache_config))

        rank = get_tensor_model_parallel_rank()
        stage = pages.stages[get_pp_group().rank_in_group]
        self.row = settings.layers.index(extract_layer_index(stock.layer_name))
        own = pages.layout(rank, stage)
        self.layout = own.layers[self.row - stage[0]]
        self.start = own.starts[self.row - stage[0]]
        self.heads = list(pages.heads[rank][self.row])
        mask = settings.channel_masks[self.row, self.heads]
        device = self._k_scale.device
        index = self.layout.chunk_index(order_channels(mask)[None])
        table = torch.tensor(self.layout.head_table, dtype=torch.int32, device="cpu")
        self.register_buffer("chunk_index", index.to(device), persistent=False)
        self.register_buffer("head_table", table.to(device), persistent=False)
        # Zeros and ones, as weights that an engine makes up have no constants.
        zeros = torch.zeros(1, self.num_kv_heads, self.head_size, dtype=torch.float32, device=device)
        self.register_buffer("key_mean", zeros if settings.has_key_mean else None, persistent=False)
        basis = torch.eye(self.head_size, dtype=torch.float32, device=device).repeat(self.num_kv_heads, 1, 1)
        self.register_buffer("value_basis", basis if settings.has_value_basis else None, persistent=False)
        for name in SCALE_NAMES:
            ones = torch.ones(1, self.num_kv_heads, self.head_size, dtype=torch.float32, device=device)
            is_fp8 = self.kv_cache_dtype in FP8_NAMES
            self.register_buffer(name, ones if is_fp8 else None, persistent=False)
        self.lacks_constants = is_fp8 or settings.has_key_mean or settings.has_value_basis
        self._first = (first,)  # in a tuple, as it is no submodule
        self._own_window = None
        if first is None and pages.numbers.window:
            self._own_window = LeanKWindow(self, vllm_config)

    @property
    def first(self) -> LeanKAttention | None:
        """The stage's first layer, None if it is this one."""
        return self._first[0]

    @property
    def window(self) -> LeanKWindow | None:
        """Whose cache the window's pages are."""
        return self._own_window if self.first is None else self.first._own_window

    @cached_property
    def kernels(self) -> DecodeKernels | None:
        """What decodes; None is plain torch. Its compilation is waited for."""
        return self.kernels_for(self._num_columns)

    @cached_property
    def wide_kernels(self) -> DecodeKernels | None:
        """The same for rows of up to `MAX_DRAFT` new tokens."""
        return self.kernels_for(MAX_DRAFT)

    @cached_property
    def page_kernels(self) -> PageKernels | None:
        """What writes and gathers tokens of prompts; None is plain torch."""
        with set_default_torch_dtype(torch.float32):
            return find_page_kernels(self.wide_kernels)

    @property
    def kernel_keys(self) -> list[KernelKey]:
        """What the layer's kernels are found by; none on a CPU."""
        device = self.chunk_index.device
        if device.type != "cuda":
            return []
        return [kernel_key(device, self.dtype, **self._shape(n)) for n in (self._num_columns, MAX_DRAFT)]

    def kernels_for(self, num_columns: int) -> DecodeKernels | None:
        """Kernels of so many new tokens of a row, once all are compiled; None is plain torch."""
        wait_for_kernels()
        with set_default_torch_dtype(torch.float32):  # kernels are held to plain torch before they serve
            return find_kernels(self.chunk_index.device, self.dtype, **self._shape(num_columns))

    def _shape(self, num_columns: int) -> dict[str, Any]:
        cache_dtype = self.kv_cache_torch_dtype if self.key_scale is None else FP8
        return {
            "head_dim": self.head_size,
            "num_groups": self.num_heads // self.num_kv_heads,
            "chunk_size": self.layout.chunk_size,
            "max_chunks": self.layout.max_chunks,
            "value_chunk": self.layout.value_chunk,
            "num_columns": num_columns,
            "load_tokens": self._load_tokens,
            "cache_dtype": None if cache_dtype == self.dtype else cache_dtype,
            "has_sinks": self.has_sink,
            "has_glue": self.is_fused and num_columns == self._num_columns,
            "has_turns": False,
        }

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Return what vLLM is to allocate for kept channels."""
        if self.first is None and has_drafter(vllm_config):  # what drafts was built after the model
            hide_prompts(vllm_config.compilation_config.static_forward_context.values())
        fields = self._fields(vllm_config, kept=True)
        if self.first is not None:
            fields |= {"state_content_bytes": get_dtype_size(fields["dtype"]), "page_size_padded": None}
        return LeanKKeptSpec(**fields)

    def window_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Return what it is to allocate for the window."""
        fields = self._fields(vllm_config, kept=False)
        is_producer = _has_role(vllm_config, "kv_producer")
        return LeanKWindowSpec(**fields, sizes=self.sizes, is_handed_over=is_producer)

    def _fields(self, vllm_config: VllmConfig, *, kept: bool) -> dict[str, Any]:
        block_size, dtype = vllm_config.cache_config.block_size, self.kv_cache_torch_dtype
        element, numbers = get_dtype_size(dtype), self.pages.numbers
        return {
            "block_size": block_size if kept else self.pages.window_block_size(block_size),
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "dtype": dtype,
            "num_head_slots": 1,
            "state_content_bytes": (numbers.kept if kept else numbers.window) * element,
            # Both alike, so that vLLM needs to pack nothing.
            "page_size_padded": self.pages.numbers_per_page(block_size) * element,
        }


def _has_role(vllm_config: VllmConfig, role: str) -> bool:
    """Whether the engine is one of two, of which one reads and the other answers."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_role == role


def _load_tokens(pages: ModelPages, block_size: int) -> int:
    """Tokens that a kernel loads at once: a divisor of both pages' sizes."""
    window = pages.window_block_size(block_size)
    return next(size for size in (64, 32, 16) if block_size % size == window % size == 0)

"""vLLM attention backend of LeanK layers: step metadata, and attention by kernel or in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from leank_convert._runtime.fp8_leank import FP8
from leank_convert._runtime.kernel_key_leank import MAX_DRAFT
from leank_convert._runtime.model_constants_leank import rotate, rotate_back
from leank_convert._runtime.pruned_attention_leank import decode_attention
from leank_convert._runtime.stored_leank import StoreTensors
from leank_convert._runtime.windows_leank import Windows
from leank_convert.vllm import BACKEND, FP8_NAMES
from leank_convert.vllm.attention import append_by_slot, attend_densely
from leank_convert.vllm.cache import LeanKWindowSpec
from leank_convert.vllm.page_copies import gather_run
from leank_convert.vllm.pages import BLOCK_SIZE, STEP, view_layer
from leank_convert.vllm.prompt_attention import attend_to_run, find_flash_attention
from leank_convert.vllm.ranks import agree_on_kernels
from leank_convert.vllm.refusals import has_drafter
from leank_convert.vllm.rows import PromptRun, Rows, cut_requests, place_requests, uniform_rows


class LeanKBackend(AttentionBackend):
    """Backend of both cache groups."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16", *FP8_NAMES]
    forward_includes_kv_cache_update = True
    # Set by a model beside which another drafts.
    layouts: ClassVar[tuple[KVCacheLayout, ...] | None] = None

    @staticmethod
    def get_name() -> str:
        """Return the name that the backend is registered by."""
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type[LeanKImpl]:
        """Return what computes attention."""
        return LeanKImpl

    @staticmethod
    def get_builder_cls() -> type[LeanKMetadataBuilder]:
        """Return what describes a step."""
        return LeanKMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the sizes of pages that kernels take."""
        return [MultipleOf(STEP)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the size of pages where none is asked for."""
        return BLOCK_SIZE

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """Return how pages may lie, the preferred way first; None for any."""
        return cls.layouts

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether heads may have attention sinks."""
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        """Whether prompts' lengths are told."""
        return True


@dataclass
class LeanKMetadata:
    """What one step does to one cache group.

    Attributes:
        num_tokens: New tokens of all requests, those of padding counted.
        max_length: Upper bound of `lengths`.
        most_columns: A prompt of more tokens, read at once, attends to itself and not to pages.
        decode_columns: New tokens of a request that decodes, at most.
        num_columns: New tokens of each request; None if they differ.
        starts: First token of every request, and one past the last; on the host.
        lengths: Tokens of every request, the new ones counted `[B]`, int32; 0 of padding.
        prompts: Tokens of its prompt `[B]`, int32.
        host_lengths: `lengths`, on the host where vLLM knows them there; one that decodes may have fewer.
        host_prompts: `prompts`, on the host; None with `num_columns`.
        block_table: The group's pages of every request `[B, n]`, int32.
        slots: Page times page size plus place of every token, -1 of padding `[T]`.
    """

    num_tokens: int
    max_length: int
    most_columns: int
    decode_columns: int
    num_columns: int | None
    starts: torch.Tensor
    lengths: torch.Tensor
    prompts: torch.Tensor
    host_lengths: torch.Tensor
    host_prompts: list[int] | None
    block_table: torch.Tensor
    slots: torch.Tensor
    _cut: tuple[list[Rows], list[PromptRun]] | None = field(default=None, repr=False)
    _is_taken_over: bool = field(default=False, repr=False)

    def take_over(self, window: LeanKMetadata, page_size: int, sizes: Windows) -> None:
        """Have last tokens of prompts that another engine read change nothing; the first layer asks for it.

        vLLM reads such a token again, whose result is not used: the other engine found the next one. It
        attends as if it were the answer's, since pages that a prompt's would need are not there, and is not
        written. `window` is the step of the window's group, whose pages have `page_size` tokens.
        """
        if self._is_taken_over:
            return
        self._is_taken_over = True
        first = -(-sizes.sink_size // page_size)
        if window.block_table.shape[1] <= first:
            return
        is_missing = window.block_table[:, first] == 0
        can_miss = self.lengths - 1 - sizes.recent_size >= (first + 1) * page_size
        taken = is_missing & can_miss & (self.lengths == self.prompts)
        self.prompts = self.prompts - taken.int()
        if self.num_columns is not None:
            tokens = taken.repeat_interleave(self.num_columns)
        else:  # each is the first new token of its request, and there may be padding behind all
            starts = self.starts[:-1].to(taken.device, torch.long, non_blocking=True)
            places = torch.where(taken, starts, self.num_tokens)
            tokens = taken.new_zeros(self.num_tokens + 1).index_fill_(0, places, True)[:-1]
        self.slots, window.slots = (slots.masked_fill(tokens, -1) for slots in (self.slots, window.slots))

    def cut(self, sizes: Windows, most_keys: int) -> tuple[list[Rows], list[PromptRun]]:
        """Rows and runs of prompts of the step, made by the first layer that asks.

        So they are part of a captured graph, which makes them anew from `lengths` and `prompts`.
        """
        if self._cut is None:
            if self.num_columns is not None:
                self._cut = [uniform_rows(self.lengths, self.prompts, self.num_columns, sizes)], []
            else:
                assert self.host_prompts is not None
                known = self.starts.tolist(), self.host_lengths.tolist(), self.host_prompts
                parts = cut_requests(*known, self.most_columns, self.decode_columns, most_keys)
                self._cut = place_requests(*parts, self.lengths, self.prompts, sizes)
        return self._cut

    @cached_property
    def valid(self) -> torch.Tensor:
        """Which tokens are no padding `[B, d]`, found by the first layer that asks."""
        return (self.slots >= 0).view(-1, self.num_columns or 1)


def _agreed_layers(vllm_config: Any) -> list[Any]:
    """The pruned layers, by plain torch if another rank lacks kernels, as graphs are captured by that."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    pruned = [layer for layer in layers if hasattr(layer, "kernels")]
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        agree_on_kernels(pruned)
    return pruned


class LeanKMetadataBuilder(AttentionMetadataBuilder[LeanKMetadata]):
    """Describes steps; what captured graphs read lies at the same place in every step."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context.values()
        told = (layer.told_prompts for layer in layers if hasattr(layer, "told_prompts"))
        self._told_prompts: list[int] = next(told, [])
        for layer in _agreed_layers(vllm_config):
            if layer.lacks_constants and (load_format := vllm_config.load_config.load_format) != "dummy":
                raise ValueError(
                    f"--load-format {load_format}: it brought no mean of keys, basis of V or scales of a "
                    "cache in FP8; serve the checkpoint itself"
                )
            # Both asked for here, that no request waits for their compilation.
            kernels, _ = layer.kernels, getattr(layer, "page_kernels", None)
            if kernels is not None and kv_cache_spec.block_size % kernels.key.load_tokens:
                raise ValueError(
                    f"decode kernels that load {kernels.key.load_tokens} tokens cannot read pages of "
                    f"{kv_cache_spec.block_size}; name the size of pages: `--block-size 64`"
                )
        self._is_window = isinstance(kv_cache_spec, LeanKWindowSpec)
        if self._is_window and has_drafter(vllm_config):
            layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
            if not layout.is_block_outermost:
                # Layers that draft would have a table of their own, and vLLM may read them by the first one.
                raise ValueError(
                    f"layers of a model that drafts cannot lie beside a LeanK cache in the layout "
                    f"{layout.name}: set VLLM_KV_CACHE_LAYOUT=BLHNC, which vLLM's attention on GPUs takes"
                )
        # Requests with drafts count as decoding ones.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        # Pages in FP8 hold what was rounded. As in `generate` a prompt attends to itself as it comes; not
        # so one as short as a decode step, which may be captured.
        is_fp8 = vllm_config.cache_config.cache_dtype in FP8_NAMES
        self._decode_columns = min(self.reorder_batch_threshold, MAX_DRAFT)
        self._most_columns = self._decode_columns if is_fp8 else MAX_DRAFT
        max_requests = vllm_config.scheduler_config.max_num_seqs
        self._prompts = torch.zeros(max_requests, dtype=torch.int32, device=device)

    def _prompts_on_host(self, common: CommonAttentionMetadata) -> list[int]:
        """Tokens of the requests' prompts, without a wait for the device, which is steps behind."""
        if common.rswa_prefix_lens is None:
            return [0] * common.num_reqs
        # The older of vLLM's runners has them on the host.
        return [*self._told_prompts] or [*common.rswa_prefix_lens.tolist()]

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Whether steps may be captured: of requests with as many new tokens each, where kernels decode."""
        kernels = [layer.kernels for layer in _agreed_layers(vllm_config)]
        if kernels and None not in kernels:
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LeanKMetadata:
        """Describe a step."""
        common = common_attn_metadata
        num_requests, num_tokens = common.num_reqs, common.num_actual_tokens
        if common.rswa_prefix_lens is not None:  # a batch that only warms up has none
            given = common.rswa_prefix_lens[:num_requests]
            self._prompts[: len(given)].copy_(given, non_blocking=True)
        columns = common.max_query_len
        prompts = self._prompts[:num_requests]
        known = common.seq_lens_cpu_upper_bound
        known = common.seq_lens if known is None else known
        uniform = columns <= self._most_columns and num_tokens == num_requests * columns
        return LeanKMetadata(
            num_tokens=num_tokens,
            max_length=common.max_seq_len,
            most_columns=self._most_columns,
            decode_columns=self._decode_columns,
            num_columns=columns if uniform else None,
            starts=common.query_start_loc_cpu[: num_requests + 1],
            lengths=common.seq_lens[:num_requests],
            prompts=prompts,
            host_lengths=known[:num_requests],
            host_prompts=None if uniform or self._is_window else self._prompts_on_host(common),
            block_table=common.block_table_tensor[:num_requests],
            slots=common.slot_mapping[:num_tokens],
        )


class LeanKImpl(AttentionImpl[LeanKMetadata]):
    """Writes a step's tokens to both groups' pages, then attends to them."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        *_: Any,
        sinks: torch.Tensor | None = None,
        **__: Any,
    ) -> None:
        self.sinks = sinks
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, float(scale)
        self.kv_cache_dtype = "auto"
        self.flash_attention = find_flash_attention(
            num_heads, self.num_kv_heads, head_size, torch.get_default_dtype(), sinks is not None
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: LeanKMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with `[T, H, D]`, `key` and `value` being `[T, H_kv, D]`; return `output`."""
        if attn_metadata is None:  # memory is measured: that of a prompt put together is part of it
            keys, values = key.new_empty(2, layer.most_keys, *key.shape[1:])
            if self.flash_attention is None and key.is_cuda:  # torch's repeats and pads them
                attend_densely(query[:1], keys, values, self.scale, self.sinks)
            return output.zero_()
        store, step, window_step = open_store(layer, kv_cache, attn_metadata)
        query, key, value = (states[: step.num_tokens] for states in (query, key, value))
        value = _by_heads(rotate, value, layer.value_basis)
        if layer.takes_over and layer.window is not None:
            step.take_over(window_step, store.window_keys.shape[2], layer.sizes)
        rows, runs = step.cut(layer.sizes, layer.most_keys)
        if step.num_columns is not None and layer.kernels is not None:
            keys, values = (_to_columns(states, step.num_columns) for states in (key, value))
            layer.kernels.append(keys, values, store, rows[0].seen, step.valid)
        elif layer.page_kernels is not None:
            layer.page_kernels.append(key, value, store, step.slots, window_step.slots)
        else:
            append_by_slot(key, value, store, layer.layout, step.slots, window_step.slots)
        for own in rows:
            self._attend_with_rows(layer, query, own.store(store), own, step, output)
        for run in runs:
            part = run.tokens
            if run.parts[0].is_fresh:
                keys, values = key[part], value[part]
            else:
                keys, values = gather_run(layer.page_kernels, store, layer.layout, run, query.dtype)
                # A sink's logit is no product with a key, so keys need their mean here.
                if self.sinks is not None and layer.key_mean is not None:
                    keys.add_(layer.key_mean[0])
            given = self.scale, self.sinks, self.flash_attention
            attend_to_run(query[part], keys, values, run, output[part], *given)
        if layer.value_basis is not None:
            attended = output[: step.num_tokens]
            attended.copy_(_by_heads(rotate_back, attended, layer.value_basis))
        return output

    def _attend_with_rows(
        self,
        layer: Any,
        query: torch.Tensor,
        store: StoreTensors,
        rows: Rows,
        step: LeanKMetadata,
        output: torch.Tensor,
    ) -> None:
        """Attend with rows of columns, by kernel where one serves; `output` gets what is no padding."""
        in_order = rows.tokens is None
        queries = _to_columns(query, rows.seen.shape[1]) if in_order else query[rows.tokens].transpose(1, 2)
        sink_size = layer.sizes.sink_size
        kernels = layer.wide_kernels if rows.is_wide else layer.kernels
        given: dict[str, Any] = {"softmax_scale": self.scale, "sinks": self.sinks}
        if kernels is None:
            given["layout"] = layer.layout
            views = rows.views(store, sink_size, step.max_length, layer.most_keys)
            parts = [decode_attention(queries[part], store, view, **given) for part, view in views]
            attended = torch.cat(parts)
        else:
            # One column of each request lies as the output does, so kernels write there.
            out = output[: step.num_tokens, :, None] if in_order and queries.shape[2] == 1 else None
            tokens = rows.seen, rows.pruned, rows.plan(kernels, sink_size)
            attended = kernels.attend(queries, store, *tokens, sink_size=sink_size, out=out, **given)
            if out is not None:
                return
        columns = attended.transpose(1, 2).flatten(0, 1)
        if in_order:
            output[: step.num_tokens] = columns
        else:
            output[rows.places] = columns if rows.real is None else columns[rows.real]


def _by_heads(
    change: Callable[..., torch.Tensor], states: torch.Tensor, basis: torch.Tensor | None
) -> torch.Tensor:
    """Rotate tokens `[T, H, D]`, which the runtime's functions take as `[1, H, T, D]`."""
    if basis is None:
        return states
    return change(states.transpose(0, 1)[None], basis)[0].transpose(0, 1).contiguous()


def _to_columns(states: torch.Tensor, num_columns: int) -> torch.Tensor:
    """View tokens `[B * d, H, D]` as rows of columns `[B, H, d, D]`."""
    return states.unflatten(0, (-1, num_columns)).transpose(1, 2)


def open_store(
    layer: Any, kv_cache: torch.Tensor, step: LeanKMetadata
) -> tuple[StoreTensors, LeanKMetadata, LeanKMetadata]:
    """View a layer's part of both groups' pages; return it, and what the step does to either group.

    `kv_cache` and `step` are the layer's own, which those of the layer that has its pages take the place of.
    """
    window, window_step = None, step
    if layer.first is not None:
        kv_cache, step = layer.first.kv_cache, get_forward_context().attn_metadata[layer.first.layer_name]
    if layer.window is not None:
        window = layer.window.kv_cache
        window_step = get_forward_context().attn_metadata[layer.window.layer_name]
    pages = view_layer(kv_cache, window, layer.layout, layer.start)
    store = StoreTensors(
        *pages,
        layer.chunk_index,
        layer.head_table,
        step.block_table,
        window_step.block_table,
        layer.key_mean,
        layer.key_scale,
        layer.value_scale,
    )
    # vLLM's pages of a cache in FP8 are bytes.
    store = store if layer.key_scale is None else store.map_memory(lambda pool: pool.view(FP8))
    return store, step, window_step

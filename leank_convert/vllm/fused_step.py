"""Decode steps in vLLM by the runtime's fused step, in place of the model that vLLM compiles.

vLLM's compiled model leaves products to cuBLAS, and what lies between them to many small kernels. Where each
request has one new token, few of them all together, a step is the kernels of `fused_step_leank` instead, over
vLLM's own weights and pages. It is part of the graphs that vLLM captures of such steps. Ranks of tensor
parallelism add up what o and down give by vLLM's all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context

from leank_convert._runtime.fused_step_leank import run_layers
from leank_convert._runtime.kernel_key_leank import LANES, MAX_NORMED, MAX_ROWS, Product
from leank_convert.vllm.backend import LeanKMetadata, open_store
from leank_convert.vllm.ranks import fused_kernels

FUSED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes of vLLM whose layers are built alike."""

# Each turns all channels of a head, by a table of angles for every position.
_ROTATIONS = ("RotaryEmbedding", "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding")


def is_hopper(device: torch.device) -> bool:
    """Whether there are kernels of products."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


class FusedModel:
    """Put before the stock class of a model that can be fused: runs what steps it can in few kernels."""

    _attentions: list[Any]
    model: Any

    def can_fuse(self, vllm_config: VllmConfig) -> bool:
        """Whether there are steps to fuse: of plain weights, in one stage, with nothing else in between."""
        model, config, parallel = self.model, vllm_config.model_config.hf_config, vllm_config.parallel_config
        given = ("quant_config", "lora_config", "kv_transfer_config", "speculative_config")
        return (
            is_hopper(self._attentions[0].chunk_index.device)
            and all(getattr(vllm_config, name) is None for name in given)
            and parallel.world_size == parallel.tensor_parallel_size
            # Such models are compiled by running them, which a fused step in their place would not.
            and not vllm_config.compilation_config.compile_sizes
            and config.hidden_size % LANES == config.intermediate_size // parallel.world_size % LANES == 0
            and config.hidden_size <= MAX_NORMED
            and [layer.self_attn.attn for layer in model.layers] == self._attentions
            and all(_is_plain(layer, parallel.world_size) for layer in model.layers)
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        """Return hidden states of a step `[T, hidden]`, normed, as the stock class does."""
        step = self._step_to_fuse(len(positions))
        if step is None:
            stock: Any = super()
            return stock.forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        hidden = self.model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        rotation = self.model.layers[0].self_attn.rotary_emb
        halves = rotation.cos_sin_cache[positions].to(hidden.dtype).chunk(2, dim=-1)
        cos, sin = (half.repeat(1, 2)[:, None] for half in halves)

        def attend(index: int, projected: Product) -> torch.Tensor:
            return _attend(self.model.layers[index].self_attn, step, cos, sin, projected)

        return run_layers(fused_kernels(self._attentions[0].kernels), self.model, hidden, attend)

    def _step_to_fuse(self, num_tokens: int) -> LeanKMetadata | None:
        """The step, if it is one to fuse: None of a batch that only warms up, and of one with padding.

        Nor where graphs of parts of the compiled model run, or are captured: steps that differ need them.
        """
        context, first = get_forward_context(), self._attentions[0]
        metadata = context.attn_metadata
        if not (first.is_fused and isinstance(metadata, dict) and num_tokens <= MAX_ROWS):
            return None
        if context.cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE:
            return None
        step: LeanKMetadata = metadata[first.layer_name]
        if step.num_columns != 1 or step.num_tokens != num_tokens:
            return None
        return None if any(attention.kernels is None for attention in self._attentions) else step


def _is_plain(layer: Any, num_ranks: int) -> bool:
    """Whether a layer computes what its class's name says, without what some releases or options add."""
    attention = layer.self_attn
    rotation = attention.rotary_emb
    return (
        type(rotation).__name__ in _ROTATIONS
        and rotation.is_neox_style
        and rotation.rotary_dim == attention.attn.head_size
        and not getattr(attention, "do_llama_4_scaling", False)
        and getattr(layer, "ada_rms_norm_t_cond", None) is None
        and "forward" not in vars(layer)  # which brings weights from the host
        and attention.attn.value_basis is None
        # vLLM adds a bias to the sum in one rank, but all have it.
        and (num_ranks == 1 or attention.o_proj.bias is None is layer.mlp.down_proj.bias)
    )


def _attend(
    attention: Any, step: LeanKMetadata, cos: torch.Tensor, sin: torch.Tensor, projected: Product
) -> torch.Tensor:
    """Append a layer's new tokens, one of each request, and attend `[B, H * D]`."""
    layer, norms = attention.attn, None
    kernels, sink_size = layer.kernels, layer.sizes.sink_size
    store, step, _ = open_store(layer, layer.kv_cache, step)
    (rows,), _ = step.cut(layer.sizes, layer.most_keys)
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm.weight, attention.k_norm.weight, attention.k_norm.variance_epsilon)
    query = kernels.rope_append(projected, cos, sin, norms, store, rows.seen, step.valid)
    tokens = rows.seen, rows.pruned, rows.plan(kernels, sink_size)
    given = {"sink_size": sink_size, "softmax_scale": layer.impl.scale}
    attended: torch.Tensor = kernels.attend(query, store, *tokens, **given)
    return attended.flatten(1)

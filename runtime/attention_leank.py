"""The attention function through which transformers reaches the cache.

transformers' attention modules pass whatever `cache.update(k, v)` returned straight to the
registered attention function. A LeanK layer returns an `AttentionHandle` in place of both tensors: the
function sees either tensors (no cache: plain SDPA) or a handle, which knows what to do by itself. So two
checkpoints loaded in one process, two copies of these files over one registry, do not disturb each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .parts_leank import carries, load_part

if TYPE_CHECKING:
    from .layer_leank import LeanKLayer

ATTENTION_NAME = "leank"


@dataclass(slots=True, eq=False)
class AttentionHandle:
    """Stands for the keys and values of one layer in one forward pass."""

    layer: LeanKLayer
    start: int  # columns that the layer held before this pass
    key: torch.Tensor  # new keys, after rotary embedding `[B, H_kv, Q, D]`
    value: torch.Tensor  # new values `[B, H_kv, Q, D]`

    def __getattr__(self, name: str) -> Any:
        """Tell a model that is not pruned, which takes this for a tensor, what it was given."""
        raise AttributeError(
            f"no `{name}`: a LeanK cache serves pruned models alone; leave `cache` and `past_key_values` out"
        )

    # torch.compile runs this as it is: what it does depends on counters that change with every token.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend with queries `[B, H, Q, D]`, and put the new tokens into the cache.

        Prompt columns attend densely to the prompt so far; when it is complete (at once in `eager` mode) it
        is split; later columns decode against the pruned cache. `attention_mask` is what `leank_mask` made,
        `s_aux` transformers' name for the logits of attention sinks `[H]`; SDPA takes the rest. Returns the
        output `[B, Q, H, D]` and no attention weights.
        """
        batch_size, _, num_columns, _ = query.shape
        rows = self.layer.rows
        step = rows.step(self.start, batch_size, num_columns, attention_mask, query.device)
        try:
            prompt = step.num_prefill
            outputs = []
            if prompt:
                keys, values = self.layer.extend_pending(self.key[:, :, :prompt], self.value[:, :, :prompt])
                if attention_mask is not None:
                    attention_mask = attention_mask[:, :, :prompt, : keys.shape[2]]
                kwargs |= {"scaling": scaling, "s_aux": s_aux}
                dense, _ = _attend_densely(
                    module, query[:, :, :prompt], keys, values, attention_mask, **kwargs
                )
                outputs.append(dense)
                del keys, values
            if step.split is not None:
                self.layer.split(step)
                if not step.num_decode:
                    self.layer.kernels = self.layer.kernels_for(query[:, :, :1], s_aux)  # for later steps
            if step.num_decode:
                scale = query.shape[3] ** -0.5 if scaling is None else scaling
                values, basis = self.value[:, :, prompt:], self.layer.value_basis
                if basis is not None:
                    values = load_part("model_constants").rotate(values, basis)
                decoded = self.layer.decode(
                    query[:, :, prompt:], self.key[:, :, prompt:], values, step, scale, s_aux
                )
                if basis is not None:
                    decoded = load_part("model_constants").rotate_back(decoded, basis)
                outputs.append(decoded.transpose(1, 2))
            del self.key, self.value  # a prompt's whole keys end here, not with the layer's forward pass
            out = (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).contiguous()
        except BaseException:
            rows.forget_step()  # which the same layer would take up in the next pass
            raise
        # Only now: a pass that fails leaves a layer with fewer columns than the cache has.
        self.layer.num_columns = self.start + num_columns
        return out, None


def leank_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | AttentionHandle,
    value: torch.Tensor | AttentionHandle,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend through the LeanK cache, or with plain SDPA in other layers and where there is no cache.

    Queries are `[B, H, Q, D]`, keys and values `[B, H_kv, Q, D]`, or the handle that the cache returned. A
    cache that is not LeanK's raises a ValueError.
    """
    # No isinstance of our own class: another checkpoint in this process has its own copy of it.
    if not isinstance(key, torch.Tensor):
        attended: tuple[torch.Tensor, None] = key.attend(module, query, attention_mask, **kwargs)
        return attended
    config: Any = module.config
    pruned = config.leank.get("layers")  # None is all
    if key.shape[2] != query.shape[2] and (pruned is None or module.layer_idx in pruned):
        raise ValueError(
            f"{key.shape[2]} keys for {query.shape[2]} queries: this model was given a cache that is not "
            "LeanK's and would decode densely; leave `cache` out, or pass `model.build_cache()`"
        )
    return _attend_densely(module, query, key, value, attention_mask, **kwargs)  # type: ignore[arg-type]


def _attend_densely(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by transformers' SDPA, `s_aux` `[H]` being the logits of sinks where the model has some."""
    if s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    # By the code of a checkpoint that has it: this function may be another's, as there is one registry.
    attend = ALL_ATTENTION_FUNCTIONS[f"{ATTENTION_NAME}_sinks"]
    output, _ = attend(module, query, key, value, attention_mask, s_aux=s_aux, **kwargs)
    return output, None


def leank_mask(
    *, kv_length: int, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """Make SDPA's mask for prompt columns, and hand the padding mask `[B, columns]` through for decoding.

    `kv_length` is the keys that SDPA will see; the LeanK cache reports 0 while decoding.
    """
    if kv_length == 0:
        return attention_mask
    mask: torch.Tensor | None = sdpa_mask(kv_length=kv_length, attention_mask=attention_mask, **kwargs)
    return mask


AttentionInterface.register(ATTENTION_NAME, leank_attention)
AttentionMaskInterface.register(ATTENTION_NAME, leank_mask)
if carries("sinks"):
    AttentionInterface.register(f"{ATTENTION_NAME}_sinks", load_part("sinks").dense_attention)

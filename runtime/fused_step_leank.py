"""Fused decode step: everything between the matrix products of a few new tokens, in few kernels.

Of a decode step's thousand kernels most add, norm, rotate and copy a few thousand numbers each. Here a layer
is four matrix products, attention, and up to four kernels of decode_kernels_leank: q, k and v are one
product, gate and up another. Their weights lie side by side in one piece of memory for that: the model's own
Parameters become views of it, so nothing is held twice, and whoever saves, loads, moves or adapts the model
finds what was there before (`own_storages`).

It computes what the stock classes of seven families compute, with their rounding, and serves no others;
`run_layers` also runs models of vLLM's whose modules have the same names.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_leank import CACHE
from .decode_kernels_leank import DecodeKernels
from .kernel_key_leank import LANES, MAX_NORMED, Product

if TYPE_CHECKING:
    from .cache_leank import LeanKCache

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "SeedOss", "SmolLM3", "Phi3")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_STOCK_PACKAGES = ("torch", "transformers")
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_LOCK = threading.Lock()  # a model may decode in several threads


def fuse_weights(model: Any, cache: LeanKCache, tokens: torch.Tensor) -> bool:
    """Lay the weights of fused products side by side, where `fused_forward` can serve a model.

    One layer after the other, so that no more than one layer's are held twice.

    Args:
        model: A model of stock modules without hooks, all on one device.
        cache: What it decodes on, split; its layers' kernels are chosen here.
        tokens: Ids `[B, d]` or embeddings `[B, d, hidden]` of a step.

    Returns:
        Whether it can, with weights as they lie now.
    """
    base = model.base_model
    dtype = base.embed_tokens.weight.dtype
    if cache.other_layers:  # which append and attend in ways of their own
        return False
    if any(layer.value_basis is not None for layer in cache.layers):  # V is rotated behind the product
        return False
    if tokens.is_floating_point() and tokens.dtype != dtype:
        return False
    if not _is_known(model) or any(parameter.dtype != dtype for parameter in model.parameters()):
        return False
    config, device = base.config, base.embed_tokens.weight.device
    for layer in cache.layers:
        heads = (0, config.num_attention_heads, 1, layer.layout.head_dim)
        layer.kernels = layer.kernels_for(torch.empty(heads, dtype=dtype, device=device))
        if layer.kernels is None:
            return False
    try:
        with _LOCK:
            for layer in base.layers:
                copied = [_join(parts) for parts in _fused_parameters(layer)]
                if any(copied) and device.type == "cuda":
                    # No later layer fits where this one's parts lay. Refused while another thread captures.
                    with contextlib.suppress(RuntimeError):
                        torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        return False  # the stock forward pass needs no more than there is
    return all(_joined(parts) is not None for layer in base.layers for parts in _fused_parameters(layer))


def fused_forward(model: Any, cache: LeanKCache, inputs: dict[str, Any]) -> Any:
    """Run columns through a model whose weights are fused, on a cache that is split and has room.

    Args:
        model: What `fuse_weights` served.
        cache: The cache; `rows.next_valid` says which rows' columns are real.
        inputs: Arguments of the model's forward pass; all logits are kept, whatever `logits_to_keep` says.

    Returns:
        What the model's forward pass returns.
    """
    base, head = model.base_model, model.get_output_embeddings()
    embeds, positions = inputs["inputs_embeds"], inputs["position_ids"]
    hidden = (base.embed_tokens(inputs["input_ids"]) if embeds is None else embeds).contiguous()
    batch_size, num_columns, _ = hidden.shape
    if positions is None:
        start = cache.rows.num_columns
        positions = torch.arange(start, start + num_columns, device=hidden.device)[None]
    cos, sin = base.rotary_emb(hidden, position_ids=positions)
    unturned = cos, sin
    if not all(getattr(layer.self_attn, "use_rope", True) for layer in base.layers):
        unturned = torch.ones_like(cos), torch.zeros_like(sin)  # some of SmolLM3's layers rotate nothing
    kernels = cache.layers[0].kernels
    assert kernels is not None

    def attend(index: int, projected: Product) -> torch.Tensor:
        attention = base.layers[index].self_attn
        angles = (cos, sin) if getattr(attention, "use_rope", True) else unturned
        return _attend(cache, cache.layers[index], attention, batch_size, projected, *angles)

    normed = run_layers(kernels, base, hidden.flatten(0, 1), attend)
    normed = normed.view(batch_size, num_columns, -1)
    held: dict[str, Any] = {CACHE: cache}
    if head is None:
        return BaseModelOutputWithPast(last_hidden_state=normed, **held)
    return CausalLMOutputWithPast(logits=head(normed), **held)


def run_layers(
    kernels: DecodeKernels,
    base: Any,
    hidden: torch.Tensor,
    attend: Callable[[int, Product], torch.Tensor],
) -> torch.Tensor:
    """Run a model's layers and its last norm.

    Args:
        kernels: What serves all but attention.
        base: The model; weights of a product are one tensor, or lie side by side.
        hidden: Its hidden states before the layers `[T, hidden]`.
        attend: Given a layer's number and projections, appends and attends: `[T, H * D]`.

    Returns:
        Hidden states behind the norm `[T, hidden]`.
    """
    delta = None
    for index, layer in enumerate(base.layers):
        attention, mlp = layer.self_attn, layer.mlp
        hidden, normed = kernels.add_norm(hidden, delta, *_norm(layer.input_layernorm))
        attended = attend(index, _apply(kernels.product, normed, *_parts(attention, "qkv_proj", _QKV)))
        delta = _apply(kernels.product, attended, attention.o_proj)
        hidden, normed = kernels.add_norm(hidden, delta, *_norm(layer.post_attention_layernorm))
        gated = _apply(kernels.gated_product, normed, *_parts(mlp, "gate_up_proj", _GATE_UP))
        delta = _apply(kernels.product, gated, mlp.down_proj)
    return kernels.add_norm(hidden, delta, *_norm(base.norm))[1]


def _attend(
    cache: LeanKCache,
    stored: Any,
    attention: Any,
    batch_size: int,
    projected: Product,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Append a layer's new tokens and attend, as `AttentionHandle.attend` does `[B * d, H * D]`."""
    num_columns = cos.shape[1]
    step = cache.rows.step(stored.num_columns, batch_size, num_columns, None, cos.device)
    append = step.append
    assert append is not None
    norms = None
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)
    query = stored.kernels.rope_append(
        projected, cos, sin, norms, stored.store.tensors, append.seen, append.valid
    )
    attended: torch.Tensor = stored.attend(query, append, attention.scaling)
    stored.num_columns += num_columns  # behind all that may fail, as in `AttentionHandle.attend`
    return attended.transpose(1, 2).reshape(batch_size * num_columns, -1)


def own_storages(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    """Give fused weights in a model's `state_dict`, whose hook this is, a storage each over the same memory.

    Who saves tensors of one storage keeps the first (accelerate), refuses (safetensors' `save_model`), or
    writes all of it for a part of it (`torch.save`).
    """
    fused = {*_QKV, *_GATE_UP}
    for name, tensor in state_dict.items():
        if (
            type(tensor) is torch.Tensor  # a Parameter is to stay the model's own
            and tensor.device.type in ("cpu", "cuda")
            and name.startswith(prefix)
            and not fused.isdisjoint(name.split(".")[-2:-1])
            and tensor.untyped_storage().nbytes() != tensor.nbytes
        ):
            with torch.inference_mode(tensor.is_inference()):  # whatever the mode is now
                state_dict[name] = from_dlpack(to_dlpack(tensor))


def _is_known(model: Any) -> bool:
    """Return whether a model is built as those families are, and no class was patched."""
    base = model.base_model
    config, layers = base.config, base.layers
    family = type(layers[0]).__name__.removesuffix("DecoderLayer")
    norm, linear, is_phi = f"{family}RMSNorm", nn.Linear, family == "Phi3"
    expected: dict[str, Any] = {
        "": f"{family}DecoderLayer",
        "input_layernorm": norm,
        "self_attn": f"{family}Attention",
        **{f"self_attn.{name}": linear for name in (("qkv_proj",) if is_phi else _QKV)},
        "self_attn.o_proj": linear,
        **(dict.fromkeys(_HEAD_NORMS, norm) if family == "Qwen3" else {}),
        "post_attention_layernorm": norm,
        "mlp": f"{family}MLP",
        **{f"mlp.{name}": linear for name in (("gate_up_proj",) if is_phi else _GATE_UP)},
        "mlp.down_proj": linear,
        "mlp.activation_fn" if is_phi else "mlp.act_fn": "SiLUActivation",
        **(dict.fromkeys(("resid_attn_dropout", "resid_mlp_dropout"), "Dropout") if is_phi else {}),
    }
    return (
        family in _FAMILIES
        and len(layers) == config.num_hidden_layers
        and all(_structure(layer) == expected for layer in layers)
        and (type(base.norm).__name__, type(base.rotary_emb).__name__) == (norm, f"{family}RotaryEmbedding")
        and 2 * base.rotary_emb.inv_freq.numel() == layers[0].self_attn.head_dim
        and config.hidden_size % LANES == config.intermediate_size % LANES == 0
        and config.hidden_size <= MAX_NORMED
        and all(layer.self_attn.layer_idx == index for index, layer in enumerate(layers))
        and all(_is_stock(type(part)) for part in [*base.layers.modules()][1:])
        and all(
            _is_stock(kind)
            for part in (model, base)
            for kind in type(part).__mro__
            if kind.__name__ in (f"{family}Model", f"{family}ForCausalLM")
        )
    )


def _is_stock(kind: Any) -> bool:
    """Return whether a stock class still runs its own forward pass, not what somebody else put into it."""
    return str(kind.forward.__module__).split(".")[0] in _STOCK_PACKAGES


def _structure(layer: nn.Module) -> dict[str, Any]:
    """Return the modules of a layer by name: linear ones by class, others by its name."""
    kinds = {name: type(module) for name, module in layer.named_modules()}
    names = {name: kind if kind is nn.Linear else kind.__name__ for name, kind in kinds.items()}
    return {name: "SiLUActivation" if kind == "SiLU" else kind for name, kind in names.items()}


def _norm(module: Any) -> tuple[torch.Tensor, float]:
    return module.weight, module.variance_epsilon


def _fused_parameters(layer: Any) -> list[list[nn.Parameter]]:
    """Return the Parameters of a layer, those of a product together; a bias that others lack stays alone."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = _parts(attention, "qkv_proj", _QKV), _parts(mlp, "gate_up_proj", _GATE_UP)
    groups = [*projections, [attention.o_proj], [mlp.down_proj]]
    found = [[getattr(module, name) for module in group] for group in groups for name in ("weight", "bias")]
    return [parts for parts in found if any(part is not None for part in parts)]


def _parts(module: Any, whole: str, parts: Sequence[str]) -> list[nn.Linear]:
    """Return the modules of a product: one where the family has it as one, else its parts."""
    return [getattr(module, name) for name in ((whole,) if hasattr(module, whole) else parts)]


def _join(parts: Sequence[nn.Parameter | None]) -> bool:
    """Lay Parameters one behind the other in new memory; return whether that was to be done and could be."""
    present = [part for part in parts if part is not None]
    if len({id(part) for part in present}) < len(parts) or _joined(parts) is not None:
        return False
    if len({part.is_inference() for part in present}) > 1:
        return False  # a tensor of one mode cannot be a view of one of the other
    # In the mode that the Parameters were made in, whatever it is now: they are to stay what they are.
    with torch.inference_mode(present[0].is_inference()), torch.no_grad():
        whole = torch.cat([part.data for part in present])
        start = 0
        for part in present:
            part.data = whole[start : start + part.shape[0]]
            start += part.shape[0]
    return True


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return Parameters as one tensor, a view of them, if they lie side by side; else None."""
    first, whole = parts[0], 0
    if first is None:
        return None
    storage, start = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if (
            part is None
            or not part.is_contiguous()
            or part.untyped_storage().data_ptr() != storage
            or part.data_ptr() != start
        ):
            return None
        whole, start = whole + part.shape[0], start + part.nbytes
    return first.data.as_strided((whole, *first.shape[1:]), first.stride())


def _apply(product: Callable[..., Any], states: torch.Tensor, *modules: nn.Linear) -> Any:
    """Apply linear modules whose weights lie side by side, as one, by a product of kernels."""
    weight = _joined([module.weight for module in modules])
    assert weight is not None
    bias = None if modules[0].bias is None else _joined([module.bias for module in modules])
    return product(states, weight, bias)

"""The model families that can be converted, as rows of one table. A family is added by adding a row.

A row says what the family's config class in transformers does not; sizes and defaults are that class's.
Nothing here imports torch or transformers: class names are strings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

LEANK_PREFIX = "leank_"

Bias = bool | str
QkNorm = Literal["none", "head", "heads"]
Shapes = Mapping[str, tuple[str, ...]]

MODEL_TENSORS: Shapes = {
    "model.embed_tokens.weight": ("vocab_size", "hidden_size"),
    "model.norm.weight": ("hidden_size",),
}
_NORMS: Shapes = {
    "input_layernorm.weight": ("hidden_size",),
    "post_attention_layernorm.weight": ("hidden_size",),
}


def _gated_mlp(prefix: str, size: str) -> Shapes:
    """Tensors of an MLP of three projections, as wide as an attribute of `ModelFacts` says."""
    return {
        f"{prefix}.gate_proj.weight": (size, "hidden_size"),
        f"{prefix}.up_proj.weight": (size, "hidden_size"),
        f"{prefix}.down_proj.weight": ("hidden_size", size),
    }


_SPLIT_MLP = _gated_mlp("mlp", "intermediate_size")
_SLIDING = ("sliding_attention",)
_FUSED_MLP: Shapes = {
    "mlp.gate_up_proj.weight": ("gate_up_size", "hidden_size"),
    "mlp.down_proj.weight": ("hidden_size", "intermediate_size"),
}


@dataclass(frozen=True)
class Experts:
    """The tensors of a layer whose MLP is a mixture of experts.

    Attributes:
        count_keys: The keys of config.json of which one says how many experts a layer has.
        size_key: The key that says how wide one is.
        router: The tensor by which such a layer is known; in a layer without it the MLP is a plain one.
        tensors: Those of expert `{expert}`, each with its shape in attributes of `ModelFacts`.
        beside: What such a layer has besides, likewise.
        plain_keys: The keys that say which layers have a plain MLP instead; none where no layer has.
    """

    count_keys: tuple[str, ...]
    size_key: str
    router: str = "mlp.gate.weight"
    tensors: Shapes = field(default_factory=lambda: _gated_mlp("mlp.experts.{expert}", "expert_size"))
    beside: Shapes = field(default_factory=dict)
    plain_keys: tuple[str, ...] = ()


def _block_sparse(**beside: tuple[str, ...]) -> Experts:
    """Mixtral's, which have names of their own and no layer without them."""
    return Experts(
        ("num_local_experts", "num_experts"),
        "intermediate_size",
        "block_sparse_moe.gate.weight",
        {
            "block_sparse_moe.experts.{expert}.w1.weight": ("expert_size", "hidden_size"),
            "block_sparse_moe.experts.{expert}.w2.weight": ("hidden_size", "expert_size"),
            "block_sparse_moe.experts.{expert}.w3.weight": ("expert_size", "hidden_size"),
        },
        beside,
    )


@dataclass(frozen=True)
class Architecture:
    """One model family: its classes in transformers, and the names and shapes of its tensors.

    Attributes:
        model_type: The `model_type` of the family's config.json.
        stem: The family's name within class names: `<stem>Config`, `<stem>Model`, `<stem>ForCausalLM`.
        qkv_bias: Whether q, k and v projections have a bias; a text is the key of config.json that says so.
        o_bias: The same of the output projection.
        mlp_bias: The same of the projections of the MLP.
        fused_qkv: Whether q, k and v are one projection, `qkv_proj`.
        qk_norm: Norms of q and k: one weight `[head_dim]` that the heads share, or one over all heads.
        qk_norm_key: The key of config.json that says whether there are any; None if there always are.
        partial_rotary: Whether the config may leave channels of a head unrotated.
        gated_query: Whether a head's rows of the query projection are followed by as many of a gate.
        sinks: Whether each query head has an attention sink, a logit of its own.
        other_layers: Kinds of layers that it may have beside those with full attention.
        other_tensors: What a layer of such a kind has instead of attention's tensors, each with its shape in
            sums of products of keys of config.json and numbers; none where those.
        rope_by_kind: Whether kinds of layers are rotated differently, each by parameters of its own.
        is_text_part: Whether `Text` is in the names of the classes but that with a head.
        interleaved_pairs: Whether rope turns neighbours together, not channels i and i + D/2.
        layer_tensors: A layer's tensors outside attention, each with its shape in attributes of `ModelFacts`.
        experts: Those of layers with a mixture of experts, None in a family without.
        attention_prefix: Where a layer's attention lives.
        layer_prefix: Where a layer lives.
        head_tensor: The language-modelling head, of the embedding's shape; absent where the two are tied.
    """

    model_type: str
    stem: str
    qkv_bias: Bias = False
    o_bias: Bias = False
    mlp_bias: Bias = False
    fused_qkv: bool = False
    qk_norm: QkNorm = "none"
    qk_norm_key: str | None = None
    partial_rotary: bool = False
    gated_query: bool = False
    sinks: bool = False
    other_layers: tuple[str, ...] = ()
    other_tensors: Shapes = field(default_factory=dict)
    rope_by_kind: bool = False
    is_text_part: bool = False
    interleaved_pairs: bool = False
    layer_tensors: Shapes = field(default_factory=lambda: {**_NORMS, **_SPLIT_MLP})
    experts: Experts | None = None
    attention_prefix: str = "model.layers.{layer}.self_attn"
    layer_prefix: str = "model.layers.{layer}"
    head_tensor: str = "lm_head.weight"

    @property
    def config_class(self) -> str:
        """The family's config class in transformers."""
        return f"{self.stem}{'Text' if self.is_text_part else ''}Config"

    @property
    def base_class(self) -> str:
        """The family's model without a head."""
        return f"{self.stem}{'Text' if self.is_text_part else ''}Model"

    @property
    def causal_lm_class(self) -> str:
        """The family's model with a language-modelling head."""
        return f"{self.stem}ForCausalLM"

    @property
    def leank_model_type(self) -> str:
        """The `model_type` of a converted checkpoint."""
        return LEANK_PREFIX + self.model_type

    def attention_tensor(self, layer: int, name: str) -> str:
        """The full name of a tensor of one layer's attention, such as `q_proj.weight`."""
        return f"{self.attention_prefix.format(layer=layer)}.{name}"


_SPARSE_KEYS = ("mlp_only_layers", "decoder_sparse_step")
_QWEN_EXPERTS = Experts(
    ("num_experts", "num_local_experts"),
    "moe_intermediate_size",
    beside={
        "mlp.shared_expert_gate.weight": ("single", "hidden_size"),
        **_gated_mlp("mlp.shared_expert", "shared_size"),
    },
)

_LINEAR_KEYS = "linear_num_key_heads*linear_key_head_dim"
_LINEAR_VALUES = "linear_num_value_heads*linear_value_head_dim"


def _linear_attention(**projections: str) -> Shapes:
    """Tensors of a gated delta net with these projections of its input, by their rows."""
    convolved = f"2*{_LINEAR_KEYS}+{_LINEAR_VALUES}"
    tensors: dict[str, tuple[str, ...]] = {
        "A_log": ("linear_num_value_heads",),
        "dt_bias": ("linear_num_value_heads",),
        "norm.weight": ("linear_value_head_dim",),
        "out_proj.weight": ("hidden_size", _LINEAR_VALUES),
        "conv1d.weight": (convolved, "1", "linear_conv_kernel_dim"),
        **{f"{name}.weight": (rows, "hidden_size") for name, rows in projections.items()},
    }
    return {f"linear_attn.{name}": shape for name, shape in tensors.items()}


_QWEN3_5_LINEAR = _linear_attention(
    in_proj_qkv=f"2*{_LINEAR_KEYS}+{_LINEAR_VALUES}",
    in_proj_z=_LINEAR_VALUES,
    in_proj_b="linear_num_value_heads",
    in_proj_a="linear_num_value_heads",
)


def find_size_keys(size: str) -> list[str]:
    """The keys of config.json in a size of `other_tensors`."""
    return re.findall(r"[a-z_]+", size)


def evaluate_size(size: str, values: Mapping[str, int]) -> int:
    """A size of `other_tensors`, of the values of its keys."""
    terms = (term.split("*") for term in size.split("+"))
    return sum(math.prod(int(part) if part.isdigit() else values[part] for part in term) for term in terms)


_ROWS = (
    Architecture(
        "llama",
        "Llama",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    Architecture(
        "mistral",
        "Mistral",
    ),
    Architecture(
        "qwen2",
        "Qwen2",
        qkv_bias=True,
        other_layers=_SLIDING,
    ),
    Architecture(
        "qwen3",
        "Qwen3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        other_layers=_SLIDING,
    ),
    Architecture(
        "qwen3_moe",
        "Qwen3Moe",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        experts=Experts(
            ("num_experts", "num_local_experts"), "moe_intermediate_size", plain_keys=_SPARSE_KEYS
        ),
    ),
    Architecture(
        "phi3",
        "Phi3",
        fused_qkv=True,
        partial_rotary=True,
        layer_tensors={**_NORMS, **_FUSED_MLP},
    ),
    Architecture(
        "smollm3",
        "SmolLM3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    Architecture(
        "glm4_moe",
        "Glm4Moe",
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        partial_rotary=True,
        experts=Experts(
            ("n_routed_experts", "num_local_experts"),
            "moe_intermediate_size",
            beside={
                "mlp.gate.e_score_correction_bias": ("num_experts",),
                **_gated_mlp("mlp.shared_experts", "shared_size"),
            },
            plain_keys=("first_k_dense_replace",),
        ),
    ),
    Architecture(
        "glm4",
        "Glm4",
        qkv_bias="attention_bias",
        partial_rotary=True,
        interleaved_pairs=True,
        layer_tensors={
            **_NORMS,
            **_FUSED_MLP,
            "post_self_attn_layernorm.weight": ("hidden_size",),
            "post_mlp_layernorm.weight": ("hidden_size",),
        },
    ),
    Architecture(
        "mixtral",
        "Mixtral",
        layer_tensors={**_NORMS, "block_sparse_moe.gate.weight": ("num_experts", "hidden_size")},
        experts=_block_sparse(),
    ),
    Architecture(
        "granite",
        "Granite",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    Architecture(
        "seed_oss",
        "SeedOss",
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    Architecture(
        "ministral3",
        "Ministral3",
    ),
    Architecture(
        "olmo2",
        "Olmo2",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="heads",
        layer_tensors={
            **_SPLIT_MLP,
            "post_attention_layernorm.weight": ("hidden_size",),
            "post_feedforward_layernorm.weight": ("hidden_size",),
        },
    ),
    Architecture(
        "minimax_m2",
        "MiniMaxM2",
        qk_norm="heads",
        partial_rotary=True,
        layer_tensors={**_NORMS, "block_sparse_moe.gate.weight": ("num_experts", "hidden_size")},
        experts=_block_sparse(**{"block_sparse_moe.e_score_correction_bias": ("num_experts",)}),
    ),
    Architecture(
        "ernie4_5",
        "Ernie4_5",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        interleaved_pairs=True,
    ),
    Architecture(
        "hy_v3",
        "HYV3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        qk_norm="head",
        experts=Experts(
            ("num_experts", "num_local_experts"),
            "moe_intermediate_size",
            "mlp.router.gate.weight",
            beside={
                "mlp.expert_bias": ("num_experts",),
                **_gated_mlp("mlp.shared_mlp", "shared_size"),
            },
            plain_keys=("mlp_layer_types",),
        ),
    ),
    Architecture(
        "olmo3",
        "Olmo3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="heads",
        other_layers=_SLIDING,
        rope_by_kind=True,
        layer_tensors={
            **_SPLIT_MLP,
            "post_attention_layernorm.weight": ("hidden_size",),
            "post_feedforward_layernorm.weight": ("hidden_size",),
        },
    ),
    Architecture(
        "qwen3_5_text",
        "Qwen3_5",
        is_text_part=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        partial_rotary=True,
        gated_query=True,
        other_layers=("linear_attention",),
        other_tensors=_QWEN3_5_LINEAR,
    ),
    Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5Moe",
        is_text_part=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        partial_rotary=True,
        gated_query=True,
        other_layers=("linear_attention",),
        other_tensors=_QWEN3_5_LINEAR,
        experts=_QWEN_EXPERTS,
    ),
    Architecture(
        "qwen3_next",
        "Qwen3Next",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        partial_rotary=True,
        gated_query=True,
        other_layers=("linear_attention",),
        other_tensors=_linear_attention(
            in_proj_qkvz=f"2*{_LINEAR_KEYS}+2*{_LINEAR_VALUES}", in_proj_ba="2*linear_num_value_heads"
        ),
        experts=replace(_QWEN_EXPERTS, plain_keys=_SPARSE_KEYS),
    ),
    Architecture(
        "gpt_oss",
        "GptOss",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        sinks=True,
        other_layers=_SLIDING,
        layer_tensors={**_NORMS, "mlp.router.weight": ("num_experts", "hidden_size")},
        experts=Experts(
            ("num_local_experts", "num_experts"),
            "intermediate_size",
            "mlp.router.weight",
            tensors={},
            beside={
                "mlp.router.bias": ("num_experts",),
                "mlp.experts.gate_up_proj": ("num_experts", "hidden_size", "gate_up_size"),
                "mlp.experts.gate_up_proj_bias": ("num_experts", "gate_up_size"),
                "mlp.experts.down_proj": ("num_experts", "intermediate_size", "hidden_size"),
                "mlp.experts.down_proj_bias": ("num_experts", "hidden_size"),
            },
        ),
    ),
    Architecture(
        "gemma3_text",
        "Gemma3",
        is_text_part=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        other_layers=_SLIDING,
        rope_by_kind=True,
        layer_tensors={
            **_NORMS,
            **_SPLIT_MLP,
            "pre_feedforward_layernorm.weight": ("hidden_size",),
            "post_feedforward_layernorm.weight": ("hidden_size",),
        },
    ),
)
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({row.model_type: row for row in _ROWS})

"""Model facts read from a config.json and checked: shapes, rope, kinds of layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from leank_convert.config_class import complete_config, known_keys
from leank_convert.errors import LeanKError, cut
from leank_convert.families import ARCHITECTURES, LEANK_PREFIX, Architecture
from leank_convert.fields import Fields
from leank_convert.rope import check_rope_parameters, read_rope_parameters

# transformers' activations with weights of their own, which no checkpoint of a family has.
_ACTIVATIONS_WITH_WEIGHTS = frozenset({"prelu", "xielu"})
# Keys that make another model of the weights.
OTHER_MODELS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "compression_config": ("is quantized", "convert the model it was quantized from"),
        "per_layer_config": ("has layers of several shapes", "layers have to be alike"),
        "use_bidirectional_attention": ("attends to tokens to come", "only causal models have a K cache"),
    }
)
_DTYPES = ("bfloat16", "float16", "float32", "float64")
SHAPE_KEYS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
# Far beyond any model: what is claimed here is looped over, and allocated, before the weights are looked at.
MAX_LAYERS = MAX_HEADS = MAX_HEAD_DIM = MAX_EXPERTS = 4096
MAX_CHANNELS = 2**24  # of all layers and KV heads together
_MOST_TOKENS = 2**24
_NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size")
_DERIVED = ("num_key_value_heads", "head_dim")  # from other keys, where they are null
_LARGEST = {
    "num_hidden_layers": MAX_LAYERS,
    "num_attention_heads": MAX_HEADS,
    "num_key_value_heads": MAX_HEADS,
    "head_dim": MAX_HEAD_DIM,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "vocab_size": _MOST_TOKENS,
    "max_position_embeddings": 2**31 - 1,
}


@dataclass(frozen=True)
class ModelFacts:
    """What conversion needs to know of a model, all of it from its config.json."""

    model_type: str  # a key of `ARCHITECTURES`
    num_hidden_layers: int  # all layers
    layers: tuple[int, ...]  # numbers of those with full attention, L of them, which are pruned
    window: int  # tokens that a query sees in a layer with a sliding window, 0 in a model without such
    num_attention_heads: int  # H
    num_key_value_heads: int  # H_kv
    head_dim: int  # D, which need not be `hidden_size / num_attention_heads`
    hidden_size: int  # width of the residual stream
    max_position_embeddings: int  # tokens of the longest sequence that it is made for
    # In transformers 5's form, with `rope_type` and `rope_theta` always there.
    rope_parameters: dict[str, Any]
    tie_word_embeddings: bool  # whether the head shares the embedding's weight
    dtype: str | None  # the config's dtype, such as `bfloat16`, or None where it names none
    config: Mapping[str, object] = field(repr=False, compare=False)  # what they were read from

    @property
    def is_mixed(self) -> bool:
        """Whether there are layers without full attention, which are not pruned."""
        return len(self.layers) < self.num_hidden_layers

    @property
    def has_states(self) -> bool:
        """Whether there are layers that hold a state instead of keys and values."""
        return self.is_mixed and "linear_attention" in self.architecture.other_layers

    @property
    def num_cached_layers(self) -> int:
        """Layers that hold keys and values."""
        return len(self.layers) if self.has_states else self.num_hidden_layers

    @property
    def mask_shape(self) -> tuple[int, int, int]:
        """Of what is known of each channel: [L, H_kv, D]."""
        return len(self.layers), self.num_key_value_heads, self.head_dim

    @property
    def num_key_value_groups(self) -> int:
        """Query heads per KV head: G."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def architecture(self) -> Architecture:
        """The family's row."""
        return ARCHITECTURES[self.model_type]


def find_architecture(model_type: object, *, origin: str) -> Architecture:
    """Look up a family by a config.json's `model_type`; LeanKError if unknown, or a converted one's."""
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    if isinstance(model_type, str) and model_type.startswith(LEANK_PREFIX):
        raise LeanKError(
            f"`{origin}` already is a LeanK checkpoint: its `model_type` is {cut(model_type)}",
            hint="start from the original model",
        )
    close = [row for row in ARCHITECTURES if _bare(row) == _bare(str(model_type)[:99])]
    known = ", ".join(f"`{name}`" for name in ARCHITECTURES)
    raise LeanKError(
        f"`{origin}`: unknown architecture: `model_type` is {cut(model_type)}",
        hint=(f"did you mean `{close[0]}`? " if close else "") + f"supported: {known}",
    )


def _bare(name: str) -> str:
    """A name without case and punctuation; one of other letters or digits is another family's."""
    return re.sub(r"[\W_]", "", name).lower()


def read_model_facts(config: Mapping[str, object], *, origin: str) -> ModelFacts:
    """Read a model's facts from its config.json, with the defaults of the family's config class filled in.

    Raises:
        LeanKError: If the family is unknown, a key makes no sense, or layers attend within a sliding window.
    """
    reason = _why_unsupported(config)
    if reason is not None and config.get("model_type") not in (*ARCHITECTURES, None):
        raise LeanKError(
            f"`{origin}`: `model_type` {cut(config.get('model_type'))} cannot be converted: {reason}"
        )
    architecture = find_architecture(config.get("model_type"), origin=origin)
    _refuse_other_models(config, origin)
    _check_sizes(Fields(config, origin))  # before transformers computes with them
    _check_given(Fields(config, origin), architecture)
    values = _complete(config, architecture, origin)
    fields = Fields(values, origin)
    layers, heads, kv_heads, head_dim = (int(values[key]) for key in SHAPE_KEYS)
    full_layers = _find_full_layers(fields, config, layers, architecture)
    has_window = len(full_layers) < layers and "sliding_attention" in architecture.other_layers
    rope = _read_rope(architecture, values, head_dim, origin)
    if architecture.experts and _has_experts(values, architecture):
        _check_experts(fields)
    if len(full_layers) < layers and "linear_attention" in architecture.other_layers:
        linear = ("linear_num_value_heads", "linear_num_key_heads")
        sizes = {key: fields.whole_number(key, 1, MAX_HEADS) for key in linear}
        _check_multiple(origin, sizes, *linear)  # a forward pass would fail
    dtype = config.get("dtype") or config.get("torch_dtype")
    return ModelFacts(
        model_type=architecture.model_type,
        num_hidden_layers=layers,
        layers=full_layers,
        window=fields.whole_number("sliding_window", 1, _MOST_TOKENS) if has_window else 0,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        **{key: values[key] for key in ("hidden_size", "max_position_embeddings")},
        rope_parameters=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=str(dtype) if dtype else None,
        config=config,
    )


def _why_unsupported(config: Mapping[str, object]) -> str | None:
    """Why a family that has no row cannot be converted, as far as its config.json says."""
    if config.get("kv_lora_rank") is not None:
        return (
            "its cache holds one compressed vector of a token for all heads (MLA, `kv_lora_rank`), so no "
            "head has K channels of its own to prune"
        )
    if config.get("attn_logit_softcapping") is not None:
        return (
            "its attention bends every logit by a tanh (`attn_logit_softcapping`), and no fused kernel does "
            "so here"
        )
    if isinstance(config.get("text_config"), Mapping):
        return "its text model is part of a larger one (`text_config`), and of a kind that is not converted"
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        return (
            f"{sum(kind != 'full_attention' for kind in kinds)} of its {len(kinds)} layers do not attend to "
            "all tokens (`layer_types`), and of families with such layers it is none that is converted"
        )
    return None


def _check_sizes(fields: Fields, needed: tuple[str, ...] = _NEEDED) -> None:
    stated = {key for key, value in fields.values.items() if value is not None or key not in _DERIVED}
    sizes = {
        key: fields.whole_number(key, 1, largest)
        for key, largest in _LARGEST.items()
        if key in needed or key in stated
    }
    if "num_key_value_heads" in sizes:
        _check_multiple(fields.origin, sizes, "num_attention_heads", "num_key_value_heads")
    if sizes.get("head_dim", 0) % 2:
        raise fields.refused("head_dim", "not even: rope turns channels in pairs")


def _check_given(fields: Fields, architecture: Architecture) -> None:
    """Check what else a config.json states, before transformers computes with it."""
    values = fields.values
    layers = values["num_hidden_layers"]
    kinds = values.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == layers):
        raise fields.refused("layer_types", f"not a list of {layers} kinds, one for each layer")
    for flag in ("tie_word_embeddings", "use_sliding_window"):
        fields.flag(flag)
    for key, least, highest in (("rms_norm_eps", 1e-12, 1), ("num_labels", 0, 2**20)):
        if key in values:
            fields.number(key, least, highest)
    if "hidden_act" in values:
        from transformers.activations import ACT2FN  # here, as it imports torch

        fields.text("hidden_act", sorted(ACT2FN.keys() - _ACTIVATIONS_WITH_WEIGHTS))
    for key in ("torch_dtype", "dtype"):
        if values.get(key) is not None:
            fields.text(key, _DTYPES)
    # Every class has a trained length, where config.json has none.
    _read_rope(architecture, {"max_position_embeddings": 2**15, **values}, None, fields.origin)
    for key in (*_EXPERT_KEYS, "num_experts_per_tok"):
        if architecture.experts and values.get(key) is not None:
            fields.whole_number(key, 0, MAX_EXPERTS)


def _has_experts(values: Mapping[str, Any], architecture: Architecture) -> bool:
    """Whether any layer has experts, by the keys from which the family's own class tells."""
    known = known_keys(architecture)
    layers = range(values["num_hidden_layers"])
    if "mlp_layer_types" in known:
        return "sparse" in (values.get("mlp_layer_types") or ("sparse",))
    if "decoder_sparse_step" in known:
        dense, step = values.get("mlp_only_layers") or (), values.get("decoder_sparse_step") or 1
        held = any(values.get(key) for key in _EXPERT_KEYS)
        return held and any(layer not in dense and (layer + 1) % step == 0 for layer in layers)
    first = values.get("first_k_dense_replace") if "first_k_dense_replace" in known else 0
    return (first or 0) < len(layers)


def _check_experts(fields: Fields) -> None:
    """Check the numbers of experts: a forward pass would fail where a token takes more than there are."""
    key = next((key for key in _EXPERT_KEYS if key in fields.values), _EXPERT_KEYS[0])
    held, taken = (fields.whole_number(name, 1, MAX_EXPERTS) for name in (key, "num_experts_per_tok"))
    if taken > held:
        raise LeanKError(
            f"`{fields.origin}`: `num_experts_per_tok` {taken} is more than the {held} experts of a layer "
            f"(`{key}`)"
        )


def _check_multiple(origin: str, sizes: Mapping[str, int], key: str, part: str) -> None:
    if sizes[key] % sizes[part]:
        raise LeanKError(f"`{origin}`: `{key}` {sizes[key]} is not a multiple of `{part}` {sizes[part]}")


def _complete(config: Mapping[str, object], architecture: Architecture, origin: str) -> dict[str, Any]:
    """The config.json as the family's class reads it, with a number of heads and channels in any case."""
    values: dict[str, Any] = complete_config(config, architecture, origin=origin)
    heads, hidden_size = values["num_attention_heads"], values["hidden_size"]
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = heads
    if values.get("head_dim") is None:
        if hidden_size % heads:
            raise LeanKError(
                f"`{origin}`: there is no `head_dim`, and `hidden_size` {hidden_size} is not a multiple of "
                f"`num_attention_heads` {heads}"
            )
        values["head_dim"] = hidden_size // heads
    _check_sizes(Fields(values, origin), (*SHAPE_KEYS, "hidden_size", "max_position_embeddings"))
    layers, _, kv_heads, head_dim = (values[key] for key in SHAPE_KEYS)
    if layers * kv_heads * head_dim > MAX_CHANNELS:
        raise LeanKError(
            f"`{origin}`: {layers} layers of {kv_heads} KV heads of {head_dim} channels are more than "
            f"{MAX_CHANNELS} channels"
        )
    return values


def _read_rope(
    architecture: Architecture, values: Mapping[str, object], head_dim: int | None, origin: str
) -> dict[str, Any]:
    of_kinds = values.get("rope_parameters")
    if architecture.rope_by_kind and isinstance(of_kinds, Mapping):
        values = {**values, "rope_parameters": of_kinds.get("full_attention", of_kinds)}
    rope = read_rope_parameters(values, origin=origin)
    check_rope_parameters(rope, head_dim=head_dim, origin=origin)
    partial = rope.get("partial_rotary_factor", 1)
    if partial != 1 and not architecture.partial_rotary and rope["rope_type"] != "proportional":
        raise Fields(rope, origin).refused(
            "partial_rotary_factor", f"not 1: heads of `{architecture.model_type}` are rotated whole"
        )
    return rope


def _refuse_other_models(values: Mapping[str, object], origin: str) -> None:
    for key, (what, hint) in OTHER_MODELS.items():
        if values.get(key) not in (None, False):
            raise LeanKError(
                f"`{origin}`: the model {what} (`{key}`: {cut(values[key])}); it cannot be converted",
                hint=hint,
            )


def _sliding_hint(values: Mapping[str, object]) -> str:
    window, positions = values.get("sliding_window"), values.get("max_position_embeddings")
    if isinstance(window, int) and isinstance(positions, int) and window >= positions:
        return (
            f"no sequence of its {positions} positions outgrows that window: leave it out by "
            "`--set 'model.config_overrides={sliding_window: null}'`"
        )
    return "a window already bounds those layers' cache; convert a model without one"


def _find_full_layers(
    fields: Fields, config: Mapping[str, object], layers: int, architecture: Architecture
) -> tuple[int, ...]:
    """The layers with full attention; refused if there are others in a family that has none beside them."""
    values, known = fields.values, ("full_attention", *architecture.other_layers)
    kinds = values.get("layer_types")
    if not isinstance(kinds, list):  # a class that knows no kinds of layers: all slide, or none
        slides = values.get("sliding_window") is not None and values.get("use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"] * layers
    others = [layer for layer, kind in enumerate(kinds) if kind != "full_attention"]
    if not others or (len(others) < layers and all(kind in known for kind in kinds)):
        return tuple(layer for layer in range(layers) if layer not in set(others))
    slide = all(kinds[layer] == "sliding_attention" for layer in others)
    what = "layers attend within a sliding window only" if slide else "layers have no full attention"
    causes = ("layer_types", "use_sliding_window", "sliding_window")
    cause = next((key for key in causes if config.get(key) is not None), causes[-1])
    raise LeanKError(
        f"`{fields.origin}`: {len(others)} of {layers} {what} (`{cause}`: {cut(values.get(cause))}, "
        f"first such layer {others[0]}); only full attention can be pruned",
        hint=_sliding_hint(values) if slide else f"kinds known of this family: {', '.join(known)}",
    )

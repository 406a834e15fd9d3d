"""The model families that can be converted, as rows of one table, and the facts read from a config.json.

A family is added by adding a row. Nothing here imports torch or transformers: class names are strings.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from leank_convert.errors import LeanKError

LEANK_PREFIX = "leank_"

Bias = Literal["always", "never", "config"]


@dataclass(frozen=True)
class Architecture:
    """One model family: its classes in transformers, its tensor names, its config defaults.

    Attributes:
        model_type: The `model_type` of the family's config.json.
        stem: The family's name within class names: `LeanK<stem>ForCausalLM`.
        config_class: The family's config class in transformers.
        base_class: The family's model without a head.
        causal_lm_class: The family's model with a language-modelling head.
        qkv_bias: Whether q, k and v projections have a bias; `config` asks `attention_bias`.
        o_bias: Whether the output projection has one.
        head_norms: Norms inside attention with one weight `[head_dim]` shared by the heads.
        config_defaults: What the config class assumes for a key that config.json leaves out.
        attention_prefix: Where a layer's attention lives.
        layer_prefix: Where a layer lives.
        layer_tensors: A layer's tensors outside attention.
        model_tensors: The model's tensors outside its layers.
        head_tensor: The language-modelling head, absent where embeddings are tied.
    """

    model_type: str
    stem: str
    config_class: str
    base_class: str
    causal_lm_class: str
    qkv_bias: Bias
    o_bias: Bias
    head_norms: tuple[str, ...] = ()
    config_defaults: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    attention_prefix: str = "model.layers.{layer}.self_attn"
    layer_prefix: str = "model.layers.{layer}"
    layer_tensors: tuple[str, ...] = (
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    )
    model_tensors: tuple[str, ...] = ("model.embed_tokens.weight", "model.norm.weight")
    head_tensor: str = "lm_head.weight"

    @property
    def leank_model_type(self) -> str:
        """The `model_type` of a converted checkpoint."""
        return LEANK_PREFIX + self.model_type

    def attention_tensor(self, layer: int, name: str) -> str:
        """The full name of a tensor of one layer's attention, such as `q_proj.weight`."""
        return f"{self.attention_prefix.format(layer=layer)}.{name}"


def _row(
    model_type: str,
    stem: str,
    qkv_bias: Bias,
    o_bias: Bias,
    head_norms: tuple[str, ...] = (),
    **config_defaults: object,
) -> Architecture:
    return Architecture(
        model_type=model_type,
        stem=stem,
        config_class=f"{stem}Config",
        base_class=f"{stem}Model",
        causal_lm_class=f"{stem}ForCausalLM",
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        head_norms=head_norms,
        config_defaults=MappingProxyType(config_defaults),
    )


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        row.model_type: row
        for row in (
            _row("llama", "Llama", "config", "config", max_position_embeddings=2048),
            _row(
                "mistral",
                "Mistral",
                "never",
                "never",
                num_key_value_heads=8,
                sliding_window=4096,
                max_position_embeddings=131072,
            ),
            _row(
                "qwen2",
                "Qwen2",
                "always",
                "never",
                num_key_value_heads=32,
                max_window_layers=28,
                use_sliding_window=False,
                max_position_embeddings=32768,
            ),
            _row(
                "qwen3",
                "Qwen3",
                "config",
                "config",
                ("q_norm", "k_norm"),
                num_key_value_heads=32,
                head_dim=128,
                max_window_layers=28,
                use_sliding_window=False,
                max_position_embeddings=32768,
            ),
        )
    }
)

# transformers 5's `RotaryEmbeddingConfigMixin.default_theta`.
_DEFAULT_ROPE_THETA = 10_000.0
# Kinds of rope whose trained length transformers takes from `max_position_embeddings` where it is not given.
_ROPE_TYPES_WITH_TRAINED_LENGTH = ("llama3", "yarn", "longrope")


@dataclass(frozen=True)
class ModelFacts:
    """What conversion needs to know of a model, all of it from its config.json.

    Attributes:
        model_type: A key of `ARCHITECTURES`.
        num_hidden_layers: L.
        num_attention_heads: H.
        num_key_value_heads: H_kv.
        head_dim: D, which need not be `hidden_size / num_attention_heads`.
        hidden_size: Width of the residual stream.
        rope_parameters: In transformers 5's form, with `rope_type` and `rope_theta` always there.
        qkv_bias: Whether q, k and v projections have a bias.
        o_bias: Whether the output projection has one.
        tie_word_embeddings: Whether the head shares the embedding's weight.
        dtype: The config's dtype, such as `bfloat16`, or None where it names none.
    """

    model_type: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int
    rope_parameters: dict[str, Any]
    qkv_bias: bool
    o_bias: bool
    tie_word_embeddings: bool
    dtype: str | None

    @property
    def num_key_value_groups(self) -> int:
        """Query heads per KV head: G."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def architecture(self) -> Architecture:
        """The family's row."""
        return ARCHITECTURES[self.model_type]


def find_architecture(model_type: object, *, origin: str) -> Architecture:
    """Look up a family by its `model_type`.

    Args:
        model_type: The `model_type` of a config.json.
        origin: Where it was read, for messages.

    Raises:
        LeanKError: If it is unknown, or is that of a converted checkpoint.
    """
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    if isinstance(model_type, str) and model_type.startswith(LEANK_PREFIX):
        raise LeanKError(
            f"`{origin}` already is a LeanK checkpoint: its `model_type` is `{model_type}`",
            hint="start from the original model",
        )
    close = difflib.get_close_matches(str(model_type), ARCHITECTURES, n=1)
    known = ", ".join(f"`{name}`" for name in ARCHITECTURES)
    raise LeanKError(
        f"`{origin}`: unknown architecture: `model_type` is `{model_type}`",
        hint=(f"did you mean `{close[0]}`? " if close else "") + f"supported: {known}",
    )


def read_model_facts(config: Mapping[str, object], *, origin: str) -> ModelFacts:
    """Read the facts of a model from its config.json.

    Args:
        config: The parsed config.json, overrides already applied.
        origin: The file or model, for messages.

    Returns:
        The facts, with the defaults of the family's config class filled in.

    Raises:
        LeanKError: If the family is unknown, a key makes no sense, or layers attend within a sliding window.
    """
    architecture = find_architecture(config.get("model_type"), origin=origin)
    values: dict[str, object] = {**architecture.config_defaults, **config}
    layers = _positive_int(values, "num_hidden_layers", origin)
    heads = _positive_int(values, "num_attention_heads", origin)
    hidden_size = _positive_int(values, "hidden_size", origin)
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = heads
    kv_heads = _positive_int(values, "num_key_value_heads", origin)
    if heads % kv_heads:
        raise LeanKError(
            f"`{origin}`: `num_attention_heads` {heads} is not a multiple of `num_key_value_heads` {kv_heads}"
        )
    if values.get("head_dim") is None:
        if hidden_size % heads:
            raise LeanKError(
                f"`{origin}`: there is no `head_dim`, and `hidden_size` {hidden_size} is not a multiple of "
                f"`num_attention_heads` {heads}"
            )
        values["head_dim"] = hidden_size // heads
    _refuse_sliding_layers(values, layers, origin)
    dtype = values.get("dtype") or values.get("torch_dtype")
    return ModelFacts(
        model_type=architecture.model_type,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_positive_int(values, "head_dim", origin),
        hidden_size=hidden_size,
        rope_parameters=read_rope_parameters(values, origin=origin),
        qkv_bias=_has_bias(architecture.qkv_bias, values),
        o_bias=_has_bias(architecture.o_bias, values),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
    )


def read_rope_parameters(config: Mapping[str, object], *, origin: str) -> dict[str, Any]:
    """Read a config's rope parameters, in the form that transformers 5 writes.

    The older form (`rope_theta` and `rope_scaling` as keys of the config) reads the same as the newer, so
    that two configs can be compared.

    Raises:
        LeanKError: If they are not an object.
    """
    # The order in which transformers itself looks.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, Mapping):
        raise LeanKError(f"`{origin}`: `{key}` is `{given!r}`, not an object")
    rope = {name: value for name, value in given.items() if name != "type" and value is not None}
    rope.setdefault("rope_type", given.get("type", "default"))
    theta = config.get("rope_theta")
    rope.setdefault("rope_theta", _DEFAULT_ROPE_THETA if theta is None else theta)
    partial = config.get("partial_rotary_factor")
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    trained_length = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    if rope["rope_type"] in _ROPE_TYPES_WITH_TRAINED_LENGTH and trained_length is not None:
        rope.setdefault("original_max_position_embeddings", trained_length)
    return dict(sorted(rope.items()))


def apply_config_overrides(
    config: Mapping[str, object], overrides: Mapping[str, object]
) -> dict[str, object]:
    """Apply a recipe's `model.config_overrides` to a config.json.

    A key replaces the config's. Rope parameters may leave out `rope_theta`, which then stays the model's;
    every other parameter of the model's own rope is dropped, and the result stands in `rope_parameters`,
    whichever of the two forms the config or the overrides were in.

    Args:
        config: The parsed config.json.
        overrides: Keys of a config.json and their new values.

    Returns:
        A new config.

    Raises:
        LeanKError: If the overrides change the model's identity or shape.
    """
    fixed = sorted(_FIXED_KEYS & overrides.keys())
    if fixed:
        raise LeanKError(
            f"`config_overrides.{fixed[0]}`: the weights fix this key; it cannot be overridden",
            hint="what the weights leave open can be, such as `rope_parameters` or `max_position_embeddings`",
        )
    result = {**config, **overrides}
    given = {key: overrides[key] for key in _ROPE_KEYS if key in overrides}
    if given:
        before = read_rope_parameters(config, origin="config.json")
        # The model's own trained length, where the overrides name a longer one.
        base: dict[str, object] = {
            "rope_theta": before["rope_theta"],
            "max_position_embeddings": config.get("max_position_embeddings"),
        }
        if given.keys() == {"rope_theta"}:
            base["rope_parameters"] = {key: value for key, value in before.items() if key != "rope_theta"}
        result.pop("rope_scaling", None)
        result.pop("rope_theta", None)
        result["rope_parameters"] = read_rope_parameters({**base, **given}, origin="config_overrides")
    return result


_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_FIXED_KEYS = frozenset(
    {
        "model_type",
        "architectures",
        "auto_map",
        "leank",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "tie_word_embeddings",
        "attention_bias",
    }
)


def _has_bias(bias: Bias, values: Mapping[str, object]) -> bool:
    return bias == "always" or (bias == "config" and bool(values.get("attention_bias", False)))


def _positive_int(values: Mapping[str, object], key: str, origin: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LeanKError(f"`{origin}`: `{key}` is `{value!r}`, not a positive integer")
    return value


def _refuse_sliding_layers(values: Mapping[str, object], layers: int, origin: str) -> None:
    layer_types = values.get("layer_types")
    if isinstance(layer_types, list):
        sliding = [layer for layer, kind in enumerate(layer_types) if kind != "full_attention"]
        cause = "layer_types"
    elif "use_sliding_window" in values:
        first = values.get("max_window_layers")
        slides = bool(values["use_sliding_window"]) and values.get("sliding_window", 4096) is not None
        sliding = list(range(first if isinstance(first, int) else 0, layers)) if slides else []
        cause = "use_sliding_window"
    else:
        sliding = list(range(layers)) if values.get("sliding_window") is not None else []
        cause = "sliding_window"
    if sliding:
        raise LeanKError(
            f"`{origin}`: {len(sliding)} of {layers} layers attend within a sliding window only (`{cause}`: "
            f"`{values.get(cause)}`, first such layer {sliding[0]}); only full attention can be pruned",
            hint="a window already bounds those layers' cache; convert a model without one",
        )

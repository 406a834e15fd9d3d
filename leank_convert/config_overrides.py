"""Overrides of a config.json, as a recipe gives them: only what the weights leave open may change."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping

from leank_convert.architectures import OTHER_MODELS, SHAPE_KEYS, find_architecture, read_model_facts
from leank_convert.checkpoint_io import LOADING_KEYS
from leank_convert.config_class import known_keys
from leank_convert.errors import LeanKError, cut, shorten
from leank_convert.rope import ROPE_KEYS, ROPE_PARAMETERS, read_rope_parameters

_FIXED_KEYS = frozenset(
    {
        *("model_type", "architectures", "auto_map", "leank", "quantization_config"),
        *SHAPE_KEYS,
        *("hidden_size", "intermediate_size", "vocab_size", "tie_word_embeddings"),
        *("attention_bias", "attention_out_bias", "mlp_bias", "use_bias"),
        *("hidden_act", "rms_norm_eps", "use_qk_norm"),
        *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
        *("partial_rotary_factor", "rotary_dim", "no_rope_layers", "no_rope_layer_interval"),
        # Of layers with experts, and with linear attention.
        *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_shared_experts"),
        *("moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor"),
        *("first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step", "mlp_layer_types"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        "linear_conv_kernel_dim",
        *OTHER_MODELS,
        *LOADING_KEYS,
    }
)


def apply_config_overrides(
    config: Mapping[str, object], overrides: Mapping[str, object]
) -> dict[str, object]:
    """Apply a recipe's `model.config_overrides` to a config.json, each in place of its key: a new config.

    Rope parameters may leave out `rope_theta`, which then stays the model's; every other parameter of the
    model's own rope is dropped, and the result stands in `rope_parameters`, whichever form the two were in.

    Raises:
        LeanKError: If the overrides change the model's identity or shape, or have a key that is not known.
    """
    if not isinstance(overrides, Mapping):
        raise LeanKError(f"`config_overrides` is {cut(overrides)}, not a mapping of config.json's keys")
    if not overrides:
        return dict(config)
    fixed = sorted(_FIXED_KEYS & overrides.keys())
    if fixed:
        raise LeanKError(
            f"`config_overrides.{fixed[0]}`: the weights fix this key; it cannot be overridden",
            hint="what the weights leave open can be, such as `rope_parameters` or `max_position_embeddings`",
        )
    try:
        json.dumps(overrides, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise LeanKError(f"`config_overrides` cannot be written as JSON: {cut(str(error))}") from error
    family = find_architecture(config.get("model_type"), origin="config.json")
    _refuse_unknown("", overrides, {*known_keys(family), *config, *ROPE_KEYS, "torch_dtype", "num_labels"})
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := overrides.get(key), Mapping):
            own = config.get(key)
            _refuse_unknown(f"{key}.", rope, {*ROPE_PARAMETERS, *(own if isinstance(own, Mapping) else ())})
    result = {**config, **overrides}
    given = {key: overrides[key] for key in ROPE_KEYS if key in overrides}
    if given:
        if family.rope_by_kind:
            raise LeanKError(
                f"`config_overrides.{min(given)}`: kinds of layers of `{family.model_type}` have rope "
                "parameters of their own, which cannot be overridden",
                hint="change the model's own `config.json`",
            )
        before = read_rope_parameters(config, origin="config.json")
        # The model's own trained length, where the overrides name a longer one.
        base: dict[str, object] = {
            "rope_theta": before["rope_theta"],
            "max_position_embeddings": config.get("max_position_embeddings"),
            # How much of a head is rotated, the weights fix.
            "partial_rotary_factor": before.get("partial_rotary_factor"),
        }
        if given.keys() == {"rope_theta"}:
            base["rope_parameters"] = {key: value for key, value in before.items() if key != "rope_theta"}
        result.pop("rope_scaling", None)
        result.pop("rope_theta", None)
        result["rope_parameters"] = read_rope_parameters({**base, **given}, origin="config_overrides")
    read_model_facts(result, origin="config.json with config_overrides")
    return result


def _refuse_unknown(section: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse a key that nothing would read, by its nearest name."""
    unknown = [str(key) for key in given if key not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        raise LeanKError(
            f"`config_overrides.{section}{shorten(unknown[0])}`: the model's config class knows no such key",
            hint=f"did you mean `{section}{close[0]}`?" if close else "leave it out",
        )

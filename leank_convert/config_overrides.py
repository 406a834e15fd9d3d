"""Overrides of a config.json, as a recipe gives them: only what the weights leave open may change."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping

from leank_convert.architectures import find_architecture, read_model_facts
from leank_convert.errors import LeanKError, cut, shorten
from leank_convert.rope import ROPE_KEYS, ROPE_PARAMETERS, read_rope_parameters

# What the weights leave open. Every other key would make another model of them, or is read by nothing.
_OPEN_KEYS = (
    *ROPE_KEYS,
    *("max_position_embeddings", "original_max_position_embeddings"),
    *("sliding_window", "use_sliding_window", "max_window_layers"),
    *("dtype", "torch_dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("id2label", "label2id", "num_labels", "attention_dropout"),
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
    try:
        json.dumps(overrides, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise LeanKError(f"`config_overrides` cannot be written as JSON: {cut(str(error))}") from error
    family = find_architecture(config.get("model_type"), origin="config.json")
    _refuse_others("", overrides, _OPEN_KEYS)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := overrides.get(key), Mapping):
            own = config.get(key)
            known = {*ROPE_PARAMETERS, *(own if isinstance(own, Mapping) else ())}
            _refuse_others(f"{key}.", rope, known)
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


def _refuse_others(section: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse a key that the weights fix, or that nothing would read; name the nearest that is neither."""
    others = [str(key) for key in given if key not in known]
    if others:
        close = difflib.get_close_matches(others[0], known, n=1)
        raise LeanKError(
            f"`config_overrides.{section}{shorten(others[0])}`: the weights fix this key, or nothing "
            "reads it",
            hint=f"did you mean `{section}{close[0]}`?"
            if close
            else f"what the weights leave open can be overridden: {', '.join(sorted(known))}",
        )

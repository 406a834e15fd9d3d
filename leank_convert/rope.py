"""RoPE parameters of a config.json, in one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leank_convert.errors import LeanKError, cut
from leank_convert.fields import Fields

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
# The kinds that transformers knows, each with what it asks for beside `rope_theta`.
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}

# transformers 5's `RotaryEmbeddingConfigMixin.default_theta`.
_DEFAULT_ROPE_THETA = 10_000.0
# Kinds of rope whose trained length transformers takes from `max_position_embeddings` where it is not given.
_ROPE_TYPES_WITH_TRAINED_LENGTH = ("llama3", "yarn", "longrope")
# Bounds of a number; transformers divides by some of them, and by the logarithm of others.
_BOUNDS = {
    "rope_theta": (1.001, 1e18),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor"), (1e-3, 1e9)),
    **dict.fromkeys(("beta_fast", "beta_slow"), (1e-3, 1e9)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), (0, 1e9)),
    "partial_rotary_factor": (0, 1),
}
# Every parameter of a rope that a recipe may give; `mrope_*` are those of models that also see images.
ROPE_PARAMETERS = frozenset(
    {
        *_BOUNDS,
        *(name for needed in ROPE_TYPES.values() for name in needed),
        "rope_type",
        "type",
        "truncate",
        "mrope_interleaved",
        "mrope_section",
    }
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
    given = config.get(key)
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise LeanKError(f"`{origin}`: `{key}` is {cut(given)}, not an object")
    rope = {name: value for name, value in given.items() if name != "type" and value is not None}
    rope.setdefault("rope_type", given.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", _DEFAULT_ROPE_THETA))
    partial = config.get("partial_rotary_factor")
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    trained_length = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    if rope["rope_type"] in _ROPE_TYPES_WITH_TRAINED_LENGTH and trained_length is not None:
        rope.setdefault("original_max_position_embeddings", trained_length)
    return dict(sorted(rope.items()))


def check_rope_parameters(rope: Mapping[str, object], *, head_dim: int | None, origin: str) -> None:
    """Check rope parameters, as `read_rope_parameters` gives them, for what transformers would stumble over.

    Raises:
        LeanKError: If the kind of rope is unknown, or a parameter is missing or makes no sense.
    """
    fields = Fields(rope, origin)
    rope_type = fields.text("rope_type", ROPE_TYPES)
    for key in (*ROPE_TYPES[rope_type], "rope_theta"):
        if key not in rope:
            raise LeanKError(f"`{origin}`: rope of type `{rope_type}` has no `{key}`")
    for key, value in rope.items():
        if key in _BOUNDS:
            fields.number(key, *_BOUNDS[key])
        elif key == "original_max_position_embeddings":
            fields.whole_number(key, 2, 2**31 - 1)
        elif key == "truncate":
            fields.flag(key)
        elif key in ("short_factor", "long_factor"):
            _check_factors(fields, key, head_dim)
        elif isinstance(value, Mapping):
            raise fields.refused(
                key, "rope parameters of one kind of layer; layers of several kinds are not known"
            )
    if rope_type == "llama3" and not fields.number("low_freq_factor", 0, 1e9) < fields.number(
        "high_freq_factor", 0, 1e9
    ):
        raise fields.refused("high_freq_factor", "not above `low_freq_factor`")


def _check_factors(fields: Fields, key: str, head_dim: int | None) -> None:
    factors = fields.values[key]
    partial = fields.number("partial_rotary_factor", 0, 1) if "partial_rotary_factor" in fields.values else 1
    if not (
        isinstance(factors, list)
        and (head_dim is None or int(head_dim * partial) == 2 * len(factors))
        and all(type(factor) in (int, float) and 0 < factor <= 1e9 for factor in factors)
    ):
        raise fields.refused(key, "not one positive number for every two channels that are rotated")

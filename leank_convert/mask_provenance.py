"""`MaskProvenance`: where a mask comes from and which model it fits; the header metadata of its file."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from leank_convert.architectures import MAX_CHANNELS, MAX_LAYERS, SHAPE_KEYS, ModelFacts
from leank_convert.errors import LeanKError, cut
from leank_convert.fields import first_problem
from leank_convert.files import parse_json
from leank_convert.held_out import HeldOut
from leank_convert.hub import hide_local_paths
from leank_convert.rope import check_rope_parameters
from leank_convert.windows import Windows

# Entries of the metadata that stand there as they are; all others are JSON.
_TEXTS = {"model", "model_type", "method", "recipe", "made_by", "source", "evaluation", "value_weights"}
_Name = Annotated[str, Field(max_length=1000)]
_Size = Annotated[int, Field(ge=1, le=MAX_CHANNELS)]


def package_versions() -> dict[str, str]:
    """The versions that a learned mask depends on."""
    versions = {"python": platform.python_version()}  # text of its documentation may be a sample
    for name in ("leank-convert", "torch", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # A source tree on the path, without an installation.
            versions[name] = "not installed"
    return versions


@dataclass(frozen=True)
class MaskProvenance:
    """Where a mask comes from and which model it fits; the header metadata of a mask file."""

    model: _Name  # hub id, or the name of a local folder
    model_type: _Name  # the family
    num_hidden_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]  # all layers
    num_attention_heads: _Size  # H
    num_key_value_heads: _Size  # H_kv
    head_dim: _Size  # D
    # The rope under which the mask holds, as `read_rope_parameters` gives it.
    rope_parameters: Mapping[str, Any]
    method: _Name  # how the mask was made, such as `leank`, or `imported`
    sink_size: int  # first tokens that keep every channel
    recent_size: int  # last tokens that keep every channel
    flush_size: int  # tokens pruned at once
    # Fraction of channels to remove, None for an imported mask.
    pruning_ratio_asked: Annotated[float, Field(ge=0, le=1)] | None = None
    width_multiple: _Size | None = None  # what training rounded widths to, None for an imported mask
    recipe: str | None = None  # the training recipe, verbatim but for local paths
    seed: Annotated[int, Field(ge=0, le=2**64)] | None = None  # the training run's seed
    versions: Mapping[_Name, _Name] = field(default_factory=package_versions)  # package versions at the time
    # How held-out samples were answered when it was made, None if that was not tried.
    held_out: HeldOut | None = None
    made_by: _Name | None = None  # who made it, if that was not a run of leank-convert of its user's own
    source: _Name | None = None  # where it was published, under what copyright and licence
    evaluation: _Name | None = None  # how it was evaluated beyond `held_out`, and by whom
    # Numbers of the layers that the mask is of, L of them; None if it is of all.
    layers: Sequence[Annotated[int, Field(ge=0, lt=MAX_LAYERS)]] | None = None
    # How many tokens the mean of keys was measured on; None without one, or if not known.
    key_mean_tokens: Annotated[int, Field(ge=1, le=2**40)] | None = None
    # Fraction of V to remove of pruned tokens; None where V is not pruned.
    value_pruning_ratio_asked: Annotated[float, Field(ge=0, lt=1)] | None = None
    # How many tokens the basis of V was measured on; None without one, or if not known.
    value_tokens: Annotated[int, Field(ge=1, le=2**40)] | None = None
    # SHA-256 of the weights that the basis of V is of, as `digest_values` gives it; None, of a packaged mask,
    # for those of `model`.
    value_weights: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None

    @classmethod
    def for_model(cls, model: str, facts: ModelFacts, **rest: Any) -> MaskProvenance:
        """Fill the model's fields from its name, as `model_name` gives it, and its facts."""
        return cls(
            model=model,
            model_type=facts.model_type,
            rope_parameters=facts.rope_parameters,
            **{key: getattr(facts, key) for key in SHAPE_KEYS},
            layers=list(facts.layers) if facts.is_mixed else None,
            **rest,
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> MaskProvenance:
        """Read the header metadata of a mask file, which may come from others.

        Raises:
            LeanKError: If an entry is missing, or is not of the type or within the bounds that it has to be.
        """
        values = {}
        for name in {entry.name for entry in fields(cls)} & metadata.keys():
            try:
                values[name] = metadata[name] if name in _TEXTS else parse_json(metadata[name].encode())
            except ValueError as error:
                raise LeanKError(f"header metadata `{name}` is {cut(metadata[name])}, no JSON") from error
        try:
            # As JSON, of which strict pydantic makes tuples and data classes.
            known = TypeAdapter(cls).validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            raise first_problem(error, "header metadata `") from error
        Windows(known.sink_size, known.recent_size, known.flush_size)
        check_rope_parameters(known.rope_parameters, head_dim=known.head_dim, origin="rope_parameters")
        return known

    def to_metadata(self) -> dict[str, str]:
        """The header metadata of a mask file, as `from_metadata` reads it; the recipe without local paths."""
        told = self if self.recipe is None else replace(self, recipe=hide_local_paths(self.recipe))
        return {
            name: value if name in _TEXTS else encode_value(value)
            for name, value in vars(told).items()
            if value is not None
        }

    @property
    def numbers_of_layers(self) -> list[int]:
        """The layers that the mask is of."""
        return list(range(self.num_hidden_layers) if self.layers is None else self.layers)

    @property
    def maker(self) -> str:
        """Who made it, in a few words."""
        return self.made_by or f"leank-convert ({self.method})"

    @property
    def evaluated(self) -> str:
        """How it was evaluated, in a few words."""
        if self.evaluation is not None or self.held_out is None:
            return self.evaluation or "not yet"
        return self.held_out.shares


def encode_value(value: object) -> str:
    """Turn a value into JSON; equal values give equal texts."""
    return json.dumps(value, sort_keys=True, default=lambda it: vars(it) if is_dataclass(it) else {**it})

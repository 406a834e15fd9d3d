"""The recipe: its keys, their defaults, and which of them go together.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)

from leank_convert.errors import cut, first_line
from leank_convert.methods import METHODS, Budget, Method, Part

Task = Literal["retrieval", "multi_value", "passkey", "variable_tracking"]
Tracker = Literal["tensorboard", "wandb"]
_RUNNING_TEXT_TASKS = ("multi_value", "passkey")  # whose facts are hidden in it
HAYSTACK_SUFFIXES = (".txt", ".json", ".jsonl")
_LARGEST_COUNT = 2**24  # of tokens, steps and all else that is counted
_LARGEST_SEED = 2**63 - 1


def _refuse_bool(value: object) -> object:
    # pydantic takes `true` for 1, and YAML 1.1 takes `yes` and `on` for `true`.
    if isinstance(value, bool):
        raise ValueError("a number is needed, not a truth value")
    return value


def _check_method(name: str) -> str:
    if name not in METHODS:
        *others, last = map(repr, METHODS)
        raise ValueError(f"input should be {', '.join(others)} or {last}")
    return name


_MethodName = Annotated[
    str,
    AfterValidator(_check_method),
    Field(json_schema_extra=lambda schema: schema.update(enum=list(METHODS))),
]
_PositiveInt = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1, le=_LARGEST_COUNT)]
_NonNegativeInt = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0, le=_LARGEST_COUNT)]
_Seed = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0, le=_LARGEST_SEED)]
# Of factors between 0 and 1: more than their whole range in a step, or a thousand times what they may lose,
# is a slip of the pen.
_Rate = Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0, le=1, allow_inf_nan=False)]
_Weight = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, le=1000, allow_inf_nan=False)]
_Fraction = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, lt=1, allow_inf_nan=False)]


# Where a key takes one value or a list, pydantic says which it judged as a part of the key's place.
ONE, SEVERAL = "<one>", "<several>"
_Fractions = Annotated[
    Annotated[_Fraction, Tag(ONE)] | Annotated[tuple[_Fraction, ...], Field(min_length=1), Tag(SEVERAL)],
    Discriminator(lambda value: SEVERAL if isinstance(value, list | tuple) else ONE),
]


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"config.json could not hold it: {first_line(error)}") from error
    return value


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Section):
    """Which model is trained on, and how it is loaded."""

    id: str | None = Field(None, description="hub id or local folder; the command line's MODEL goes first")
    config_overrides: Annotated[dict[str, Any], AfterValidator(_check_json)] = Field(
        default_factory=dict, description="config.json keys to change, here and in the exported checkpoint"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype of the frozen weights in training; `auto` is the checkpoint's own"
    )
    device_map: Literal["auto"] | None = Field(
        None, description="`auto` spreads the layers over all GPUs, for a model that one cannot hold"
    )


class WindowsSection(_Section):
    """Token counts of the regions that keep every channel."""

    sink_size: _NonNegativeInt = Field(128, description="first tokens of a sequence")
    recent_size: _NonNegativeInt = Field(1024, description="last tokens of a sequence")
    flush_size: _PositiveInt = Field(
        32, description="tokens that leave the recent window at once; decoding only"
    )


class HaystackSection(_Section):
    """Where running text comes from. Without a source it is made of a small grammar, and nothing is read."""

    source: str | None = Field(
        None,
        description="a .txt file, or with the extra `datasets` a .json or .jsonl file or a dataset's hub id; "
        "null: the built-in sentences",
    )
    column: str = Field(
        "text", description="the key of a record, or the dataset's column, that holds the text"
    )
    config: str | None = Field(None, description="the dataset's configuration")
    split: str = Field("train", description="the dataset's split")


class DataSection(_Section):
    """Which samples are drawn. Every step draws fresh ones."""

    tasks: tuple[Task, ...] = Field(("retrieval", "multi_value"), min_length=1, description="taken in turn")
    wording: Literal["general", "testbed"] = Field(
        "general", description="`testbed` is the small language of the shipped model"
    )
    min_length: _PositiveInt = Field(
        4096, description="tokens of the shortest sample, template and answer included"
    )
    max_length: _PositiveInt = Field(32768, description="tokens of the longest sample")
    questions_per_context: _PositiveInt = Field(
        1, description="independent questions on one context, which is run once for all of them"
    )
    haystack: HaystackSection = Field(default_factory=HaystackSection)


class Stage1Section(_Section):
    """Stage 1: real-valued scaling factors under an L1 penalty."""

    steps: _NonNegativeInt = Field(2000, description="optimizer steps")
    learning_rate: _Rate = Field(0.02, description="Adam's, between its ramps")
    l1_weight: _Weight = Field(0.06, description="the paper's lambda, on the mean of |scaling factor|")


class Stage2Section(_Section):
    """Stage 2: the 0/1 mask itself, straight through to the scaling factors."""

    steps: _NonNegativeInt = Field(200, description="optimizer steps, for each pruning ratio")
    learning_rate: _Rate = Field(0.01, description="Adam's, between its ramps")
    validation_contexts: _NonNegativeInt = Field(
        0,
        description="contexts of another seed that stage 1's mask and those after every tenth of the steps "
        "are compared on; that of the least loss is taken; 0: the last one, as in the paper",
    )


class ValuesSection(_Section):
    """Gates on V's directions, of a method that trains, where V is pruned."""

    steps: _NonNegativeInt = Field(
        240,
        description="optimizer steps, for each pruning ratio; 0: directions are chosen by their part of "
        "attention's output, as methods that train nothing do",
    )
    learning_rate: _Rate = Field(0.02, description="Adam's, between its ramps")
    l1_weight: _Weight = Field(0.2, description="on the mean of all gates")


class HeadsSection(_Section):
    """Which heads lose all channels, as DuoAttention chooses them; methods without gates ignore it.

    Defaults are those of DuoAttention's published patterns.
    """

    pattern: str | None = Field(
        None,
        description="a folder of DuoAttention's `full_attention_heads.tsv` and `config.json`, to take gates "
        "from; null: they are learned",
    )
    pruning_ratio: _Fraction = Field(
        0.5,
        description="`duo-attention+leank`: fraction of all heads that lose every channel; `duo-attention` "
        "takes the recipe's `pruning_ratio`",
    )
    steps: _PositiveInt = Field(2000, description="optimizer steps")
    learning_rate: _Rate = Field(0.02, description="Adam's, between its ramps")
    l1_weight: _Weight = Field(0.05, description="on the mean of all gates")


class Recipe(_Section):
    """A whole recipe. Defaults are the paper's settings for Llama-3.1-8B, its context lengths aside."""

    model: ModelSection = Field(default_factory=ModelSection)
    mask: str | None = Field(
        None,
        description="a mask to export instead of training one: path, hub id or packaged name; training keeps "
        "its channels of K and learns V's directions (`value_pruning_ratio`)",
    )
    windows: WindowsSection = Field(default_factory=WindowsSection)
    method: _MethodName = Field(
        "leank",
        description="what chooses channels: " + "; ".join(f"{m.name} {m.summary}" for m in METHODS.values()),
    )
    budget: Budget | None = Field(
        None,
        description="`uniform`: every head keeps as many channels; `global`: the whole model's best; null: "
        f"uniform for {', '.join(m.name for m in METHODS.values() if m.budget == 'uniform')}, else global",
    )
    calibration_prompts: _PositiveInt = Field(
        16,
        description="prompts that "
        + " and ".join(m.name for m in METHODS.values() if m.num_prompts is None)
        + " average over; others ignore it",
    )
    pruning_ratio: _Fractions = Field(
        0.7, description="fraction of the whole model's K channels that is removed; a list: a mask for each"
    )
    width_multiple: _PositiveInt = Field(
        32,
        description="kept channels of a head are a multiple of this; 16 keeps more of small heads, and pays "
        "with a finer layout",
    )
    max_width: _PositiveInt | None = Field(
        None, description="no head keeps more channels than this; null: as many as it has"
    )
    rounding: Literal["nearest", "budget"] = Field(
        "nearest", description="`nearest` is the paper's; `budget` never ends below the asked pruning_ratio"
    )
    key_mean: bool = Field(
        True,
        description="keys are cached less their mean over the first contexts: a removed channel counts as "
        "its mean, not as 0",
    )
    value_pruning_ratio: _Fraction = Field(
        0.0,
        description="fraction of V's channels that pruned tokens lose, in a basis of V that is measured; 0: "
        "V as it is",
    )
    data: DataSection = Field(default_factory=DataSection)
    stage1: Stage1Section = Field(default_factory=Stage1Section)
    stage2: Stage2Section = Field(default_factory=Stage2Section)
    values: ValuesSection = Field(default_factory=ValuesSection)
    heads: HeadsSection = Field(default_factory=HeadsSection)
    batch_size: _PositiveInt = Field(
        1, description="contexts of one optimizer step, run one after another and shared by all ranks"
    )
    held_out_samples: _NonNegativeInt = Field(
        16, description="held-out contexts that are answered dense and pruned when a mask is made; 0: none"
    )
    offload_context: bool = Field(
        False, description="keep the context's keys and values in host memory, for contexts a GPU cannot hold"
    )
    trackers: tuple[Tracker, ...] = Field(
        ("tensorboard",), description="where every step is logged besides log.jsonl"
    )
    save_every: _PositiveInt = Field(50, description="steps between two saved states")
    seed: _Seed = Field(0, description="samples are a function of the seed and the step")

    _text: str | None = PrivateAttr(default=None)
    _derivation: str = PrivateAttr(default="")

    @model_validator(mode="before")
    @classmethod
    def _drop_stage2(cls, document: Any) -> Any:
        method = METHODS.get(str(document.get("method"))) if isinstance(document, Mapping) else None
        if method is not None and "stage1" in method.trains and "stage2" not in method.trains:
            stage2 = document.get("stage2") or {}
            if isinstance(stage2, Mapping | Stage2Section):
                return {**document, "stage2": {**dict(stage2), "steps": 0}}
        return document

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if found := "\n".join(_find_contradictions(self)):
            raise ValueError(found)
        return self

    @property
    def pruning_ratios(self) -> tuple[float, ...]:
        """Every asked ratio, one or more."""
        return self.pruning_ratio if isinstance(self.pruning_ratio, tuple) else (self.pruning_ratio,)

    @property
    def validation_seed(self) -> int:
        """What contexts that masks are compared on are drawn by, apart from training and what is held out."""
        return self.seed + 500_000

    @property
    def method_row(self) -> Method:
        """The row of its method in the table of methods."""
        return METHODS[self.method]

    @property
    def trains(self) -> tuple[Part, ...]:
        """What is learned, in this order: no gates that `heads.pattern` brings, no channels of a `mask`."""
        known = () if self.heads.pattern is None else ("gates",)
        of_keys = tuple(part for part in self.method_row.trains if part not in known and self.mask is None)
        may_learn = bool(of_keys) or self.mask is not None
        of_values = may_learn and self.value_pruning_ratio and self.values.steps
        return (*of_keys, *(("values",) if of_values else ()))

    @property
    def resolved_budget(self) -> Budget:
        """`budget`, or where it is null the method's own."""
        return self.budget or self.method_row.budget

    def width_unit(self, head_dim: int) -> int:
        """What a head's kept channels are a multiple of: `width_multiple`, or all that it has."""
        return head_dim if self.method_row.whole_heads else self.width_multiple

    def share_of_heads(self, pruning_ratio: float) -> float:
        """Fraction of heads that lose all channels of K by their gates, of the masks of a ratio."""
        if self.mask is not None or not self.method_row.has_gates:
            return 0.0
        return pruning_ratio if self.method_row.whole_heads else self.heads.pruning_ratio

    @property
    def text(self) -> str:
        """The recipe as its author wrote it, overrides as trailing comments; for provenance."""
        return self.to_yaml() if self._text is None else self._text

    @property
    def derivation(self) -> str:
        """The opening comment of a recipe that was derived, and so not written for its model; else empty."""
        return self._derivation

    def remember_text(self, text: str, derivation: str = "") -> None:
        """Keep what `text` and `derivation` give."""
        self._text, self._derivation = text, derivation

    def to_yaml(self) -> str:
        """The resolved recipe, every key spelt out; of a derived one, below how it was derived."""
        keys = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)
        return f"{self._derivation}\n{keys}" if self._derivation else keys


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a section, dotted, those of its own sections included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        section = field.default_factory
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from known_keys(section, f"{prefix}{name}.")


def _find_contradictions(recipe: Recipe) -> Iterator[str]:
    yield from _find_in_data(recipe.data, measures_values=recipe.value_pruning_ratio > 0)
    yield from _find_in_method(recipe)
    for key, values, what in (
        ("pruning_ratio", recipe.pruning_ratios, "ratio"),
        ("trackers", recipe.trackers, "tracker"),
    ):
        if len(set(values)) < len(values):
            yield f"`{key}` {cut(list(values))} names a {what} twice"
    windows, longest = recipe.windows, recipe.data.max_length
    if longest <= windows.sink_size + windows.recent_size:
        yield (
            f"`data.max_length` {longest} leaves nothing to prune between `windows.sink_size` "
            f"{windows.sink_size} and `windows.recent_size` {windows.recent_size}"
        )


def _find_in_data(data: DataSection, *, measures_values: bool) -> Iterator[str]:
    haystack = data.haystack
    # Compared with the defaults: a resolved recipe spells out every key.
    unread = haystack.model_dump(exclude_defaults=True) if haystack.source is None else {}
    if unread:
        keys = ", ".join(f"`{key}`" for key in unread)
        yield f"`data.haystack`: {keys} without a `source`: nothing is read"
    reads_text = data.wording == "general" and any(task in _RUNNING_TEXT_TASKS for task in data.tasks)
    if haystack.source is not None and not reads_text and not measures_values:
        tasks = ", ".join(f"`{task}`" for task in dict.fromkeys(data.tasks))
        yield (
            f"`data.haystack.source` is {cut(haystack.source)}, and none of the tasks {tasks} in `wording: "
            f"{data.wording}` has running text; remove it, or add `multi_value` or `passkey` of `wording: "
            "general`"
        )
    if data.min_length > data.max_length:
        yield f"`data`: `min_length` {data.min_length} is above `max_length` {data.max_length}"
    if data.wording == "general" and "variable_tracking" in data.tasks:
        yield "`data`: task `variable_tracking` exists only in `wording: testbed`"
    if data.wording == "testbed" and "passkey" in data.tasks:
        yield "`data`: task `passkey` does not exist in `wording: testbed`"


def _find_in_method(recipe: Recipe) -> Iterator[str]:
    method, ratio = recipe.method_row, min(recipe.pruning_ratios)
    whose = "whose heads keep all channels or none"
    if "stage1" in recipe.trains and not recipe.stage1.steps and not recipe.stage2.steps:
        yield "`stage1.steps` and `stage2.steps` are 0: nothing would tell channels apart; give stage 1 steps"
    if recipe.budget == "uniform" and (method.whole_heads or method.has_gates):
        whose_budget = whose if method.whole_heads else "some of whose heads keep no channel"
        yield f"`budget: uniform` does not go with `method: {method.name}`, {whose_budget}; leave it out"
    if method.whole_heads and recipe.max_width is not None:
        yield (
            f"`max_width` {recipe.max_width} does not go with `method: {method.name}`, {whose}; set it to "
            "null"
        )
    if ratio < recipe.share_of_heads(ratio):
        yield (
            f"`pruning_ratio` {ratio} is below `heads.pruning_ratio` {recipe.heads.pruning_ratio}, which "
            "heads without channels remove already; lower that one"
        )

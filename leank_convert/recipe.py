"""Recipes: what is trained, on what, for how long. One YAML file, checked whole before anything runs.

Precedence: defaults < the recipe's file < `--set key=value` < flags. An unknown key is an error with a
suggestion, and every problem is told at once.
Importing this module does not import torch.
"""

from __future__ import annotations

import difflib
import importlib.resources
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)

from leank_convert.errors import LeanKError, RecipeError

if TYPE_CHECKING:
    from importlib.abc import Traversable

Task = Literal["retrieval", "multi_value", "passkey", "variable_tracking"]
Tracker = Literal["tensorboard", "wandb"]
Method = Literal[
    "leank", "magnitude-alpha", "static-norm", "double-sparsity", "random", "high-frequency-ratio"
]
Budget = Literal["uniform", "global"]

_TRAINED_METHODS = ("leank", "magnitude-alpha")
_UNIFORM_METHODS = ("static-norm", "double-sparsity", "random")


def _refuse_bool(value: object) -> object:
    # pydantic takes `true` for 1, and YAML 1.1 takes `yes` and `on` for `true`.
    if isinstance(value, bool):
        raise ValueError("a number is needed, not a truth value")
    return value


_PositiveInt = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1)]
_NonNegativeInt = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=0)]
_PositiveFloat = Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0, allow_inf_nan=False)]
_NonNegativeFloat = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, allow_inf_nan=False)]
_Fraction = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, lt=1, allow_inf_nan=False)]


# Where a key takes one value or a list, pydantic says which it judged as a part of the key's place.
_ONE, _SEVERAL = "<one>", "<several>"
_Fractions = Annotated[
    Annotated[_Fraction, Tag(_ONE)] | Annotated[tuple[_Fraction, ...], Field(min_length=1), Tag(_SEVERAL)],
    Discriminator(lambda value: _SEVERAL if isinstance(value, list | tuple) else _ONE),
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Section):
    """Which model is trained on, and how it is loaded."""

    id: str | None = Field(None, description="hub id or local folder; the command line's MODEL goes first")
    config_overrides: dict[str, Any] = Field(
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
        None, description="a .txt, .json or .jsonl file, or a dataset's hub id; null: the built-in sentences"
    )
    column: str = Field(
        "text", description="the key of a record, or the dataset's column, that holds the text"
    )
    config: str | None = Field(None, description="the dataset's configuration")
    split: str = Field("train", description="the dataset's split")

    @model_validator(mode="after")
    def _check(self) -> HaystackSection:
        # Compared with the defaults: a resolved recipe spells out every key.
        unread = self.model_dump(exclude_defaults=True) if self.source is None else {}
        if unread:
            keys = ", ".join(f"`{key}`" for key in unread)
            raise ValueError(f"{keys} without a `source`: nothing is read")
        return self


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

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        if self.min_length > self.max_length:
            raise ValueError(f"`min_length` {self.min_length} is above `max_length` {self.max_length}")
        if self.wording == "general" and "variable_tracking" in self.tasks:
            raise ValueError("task `variable_tracking` exists only in `wording: testbed`")
        if self.wording == "testbed" and "passkey" in self.tasks:
            raise ValueError("task `passkey` does not exist in `wording: testbed`")
        return self


class Stage1Section(_Section):
    """Stage 1: real-valued scaling factors under an L1 penalty."""

    steps: _NonNegativeInt = Field(2000, description="optimizer steps")
    learning_rate: _PositiveFloat = Field(0.02, description="Adam's, between its ramps")
    l1_weight: _NonNegativeFloat = Field(
        0.06, description="the paper's lambda, on the mean of |scaling factor|"
    )


class Stage2Section(_Section):
    """Stage 2: the 0/1 mask itself, straight through to the scaling factors."""

    steps: _NonNegativeInt = Field(200, description="optimizer steps, for each pruning ratio")
    learning_rate: _PositiveFloat = Field(0.01, description="Adam's, between its ramps")


class Recipe(_Section):
    """A whole recipe. Defaults are the paper's settings for Llama-3.1-8B, its context lengths aside."""

    model: ModelSection = Field(default_factory=ModelSection)
    mask: str | None = Field(None, description="a mask to export instead of training one: path or hub id")
    windows: WindowsSection = Field(default_factory=WindowsSection)
    method: Method = Field(
        "leank",
        description="what chooses channels; `magnitude-alpha` is `leank` without stage 2, the others train "
        "nothing",
    )
    budget: Budget | None = Field(
        None,
        description="`uniform`: every head keeps as many channels; `global`: the whole model's best; null: "
        f"uniform for {', '.join(_UNIFORM_METHODS)}, else global",
    )
    calibration_prompts: _PositiveInt = Field(
        16, description="prompts that static-norm and double-sparsity average over; others ignore it"
    )
    pruning_ratio: _Fractions = Field(
        0.7,
        description="fraction of the whole model's K channels that is removed; a list: a mask for each",
    )
    width_multiple: _PositiveInt = Field(32, description="kept channels of a head are a multiple of this")
    max_width: _PositiveInt | None = Field(
        None, description="no head keeps more channels than this; null: as many as it has"
    )
    rounding: Literal["nearest", "budget"] = Field(
        "nearest", description="`nearest` is the paper's; `budget` never ends below the asked pruning_ratio"
    )
    data: DataSection = Field(default_factory=DataSection)
    stage1: Stage1Section = Field(default_factory=Stage1Section)
    stage2: Stage2Section = Field(default_factory=Stage2Section)
    batch_size: _PositiveInt = Field(
        1, description="contexts of one optimizer step, run one after another and shared by all ranks"
    )
    offload_context: bool = Field(
        False, description="keep the context's keys and values in host memory, for contexts a GPU cannot hold"
    )
    trackers: tuple[Tracker, ...] = Field(("tensorboard",), description="who is told of every step")
    save_every: _PositiveInt = Field(50, description="steps between two saved states")
    seed: _NonNegativeInt = Field(0, description="samples are a function of the seed and the step")

    _text: str | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _drop_stage2(cls, document: Any) -> Any:
        if isinstance(document, Mapping) and document.get("method") == "magnitude-alpha":
            stage2 = document.get("stage2") or {}
            if isinstance(stage2, Mapping | Stage2Section):
                return {**document, "stage2": {**dict(stage2), "steps": 0}}
        return document

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.method == "high-frequency-ratio":
            if self.budget == "uniform":
                raise ValueError(
                    "`budget: uniform` does not go with `method: high-frequency-ratio`, whose heads keep all "
                    "channels or none; leave it out"
                )
            if self.max_width is not None:
                raise ValueError(
                    f"`max_width` {self.max_width} does not go with `method: high-frequency-ratio`, whose "
                    "heads keep all channels or none; set it to null"
                )
        if len(set(self.pruning_ratios)) < len(self.pruning_ratios):
            raise ValueError(f"`pruning_ratio` {list(self.pruning_ratios)} names a ratio twice")
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"`trackers` {list(self.trackers)} names a tracker twice")
        full_width = self.windows.sink_size + self.windows.recent_size
        if self.data.max_length <= full_width:
            raise ValueError(
                f"`data.max_length` {self.data.max_length} leaves nothing to prune between "
                f"`windows.sink_size` {self.windows.sink_size} and `windows.recent_size` "
                f"{self.windows.recent_size}"
            )
        return self

    @property
    def pruning_ratios(self) -> tuple[float, ...]:
        """Every asked ratio, one or more."""
        return self.pruning_ratio if isinstance(self.pruning_ratio, tuple) else (self.pruning_ratio,)

    @property
    def is_trained(self) -> bool:
        """Whether its method learns scaling factors, step by step."""
        return self.method in _TRAINED_METHODS

    @property
    def resolved_budget(self) -> Budget:
        """`budget`, or where it is null the method's own."""
        return self.budget or ("uniform" if self.method in _UNIFORM_METHODS else "global")

    @property
    def text(self) -> str:
        """The recipe as its author wrote it, overrides as trailing comments; for provenance."""
        return self.to_yaml() if self._text is None else self._text

    @property
    def given_windows(self) -> dict[str, int]:
        """The `windows` keys that the file, an override or a flag gave, with their values; no defaults.

        What was not given may yield to a mask's own window sizes. A resolved recipe (`to_yaml`) gives all.
        """
        return self.windows.model_dump(exclude_unset=True)

    def to_yaml(self) -> str:
        """The resolved recipe, every key spelt out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


@dataclass(frozen=True)
class PackagedRecipe:
    """A recipe that ships with the package."""

    name: str
    summary: str
    model: str | None
    text: str


def load_recipe(
    path_or_name: str | Path,
    overrides: Sequence[str] = (),
    *,
    flags: Mapping[str, object] = MappingProxyType({}),
) -> Recipe:
    """Read and check a recipe.

    Args:
        path_or_name: A YAML file, or the bare name of a packaged recipe such as `quickstart`.
        overrides: `key=value` strings; keys are dotted (`stage1.steps`), values YAML; later ones win.
        flags: Values by dotted key, applied last. Told to the user as command-line options of the key's
            last part: `windows.flush_size` as `--flush-size`.

    Raises:
        RecipeError: Everything that is wrong with the recipe, the overrides and the flags, at once.
        LeanKError: There is no such recipe.
    """
    name = str(path_or_name)
    text = _read_text(path_or_name)
    document = _parse(name, text)
    changes = [f"--set {override}" for override in overrides]
    origins: dict[str, str] = {}
    problems: list[str] = []
    for override in overrides:
        problem = _apply_override(document, override, origins)
        if problem is not None:
            problems.append(problem)
    for key, value in flags.items():
        option = f"--{key.rpartition('.')[2].replace('_', '-')}"
        _write_key(document, key, value)
        origins[key] = option
        changes.append(f"{option} {value}")
    hint = None
    recipe = None
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        found, hint = _describe_errors(error, origins)
        problems += found
    if recipe is None or problems:
        raise RecipeError(name, problems, hint)
    if changes and not text.endswith("\n"):
        text += "\n"
    recipe._text = text + "".join(f"# {line}\n" for change in changes for line in change.splitlines())
    return recipe


def list_recipes() -> list[PackagedRecipe]:
    """The packaged recipes by name, each with the first line of its opening comment."""
    return [
        PackagedRecipe(
            name=entry.name.removesuffix(".yaml"),
            summary=text.partition("\n")[0].lstrip("# ").strip(),
            model=(yaml.safe_load(text).get("model") or {}).get("id"),
            text=text,
        )
        for entry in sorted(_packaged_files(), key=lambda entry: entry.name.removesuffix(".yaml"))
        for text in [entry.read_text(encoding="utf-8")]
    ]


def find_recipe(model: str) -> str:
    """Find the packaged recipe of a model; of several, the one with the plainest name.

    Args:
        model: Hub id, or `testbed`.

    Raises:
        LeanKError: No packaged recipe is for `model`.
    """
    names = [recipe.name for recipe in list_recipes() if recipe.model == model]
    if not names:
        raise LeanKError(
            f"there is no packaged recipe for `{model}`",
            hint="name one with `--recipe NAME|FILE`; `leank-convert recipes` lists what is packaged",
        )
    return min(names, key=len)


def _packaged_files() -> Iterator[Traversable]:
    folder = importlib.resources.files("leank_convert._recipes")
    return (entry for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _read_text(path_or_name: str | Path) -> str:
    name = str(path_or_name)
    path = Path(path_or_name)
    packaged = {entry.name.removesuffix(".yaml"): entry for entry in _packaged_files()}
    if not path.is_file() and name in packaged:
        return packaged[name].read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        close = difflib.get_close_matches(path.name.removesuffix(".yaml"), packaged, n=1)
        raise LeanKError(
            f"recipe `{name}` is neither a file nor a packaged recipe",
            hint=f"did you mean `{close[0]}`?"
            if close
            else f"packaged recipes: {', '.join(sorted(packaged))}",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise LeanKError(f"recipe `{name}` cannot be read: {error}") from None


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which by itself lets the last of two equal keys win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key `{key}` is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        document = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise RecipeError(name, [f"{place}{getattr(error, 'problem', None) or error}"]) from None
    if document is None or document == {}:
        # The defaults alone are nobody's recipe; a file cut short is more likely.
        raise RecipeError(name, ["the file holds no key"], "write at least one key, such as `seed: 0`")
    if not isinstance(document, dict):
        raise RecipeError(name, [f"the file holds a {type(document).__name__}, not a mapping of keys"])
    return document


def _apply_override(document: dict[str, Any], override: str, origins: dict[str, str]) -> str | None:
    """Write one `key=value` into `document`; returns what is wrong with it, if anything."""
    key, equals, value = override.partition("=")
    key = key.strip()
    if not equals or not key:
        return f"`--set {override}` is not of the form `key=value`"
    try:
        parsed = yaml.load(value, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        return f"`--set {override}`: the value is not YAML: {getattr(error, 'problem', None) or error}"
    _write_key(document, key, parsed)
    origins[key] = f"--set {override}"
    return None


def _write_key(document: dict[str, Any], key: str, value: object) -> None:
    *parents, leaf = key.split(".")
    section = document
    for parent in parents:
        child = section.get(parent)
        # What is not a mapping is replaced: the override goes first, and validation judges the result.
        section[parent] = dict(child) if isinstance(child, Mapping) else {}
        section = section[parent]
    section[leaf] = value


def _describe_errors(error: ValidationError, origins: Mapping[str, str]) -> tuple[list[str], str | None]:
    """One sentence per problem, and the hint: beside the problem where there are several."""
    problems: list[str] = []
    hints: list[str | None] = []
    items = error.errors(include_url=False)
    for item in items:
        place = item["loc"]
        within = [other for other in items if other["loc"][: len(place)] == place != other["loc"]]
        if item["type"] == "too_short" and within:
            continue  # pydantic counts what is left of a list without its wrong items
        key = ".".join(str(part) for part in place if part not in (_ONE, _SEVERAL))
        # The last of several is the one whose value is judged. An item of a list came with the whole list.
        sources = [
            origins[name]
            for name in origins
            if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")
        ]
        origin = f" (from `{sources[-1]}`)" if sources else ""
        hint = None
        if item["type"] == "extra_forbidden":
            problem = f"unknown key `{key}`{origin}"
            close = _closest_key(key)
            hint = f"did you mean `{close}`?" if close else None
        elif item["type"] == "model_type":
            problem = f"`{key}` is `{item['input']!r}`, not a mapping of keys{origin}"
        elif item["type"] == "tuple_type":
            problem = f"`{key}` is `{item['input']}`, not a list{origin}"
        elif item["type"] == "too_short":
            problem = f"`{key}` is `[]`, an empty list{origin}"
        elif item["type"] == "value_error" and isinstance(item["input"], dict | BaseModel):
            # A check over several keys names them itself, relative to its section.
            problem = (f"`{key}`: " if key else "") + str(item["ctx"]["error"])
        else:
            message = item["msg"].removeprefix("Value error, ")
            problem = f"`{key}` is `{item['input']}`: {message[:1].lower()}{message[1:]}{origin}"
        problems.append(problem)
        hints.append(hint)
    if len(problems) == 1:
        return problems, hints[0]
    return [
        f"{problem} ({hint})" if hint else problem for problem, hint in zip(problems, hints, strict=True)
    ], None


def _closest_key(key: str) -> str | None:
    """The known key an unknown one may stand for: misplaced first, then misspelt, then anything alike."""
    known = list(_known_keys(Recipe))
    section, _, leaf = key.rpartition(".")
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if same_leaf:
        return same_leaf[0]
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    close = difflib.get_close_matches(leaf, siblings, n=1)
    if close:
        return siblings[close[0]]
    close = difflib.get_close_matches(key, known, n=1)
    return close[0] if close else None


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        annotations = (field.annotation, *get_args(field.annotation))
        for annotation in annotations:
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from _known_keys(annotation, f"{prefix}{name}.")

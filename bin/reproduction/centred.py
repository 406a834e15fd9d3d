"""Centred keys on a real model whose keys have large constant parts: answers and text.

Masks of all ratios come from one training. RULER's prompts are answered in rounds, a few more of every cell
in each, so that what is there at any time says the same of all cells; a cell is a task at a length.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from bin.baselines import make_variants
from bin.reproduction.bench import Bench, Masks
from bin.reproduction.findings import describe_difference
from bin.reproduction.plan import MAIN, Cell, RealSizes, Run, Sizes
from bin.reproduction.rounded import RoundedPrompt
from bin.reproduction.texts import Texts, find_kinds
from bin.reproduction.units import Unit, work_off
from bin.reproduction.workers import run_workers
from leank_convert.device import choose_device
from leank_convert.evaluate.answer_log import AnswerLog
from leank_convert.evaluate.answering import answer_prompts
from leank_convert.evaluate.comparison import compare
from leank_convert.evaluate.ruler import draw_prompts
from leank_convert.evaluate.text import measure_rows
from leank_convert.evaluate.variants import Dense, Masked, ThinK, Variant
from leank_convert.files import read_json, write_atomically
from leank_convert.mask import ChannelMask
from leank_convert.methods.measured_cache import measure_cache
from leank_convert.recipe_file import load_recipe

RULER_SEED, OTHERS_SEED = 7_000_000, 8_000_000
DENSE = "dense"


@dataclass(frozen=True)
class CentredSizes:
    """How much is done."""

    recipe: str = "qwen2.5-coder-1.5b-instruct"
    overrides: tuple[str, ...] = ()
    ratios: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    tasks: tuple[str, ...] = (
        "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multivalue",
        "niah_multiquery", "vt", "fwe",
    )  # fmt: skip
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    rounds: tuple[int, ...] = (8, 16, 24, 32, 48, 64, 80, 100)  # prompts of a cell that are answered by then
    num_int4: int = 100  # of these by an int4 cache, which no kernels read
    other_tasks: tuple[str, ...] = ("niah_single_2", "niah_multikey_1", "niah_multivalue")
    other_lengths: tuple[int, ...] = (8192, 16384)
    num_others: int = 32
    text_tokens: tuple[int, ...] = (4000, 12000)  # of a text, before those that are fed
    num_fed: int = 128
    num_texts: int = 6  # of each kind
    batch_tokens: int = 2**18  # of prompts that are answered together


QUICK_CENTRED = CentredSizes(
    overrides=(
        "windows.sink_size=16", "windows.recent_size=64", "windows.flush_size=16", "data.min_length=448",
        "data.max_length=512", "data.questions_per_context=1", "stage1.steps=2", "stage2.steps=1",
        "stage2.validation_contexts=0", "calibration_prompts=1", "held_out_samples=1",
    ),
    ratios=(0.7, 0.8),
    tasks=("niah_single_2", "fwe"),
    lengths=(448,),
    rounds=(1, 2),
    num_int4=1,
    other_tasks=("niah_single_2",),
    other_lengths=(448,),
    num_others=1,
    text_tokens=(300,),
    num_fed=4,
    num_texts=2,
    batch_tokens=1024,
)  # fmt: skip


@dataclass
class CentredKeys:
    """All units and their results.

    Attributes:
        out: Where results are kept.
        sizes: How much is done.
        model: The model's folder.
        device: Where it runs.
        texts: The folder that `bin/fetch-texts` wrote, if any.
        minutes: After so many no unit is begun; None for all.
    """

    out: Path
    sizes: CentredSizes
    model: str
    device: torch.device
    texts: Path | None = None
    minutes: float | None = None
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        sizes = self.sizes
        recipe = load_recipe(sizes.recipe, sizes.overrides)
        runs = {MAIN: Run((), sizes.ratios)}
        for method in ("static-norm", "double-sparsity"):
            for centred in ("true", "false"):
                settings = (f"method={method}", "width_multiple=1", f"key_mean={centred}")
                runs[f"{method}-{centred}"] = Run((*settings, "held_out_samples=0"), (0.7,))
        self._recipe = recipe
        masks = Masks(runs, Sizes(sizes.recipe, sizes.overrides), self.model, self.out / "masks", self.device)
        self._bench = Bench(recipe, self.model, masks, self.device)

    def work(self, prefix: str = "") -> None:
        """Do what no other process does, until all is done or time is up."""
        self.out.mkdir(parents=True, exist_ok=True)
        console = Console(stderr=True)

        def note(line: str) -> None:
            console.print(f"{prefix}{line}", highlight=False)

        work_off(self._list_units(), self.out, note, self._is_up)

    def _is_up(self) -> bool:
        return self.minutes is not None and time.monotonic() - self._started > 60 * self.minutes

    def _list_units(self) -> list[Unit]:
        masks = self._bench.masks
        units = [
            Unit(f"masks/{name}", lambda name=name: masks.are_made(name), lambda name=name: masks.make(name))  # type: ignore[misc]
            for name in masks
        ]
        units.append(Unit("constants", self._constants_file.exists, self._measure, (units[0].name,)))
        needs = tuple(unit.name for unit in units)
        path = self.out / "text.json"
        units.append(Unit("text", path.exists, lambda: self._feed(path), needs))
        others = [
            self._answers_unit("others", OTHERS_SEED, Cell(task, length), self.sizes.num_others, (), needs)
            for length in self.sizes.other_lengths
            for task in self.sizes.other_tasks
        ]
        last: dict[Cell, tuple[str, ...]] = {}
        for number, count in enumerate(self.sizes.rounds):
            for length in self.sizes.lengths:
                for task in self.sizes.tasks:
                    cell = Cell(task, length)
                    names = self._main_names if count <= self.sizes.num_int4 else self._main_names[:-2]
                    before = last.get(cell, ())
                    units.append(
                        self._answers_unit("ruler", RULER_SEED, cell, count, names, (*needs, *before))
                    )
                    last[cell] = (units[-1].name,)
            units += others if number == 1 else []
        return units

    @property
    def _main_names(self) -> tuple[str, ...]:
        return (DENSE, "leank 70%", "leank 80%", "fp8", "leank 70% x fp8", "int4", "leank 70% x int4")

    def _answers_unit(
        self, part: str, seed: int, cell: Cell, count: int, names: Sequence[str], needs: tuple[str, ...]
    ) -> Unit:
        folder = self.out / part / f"{cell.task}-{cell.length}"

        path = folder / "scores.json"

        def kept() -> dict[str, list[float]]:
            found: dict[str, list[float]] = read_json(path) if path.exists() else {}
            return found

        def is_done() -> bool:
            found = kept()
            return all(len(found.get(name, ())) >= count for name in names or tuple(self._variants))

        def answer() -> None:
            asked, evaluated = names or tuple(self._variants), self._bench.evaluated
            prompts = draw_prompts(evaluated.tokenizer, [cell.task], [cell.length], count, seed + cell.length)
            log = AnswerLog(folder, {"seed": seed, "windows": self._recipe.windows.model_dump()})
            size = max(1, self.sizes.batch_tokens // cell.length)
            left = log.missing(prompts, asked)
            for start in range(0, len(left), size):
                batch = left[start : start + size]
                waiting = [self._variants[name] for name in asked if log.missing(batch, [name])]
                for answers in answer_prompts(evaluated, batch, waiting, batch_size=size):
                    log.add(answers)
            scores = {
                name: [log.outcome(prompt, [name]).scores[name] for prompt in prompts] for name in asked
            }
            write_atomically(path, json.dumps({**kept(), **scores}).encode())

        return Unit(f"{part}/{cell.task}-{cell.length}-{count}", is_done, answer, needs)

    @property
    def _constants_file(self) -> Path:
        return self.out / "constants.pt"

    def _measure(self) -> None:
        """Measure scales for FP8 of centred keys, as an export does."""
        scales = measure_cache(self.model, self._recipe, device=self.device).scales(self._mask(0.7))
        torch.save({"key_scale": scales.keys, "value_scale": scales.values}, self._constants_file)

    def _mask(self, ratio: float, run: str = MAIN) -> ChannelMask:
        return self._bench.masks[run][ratio]

    @cached_property
    def _variants(self) -> dict[str, Variant]:
        """All that answers, by its name."""
        bench = self._bench
        mean = self._mask(0.7).key_mean
        assert mean is not None
        none = {"key_mean": torch.zeros_like(mean)}
        of_model = {"key_mean": mean}
        fp8 = {**of_model, **torch.load(self._constants_file)}
        every = torch.ones_like(self._mask(0.7).channel_mask)
        masks = {ratio: self._mask(ratio).channel_mask for ratio in self.sizes.ratios}
        found: list[Variant] = [Dense(bench.evaluated.dense, DENSE)]
        found += [Masked(f"leank {ratio:.0%}", mask, constants=of_model) for ratio, mask in masks.items()]
        found += [
            Masked("fp8", every, kv_dtype="fp8", constants=fp8),
            Masked("leank 70% x fp8", masks[0.7], kv_dtype="fp8", constants=fp8),
            Masked("int4", every, kv_dtype="int4", constants=of_model),
            Masked("leank 70% x int4", masks[0.7], kv_dtype="int4", constants=of_model),
            Masked("fp8, prompt's mean", every, kv_dtype="fp8"),
            Masked("leank 70%, not centred", masks[0.7], constants=none),
            Masked("fp8, not centred", every, kv_dtype="fp8", constants=none),
            Masked("leank 70% x fp8, not centred", masks[0.7], kv_dtype="fp8", constants=none),
            Masked("int4, not centred", every, kv_dtype="int4", constants=none),
            ThinK(0.7, name="think"),
        ]
        for method in ("static-norm", "double-sparsity"):
            for centred, constants in (("true", of_model), ("false", none)):
                label = f"{method}{', centred' if centred == 'true' else ''}"
                found.append(
                    Masked(label, self._mask(0.7, f"{method}-{centred}").channel_mask, constants=constants)
                )
        for name in ("kivi", "quest", "snapkv"):
            found += make_variants(name, every, alone=True)[:1]
        return {variant.name: variant for variant in found}

    def _feed(self, path: Path) -> None:
        """Compare predictions on natural text, keys alone rounded and as deployed."""
        every, mask = torch.ones_like(self._mask(0.7).channel_mask), self._mask(0.7).channel_mask
        mean = self._mask(0.7).key_mean
        assert mean is not None
        variants = [variant for name, variant in self._variants.items() if name not in _NOT_FED]
        for kv_dtype in ("fp8", "int4"):
            for label, kept in (("", every), ("leank 70% x ", mask)):
                for centred in (True, False):
                    named = f"{label}{kv_dtype}, K alone{'' if centred else ', not centred'}"
                    variants.append(
                        RoundedPrompt(named, kept, mean if centred else torch.zeros_like(mean), kv_dtype)
                    )
            variants.append(RoundedPrompt(f"{kv_dtype}, V alone", every, mean, kv_dtype, keys=False))
        found: dict[str, Any] = {}
        for kind in find_kinds(self.texts):
            for length in self.sizes.text_tokens:
                texts = Texts(self._bench, kind, self.texts, self.out / "text", RealSizes())
                rows = texts._take(self.sizes.num_texts, length + self.sizes.num_fed + 1)
                measured = measure_rows(self._bench.evaluated, rows, variants, prefix_tokens=length)
                found[f"{kind}, {length}"] = {
                    variant.name: {
                        "kl": float(measured.divergence[place].double().mean()),
                        "agreement": float(measured.agrees[place].double().mean()),
                        "nll": float(measured.nll[place].double().mean()),
                        "dense_nll": float(measured.dense_nll.double().mean()),
                    }
                    for place, variant in enumerate(variants)
                }
        write_atomically(path, json.dumps(found, indent=1).encode())

    def report(self) -> str:
        """What is there by now, as Markdown."""
        lines = ["| text behind | " + " | ".join(("cache", "KL", "agreement")) + " |", "|---|---|---|---|"]
        path = self.out / "text.json"
        for where, found in (read_json(path) if path.exists() else {}).items():
            lines += [
                f"| {where} | {name} | {row['kl']:.4f} | {row['agreement']:.1%} |"
                for name, row in found.items()
            ]
        for part in ("ruler", "others"):
            lines += ["", f"| {part} | n | score | against dense, 95% interval |", "|---|---|---|---|"]
            lines += _render(self._read(part))
        return "\n".join(lines)

    def _read(self, part: str) -> dict[Cell, dict[str, list[float]]]:
        """By cell and cache, the scores of the first prompts."""
        found = {}
        for path in sorted((self.out / part).glob("*/scores.json")):
            task, _, length = path.parent.name.rpartition("-")
            found[Cell(task, int(length))] = read_json(path)
        return found


_NOT_FED = (DENSE, "think", "kivi", "quest-16", "snapkv-2048")
_FLOOR = 0.2  # of the dense model's score in a cell that counts, as of SmolLM2


def _render(found: Mapping[Cell, Mapping[str, list[float]]]) -> list[str]:
    """A line for each cache over all cells that the dense model can answer, then by length, then by task."""
    strong = {cell: scores for cell, scores in found.items() if fmean(scores[DENSE]) > _FLOOR}
    groups: dict[str, list[Cell]] = {"": list(strong)}
    for cell in strong:
        groups.setdefault(f", {cell.length}", []).append(cell)
        groups.setdefault(f", {cell.task}", []).append(cell)
    lines = []
    for suffix, cells in groups.items():
        for name in dict.fromkeys(name for cell in cells for name in strong[cell]):
            pairs = [
                pair
                for cell in cells
                for pair in zip(strong[cell].get(name, ()), strong[cell][DENSE], strict=False)
            ]
            against = describe_difference(compare([own - dense for own, dense in pairs]))
            score = fmean(own for own, _ in pairs)
            lines.append(
                f"| {name}{suffix} | {len(pairs)} | {score:.1%} | {'' if name == DENSE else against} |"
            )
    return lines


def reproduce_centred(
    out: Path,
    sizes: CentredSizes,
    model: str,
    *,
    texts: Path | None = None,
    device: str | None = None,
    num_workers: int = 1,
    minutes: float | None = None,
) -> str:
    """Do what is left, or as much of it as there is time for; return what is there, as Markdown.

    Args:
        out: The folder; one of an earlier run is gone on with.
        sizes: How much is done in all.
        model: The model's folder.
        texts: The folder that `bin/fetch-texts` wrote; None: one kind of text is all.
        device: Default: CUDA if there is any, else the CPU.
        num_workers: Processes that share the work; 1 is this one.
        minutes: After so many no piece of work is begun; None for all.

    Raises:
        LeanKError: As training and evaluation; also if `out` holds masks or answers of other settings.
    """
    arguments = (out, sizes, model, texts, device, minutes)
    if num_workers > 1:
        run_workers(_work, arguments, num_workers)
    else:
        _work(*arguments, 0)
    report = CentredKeys(out, sizes, model, choose_device(device), texts).report()
    write_atomically(out / "tables.md", report.encode())
    return report


def _work(
    out: Path, sizes: CentredSizes, model: str, texts: Path | None, device: str | None, minutes: float | None,
    number: int,
) -> None:  # fmt: skip
    CentredKeys(out, sizes, model, choose_device(device), texts, minutes).work(f"worker {number}: ")

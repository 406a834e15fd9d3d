"""Checks of a written graph: onnx's own checker, then onnxruntime's answers against PyTorch's.

A graph is held to PyTorch strictly as long as its weights are the model's. How far logits are from those once
they are quantized is measured and reported, since that is the model's and the user's affair: in a deep model
of random weights it is as far as logits of another model are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from leank_convert.errors import LeanKError, first_line
from leank_convert.onnx.graph import StepModel, attend_in_regions, attending, cache_shapes, trial_sizes
from leank_convert.onnx.leank_onnx_session import load_graph
from leank_convert.onnx.pruned_model import PrunedModel

# Of the largest number. A wrong graph, other weights or other channels are off by about as much as that;
# rounding is far below.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-2}
# ‖graph's - model's‖ / ‖model's‖ of quantized weights, from which on a user is warned.
_MUCH = 0.5

_logger = logging.getLogger("leank_convert")


@dataclass(frozen=True)
class Trial:
    """A step that a graph is held to."""

    name: str
    inputs: list[Tensor]  # the graph's, in its order
    logits: Tensor  # what PyTorch makes of them, float32 [B, K, V]


def make_trials(pruned: PrunedModel) -> list[Trial]:
    """Run a prompt and a decode step in PyTorch, after which the model is no longer needed.

    LeanKError if a logit is not finite.
    """
    slots, num_tokens, num_pruned = trial_sizes(**pruned.windows.sizes)
    generator = torch.Generator().manual_seed(1)
    shapes = cache_shapes(pruned, 2, slots, 5)
    cache = [torch.randn(*shape, generator=generator).to(pruned.model.dtype) for shape in shapes.values()]
    ids, nothing = _some_tokens(pruned, 7), torch.zeros(2, dtype=torch.long)
    prompt = [ids, nothing, nothing, torch.arange(7).expand(2, -1), *cache]
    with torch.no_grad():  # by the stock model, which knows nothing of the cache
        expected = pruned.model(input_ids=ids, use_cache=False).logits
    step = [
        _some_tokens(pruned, 1),
        torch.tensor([num_tokens, num_tokens - 2]),
        torch.tensor([num_pruned, max(num_pruned - 2, 0)]),
        torch.zeros(2, 1, dtype=torch.long),
    ]
    with torch.no_grad(), attending(pruned.model, attend_in_regions):
        logits, _ = StepModel(pruned)(*step, cache)
    if not (expected.isfinite().all() and logits.isfinite().all()):
        dtype = str(pruned.model.dtype).removeprefix("torch.")
        raise LeanKError(
            f"model `{pruned.name}` answers random tokens with what is no number in {dtype}",
            hint="look at its weights"
            if dtype == "float32"
            else "export it with `--dtype float32`, and with `--weights int8` where that takes too much",
        )
    return [
        Trial("a prompt", prompt, expected.float()),
        Trial("a decode step", [*step, *cache], logits.float()),
    ]


def check_graph(trials: Sequence[Trial], path: Path, weights: str | None = None) -> float:
    """Check a graph of a model by what `make_trials` made of it; warn where quantized `weights` are far off.

    Returned is ‖graph's - model's‖ / ‖model's‖, of a prompt of random tokens or of a decode step on a random
    cache, whichever is more. LeanKError if the graph breaks ONNX's rules, cannot be run, gives what is no
    number, or, as long as weights are the model's, other logits than PyTorch's.
    """
    differences = []
    for trial, logits in zip(trials, _run(trials, path, weights), strict=True):
        error = largest_difference(logits, trial.logits)
        limit = _TOLERANCES[trial.inputs[-1].dtype] if weights is None else math.inf
        if not error < limit:
            raise _fault(
                f"`{path.name}`: logits of {trial.name} differ from PyTorch's by {error:.1e} of the largest"
            )
        differences.append(distance(logits, trial.logits))
    difference = max(differences)
    if weights is not None and difference > _MUCH:
        _logger.warning(
            "with %s weights logits differ by %.2f of their norm from the model's, on random tokens; where "
            "answers suffer take more bits, or leave `--weights` out",
            weights,
            difference,
        )
    return difference


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """By how much numbers differ at most, as a share of the largest one expected."""
    return float((found - expected).abs().max() / expected.abs().max())


def distance(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖."""
    return float((found - expected).norm() / expected.norm())


def _run(trials: Sequence[Trial], path: Path, weights: str | None) -> list[Tensor]:
    """Logits of every trial by onnxruntime, in float32."""
    import onnx

    # Without a copy of its own onnxruntime reads weights where the file is mapped. Unpacked blocks of
    # quantized ones are multiplied by other code than the runner's.
    settings = {"session.disable_prepacking": "1"} if weights is None else {}
    try:
        onnx.checker.check_model(path, full_check=True)
    except Exception as error:  # whatever the checker is made of
        raise _fault(f"`{path.name}` breaks the rules of ONNX: {first_line(error)}") from error
    try:
        graph = load_graph(path, settings=settings)
        names = [tensor.name for tensor in graph.get_inputs()]
        feeds = [
            {name: value.numpy() for name, value in zip(names, trial.inputs, strict=True)} for trial in trials
        ]
        return [torch.from_numpy(graph.run(["logits"], feed)[0]).float() for feed in feeds]
    except Exception as error:  # onnxruntime's errors share no class of their own
        raise _fault(first_line(error)) from error


def _some_tokens(pruned: PrunedModel, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(pruned.model.config.vocab_size, (2, num_tokens), generator=generator)


def _fault(message: str) -> LeanKError:
    return LeanKError(
        message,
        hint="a fault of leank-convert or of these versions of torch and onnxruntime: please report it",
        exit_code=1,
    )

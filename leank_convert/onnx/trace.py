"""Traces a graph and writes it, with the model's weights in memory once."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leank_convert.errors import LeanKError
from leank_convert.onnx.graph import StepModel, attend_in_regions, attending, cache_shapes
from leank_convert.onnx.subject import PrunedModel

# torch 2.13's exporter about itself: that one size has one name, and that it copies its own trees.
_EXPORTER_WARNINGS = (
    (UserWarning, "# The axis name: .* will not be used"),
    (FutureWarning, r"`isinstance\(treespec, LeafSpec\)` is deprecated"),
)


def write_graph(pruned: PrunedModel, path: Path, *, opset: int) -> None:
    """Trace the step of a model and write it.

    Args:
        pruned: The model and its masks.
        path: The graph's file. The weights' has the same name and `.data` behind it.
        opset: The graph's version of the ONNX operators.

    Raises:
        LeanKError: If the weights cannot be written.
    """
    from onnxscript import optimizer

    step = StepModel(pruned).eval()
    with _quiet_exporter(), _hollow(step) as weights:
        program = _trace(pruned, step, opset)
        with _attached(program, weights):
            # Rewriting compares nodes with nodes: first drop the half of them that says nothing.
            optimizer.fold_constants(program.model)
            optimizer.remove_unused_nodes(program.model)
            program.optimize()
            for node in program.model.graph.all_nodes():
                node.metadata_props.clear()  # where in whose source it was traced
            _save(program, path)


def _save(program: Any, path: Path) -> None:
    try:
        program.save(path, external_data=True)
    except OSError as error:
        if error.strerror is not None:
            raise
        # numpy, writing weights, tells neither the file nor the system's reason.
        raise LeanKError(
            f"`{path}.data` could not be written to its end: {error}",
            hint="most likely the disk is full: the weights are written anew, in `--dtype`",
        ) from error


def _trace(pruned: PrunedModel, step: StepModel, opset: int) -> Any:
    """Trace into a `torch.onnx.ONNXProgram`, every operation as the tracer gives it."""
    # Sizes that no other size equals, lest the tracer takes two for one.
    batch, num_new, num_logits = 2, 3, 5
    shapes = cache_shapes(pruned, batch, pruned.sink_size + 11, pruned.sink_size + 17)
    names = cache_shapes(pruned, "batch", "window_slots", "pruned_slots")
    args = (
        torch.ones(batch, num_new, dtype=torch.long),
        torch.tensor([4, 5]),
        torch.tensor([0, 0]),
        torch.zeros(batch, num_logits, dtype=torch.long),
        [torch.zeros(*shape, dtype=pruned.model.dtype) for shape in shapes.values()],
    )
    dynamic = (
        {0: "batch", 1: "new_tokens"},
        {0: "batch"},
        {0: "batch"},
        {0: "batch", 1: "logits"},
        [
            {axis: size for axis, size in enumerate(shape) if isinstance(size, str)}
            for shape in names.values()
        ],
    )
    layers = range(len(pruned.buckets))
    with torch.no_grad(), attending(pruned.model, attend_in_regions):
        return torch.onnx.export(
            step,
            args,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=dynamic,
            input_names=["input_ids", "past_lengths", "pruned_lengths", "logits_index", *shapes],
            output_names=["logits", *(f"present.{i}.{part}" for i in layers for part in ("key", "value"))],
            optimize=False,
            verbose=False,
        )


@contextmanager
def _hollow(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Give a module weights of the same shapes that take no memory, for a while; yields its own by name.

    What the tracer remembers outlives the program: with the weights themselves in it they would stay in
    memory for good.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    # By identity, so that tied weights stay tied.
    hollow = {
        id(weight): nn.Parameter(weight.new_zeros(()).expand(weight.shape), requires_grad=False)
        for weight in own.values()
    }
    for name, weight in own.items():
        _set_parameter(module, name, hollow[id(weight)])
    try:
        yield {name: weight.detach() for name, weight in own.items()}
    finally:
        for name, weight in own.items():
            _set_parameter(module, name, weight)


def _set_parameter(module: nn.Module, name: str, weight: Tensor) -> None:
    owner, _, key = name.rpartition(".")
    setattr(module.get_submodule(owner), key, weight)


@contextmanager
def _attached(program: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a program read weights where they are, for a while."""
    import onnx_ir

    def read(name: str) -> onnx_ir.LazyTensor:
        value = program.model.graph.initializers[name]
        return onnx_ir.LazyTensor(
            lambda: onnx_ir.tensor(weights[name].numpy(), name=name),
            dtype=value.dtype,
            shape=value.shape,
            name=name,
        )

    attached = [value for name, value in program.model.graph.initializers.items() if name in weights]
    for value in attached:
        value.const_value = read(value.name)
    try:
        yield
    finally:
        # Those that were folded, and what they became.
        for value in (*attached, *program.model.graph.initializers.values()):
            value.const_value = None


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Keep what the tracer says about itself, and not about the model, out of the terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category, message in _EXPORTER_WARNINGS:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        logger.setLevel(level)

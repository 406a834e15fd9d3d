"""Export to ONNX: trace a pruned model's graph, check it, and write the folder that runs without PyTorch."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leank_convert.checkpoint_io import CARD_NAME, ONNX_DESCRIPTION_NAME, read_config
from leank_convert.errors import LeanKError
from leank_convert.export import write_export
from leank_convert.export.companions import read_companions, write_files
from leank_convert.export.config_json import encode_json
from leank_convert.export.foreign import MARKER_NAME
from leank_convert.export.publish import staged_folder
from leank_convert.export.request import (
    ExportRequest,
    MaskLike,
    refuse_overlap,
    refuse_to_lose_mask,
    resolve_export,
)
from leank_convert.fields import Fields
from leank_convert.files import sha256_of, user_path, write_atomically
from leank_convert.folders import check_folder
from leank_convert.hub import model_name, resolve_model
from leank_convert.mask import MASK_FILE_NAME, load_mask
from leank_convert.onnx.check import check_graph, make_trials
from leank_convert.onnx.description import describe
from leank_convert.onnx.graph import STEP_INPUTS, StepModel, attend_in_regions, attending, cache_shapes
from leank_convert.onnx.leank_onnx_cache import MODEL_FILE
from leank_convert.onnx.libraries import OPSET, check_available
from leank_convert.onnx.pruned_model import (
    DTYPES,
    PrunedModel,
    check_traceable,
    load_pruned,
    refuse_quantized,
)
from leank_convert.onnx.quantize import check_quantizer, quantize_weights
from leank_convert.onnx.readme import build_readme

# The program that runs the graph, copied into its folder.
_HOST = [Path(__file__).with_name(f"leank_onnx{part}.py") for part in ("", "_session", "_cache")]

# torch 2.13's exporter about itself: that one size has one name, and that it copies its own trees.
_EXPORTER_WARNINGS = (
    (UserWarning, "# The axis name: .* will not be used"),
    (FutureWarning, r"`isinstance\(treespec, LeafSpec\)` is deprecated"),
)

_logger = logging.getLogger("leank_convert")


def export_onnx(
    model: str | Path,
    mask: MaskLike,
    out: str | Path,
    *,
    dtype: str = "float32",
    weights: str | None = None,
    overwrite: bool = False,
    **choices: Any,
) -> Path:
    """Write a folder that decodes with a pruned cache by onnxruntime: graph, description, runner, tokenizer.

    The weights are in memory once. The graph is checked against PyTorch before they are quantized, and once
    more afterwards.

    Args:
        model: A local folder or a hub id, of a model or of a checkpoint that was converted before.
        mask: As for `export_checkpoint`; None for a checkpoint, which has one.
        out: The folder to write. A training run and files of your own that lie there are kept.
        dtype: Of weights and cache: `float32` or `float16`.
        weights: `int8` or `int4`; None leaves them in `dtype`. The embedding and the cache stay in it.
        overwrite: Whether to replace a checkpoint or a graph in `out`.
        choices: Of a model, `export_checkpoint`'s `pruning_ratio`, `recipe`, `overrides`, `all_channels`,
            window sizes and `config_overrides`.

    Returns:
        `out`.

    Raises:
        LeanKError: If a library is missing, or anything about the source, the mask or the target
            is wrong; `out` is then as before.
    """
    check_available()
    check_quantizer(weights)
    Fields({"dtype": dtype}, "export").text("dtype", DTYPES)
    out = user_path(out)
    check_folder(out)
    checkpoint = resolve_model(model)
    export = None
    if "leank" in read_config(checkpoint):
        # A window size of 0 is a choice, though 0 equals False.
        nothing: tuple[Any, ...] = (None, (), [], {})
        chosen = any(value not in nothing and value is not False for value in choices.values())
        if mask is not None or chosen:
            raise LeanKError(
                f"`{model}` already is a LeanK checkpoint, with a mask and windows of its own",
                hint="leave out `--mask`, `--all-channels`, `--recipe`, `--set` and the window sizes, or "
                "start from the original model",
            )
        refuse_overlap(checkpoint, out)
        refuse_to_lose_mask(out, load_mask(checkpoint / MASK_FILE_NAME), overwrite=overwrite)
    else:
        export = resolve_export(
            ExportRequest(model, mask, out, prune="deferred", overwrite=overwrite, **choices)
        )
        # Before a checkpoint is written, which may be large.
        refuse_quantized(export.config, checkpoint)
        check_traceable(export.facts, checkpoint)
    with staged_folder(out, overwrite=overwrite) as partial:
        temporary = partial / "checkpoint"
        if export is not None:
            request = dataclasses.replace(export.request, out=temporary, overwrite=False)
            checkpoint = write_export(dataclasses.replace(export, request=request))
        pruned = dataclasses.replace(load_pruned(checkpoint, dtype), name=model_name(model))
        trials = make_trials(pruned)
        _logger.info("the graph is traced and optimized, which takes a second or more per layer")
        write_graph(pruned, partial / MODEL_FILE)
        _logger.info("the graph's answers are compared with PyTorch's")
        pruned.model.to("meta")  # its weights are in the file: from here on they need not be in memory, too
        check_graph(trials, partial / MODEL_FILE)
        difference = None
        if weights is not None:
            with full_disk_named(partial / MODEL_FILE):
                quantize_weights(partial / MODEL_FILE, weights)
            difference = check_graph(trials, partial / MODEL_FILE, weights)
        companions, _ = read_companions(checkpoint)
        others = {file.name: file.read_bytes() for file in (*_HOST, checkpoint / MASK_FILE_NAME)}
        write_files({**companions, **others}, partial)
        if "tokenizer.json" not in companions:
            _logger.warning(
                "`%s` has no `tokenizer.json`; `leank_onnx.py` will take tokens alone, no text", model
            )
        if temporary.exists():
            shutil.rmtree(temporary)
        readme = build_readme(pruned, weights=weights, difference=difference)
        write_atomically(partial / CARD_NAME, readme.encode())
        _describe_folder(pruned, partial, weights, difference)
    return out


def export_graph(pruned: PrunedModel, folder: Path, *, weights: str | None = None) -> None:
    """Write `model.onnx`, `model.onnx.data` and `leank_onnx.json` into a folder, without running the graph.

    For the dense model of the same exporter, replace `channel_masks` by zeros and the recent window by the
    capacity: nothing is pruned then.

    Raises:
        LeanKError: If a library is missing, or the weights are not supported.
    """
    check_available()
    check_quantizer(weights)
    write_graph(pruned, folder / MODEL_FILE)
    if weights is not None:
        quantize_weights(folder / MODEL_FILE, weights)
    _describe_folder(pruned, folder, weights)


def _describe_folder(
    pruned: PrunedModel, folder: Path, weights: str | None, difference: float | None = None
) -> None:
    """Write the description, with the digest of every file that is there."""
    others = (ONNX_DESCRIPTION_NAME, MARKER_NAME)
    present = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in others)
    files = {path.relative_to(folder).as_posix(): sha256_of(path) for path in present}
    description = describe(pruned, files=files, weights=weights, difference=difference)
    write_atomically(folder / ONNX_DESCRIPTION_NAME, encode_json(description))


def write_graph(pruned: PrunedModel, path: Path) -> None:
    """Trace the step of a model and write it; the weights' file has the graph's name and `.data` behind it.

    Raises:
        LeanKError: If the weights cannot be written.
    """
    import onnx_ir
    from onnxscript import optimizer

    step = StepModel(pruned).eval()
    with _quiet_exporter(), _hollow(step) as weights:
        program = _trace(pruned, step)
        with _attached(program, weights):
            # Rewriting compares nodes with nodes: first drop the half of them that says nothing.
            optimizer.fold_constants(program.model)
            optimizer.remove_unused_nodes(program.model)
            program.optimize()
            for node in [*program.model.graph.all_nodes()]:
                node.metadata_props.clear()  # the source lines it was traced from
                # OLMo 2's norms have another dtype than what they read, which onnx takes theirs for.
                if node.op_type == "RMSNormalization" and node.inputs[0].dtype != node.inputs[1].dtype:
                    cast = onnx_ir.node("Cast", node.inputs[:1], {"to": node.inputs[1].dtype.value})
                    node.graph.insert_before(node, cast)
                    node.replace_input_with(0, cast.outputs[0])
            with full_disk_named(path):
                program.save(path, external_data=True)


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Name the weights' file of the graph at `path` where writing it fails; LeanKError."""
    try:
        yield
    except OSError as error:
        if error.strerror is not None:
            raise
        # numpy, writing weights, names neither the file nor the system's reason.
        raise LeanKError(
            f"`{path}.data` could not be written to its end: {error}",
            hint="most likely the disk is full: the weights are written anew, in `--dtype`",
        ) from error


def _trace(pruned: PrunedModel, step: StepModel) -> Any:
    """Trace into a `torch.onnx.ONNXProgram`, every operation as the tracer gives it."""
    # Sizes that no other size equals, lest the tracer takes two for one.
    batch, num_new, num_logits = 2, 3, 5
    sink = pruned.windows.sink_size
    sink = sink if sink <= 8192 else 4096  # memory that nothing reads
    shapes = cache_shapes(pruned, batch, sink + 11, sink + 17)
    names = cache_shapes(pruned, "batch", "window_slots", "pruned_slots")
    args = (
        torch.ones(batch, num_new, dtype=torch.long),
        torch.tensor([4, 5]),
        torch.tensor([0, 0]),
        torch.zeros(batch, num_logits, dtype=torch.long),
        [torch.zeros(*shape, dtype=pruned.model.dtype) for shape in shapes.values()],
    )
    given, cache = (
        [{axis: size for axis, size in enumerate(shape) if isinstance(size, str)} for shape in each.values()]
        for each in (STEP_INPUTS, names)
    )
    layers = range(len(pruned.buckets))
    # A cache of what operations give takes longer to ask than they do, where sizes are symbols.
    plainly = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
    with torch.no_grad(), attending(pruned.model, attend_in_regions), plainly:
        return torch.onnx.export(
            step,
            args,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=(*given, cache),
            input_names=[*STEP_INPUTS, *shapes],
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
    given = {name: hollow[id(weight)] for name, weight in own.items()}
    module.load_state_dict(given, strict=False, assign=True)
    try:
        yield {name: weight.detach() for name, weight in own.items()}
    finally:
        module.load_state_dict(own, strict=False, assign=True)


@contextmanager
def _attached(program: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a program read weights where they are, for a while."""
    import onnx_ir

    def read(name: str) -> onnx_ir.TensorProtocol:
        return onnx_ir.tensor(weights[name].numpy(), name=name)

    attached = [value for name, value in program.model.graph.initializers.items() if name in weights]
    for value in attached:
        lazily = partial(read, value.name)
        value.const_value = onnx_ir.LazyTensor(lazily, dtype=value.dtype, shape=value.shape, name=value.name)
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

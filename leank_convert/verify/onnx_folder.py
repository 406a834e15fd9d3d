"""Checks of an ONNX folder: description, files, a step of the graph, its logits beside its source's."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leank_convert.architectures import ModelFacts, read_model_facts
from leank_convert.checkpoint_io import ONNX_DESCRIPTION_NAME, Checkpoint, open_checkpoint, read_leank_facts
from leank_convert.config_overrides import apply_config_overrides
from leank_convert.errors import LeanKError, cut
from leank_convert.export.fold import DTYPES, fold
from leank_convert.export.plan import plan_edits
from leank_convert.hub import resolve_model
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask
from leank_convert.onnx.check import distance, largest_difference
from leank_convert.onnx.description import host_errors, read_description
from leank_convert.onnx.graph import trial_sizes
from leank_convert.onnx.leank_onnx import LeanKOnnx
from leank_convert.onnx.leank_onnx_cache import MODEL_FILE, Cache, Description
from leank_convert.onnx.leank_onnx_session import run_graph
from leank_convert.onnx.libraries import check_available
from leank_convert.onnx.pruned_model import load_stock
from leank_convert.verify.checks import Checks, Report

# Of the largest number, on a real prompt: other weights are off by about as much as that.
_TOLERANCES = {"float32": 1e-4, "float16": 5e-2}
# How often what was measured at the export, of other tokens. Another model is off by more than 1 of the norm.
_QUANTIZED_EXCESS = 3
_PROMPT_SIZE = 16


def verify_onnx(path: str | Path, source: str | Path | None) -> Report:
    """Check an ONNX folder, run its graph, and compare it with its source; raises as `verify_checkpoint`."""
    check_available()
    original = None if source is None else open_checkpoint(resolve_model(source))
    folder, checks = Path(path), Checks()
    description = checks.value("description", lambda: _read(folder))
    if description is not None:
        checks.digests(folder, description.files, listed_in=ONNX_DESCRIPTION_NAME)
        mask = checks.value("mask file", lambda: _read_mask(folder))
        model = checks.value("onnxruntime", lambda: _run(folder))
        if original is not None and mask is not None and model is not None:
            _compare_with_source(model, original, mask, checks)
    return checks.report(path, source)


def _read(folder: Path) -> tuple[Description, str]:
    description = read_description(folder)
    content = description.content
    return description, (
        f"format {content['format_version']}, cache {content['dtype']}, window sizes "
        f"{description.sink_size}, {description.recent_size}, {description.flush_size}"
    )


def _read_mask(folder: Path) -> tuple[ChannelMask, str]:
    mask = load_mask(folder / MASK_FILE_NAME)
    more = "" if mask.key_mean is None else ", and the mean of keys"
    more += "" if mask.value_basis is None else ", and the basis of V"
    return mask, f"pruning ratio {mask.pruning_ratio:.4f}{more}"


def _run(folder: Path) -> tuple[LeanKOnnx, str]:
    """Decode one token on a full window, or much of one, some tokens pruned, over random keys and values."""
    with host_errors():
        model = LeanKOnnx(folder)
        d = model.description
        num_slots, past, pruned = trial_sizes(d.sink_size, d.recent_size, d.flush_size)
        cache = Cache(d, 1, num_slots, 5).tensors()
        generator = np.random.default_rng(0)
        for values in cache.values():
            values[:] = generator.standard_normal(values.shape, np.float32)
        token = np.array([[0]])
        logits, present = run_graph(model.graph, cache, token, np.array([past]), np.array([pruned]), token)
    if not all(np.isfinite(values).all() for values in (logits, *chain(*present))):
        raise LeanKError(f"`{folder / MODEL_FILE}`: what a step gives holds numbers that are not finite")
    return model, f"a decode step behind {past} tokens gives logits {list(logits.shape)}"


def _compare_with_source(model: LeanKOnnx, source: Checkpoint, mask: ChannelMask, checks: Checks) -> None:
    """Let a graph and its source's stock class read the same prompt, and compare their logits."""
    config, description = source.config, model.description
    is_checkpoint = "leank" in config
    facts = (
        read_leank_facts(config, source.folder)
        if is_checkpoint
        else read_model_facts(config, origin=str(source.folder))
    )
    if not checks.holds("source: sizes", lambda: _check_sizes(description, facts, source)):
        return
    # Under the rope that the graph was made with.
    rope = mask.provenance.rope_parameters if mask.provenance else None
    if not is_checkpoint and rope is not None and dict(rope) != facts.rope_parameters:
        config = apply_config_overrides(config, {"rope_parameters": dict(rope)})
    stock = load_stock(source.folder, config, facts.architecture, description.content["dtype"])
    if not is_checkpoint and mask.value_basis is not None:
        _fold(stock, source, facts, mask.value_basis)
    tokens = np.random.default_rng(0).integers(description.vocab_size, size=_PROMPT_SIZE)
    with torch.no_grad():
        expected = stock(torch.from_numpy(tokens)[None]).logits[0]
    checks.holds("source: logits", lambda: _check_logits(model, tokens.tolist(), expected))


def _fold(stock: Any, source: Checkpoint, facts: ModelFacts, basis: Tensor) -> None:
    """Fold a basis of V [L, H_kv, D, D] into a model's weights, rounded as an export rounds them."""
    weights = dict(stock.named_parameters())
    for name, edit in plan_edits(source, facts, value_basis=basis).items():
        stored = source.find(name)
        if edit.bases is None or stored is None or name not in weights:  # the class may lack a bias
            continue
        weight = weights[name].data
        for block, own in zip(weight.chunk(len(edit.bases), edit.dim), edit.bases, strict=True):
            if own is not None:
                block.copy_(fold(block, own, edit.dim).to(DTYPES[stored.dtype]))


def _check_sizes(description: Description, facts: ModelFacts, source: Checkpoint) -> str:
    described: Mapping[str, Any] = description.content["model"]
    expected = {
        "model_type": facts.model_type,
        "num_hidden_layers": facts.num_hidden_layers,
        "num_attention_heads": facts.num_attention_heads,
        "num_key_value_heads": facts.num_key_value_heads,
        "head_dim": facts.head_dim,
        "vocab_size": source.config.get("vocab_size", description.vocab_size),
    }
    for key, value in expected.items():
        if described[key] != value:
            raise LeanKError(f"`model.{key}` is {cut(described[key])}; `{source.folder}` has {cut(value)}")
    return f"{described['model_type']}, {described['num_hidden_layers']} layers"


def _check_logits(model: LeanKOnnx, tokens: list[int], expected: Tensor) -> str:
    """Compare logits [S, V] of a prompt."""
    with host_errors():
        (logits,) = model.start().feed([tokens], all_logits=True)
    found, right = torch.from_numpy(logits).double(), expected.double()
    same = f"{float((found.argmax(-1) == right.argmax(-1)).double().mean()):.0%} of next tokens are the same"
    content = model.description.content
    if content["quantization"] is not None:
        difference, at_export = distance(found, right), content["quantization"]["difference"]
        before = "" if at_export is None else f" ({at_export:.1e} of other tokens, at the export)"
        detail = (
            f"weights of {content['weights']} change them by {difference:.1e} of their norm{before}; {same}"
        )
        if not difference < (1.0 if at_export is None else min(1.0, _QUANTIZED_EXCESS * at_export)):
            raise LeanKError(f"{detail}: other weights than the source's")
        return detail
    difference = largest_difference(found, right)
    detail = f"they differ from the source's by {difference:.1e} of the largest; {same}"
    if not difference < _TOLERANCES[content["dtype"]]:
        raise LeanKError(detail)
    return detail

"""Checks of a checkpoint against itself: digests, headers, shapes, masks.

Nothing is loaded into a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from leank_convert._runtime.configuration_leank import LeanKSettings
from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import (
    CONFIG_NAME,
    DIGESTS_NAME,
    INDEX_NAME,
    Checkpoint,
    find_companions,
    open_checkpoint,
    read_leank_config,
    read_leank_facts,
)
from leank_convert.digests import find_unlisted, read_digests
from leank_convert.errors import LeanKError, cut, shorten
from leank_convert.export.plan import plan_edits
from leank_convert.export.runtime_files import auto_map
from leank_convert.files import parse_json
from leank_convert.hub import resolve_model
from leank_convert.kv_scales import check_scale_tensors
from leank_convert.leank_block import KEY_MEAN_KEY, VALUE_WIDTHS_KEY, metadata_facts, read_block
from leank_convert.mask import MASK_FILE_NAME, check_mask_fits, load_mask
from leank_convert.mask_tensor import in_checkpoint_order
from leank_convert.trust import check_config
from leank_convert.verify.checks import Checks, Report
from leank_convert.verify.source import compare_with_source

# What a Trainer saves, which a model is not loaded from.
_TRAINERS = (
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
)


def verify_weights(path: str | Path, source: str | Path | None) -> Report:
    """Check a checkpoint against itself, and compare it with its source; raises as `verify_checkpoint`."""
    folder = Path(path)
    config, leank = read_leank_config(folder)
    original = None if source is None else open_checkpoint(resolve_model(source))
    checks = Checks()
    holds = checks.holds
    settings = checks.value("config", lambda: _check_config(config, leank, folder))
    opened = checks.value("headers and index", lambda: _check_headers(folder))
    _check_digests(checks, folder, leank, opened)
    if settings is not None and opened is not None:
        checkpoint, facts = opened, read_leank_facts(config, folder)
        sound = holds("tensor shapes", lambda: _check_shapes(checkpoint, facts))
        masks = settings.channel_masks
        holds("mask file", lambda: _check_mask_file(checkpoint, facts, leank, masks))
        holds("cache scales", lambda: check_scale_tensors(checkpoint, facts, leank))
        holds("header metadata", lambda: _check_metadata(checkpoint, leank))
        if original is not None and sound:
            compare_with_source(checks, checkpoint, original, facts, leank)
    return checks.report(path, source)


def _check_config(
    config: Mapping[str, Any], leank: Mapping[str, Any], folder: Path
) -> tuple[LeanKSettings, str]:
    check_config(folder)
    facts = read_leank_facts(config, folder)
    if config.get("auto_map") != auto_map(facts.architecture):
        raise LeanKError(f"`auto_map` is {cut(config.get('auto_map'))}")
    settings = read_block(leank, facts, origin=str(folder / CONFIG_NAME))
    if not isinstance(leank["files"], dict) or MASK_FILE_NAME not in leank["files"]:
        raise LeanKError(f"`leank.files` does not name `{MASK_FILE_NAME}`")
    own = f"LeanK{facts.architecture.causal_lm_class}"
    if config.get("architectures") != [own]:
        raise LeanKError(f"`architectures` is {cut(config.get('architectures'))}, not `{own}`")
    ratio = leank["pruning_ratio"]
    return settings, f"format {leank['format_version']}, {config['model_type']}, pruning ratio {ratio:.4f}"


def _check_digests(checks: Checks, folder: Path, leank: Mapping[str, Any], opened: Checkpoint | None) -> None:
    """Compare files with their digests: those of all files, else those of config.json."""
    files = leank.get("files")
    own = files if isinstance(files, dict) else {}
    listed = checks.value("list of digests", lambda: _list_digests(folder, own, opened))
    if listed:
        checks.digests(folder, listed, listed_in=DIGESTS_NAME)
        checks.holds("files without a digest", lambda: _check_unlisted(folder, listed, DIGESTS_NAME))
    else:
        checks.digests(folder, own, listed_in=CONFIG_NAME)
        if opened is None:
            return
        # Those that transformers saves beside what `leank.files` names.
        saved = {*own, *opened.shards, CONFIG_NAME, INDEX_NAME, *find_companions(folder)[0]}
        saved |= {path.name for pattern in _TRAINERS for path in folder.glob(pattern)}
        checks.holds("files without a digest", lambda: _check_unlisted(folder, saved, CONFIG_NAME))


def _list_digests(
    folder: Path, own: Mapping[str, object], opened: Checkpoint | None
) -> tuple[dict[str, str], str]:
    if (
        not (folder / DIGESTS_NAME).exists()
        and opened is not None
        and not any("leank" in header.metadata for header in opened.shards.values())
    ):
        return {}, f"no `{DIGESTS_NAME}`: transformers saved this folder, with weights of its own making"
    listed = read_digests(folder)
    for name, digest in own.items():
        if listed.get(name) != digest:
            raise LeanKError(
                f"`{shorten(name)}`: `{DIGESTS_NAME}` says {cut(listed.get(name))}, {CONFIG_NAME} says "
                f"{cut(digest)}"
            )
    return listed, f"{len(listed)} files"


def _check_unlisted(folder: Path, listed: Iterable[str], listed_in: str) -> str:
    if unlisted := find_unlisted(folder, listed):
        raise LeanKError(
            f"`{folder / unlisted[0]}` is not in `{listed_in}`, and what loads the folder may read it"
            + (f"; nor are {len(unlisted) - 1} more files" if unlisted[1:] else "")
        )
    return "none that anything reads"


def _check_headers(folder: Path) -> tuple[Checkpoint, str]:
    checkpoint = open_checkpoint(folder)
    index = checkpoint.index
    if index is not None:
        total, named = (index.get("metadata") or {}).get("total_size"), index["weight_map"].keys()
        held = {tensor for header in checkpoint.shards.values() for tensor in header.tensors}
        if total != checkpoint.num_data_bytes:
            raise LeanKError(
                f"`{INDEX_NAME}`: `total_size` is {cut(total)}; "
                f"the shards hold {checkpoint.num_data_bytes} bytes"
            )
        if unnamed := sorted(held - named):
            raise LeanKError(f"`{INDEX_NAME}` does not name tensor `{unnamed[0]}`")
    return checkpoint, f"{len(checkpoint.shards)} files, {checkpoint.num_data_bytes} bytes of tensors"


def _check_shapes(checkpoint: Checkpoint, facts: ModelFacts) -> str:
    plan_edits(checkpoint, facts)
    return f"{facts.num_hidden_layers} layers"


def _check_mask_file(
    checkpoint: Checkpoint, facts: ModelFacts, leank: Mapping[str, Any], masks: Tensor
) -> str:
    path = checkpoint.folder / MASK_FILE_NAME
    mask = load_mask(path)
    check_mask_fits(mask, facts, mask_origin=str(path), model_origin=str(checkpoint.folder))
    for layer, permutation in enumerate(leank["head_permutation"]):
        if not mask.channel_mask[layer][permutation].equal(masks[layer]):
            raise LeanKError(f"`{path}`: layer {layer} keeps other channels than the checkpoint's layer")
    if (mask.key_mean is not None) != (KEY_MEAN_KEY in leank):
        there, missing = f"tensor `{KEY_MEAN_KEY}`", f"`leank.{KEY_MEAN_KEY}`"
        raise LeanKError(
            f"`{path}` holds {there}, and config.json has no {missing}"
            if mask.key_mean is not None
            else f"config.json says {missing}, and `{path}` holds no {there}"
        )
    orders, stored = leank["head_permutation"], leank.get(VALUE_WIDTHS_KEY)
    own = None if mask.value_widths is None else in_checkpoint_order(mask.value_widths, orders).tolist()
    if own != stored:
        raise LeanKError(
            f"`{path}`: its `value_widths`, in the checkpoint's order, are {cut(own)}, and config.json has "
            f"`leank.{VALUE_WIDTHS_KEY}` {cut(stored)}"
        )
    more = "" if mask.key_mean is None else ", and the mean of keys"
    more += "" if own is None else ", and the basis of V"
    return f"the same channels, in the original head order{more}"


def _check_metadata(checkpoint: Checkpoint, leank: Mapping[str, Any]) -> str:
    expected = metadata_facts(leank)
    without = []
    for name, header in checkpoint.shards.items():
        if header.metadata.get("format") != "pt":
            raise LeanKError(f"`{name}`: its header metadata lacks `format`: `pt`")
        if "leank" not in header.metadata:
            without.append(name)
            continue
        try:
            found = parse_json(header.metadata["leank"].encode())
        except ValueError:
            found = None
        if found != expected:
            raise LeanKError(f"`{name}`: its header metadata is not the `leank` block of config.json")
    if without:
        # What transformers' save_pretrained writes; config.json says it all.
        return f"none in `{without[0]}`" + (f" and {len(without) - 1} more" if without[1:] else "")
    return "every shard carries the facts of config.json"

"""Write a self-describing checkpoint from a model and a mask.

Plan on headers alone, then stream shard by shard into a folder next to the target, check it, rename it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from leank_convert.checkpoint_io import (
    ADAPTER_FOLDER,
    CARD_NAME,
    CONFIG_NAME,
    INDEX_NAME,
    TOKENIZER_CONFIG_NAME,
    Checkpoint,
    find_companions,
    open_checkpoint,
)
from leank_convert.digests import write_digests
from leank_convert.errors import LeanKError, first_line
from leank_convert.export.adapter import converted_for, order_of, remove_converted
from leank_convert.export.apply import write_shard
from leank_convert.export.companions import copy_companions, has_chat_template, write_files
from leank_convert.export.config_json import build_config, build_leank_facts, encode_json
from leank_convert.export.model_card import build_model_card
from leank_convert.export.packaged import identify_model
from leank_convert.export.plan import ExportPlan, plan_export
from leank_convert.export.publish import check_replaceable, staged_folder
from leank_convert.export.request import (
    Export,
    ExportRequest,
    MaskLike,
    RecipeLike,
    open_source,
    resolve_export,
)
from leank_convert.export.runtime_files import needed_parts, read_runtime_files
from leank_convert.export.source_card import Source, find_base_model, read_licence
from leank_convert.families import attention_tensor
from leank_convert.files import read_json_if_there, sha256_of, sync_path, user_path, write_atomically
from leank_convert.head_layout import bytes_of
from leank_convert.hub import model_name
from leank_convert.kv_scales import KVScales, describe_cache
from leank_convert.leank_block import metadata_facts
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, all_channels_mask, save_mask

__all__ = ["check_exportable", "export_checkpoint", "write_export"]


CacheTrial = Callable[[Path], str | None]
"""Tries a checkpoint's cache, and says what came of it in a sentence without its full stop."""

# Shards that are hashed at a time: a hash takes a gigabyte a second, and needs a core for itself.
_NUM_HASHERS = max(1, min(4, (os.cpu_count() or 1) // 2))


def check_exportable(
    model: str | Path,
    out: Path,
    *,
    config_overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Check by headers alone what an export would refuse whatever the mask, before one is trained.

    Raises:
        LeanKError: If the source cannot be converted, or `out` not be written.
    """
    checkpoint, _, facts = open_source(model, out, config_overrides)
    plan_export(checkpoint, all_channels_mask(facts), facts)
    check_replaceable(out, overwrite=overwrite)


def export_checkpoint(
    model: str | Path,
    mask: MaskLike,
    out: str | Path,
    *,
    pruning_ratio: float | None = None,
    recipe: RecipeLike = None,
    overrides: Sequence[str] = (),
    all_channels: bool = False,
    sink_size: int | None = None,
    recent_size: int | None = None,
    flush_size: int | None = None,
    prune: str = "eager",
    config_overrides: Mapping[str, Any] | None = None,
    base_model: str | None = None,
    kv_dtype: str | None = None,
    kv_scales: KVScales | None = None,
    try_cache: CacheTrial | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint that prunes its K cache with a mask.

    Args:
        model: A local folder or a hub id.
        mask: Which channels are kept, in the model's own head order: a mask, its file, the folder of a
            training run or checkpoint, a hub id, or the name of a packaged mask. None takes the one that
            training left in `out`, else the recipe's, else the packaged one of `model`.
        out: The folder to write. A training run and files of your own that lie there are kept.
        pruning_ratio: Which of several packaged masks; by default the only one, else that for 0.7.
        recipe: Whose config overrides, mask and windows are taken where nothing else gives them: a recipe,
            its file or a packaged one's name. None for that of the run in `out`, else the packaged one of
            `model`, if there is one.
        overrides: `key=value` strings that change the recipe; its windows then come before the mask's.
        all_channels: Keep every channel instead of a mask's.
        sink_size: First tokens that keep every channel; by default the mask's, the recipe's, else 128.
        recent_size: Last tokens that keep every channel; by default the mask's, the recipe's, else 1024.
        flush_size: Tokens that leave the recent window at once; by default the mask's, the recipe's, else 32.
        prune: `eager` or `deferred`.
        config_overrides: Keys of config.json to replace, such as `rope_parameters`; None for the recipe's.
        base_model: What `model` is called on the hub, for the model card; by default what is known of it.
        kv_dtype: `fp8` stores keys and values in eight bits, `int4` in four; None as they come.
        kv_scales: Scales for `fp8`, as `measure_cache` gives them; None leaves them to every prompt.
        try_cache: Tries the checkpoint before it is in `out`, by whose result the card is completed; what it
            raises leaves `out` as it was.
        overwrite: Whether to replace a checkpoint in `out`.

    Returns:
        `out`.

    Raises:
        LeanKError: If anything about the source, the mask, the recipe or the target is wrong; `out` is then
            as before.
    """
    asked = locals()  # a request's attributes are these parameters, but for those of the cache
    cache = {name: asked.pop(name) for name in ("kv_dtype", "kv_scales", "try_cache")}
    return write_export(resolve_export(ExportRequest(**{**asked, "out": user_path(out)})), **cache)


def write_export(
    export: Export,
    *,
    kv_dtype: str | None = None,
    kv_scales: KVScales | None = None,
    try_cache: CacheTrial | None = None,
) -> Path:
    """Write the checkpoint of an export that has been resolved, as `export_checkpoint` does; its folder.

    Raises:
        LeanKError: If something cannot be read or written; the folder is then as before.
    """
    cache = describe_cache(kv_dtype, kv_scales)
    checkpoint, facts, choice = export.checkpoint, export.facts, export.choice
    known, windows, out = export.provenance, choice.windows, export.request.out
    mask = replace(choice.mask, provenance=known)
    if (whole := windows.sink_size + windows.recent_size) >= facts.max_position_embeddings:
        message = (
            "the first and last %d tokens stay whole, and the model is made for %d: nothing is ever pruned"
        )
        logging.getLogger("leank_convert").warning(message, whole, facts.max_position_embeddings)
    made_for = converted_for(beside := out / ADAPTER_FOLDER)  # read before anything is written
    plan = plan_export(checkpoint, mask, facts, kv_scales)
    overrides, folds = choice.config_overrides, plan.folds_values
    leank = build_leank_facts(mask, known, plan.layout, windows, overrides, cache, folds_values=folds)
    try:
        with staged_folder(out, overwrite=export.request.overwrite) as partial:
            # Loading a tokenizer is processor time, writing weights is the disk's.
            with ThreadPoolExecutor(max_workers=1) as copier:
                companions = copier.submit(copy_companions, checkpoint.folder, partial)
                hashed = _write_weights(checkpoint, plan, leank, partial)
                companions.result()
            runtime = read_runtime_files(needed_parts(facts.architecture, leank))
            write_files(runtime, partial)
            save_mask(mask, partial / MASK_FILE_NAME)
            digests = {file: sha256_of(partial / file) for file in (*runtime, MASK_FILE_NAME)}
            config = build_config(export.config, facts.architecture, leank, digests)
            write_atomically(partial / CONFIG_NAME, encode_json(config))
            _check_written(checkpoint, plan, partial)
            tried = None if try_cache is None else try_cache(partial)
            card = _describe(export, mask, leank, tried)
            write_atomically(partial / CARD_NAME, card.encode())
            write_digests(partial, {**hashed, **digests})
        if made_for not in (None, order_of(config["leank"])):
            remove_converted(beside)
            logging.getLogger("leank_convert").warning("removed `%s`, of the checkpoint before", beside)
    except OSError as error:
        raise _cannot_export(error, out, checkpoint) from error
    return out


def _write_weights(
    checkpoint: Checkpoint, plan: ExportPlan, leank: Mapping[str, Any], partial: Path
) -> dict[str, str]:
    """Write the shards and their index; SHA-256 of each shard by its name."""
    facts_json = json.dumps(metadata_facts(leank), separators=(",", ":"))
    # While one shard is copied the disk takes those before, and their pages are hashed.
    with (
        ThreadPoolExecutor(max_workers=1) as flusher,
        ThreadPoolExecutor(max_workers=_NUM_HASHERS) as hashers,
    ):
        flushed, digests = [], {}
        for name, header in checkpoint.shards.items():
            metadata = {**header.metadata, "format": "pt", "leank": facts_json}
            path = partial / name
            added = plan.added.get(name, {})
            write_shard(header, path, edits=plan.edits, metadata=metadata, added=added)
            digests[name] = hashers.submit(sha256_of, path)
            flushed.append(flusher.submit(sync_path, path))
        for future in flushed:
            future.result()
        hashed = {name: digest.result() for name, digest in digests.items()}
    # Of a single shard, too: engines take every safetensors file for weights unless an index names them.
    given = checkpoint.index or {}
    weight_map = {
        tensor: name
        for name, header in checkpoint.shards.items()
        for tensor in (*header.tensors, *plan.added.get(name, ()))
    }
    size = {**(given.get("metadata") or {}), "total_size": checkpoint.num_data_bytes + plan.num_added_bytes}
    index = {**given, "metadata": size, "weight_map": dict(sorted(weight_map.items()))}
    write_atomically(partial / INDEX_NAME, encode_json(index))
    return hashed


def _describe(export: Export, mask: ChannelMask, leank: Mapping[str, Any], tried: str | None) -> str:
    """Build the model card."""
    folder, facts = export.checkpoint.folder, export.facts
    name, known_as = model_name(export.request.model), export.provenance.model
    output = export.checkpoint.find(attention_tensor(facts.layers[0], "o_proj.weight"))
    tokenizer = read_json_if_there(folder / TOKENIZER_CONFIG_NAME)
    source = Source(
        name,
        noted_name=identify_model(folder),
        base_model=export.request.base_model or find_base_model(folder, name, known_as),
        licence=read_licence(folder),
        chats=has_chat_template(tokenizer, find_companions(folder)[0]),
        whole=export.checkpoint.whole,
    )
    size, windows = bytes_of(facts.dtype or (output.dtype if output else None)), export.choice.windows
    return build_model_card(source, mask, facts, windows, element_bytes=size, leank=leank, tried=tried)


def _check_written(source: Checkpoint, plan: ExportPlan, partial: Path) -> None:
    """Check headers, sizes and the index of what was written; the weights are `verify`'s work."""
    written, expected = open_checkpoint(partial), source.num_data_bytes + plan.num_added_bytes
    if written.shards.keys() != source.shards.keys() or written.num_data_bytes != expected:
        raise LeanKError(
            f"`{partial}` holds {written.num_data_bytes} bytes of tensors, not {expected}",
            hint="this is a fault of leank-convert, please report it",
            exit_code=1,
        )


def _cannot_export(error: OSError, out: Path, checkpoint: Checkpoint) -> LeanKError:
    file = Path(error.filename or out)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = decimal(checkpoint.num_data_bytes)
        return LeanKError(
            f"no space left while writing `{file}`; nothing of the checkpoint was left behind",
            hint=f"it needs {needed} on top of what lies in `{out}` now",
        )
    action = "read" if file.is_relative_to(checkpoint.folder) else "write"
    return LeanKError(f"cannot {action} `{file}`: {error.strerror or first_line(error)}")

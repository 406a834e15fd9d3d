"""Rewriting of a checkpoint that an earlier release wrote: the same weights and mask, in today's format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from leank_convert.checkpoint_io import (
    Checkpoint,
    open_checkpoint,
    read_leank_config,
    read_leank_facts,
)
from leank_convert.checkpoint_masks import name_mask_tensors
from leank_convert.errors import LeanKError
from leank_convert.export import Original, refuse_overlap, refuse_to_lose_mask, write_checkpoint
from leank_convert.export.companions import read_companions, write_companions
from leank_convert.export.plan import ExportPlan
from leank_convert.export.source_card import read_base_model
from leank_convert.head_layout import plan_head_layout
from leank_convert.hub import check_base_model
from leank_convert.leank_block import CACHE_KEYS, read_windows
from leank_convert.mask import MASK_FILE_NAME, load_mask
from leank_convert.verify import verify_checkpoint


def rewrite_checkpoint(
    old: str | Path, out: str | Path, *, base_model: str | None = None, overwrite: bool = False
) -> Path:
    """Write a checkpoint anew, with this release's format and runtime files. Its source is not needed.

    Args:
        old: A checkpoint of this or an earlier release.
        out: The folder to write.
        base_model: What its model is called on the hub, for the model card; by default as `old` has it.
        overwrite: Whether to replace a checkpoint in `out`.

    Returns:
        `out`.

    Raises:
        LeanKError: If `old` is no checkpoint, or does not verify, or `out` cannot be written; `out` is then
            as before.
    """
    old, out = Path(old), Path(out)
    check_base_model(base_model)
    config, leank = read_leank_config(old)
    refuse_overlap(old, out)
    failed = [check for check in verify_checkpoint(old).checks if not check.ok]
    if failed:
        raise LeanKError(
            f"`{old}` does not verify: {failed[0].name}: {failed[0].detail}",
            hint=f"`leank-convert verify {old}` lists everything that is wrong",
        )
    facts = read_leank_facts(config, old)
    mask = load_mask(old / MASK_FILE_NAME)
    refuse_to_lose_mask(out, mask, overwrite=overwrite)
    original = Original(
        mask.provenance.model if mask.provenance else old.resolve().name,
        _without_masks(open_checkpoint(old), name_mask_tensors(facts)),
        {**{key: value for key, value in config.items() if key != "leank"}, "model_type": facts.model_type},
        facts,
        leank.get("config_overrides"),
        base_model or read_base_model(old),
        {key: leank[key] for key in CACHE_KEYS if key in leank},
    )
    write_checkpoint(
        out,
        original,
        ExportPlan(plan_head_layout(mask.widths), edits={}),  # the heads are in order already
        mask,
        read_windows(leank),
        copy_companions=_copy_companions,
        overwrite=overwrite,
    )
    return out


def _without_masks(checkpoint: Checkpoint, names: list[str]) -> Checkpoint:
    """The checkpoint without the tensors that hold the masks in format 1."""
    shards = {
        shard: replace(
            header, tensors={name: info for name, info in header.tensors.items() if name not in names}
        )
        for shard, header in checkpoint.shards.items()
    }
    return replace(checkpoint, shards=shards)


def _copy_companions(old: Path, partial: Path) -> None:
    contents, _ = read_companions(old)
    write_companions(contents, partial)

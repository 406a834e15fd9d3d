"""The mask that a user names, and the size of the numbers in its model's cache."""

from __future__ import annotations

from pathlib import Path

from leank_convert.checkpoint_io import CONFIG_NAME, read_config
from leank_convert.errors import LeanKError
from leank_convert.head_layout import BYTES_PER_ELEMENT
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask, resolve_mask

_ASSUMED_ELEMENT_BYTES = 2


def load_artifact(artifact: str) -> tuple[ChannelMask, int]:
    """Load a mask by what a user calls it.

    Args:
        artifact: A mask file, the folder of a training run or of a converted checkpoint, or a hub id.

    Returns:
        The mask, and the bytes of one number in the cache: a checkpoint's dtype tells, otherwise 2.

    Raises:
        LeanKError: If there is no mask, or it cannot be read.
    """
    folder = Path(artifact).expanduser()
    path = resolve_mask(artifact)
    if not path.exists():
        where = (
            f"`{artifact}` holds no `{MASK_FILE_NAME}`" if folder.is_dir() else f"`{artifact}` does not exist"
        )
        raise LeanKError(
            where, hint="name a mask file, the folder of a training run, or a converted checkpoint"
        )
    mask = load_mask(path)
    dtype = None
    if folder.is_dir() and (folder / CONFIG_NAME).exists():
        config = read_config(folder)
        dtype = config.get("dtype") or config.get("torch_dtype")
    return mask, BYTES_PER_ELEMENT.get(str(dtype), _ASSUMED_ELEMENT_BYTES)

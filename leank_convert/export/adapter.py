"""LoRA adapters of an original model, for its checkpoint, whose KV heads are in another order.

A LoRA adds B·A to a projection's weight. Rows of the weight are rows of B, and its columns are columns of A,
so both move as the weight's do: the sum is the original's in the checkpoint's order, without a rounding. A
basis of V that is folded into the weights is folded into rows of B and columns of A, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from leank_convert.architectures import ModelFacts, read_model_facts
from leank_convert.checkpoint_io import (
    ADAPTER_NAME,
    ADAPTER_WEIGHTS_NAME,
    CONFIG_NAME,
    FLOAT_DTYPES,
    read_config,
    read_leank_config,
    read_leank_facts,
)
from leank_convert.errors import LeanKError, cut
from leank_convert.export.apply import write_shard
from leank_convert.export.config_json import encode_json
from leank_convert.export.plan import TensorEdit, list_stock_tensors, plan_edit
from leank_convert.files import read_json, sync_path, user_path, write_atomically
from leank_convert.folders import check_folder
from leank_convert.hub import resolve_model
from leank_convert.leank_block import VALUE_BASIS_KEY, VALUE_WIDTHS_KEY, read_block
from leank_convert.mask import MASK_FILE_NAME, load_own_mask
from leank_convert.safetensors_file import SafetensorsHeader, TensorInfo, read_header

_FILES = {ADAPTER_NAME, ADAPTER_WEIGHTS_NAME}
_MERGE = "merge it into the original model (`merge_and_unload`), then convert that with the checkpoint's mask"
# PEFT puts its own names before those of the model; of a model without a head, `model.` lacks.
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?:model\.)?(layers\.\d+\.self_attn\.\w+)\.(.+)")
# By what they have: a projection's outputs, or its inputs.
_OF_OUTPUTS = ("lora_B.weight", "lora_B.bias", "lora_magnitude_vector", "lora_magnitude_vector.weight")
_OF_INPUTS = ("lora_A.weight",)
_WHOLE = ("weight", "bias", "base_layer.weight", "base_layer.bias")


def convert_adapter(
    adapter: str | Path,
    checkpoint: str | Path,
    out: str | Path,
    *,
    trained_on_checkpoint: bool = False,
    base_model: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a LoRA adapter of the original model as one of a checkpoint that was made from it.

    DoRA's magnitudes, biases and whole modules that were trained beside it are converted, too. What adds to V
    or to the output projection of a checkpoint that prunes V is rounded once.

    Args:
        adapter: The adapter's folder or hub id, with adapter_config.json and adapter_model.safetensors.
        checkpoint: The checkpoint's folder or hub id.
        out: The folder to write; it does not exist yet, or is empty.
        trained_on_checkpoint: Whether the adapter was trained on the checkpoint itself: it is only marked as
            fitting, for `load_adapter` and vLLM.
        base_model: What the adapter is to name as its base model, such as the id that the checkpoint is
            uploaded to; None for `checkpoint`.
        overwrite: Whether a converted adapter in it is replaced, once the new one is there.

    Returns:
        `out`.

    Raises:
        LeanKError: If the adapter is no LoRA, does not fit the model, was converted before, names a
            checkpoint as its base model, or holds something that has no order of heads known here, or DoRA's
            magnitudes of a V that is pruned; or if one cannot be read, or `out` not be written.
    """
    out, origin = check_folder(user_path(out)), resolve_model(checkpoint)
    config, leank = read_leank_config(origin)
    facts = read_leank_facts(config, origin)
    read_block(leank, facts, origin=str(origin / CONFIG_NAME))
    settings, header = check_adapter(
        adapter, out, checkpoint=None if trained_on_checkpoint else checkpoint, overwrite=overwrite
    )
    edits: dict[str, TensorEdit] = {}
    if not trained_on_checkpoint:
        basis = load_own_mask(origin, leank).value_basis if _is_folded(leank) else None
        exact = None if basis is None else basis.double()
        edits = _plan(header, facts, leank["head_permutation"], exact, str(origin / CONFIG_NAME))
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as partial:
        new = Path(partial) / "adapter"
        new.mkdir()
        metadata = {**header.metadata, "format": "pt", "leank": order_of(leank)}
        write_shard(header, new / ADAPTER_WEIGHTS_NAME, edits=edits, metadata=metadata)
        sync_path(new / ADAPTER_WEIGHTS_NAME)
        named = str(checkpoint) if base_model is None else base_model
        settings |= {"base_model_name_or_path": named, "revision": None}  # that was the original's
        write_atomically(new / ADAPTER_NAME, encode_json(settings))
        if overwrite:
            remove_converted(out)
        new.replace(out)
    return out


def _is_folded(leank: Mapping[str, Any]) -> bool:
    return VALUE_WIDTHS_KEY in leank and VALUE_BASIS_KEY not in leank


def order_of(leank: Mapping[str, Any]) -> str:
    """What an adapter is converted for: the order of heads of a `leank` block, and the basis of V."""
    made_for = {"head_permutation": leank["head_permutation"]}
    if _is_folded(leank):  # the basis is in that file
        made_for["mask"] = leank["files"][MASK_FILE_NAME]
    return json.dumps(made_for, separators=(",", ":"))


def converted_for(folder: Path) -> str | None:
    """What the adapter in a folder was converted for, see `order_of`; None if there is none."""
    path = folder / ADAPTER_WEIGHTS_NAME
    return read_header(path).metadata.get("leank") if path.is_file() else None


def remove_converted(folder: Path) -> None:
    """Remove a converted adapter, and its folder where nothing else lies in it."""
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def check_adapter(
    adapter: str | Path,
    out: Path,
    *,
    model: str | None = None,
    checkpoint: str | Path | None = None,
    overwrite: bool = False,
) -> tuple[dict[str, Any], SafetensorsHeader]:
    """Check an adapter before there is a checkpoint of its `model`; return its settings and header.

    With a `checkpoint` it is to be the original's.
    """
    held = {path.name for path in out.iterdir()} if check_folder(out).exists() else set()
    if held - (_FILES if overwrite and converted_for(out) is not None else set()):
        raise LeanKError(f"`{out}` holds files already", hint="remove it, or name another folder for `-o`")
    folder = resolve_model(adapter)
    settings = _read_settings(folder)
    header = read_header(folder / ADAPTER_WEIGHTS_NAME)
    if "leank" in header.metadata:
        raise LeanKError(f"`{header.path}` was converted before", hint="name the original model's adapter")
    base = settings.get("base_model_name_or_path")
    if checkpoint is not None and (base == str(checkpoint) or _is_checkpoint(base)):
        raise LeanKError(
            f"`{adapter}` names the checkpoint {cut(base)} as the model that it was trained on",
            hint="pass `--trained-on-checkpoint` to `leank-convert adapter` if it was; else correct "
            f"`base_model_name_or_path` in its `{ADAPTER_NAME}`",
        )
    if model is not None:
        source = resolve_model(model)
        facts = read_model_facts(read_config(source), origin=str(source / CONFIG_NAME))
        _plan(header, facts, None, None, str(source))
    return settings, header


def _is_checkpoint(base: object) -> bool:
    """Whether what an adapter was trained on is the folder of a LeanK checkpoint that can be read."""
    with suppress(LeanKError, OSError):
        return bool(base) and isinstance(base, str) and "leank" in read_json(Path(base) / CONFIG_NAME)
    return False


def _read_settings(folder: Path) -> dict[str, Any]:
    """The adapter's adapter_config.json, of a kind whose weights are known here."""
    path = folder / ADAPTER_NAME
    settings = read_json(path)
    if settings.get("peft_type") != "LORA":
        raise LeanKError(
            f"`{path}`: `peft_type` is {cut(settings.get('peft_type'))}, and only LORA is known here",
            hint=_MERGE,
        )
    for name in ("layer_replication", "target_parameters", "use_bdlora", "use_qalora"):
        if settings.get(name):
            raise LeanKError(f"`{path}`: `{name}` is not known here", hint=_MERGE)
    if settings.get("init_lora_weights") == "olora":
        raise LeanKError(
            f"`{path}`: `init_lora_weights` is 'olora', of which PEFT works out a part anew from the weights "
            "that it is put on",
            hint="save it by PEFT's `path_initial_model_for_weight_conversion`, or " + _MERGE,
        )
    if not (folder / ADAPTER_WEIGHTS_NAME).is_file():
        raise LeanKError(
            f"`{folder}` has no `{ADAPTER_WEIGHTS_NAME}`",
            hint="load the adapter by PEFT and save it by `save_pretrained`: it then is in safetensors",
        )
    return settings


def _plan(
    header: SafetensorsHeader,
    facts: ModelFacts,
    head_permutation: list[list[int]] | None,
    value_basis: Tensor | None,
    origin: str,
) -> dict[str, TensorEdit]:
    """The adapter's tensors that move, by name."""
    path, shapes = header.path, list_stock_tensors(facts, origin=origin)
    modules = [name.removeprefix("model.").removesuffix(".weight") for name in shapes]
    if not any(module in name for name in header.tensors for module in modules):
        raise LeanKError(
            f"`{path}` has {len(header.tensors)} tensors, and none is of a module that the model has",
            hint="name the model that the adapter was trained on, or its checkpoint",
        )
    edits = {}
    for tensor in header.tensors.values():
        match = _TENSOR.fullmatch(tensor.name)
        if match is None:
            if ".self_attn." in tensor.name:
                raise _unknown(path, tensor)
            continue
        module, part = f"model.{match[1]}", match[2]
        weight, is_whole = f"{module}.weight", part in _WHOLE
        if not (is_whole or part in (*_OF_OUTPUTS, *_OF_INPUTS)):
            raise _unknown(path, tensor)
        dim, shape = 1 if part in _OF_INPUTS else 0, shapes.get(weight)
        if shape is None or len(tensor.shape) <= dim or tensor.shape[dim] != shape[dim]:
            found = f"has no `{weight}`" if shape is None else f"has {list(shape)}"
            raise LeanKError(
                f"`{path}`: tensor `{tensor.name}` has shape {cut(list(tensor.shape))}, and the model "
                f"{found}: the adapter is another model's",
                hint="name the model that the adapter was trained on, or its checkpoint",
            )
        name = f"{module}.{part.removeprefix('base_layer.')}" if is_whole else weight
        edit = plan_edit(name, tensor.shape if is_whole else shape, facts, head_permutation, value_basis)
        if edit is None or not (is_whole or edit.dim == dim):
            continue
        if edit.bases is not None and "magnitude" in part:
            raise LeanKError(
                f"`{path}`: tensor `{tensor.name}` holds DoRA's magnitudes of V's rows, and the checkpoint "
                "has V in another basis, where rows have others",
                hint=_MERGE,
            )
        if edit.bases is not None and tensor.dtype not in FLOAT_DTYPES:
            raise _unknown(path, tensor)
        edits[tensor.name] = edit
    return edits


def _unknown(path: Path, tensor: TensorInfo) -> LeanKError:
    return LeanKError(f"`{path}`: it is not known how heads lie in tensor `{tensor.name}`", hint=_MERGE)

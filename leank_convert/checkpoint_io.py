"""Checkpoint folders: headers read and checked, without weights.

A folder is opened once, and opening it checks everything that can be known without reading weights: the
config, the index, every shard's header against its size.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from leank_convert.architectures import ModelFacts, read_model_facts
from leank_convert.errors import LeanKError, cut
from leank_convert.families import LEANK_PREFIX
from leank_convert.files import read_json
from leank_convert.safetensors_file import SafetensorsHeader, TensorInfo, is_name, read_header
from leank_convert.text_part import find_whole, read_text_part, text_name

CONFIG_NAME = "config.json"
SINGLE_FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
ADAPTER_FOLDER = "adapter"  # where `export` puts a converted one, in the checkpoint
ADAPTER_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
CARD_NAME = "README.md"
ONNX_DESCRIPTION_NAME = "leank_onnx.json"
# SHA-256 of a checkpoint's files.
DIGESTS_NAME = "leank_digests.json"
# A training run, in the folder that becomes or became its checkpoint.
TRAINING_FOLDER = "leank"
RATIO_PREFIX = "ratio-"  # of the folders of several ratios, in that of their run

# Of weights that are not quantized, as safetensors names them.
FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")

# Small files that travel with a model's weights: all that a tokenizer may need, and the licence.
COMPANION_PATTERNS = (
    "tokenizer*",
    "*.tiktoken",
    "tekken.json",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
# What they may end in, so that no code is among them; `tokenizer.model.v3` is one of Mistral's.
_DATA_NAME = re.compile(r"[^.]+|.+\.(json|model|txt|jinja|tiktoken|bpe|vocab|md|rst|pdf|v?[0-9]\w*)")
_SUFFIX = ".safetensors"
DOWNLOADED_PATTERNS = (
    CONFIG_NAME,
    ADAPTER_NAME,
    ADAPTER_WEIGHTS_NAME,
    INDEX_NAME,
    SINGLE_FILE_NAME,
    "model-*.safetensors",
    "model.safetensors-*.safetensors",  # Qwen3.5's
    CARD_NAME,  # names the licence
    *COMPANION_PATTERNS,
)
_ADAPTER_HINT = (
    "merge it into its base model (PEFT's `merge_and_unload`), save that with `save_pretrained` and name the "
    "folder"
)
GGUF_HINT = "GGUF holds weights quantized for llama.cpp: name the model in safetensors that it was made of"
# `tokenizer*` fits code, too, and nothing runs a source's.
NEVER_DOWNLOADED_PATTERNS = ("*.py",)
# Keys of a config.json by which transformers would load something else than the folder's own files: another
# config, kernels from the hub, the code of another folder, code for `pipeline`, other weights.
OTHER_FILES_KEYS = {"configuration_files", "transformers_weights"}
KERNEL_KEYS = {f"{prefix}{part}_implementation" for prefix in ("", "_") for part in ("attn", "experts")}
LOADING_KEYS = {*OTHER_FILES_KEYS, *KERNEL_KEYS, "_name_or_path", "name_or_path", "custom_pipelines"}


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose headers have been read and checked."""

    folder: Path
    config: Mapping[str, Any]  # the parsed config.json
    shards: Mapping[str, SafetensorsHeader]  # the shards' headers by file name, in the order of the index
    index: Mapping[str, Any] | None  # the parsed index, None for a single file
    # The `model_type` of a larger model, whose text model this is; None for a model of its own.
    whole: str | None = None

    @property
    def num_data_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(header.num_data_bytes for header in self.shards.values())

    def shard_of(self, tensor: str) -> str | None:
        """The name of the shard that holds a tensor, None where none does."""
        return self._holders.get(tensor)

    @cached_property
    def _holders(self) -> dict[str, str]:
        return {tensor: name for name, header in self.shards.items() for tensor in header.tensors}

    def names_in(self, module: str) -> Sequence[str]:
        """Full names of the tensors that a module has itself."""
        return self._modules.get(module, ())

    @cached_property
    def _modules(self) -> dict[str, list[str]]:
        modules: dict[str, list[str]] = {}
        for name in self._holders:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        return modules

    def find(self, tensor: str) -> TensorInfo | None:
        """A tensor's header entry, None where no shard holds it."""
        shard = self.shard_of(tensor)
        return None if shard is None else self.shards[shard].tensors[tensor]


def is_onnx_folder(path: Path) -> bool:
    """Whether a folder was written by `export-onnx`, if need be without its description."""
    if (path / ONNX_DESCRIPTION_NAME).exists():
        return True
    return (path / "model.onnx").exists() and not (path / CONFIG_NAME).exists()


def find_companions(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Find the small files that travel with a model's weights, by name, and the names of what is no data."""
    found = {
        path.relative_to(folder).as_posix(): path
        for pattern in COMPANION_PATTERNS
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }
    others = sorted(name for name, path in found.items() if not _DATA_NAME.fullmatch(path.name))
    return {name: path for name, path in found.items() if name not in others}, others


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model folder's config.json, without what would make transformers load anything else.

    Of a larger model that of its text model.

    Raises:
        LeanKError: If there is none, it is not a JSON object, or a larger model's, which is quantized.
    """
    path = folder / CONFIG_NAME
    if not folder.is_dir():
        what = "is a file, not the folder of a model" if folder.exists() else "does not exist"
        raise LeanKError(f"`{folder}` {what}")
    if not path.is_file():
        named = "name the folder of a model in Hugging Face's layout"
        hint = ratios_hint(folder) or _other_layout_hint(folder) or named
        raise LeanKError(f"`{folder}` has no `{CONFIG_NAME}`", hint=hint)
    config = read_json(path)
    config = read_text_part(config, path) or config
    return {key: value for key, value in config.items() if key not in LOADING_KEYS}


def read_leank_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a converted checkpoint's config.json, and its `leank` block; LeanKError without one."""
    hint = "make one with `leank-convert export`; `evaluate` and `evaluate-text` take a model beside `--mask`"
    if not folder.exists():
        raise LeanKError(f"`{folder}` does not exist, so it is no checkpoint", hint=hint)
    config = read_config(folder)
    leank = config.get("leank")
    if not isinstance(leank, dict):
        raise LeanKError(
            f"`{folder}` is not a LeanK checkpoint: its `{CONFIG_NAME}` has no `leank` block", hint=hint
        )
    return config, leank


def read_leank_facts(config: Mapping[str, Any], folder: Path) -> ModelFacts:
    """Read the facts of the model that a converted checkpoint was made from, by the checkpoint's config.json.

    Raises:
        LeanKError: If `model_type` is not that of a checkpoint, or the config makes no sense.
    """
    model_type = str(config.get("model_type"))
    origin = str(folder / CONFIG_NAME)
    if not model_type.startswith(LEANK_PREFIX):
        raise LeanKError(
            f"`{origin}`: `model_type` is {cut(config.get('model_type'))}, not that of a LeanK checkpoint"
        )
    return read_model_facts({**config, "model_type": model_type.removeprefix(LEANK_PREFIX)}, origin=origin)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read a model folder's config, index and shard headers, and check that they belong together.

    Raises:
        LeanKError: If anything is missing, truncated or contradicts the index, or an adapter lies there.
    """
    config = read_config(folder)
    single, index_path = folder / SINGLE_FILE_NAME, folder / INDEX_NAME
    if not single.is_file() and not index_path.is_file():
        raise _no_weights(folder)
    refuse_adapter(folder)
    # The order in which transformers looks.
    if single.is_file():
        return _as_text(Checkpoint(folder, config, {SINGLE_FILE_NAME: read_header(single)}, None))
    index = read_json(index_path)
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LeanKError(f"`{index_path}` has no `weight_map`")
    if metadata is not None and not isinstance(metadata, dict):
        raise LeanKError(
            f"`{index_path}`: `metadata` is {cut(metadata)}, not an object", hint="download the model again"
        )
    shards: dict[str, SafetensorsHeader] = {}
    for tensor, name in weight_map.items():
        if not is_name(tensor):
            raise LeanKError(f"`{index_path}`: {cut(tensor)} is not a valid tensor name")
        if not (
            isinstance(name, str) and is_name(name) and Path(name).name == name and name.endswith(_SUFFIX)
        ):
            raise LeanKError(
                f"`{index_path}`: tensor `{tensor}` is in {cut(name)}, which is not the name of a "
                f"`{_SUFFIX}` file"
            )
        if name not in shards:
            if not (folder / name).exists():
                raise LeanKError(
                    f"shard `{name}` is missing in `{folder}`; `{INDEX_NAME}` names it for tensor `{tensor}`",
                    hint="download the model again",
                )
            shards[name] = read_header(folder / name)
        if tensor not in shards[name].tensors:
            raise LeanKError(
                f"`{folder / name}` has no tensor `{tensor}`, which `{INDEX_NAME}` says is there"
            )
    holder: dict[str, str] = {}
    for name, header in shards.items():
        for tensor in header.tensors:
            if tensor in holder:
                raise LeanKError(f"`{folder}`: tensor `{tensor}` is in both `{holder[tensor]}` and `{name}`")
            holder[tensor] = name
    return _as_text(Checkpoint(folder, config, shards, index))


def _as_text(checkpoint: Checkpoint) -> Checkpoint:
    """Return of a larger model its text model, of any other what it is."""
    whole = find_whole(checkpoint.folder)
    if whole is None:
        return checkpoint
    renamed = {name: header.rename(text_name) for name, header in checkpoint.shards.items()}
    shards = {name: header for name, header in renamed.items() if header.tensors}
    return replace(checkpoint, shards=shards, whole=whole)


def refuse_adapter(folder: Path) -> None:
    """Refuse, by a LeanKError, an adapter that transformers would load on top of the weights beside it."""
    if os.path.lexists(folder / ADAPTER_NAME):
        raise LeanKError(
            f"`{folder / ADAPTER_NAME}`: transformers would load an adapter on top of the weights beside it",
            hint=f"{_ADAPTER_HINT}; if the weights have it in them already, remove that file",
        )


def ratios_hint(folder: Path) -> str | None:
    """Where the results of a run of several ratios lie, None for any other folder."""
    named = " or ".join(f"`{path}`" for path in sorted(folder.glob(f"{RATIO_PREFIX}*")))
    return f"it holds a run of several ratios: name {named}" if named else None


def _other_layout_hint(folder: Path) -> str | None:
    """What to do about a folder that holds a model in another form, None where it is none of those known."""
    if (folder / ONNX_DESCRIPTION_NAME).exists():
        return "it is an ONNX folder: name the checkpoint or the model that it was made of"
    if (folder / ADAPTER_NAME).exists():
        return f"it is an adapter: {_ADAPTER_HINT}"
    return GGUF_HINT if any(folder.glob("*.gguf")) else None


def _no_weights(folder: Path) -> LeanKError:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    other_layout = _other_layout_hint(folder)
    if pickled and not other_layout:
        return LeanKError(
            f"`{folder}` holds only pickled weights (`{pickled[0]}`)",
            hint="convert them to safetensors: load the model with transformers and save it with "
            "`save_pretrained`",
        )
    return LeanKError(
        f"`{folder}` has neither `{SINGLE_FILE_NAME}` nor `{INDEX_NAME}`",
        hint=other_layout
        or "only safetensors weights are read; what is in the hub's cache in part, a run online completes",
    )

"""What was done to a checkpoint after it was exported, of every kind: `verify` finds each.

`left`: the list of digests is as it was. `listed`: it was brought up to date, so only what lies behind it can
tell. `source`: that, and the model it was made from is at hand.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from leank_convert.checkpoint_io import DIGESTS_NAME, INDEX_NAME
from leank_convert.digests import write_digests
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json, sha256_of
from leank_convert.mask import ChannelMask, load_mask, save_mask
from leank_convert.verify import verify_checkpoint

Tamper = Callable[[Path], object]
LAYER = "model.layers.1.self_attn."
RUNTIME = "rows_leank.py"


@pytest.fixture(scope="session")
def source(once_per_run: Callable[..., Path], testbed_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny Llama in shards, with whatever may lie beside weights."""

    def write(folder: Path) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=len(testbed_tokenizer),
            attention_bias=True,
            bos_token_id=1,
            eos_token_id=4,
        )
        LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="40KB")
        testbed_tokenizer.save_pretrained(folder)
        (folder / "LICENSE").write_text("terms")

    return once_per_run("tampered_source", write)


@pytest.fixture(scope="session")
def exported(once_per_run: Callable[..., Path], source: Path) -> Path:
    """A checkpoint of it, not to be changed: heads change places in both layers."""
    mask = torch.zeros(2, 2, 16, dtype=torch.bool)
    mask[:, 0, :12] = mask[:, 1, 3:7] = True
    overrides = {"max_position_embeddings": 4096}
    return once_per_run(
        "tampered",
        lambda out: export_checkpoint(source, ChannelMask(mask), out, config_overrides=overrides),
    )


@pytest.fixture
def out(exported: Path, tmp_path: Path) -> Path:
    """A copy, to be tampered with."""
    return Path(shutil.copytree(exported, tmp_path / "out"))


def edit_json(name: str, edit: Callable[[dict[str, Any]], object]) -> Tamper:
    def tamper(out: Path) -> None:
        content = read_json(out / name) if (out / name).exists() else {}
        edit(content)
        (out / name).write_text(json.dumps(content))

    return tamper


def put(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda content: content.update({key: value})


def config(key: str, value: object) -> Tamper:
    return edit_json("config.json", put(key, value))


def leank(edit: Callable[[dict[str, Any]], object]) -> Tamper:
    return edit_json("config.json", lambda content: edit(content["leank"]))


def digests(edit: Callable[[dict[str, Any]], object]) -> Tamper:
    return edit_json(DIGESTS_NAME, edit)


def write(name: str, text: str) -> Tamper:
    def tamper(out: Path) -> None:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text)

    return tamper


def append(name: str) -> Tamper:
    return lambda out: (out / name).write_bytes((out / name).read_bytes() + b"\n")


def remove(name: str) -> Tamper:
    return lambda out: (out / name).unlink()


def shard_with(out: Path, tensor: str) -> Path:
    return out / read_json(out / INDEX_NAME)["weight_map"][tensor]


def resave(file: Path, edit: Callable[[dict[str, torch.Tensor], dict[str, str]], object]) -> None:
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    edit(tensors, metadata)
    save_file(tensors, file, metadata)


def flip(tensor: str, out: Path) -> None:
    """Flip the lowest bit of a tensor's last byte but three."""

    def edit(tensors: dict[str, torch.Tensor], _: object) -> None:
        tensors[tensor].view(-1).view(torch.uint8)[-4] ^= 1

    resave(shard_with(out, tensor), edit)


def swap_tensors(out: Path) -> None:
    names = [f"{LAYER}{projection}.weight" for projection in ("k_proj", "v_proj")]
    files = [shard_with(out, name) for name in names]
    first, second = (load_file(file)[name] for file, name in zip(files, names, strict=True))
    for file, name, tensor in zip(files, names, (second, first), strict=True):
        resave(file, lambda tensors, _, name=name, tensor=tensor: tensors.update({name: tensor.clone()}))


def swap_shards(out: Path) -> None:
    first, second = sorted(out.glob("model-*.safetensors"))[:2]
    first.rename(out / "held")
    second.rename(first)
    (out / "held").rename(second)


def metadata(edit: Callable[[dict[str, str]], object]) -> Tamper:
    return lambda out: resave(shard_with(out, f"{LAYER}q_proj.weight"), lambda _, held: edit(held))


def truncate(out: Path) -> None:
    file = shard_with(out, f"{LAYER}q_proj.weight")
    file.write_bytes(file.read_bytes()[:-4])


def change_mask_file(out: Path) -> None:
    mask = load_mask(out / "channel_mask.safetensors")
    save_mask(
        ChannelMask(mask.channel_mask.roll(1, -1), None, mask.provenance), out / "channel_mask.safetensors"
    )


def change_runtime(out: Path) -> None:
    """A forger's: every list knows the changed file."""
    append(RUNTIME)(out)
    leank(lambda block: block["files"].update({RUNTIME: sha256_of(out / RUNTIME)}))(out)


def list_changed_runtime(out: Path) -> None:
    append(RUNTIME)(out)
    digests(lambda content: content["files"].update({RUNTIME: sha256_of(out / RUNTIME)}))(out)


def rotated(block: dict[str, Any]) -> None:
    """The widths stay, the channels move: 12 and 4 kept of 16."""
    block["channel_masks"] = [row[1:4] + row[0] + row[4:] for row in block["channel_masks"]]


NEW_LEANK: dict[str, object] = {
    "format_version": 2,
    "widths": [[4, 12], [12, 4]],
    "head_permutation": [[0, 1], [1, 0]],
    "channel_masks": rotated,
    "sink_size": 7,
    "recent_size": 7,
    "flush_size": 7,
    "prune": "deferred",
    "pruning_ratio_asked": 0.7,
    "pruning_ratio": 0.6,
    "width_multiple": 8,
    "config_overrides": {"max_position_embeddings": 8192},
    "files": lambda block: block["files"].update({RUNTIME: "0" * 64}),
}
NEW_CONFIG: dict[str, object] = {
    "rms_norm_eps": 1e-3,
    "hidden_act": "gelu",
    "eos_token_id": 5,
    "bos_token_id": 5,
    "pad_token_id": 5,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "dtype": "float16",
    "use_cache": False,
    "attention_dropout": 0.5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "vocab_size": 5,
    "head_dim": 8,
    "num_attention_heads": 8,
    "intermediate_size": 64,
    "model_type": "leank_mistral",
    "architectures": ["LlamaForCausalLM"],
    "auto_map": {"AutoConfig": "evil.Config"},
    "quantization_config": {"quant_method": "fp8"},
    "anything_else": 1,
}
COMPANIONS = ("tokenizer.json", "chat_template.jinja", "generation_config.json", "LICENSE")
TENSORS = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.1.mlp.down_proj.weight",
    *(f"{LAYER}{projection}.weight" for projection in ("q_proj", "k_proj", "v_proj", "o_proj")),
    f"{LAYER}k_proj.bias",
    f"{LAYER}o_proj.bias",
)
EXTRA = (
    "modeling_evil.py",
    "tokenizer_evil.py",
    "custom_generate/generate.py",
    "adapter_config.json",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "model-00099-of-00099.safetensors",
    "preprocessor_config.json",
    "added_tokens.json",
    "vocab.json",
    "additional_chat_templates/tool.jinja",
)

# By their names: what is done, and how much of the rest fits it.
KINDS: dict[str, tuple[Tamper, str]] = {
    **{
        f"leank.{key}": (leank(value if callable(value) else put(key, value)), "listed")
        for key, value in NEW_LEANK.items()
    },
    **{f"no leank.{key}": (leank(lambda block, key=key: block.pop(key)), "listed") for key in NEW_LEANK},
    "leank.added": (leank(put("added", 1)), "listed"),
    **{f"config.{key}": (config(key, value), "left") for key, value in NEW_CONFIG.items()},
    **{f"config.{key}, listed": (config(key, value), "source") for key, value in NEW_CONFIG.items()},
    **{
        f"{name} changed": (append(name), "left")
        for name in (*COMPANIONS, "tokenizer_config.json", "README.md")
    },
    **{f"{name} changed, listed": (append(name), "source") for name in COMPANIONS},
    **{
        f"{name} gone": (remove(name), "left") for name in (*COMPANIONS, "tokenizer_config.json", "README.md")
    },
    **{f"{name} gone, listed": (remove(name), "source") for name in COMPANIONS},
    **{
        f"tokenizer_config.{key}": (edit_json("tokenizer_config.json", put(key, value)), "source")
        for key, value in {"tokenizer_class": "BertTokenizer", "eos_token": "x", "auto_map": {}}.items()
    },
    "no tokenizer_config": (remove("tokenizer_config.json"), "source"),
    **{f"{tensor} flipped": (partial(flip, tensor), "left") for tensor in TENSORS},
    **{f"{tensor} flipped, listed": (partial(flip, tensor), "source") for tensor in TENSORS},
    "tensors swapped": (swap_tensors, "left"),
    "tensors swapped, listed": (swap_tensors, "source"),
    "shards swapped": (swap_shards, "listed"),
    "shard cut": (truncate, "listed"),
    "shard gone": (lambda out: shard_with(out, "model.norm.weight").unlink(), "listed"),
    "metadata.leank": (metadata(put("leank", "{}")), "listed"),
    "metadata.format": (metadata(put("format", "np")), "listed"),
    "metadata.added": (metadata(put("added", "1")), "left"),
    "no metadata": (metadata(lambda held: held.pop("leank")), "left"),
    "index.total_size": (edit_json(INDEX_NAME, put("metadata", {"total_size": 5})), "listed"),
    "index.weight_map": (
        edit_json(INDEX_NAME, lambda content: content["weight_map"].pop("model.norm.weight")),
        "listed",
    ),
    "index gone": (remove(INDEX_NAME), "listed"),
    "mask file": (change_mask_file, "left"),
    "mask file, listed": (change_mask_file, "listed"),
    "mask file gone": (remove("channel_mask.safetensors"), "left"),
    "runtime file": (append(RUNTIME), "left"),
    "runtime file, in one list": (list_changed_runtime, "left"),
    "runtime file, in both lists": (change_runtime, "source"),
    "runtime file gone": (remove(RUNTIME), "left"),
    **{f"{name} added": (write(name, "{}"), "left") for name in EXTRA},
    **{f"{name} added, listed": (write(name, "{}"), "source") for name in EXTRA if name.endswith(".py")},
    "added_tokens.json added, listed": (write("added_tokens.json", "{}"), "source"),
    "digests gone": (remove(DIGESTS_NAME), "left"),
    "digests no JSON": (write(DIGESTS_NAME, "{"), "left"),
    **{
        f"digests.format_version {version}": (digests(put("format_version", version)), "left")
        for version in (2, True, 1.0)
    },
    "digests.files": (digests(put("files", ["README.md"])), "left"),
    "digests.added": (digests(put("added", 1)), "left"),
    "digest of nothing": (digests(lambda content: content["files"].update(other="0")), "left"),
    "digest changed": (digests(lambda content: content["files"].update({"README.md": "0" * 64})), "left"),
    "digest no text": (digests(lambda content: content["files"].update({"README.md": 7})), "left"),
    **{
        f"no digest of {name}": (digests(lambda content, name=name: content["files"].pop(name)), "left")
        for name in ("config.json", "tokenizer.json", RUNTIME, INDEX_NAME)
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_tampering_is_found(kind: str, out: Path, source: Path) -> None:
    tamper, fits = KINDS[kind]
    tamper(out)
    if fits != "left":
        (out / DIGESTS_NAME).unlink()
        write_digests(out, {})
    report = verify_checkpoint(out, source if fits == "source" else None)
    assert not report.ok
    if fits == "source":
        assert [
            check.name for check in report.checks if not check.ok and check.name.startswith("digest")
        ] == []


def test_what_nothing_reads_is_fine(out: Path, source: Path) -> None:
    for name in ("notes.txt", ".gitattributes", "leank/log.jsonl", "leank/state.safetensors", "results.json"):
        write(name, "mine")(out)
    report = verify_checkpoint(out, source)
    assert report.ok, [check for check in report.checks if not check.ok]

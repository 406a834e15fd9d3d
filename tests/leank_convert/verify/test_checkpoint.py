"""A checkpoint as it was exported verifies; whatever was done to it afterwards `verify` finds, of every kind.

`left`: the list of digests is as it was. `listed`: it was brought up to date, so only what lies behind it can
tell. `source`: that, and the model it was made from is at hand.
"""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from leank_convert.checkpoint_io import DIGESTS_NAME, INDEX_NAME
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json, sha256_of
from leank_convert.leank_block import LEANK_KEYS
from leank_convert.mask import ChannelMask
from leank_convert.verify import Check, verify_checkpoint
from tests.checks import append, bless, edit_tensors, failed, refusal, remove, write
from tests.tiny_families import tiny_folder

LAYER = "model.layers.1.self_attn."
RUNTIME = "rows_leank.py"


@pytest.fixture(scope="session")
def source(once_per_run, testbed_tokenizer):
    """A tiny Llama in shards, with whatever may lie beside weights."""

    def write(folder):
        config = {"head_dim": 12, "attention_bias": True, "bos_token_id": 1, "eos_token_id": 4}
        tiny_folder(folder, testbed_tokenizer, shard_size="40KB", **config)
        (folder / "LICENSE").write_text("terms")

    return once_per_run("tampered_source", write)


@pytest.fixture(scope="session")
def exported(once_per_run, source):
    """A checkpoint of it, not to be changed: heads of layer 1 change places, those of layer 0 do not."""
    mask = torch.zeros(2, 2, 12, dtype=torch.bool)
    mask[0, :, :6] = mask[1, 0, :9] = mask[1, 1, 3:7] = True
    overrides = {"max_position_embeddings": 4096}
    return once_per_run(
        "tampered",
        lambda out: export_checkpoint(source, ChannelMask(mask), out, config_overrides=overrides),
    )


@pytest.fixture
def out(exported, tmp_path):
    """A copy, to be tampered with."""
    return shutil.copytree(exported, tmp_path / "out")


def test_an_export_verifies_with_and_without_its_source(exported, source):
    report = verify_checkpoint(exported, str(source))
    assert report.ok, failed(exported, source)
    names = [check.name for check in report.checks]
    num_files = sum(path.is_file() for path in exported.rglob("*")) - 1  # but the list itself
    assert Check("digests", True, f"{num_files} of {num_files} files as {DIGESTS_NAME} says") in report.checks
    shards = list(source.glob("*.safetensors"))
    assert sum(name.startswith("source: model") for name in names) == len(shards) > 1
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    alone = verify_checkpoint(exported)
    assert alone.ok and not [check for check in alone.checks if check.name.startswith("source")]


def test_another_source_is_found(exported, source_model):
    assert "source: tensors" in failed(exported, source_model("qwen2"))
    assert "source: tensors" in failed(exported, source_model("llama", dtype="bfloat16"))


# Of whose folders transformers makes an empty tokenizer, of a class that it has for them.
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text", "qwen3_next"])
def test_a_model_without_a_tokenizer_and_a_dtype_verifies(family, source_model, tmp_path):
    source = source_model(family, num_hidden_layers=4, pad_token_id=0)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).unlink()
    edit_json("config.json", lambda config: config.update(dtype=None))(source)
    out = export_checkpoint(source, None, tmp_path / "out", all_channels=True)
    assert failed(out, source) == {}
    assert "\nAt 4 bytes per number, " in (out / "README.md").read_text()
    for key, value in (("tokenizer_class", "Qwen2Tokenizer"), ("eos_token", "x")):
        (out / "tokenizer_config.json").write_text(json.dumps({key: value}))
        bless(out)
        assert failed(out, source).keys() == {"source: companions"}
        assert f"`{key}` is {value!r}" in failed(out, source)["source: companions"]
    (out / "tokenizer_config.json").unlink()
    (out / "tokenizer.json").write_text("{}")
    bless(out)
    assert "is not in both folders" in failed(out, source)["source: companions"]


def test_a_model_that_is_no_checkpoint_of_ours_is_an_error(source, exported, tmp_path):
    for arguments, message in (
        ([source], "is not a LeanK checkpoint"),
        ([tmp_path], "has no `config.json`"),
        ([exported, tmp_path / "missing"], "does not exist"),
    ):
        with refusal(re.escape(message)):
            verify_checkpoint(*arguments)


def edit_json(name, edit):
    def tamper(out):
        content = read_json(out / name) if (out / name).exists() else {}
        edit(content)
        (out / name).write_text(json.dumps(content))

    return tamper


def put(key, value):
    """Set a key of an object: to a value, or to what a function makes of that which stood there."""
    return lambda content: content.update({key: value(content.get(key)) if callable(value) else value})


def leank(edit):
    return edit_json("config.json", lambda content: edit(content["leank"]))


def lack(key):
    return leank(lambda block: block.pop(key))


def listed_files(edit):
    return edit_json(DIGESTS_NAME, lambda content: edit(content["files"]))


def shard_with(out, tensor):
    return out / read_json(out / INDEX_NAME)["weight_map"][tensor]


def flip(name):
    """Flip the lowest bit of a tensor's last byte but three."""

    def edit(tensor):
        tensor.view(-1).view(torch.uint8)[-4] ^= 1
        return tensor

    return lambda out: edit_tensors(shard_with(out, name), **{name: edit})


def swap_heads(name):
    """Put both KV heads' rows, or those of their query heads, where the source has them."""
    return lambda out: edit_tensors(shard_with(out, name), **{name: lambda t: t.roll(len(t) // 2, 0)})


def swap_tensors(out):
    names = [f"{LAYER}{projection}.weight" for projection in ("k_proj", "v_proj")]
    files = [shard_with(out, name) for name in names]
    first, second = (load_file(file)[name] for file, name in zip(files, names, strict=True))
    for file, name, tensor in zip(files, names, (second, first), strict=True):
        edit_tensors(file, **{name: tensor.clone()})


def metadata(key, value):
    return lambda out: edit_tensors(shard_with(out, f"{LAYER}q_proj.weight"), {key: value})


def truncate(out):
    file = shard_with(out, f"{LAYER}q_proj.weight")
    file.write_bytes(file.read_bytes()[:-4])


def change_mask_file(out):
    edit_tensors(out / "channel_mask.safetensors", channel_mask=lambda mask: mask.roll(1, -1))


def change_runtime(out):
    """A forger's: every list knows the changed file."""
    append(RUNTIME)(out)
    leank(lambda block: block["files"].update({RUNTIME: sha256_of(out / RUNTIME)}))(out)


def list_a_file_outside(out):
    (out.parent / "secret").touch()
    listed_files(put("../secret", "0"))(out)


def roll(rows):
    return [rows[0], [*rows[1][1:], rows[1][0]]]


# What is put into the `leank` block, and what the check of config.json says of it. The runtime's tests have
# all that its reader, which is asked here, refuses.
LEANK = [
    ("format_version", 2, "`leank.format_version` is 2, these runtime files read 1"),
    ("widths", roll, "`leank.channel_masks[1]` keeps"),
    ("pruning_ratio", 0.25, "`leank.pruning_ratio` is 0.25"),
    ("config_overrides", [], "`leank.config_overrides` is []: Input should be a valid"),
    ("files", None, "does not name `channel_mask.safetensors`"),
    ("extra", 1, "has key 'extra', which format 1 does not know"),
    ("z" * 10**4, 1, "has key 'zzz"),
]
# What contradicts other files alone.
ELSEWHERE = {
    # Of three hex digits, and one of padding: every head keeps as many other channels.
    "channel_masks": (lambda rows: [row[1:3] + row[0] + row[3:] for row in rows], "mask file: "),
    "sink_size": (7, "header metadata: "),
    "recent_size": (7, "header metadata: "),
    "flush_size": (7, "header metadata: "),
    "prune": ("deferred", "header metadata: "),
    "pruning_ratio_asked": (0.7, "header metadata: "),
    "width_multiple": (8, "header metadata: "),
    "config_overrides": ({"max_position_embeddings": 8192}, "header metadata: "),
    "files": (lambda files: {**files, RUNTIME: "0" * 64}, f"digest of {RUNTIME}: "),
}
CONFIG = {
    "rms_norm_eps": 1e-3,
    "hidden_act": "gelu",
    "eos_token_id": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "dtype": "float16",
    "attention_dropout": 0.5,
    "tie_word_embeddings": True,
    "vocab_size": 5,
    "head_dim": 8,
    "model_type": "leank_mistral",
    "architectures": ["LlamaForCausalLM"],
    "auto_map": {"AutoConfig": "evil.Config"},
    "quantization_config": {"quant_method": "fp8"},
}
COMPANIONS = ("tokenizer.json", "chat_template.jinja", "generation_config.json", "LICENSE")
PERMUTED = [f"{LAYER}{projection}.weight" for projection in ("q_proj", "k_proj", "v_proj", "o_proj")]
PERMUTED.append(f"{LAYER}k_proj.bias")
SAME = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.1.mlp.down_proj.weight",
    f"{LAYER}o_proj.bias",
)
IN_SOURCE = (f"{LAYER}q_proj.bias", f"{LAYER}k_proj.weight")
TEXTS = ("tokenizer_config.json", "README.md")
NEEDED = ("config.json", "tokenizer.json", RUNTIME, INDEX_NAME)
EXTRA = (
    "modeling_evil.py",
    "tokenizer_evil.py",
    "custom_generate/generate.py",
    "adapter_config.json",
    "pytorch_model.bin",
    "model-00099-of-00099.safetensors",
    "added_tokens.json",
    "additional_chat_templates/tool.jinja",
)

LOADED = [name for name in EXTRA if name.endswith(".py") or name == "added_tokens.json"]
TOKENIZER = {"tokenizer_class": "BertTokenizer", "eos_token": "x", "auto_map": {}}
LISTS = (*(("format_version", version) for version in (2, True, 1.0)), ("files", ["README.md"]), ("added", 1))


def each(form, names, tamper, fits, said):
    """A kind for every name."""
    return {form.format(name): (tamper(name), fits, said.format(name)) for name in names}


# By their names: what is done, how much of the rest fits it, and what a check says, as a pattern.
KINDS = {
    **{
        f"leank.{key[:30]} {row}": (leank(put(key, value)), "listed", f"config: .*{re.escape(said)}")
        for row, (key, value, said) in enumerate(LEANK)
    },
    **{f"leank.{key}": (leank(put(key, value)), "listed", said) for key, (value, said) in ELSEWHERE.items()},
    **each("no leank.{}", LEANK_KEYS, lack, "listed", "config: .*{}`"),
    **each("config.{}", CONFIG, lambda key: edit_json("config.json", put(key, CONFIG[key])), "source", ""),
    **each("{} changed", ("config.json", *TEXTS), append, "left", "digest of {}: "),
    **each("{} changed, listed", COMPANIONS, append, "source", "{}"),
    **each("{} gone", ("tokenizer.json", "README.md"), remove, "left", "{}"),
    **each("{} gone, listed", (*COMPANIONS, "tokenizer_config.json"), remove, "source", "{}"),
    **{
        f"tokenizer_config.{key}": (edit_json("tokenizer_config.json", put(key, value)), "source", f"`{key}`")
        for key, value in TOKENIZER.items()
    },
    **each("{} flipped", (PERMUTED[0], SAME[0]), flip, "left", "digest of model-"),
    **each("{} flipped, listed", PERMUTED, flip, "source", "tensor `{}` is not the permutation of its"),
    **each("{} flipped, listed", SAME, flip, "source", "tensor `{}` differs from its source"),
    **each("{} as in the source", IN_SOURCE, swap_heads, "source", "tensor `{}` is not the perm"),
    "tensors swapped, listed": (swap_tensors, "source", "k_proj.weight` is not the permutation"),
    "shard cut": (truncate, "listed", "headers and index: .*truncated or damaged"),
    "shard gone": (lambda out: shard_with(out, "model.norm.weight").unlink(), "listed", "is missing"),
    "metadata.leank": (metadata("leank", "{}"), "listed", "is not the `leank` block"),
    "metadata.format": (metadata("format", "np"), "listed", "lacks `format`"),
    "index.total_size": (
        edit_json(INDEX_NAME, put("metadata", {"total_size": 5})),
        "listed",
        "headers and index: .*`total_size` is 5",
    ),
    "index.weight_map": (
        edit_json(INDEX_NAME, lambda content: content["weight_map"].pop("model.norm.weight")),
        "listed",
        "headers and index: .*does not name tensor",
    ),
    "index gone": (remove(INDEX_NAME), "listed", "index"),
    "mask file": (change_mask_file, "left", "digest of channel_mask.safetensors: "),
    "mask file, listed": (change_mask_file, "listed", "mask file: .*keeps other channels"),
    "mask file gone": (remove("channel_mask.safetensors"), "left", "mask file: "),
    "runtime file": (append(RUNTIME), "left", f"digest of {RUNTIME}: .*was changed: its SHA-256"),
    "runtime file, in both lists": (change_runtime, "source", "runtime files: "),
    "runtime file gone": (remove(RUNTIME), "left", f"digest of {RUNTIME}: .*is missing"),
    **each("{} added", EXTRA, lambda name: write(name, "{}"), "left", "files without a digest: "),
    **each("{} added, listed", LOADED, lambda name: write(name, "{}"), "source", ""),
    "digests gone": (remove(DIGESTS_NAME), "left", "list of digests: "),
    "digests no JSON": (write(DIGESTS_NAME, "{"), "left", "list of digests: "),
    **{
        f"digests.{key} {value}": (edit_json(DIGESTS_NAME, put(key, value)), "left", "list of digests: ")
        for key, value in LISTS
    },
    "digest of nothing": (listed_files(put("other", "0")), "left", "digest of other: .*is missing"),
    "digest of a file outside": (list_a_file_outside, "left", "digest of ../secret: .*is missing"),
    "digest changed": (listed_files(put("README.md", "0" * 64)), "left", "digest of README.md: "),
    **each("no digest of {}", NEEDED, lambda name: listed_files(lambda files: files.pop(name)), "left", "{}"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tampering_is_found(kind, out, source):
    tamper, fits, said = KINDS[kind]
    tamper(out)
    if fits != "left":
        bless(out)
    found = failed(out, source if fits == "source" else None)
    lines = [f"{name}: {detail}" for name, detail in found.items()]
    assert any(re.search(said, line) for line in lines), lines
    assert all(len(line) < 600 for line in lines)
    if fits == "source":
        assert not [name for name in found if name.startswith("digest")]


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (
            edit_json("config.json", put("transformers_weights", "other.safetensors")),
            "config: .*`transformers_weights`",
        ),
        # Of other data that is read, such as a chat template, nothing is known.
        *(
            (write(name, "x"), "files without a digest: ")
            for name in (*EXTRA[:6], "optimizer.safetensors")
            if name != "adapter_config.json"
        ),
    ],
)
def test_of_a_folder_that_transformers_saved_all_that_is_read_is_known(tamper, said, exported, tmp_path):
    saved = tmp_path / "saved"
    AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True).save_pretrained(saved)
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth"):
        write(name, "a Trainer's")(saved)
    assert failed(saved) == {}
    tamper(saved)
    assert any(re.match(said, f"{name}: {detail}") for name, detail in failed(saved).items())


def test_what_nothing_reads_is_fine(out, source):
    for name in ("notes.txt", ".gitattributes", "leank/log.jsonl", "leank/state.safetensors", "results.json"):
        write(name, "mine")(out)
    assert failed(out, source) == {}

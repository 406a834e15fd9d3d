"""Mutated configs, headers, indexes, masks, checkpoints: one sentence, or a result that verifies.

Every case is drawn from `--fuzz-seed` and its number; `--fuzz-cases N` runs more of them than the suite does.
What fails is told with the number, and with the folder that it was left in.
"""

import copy
import json
import random
import resource
import shutil
import signal
import traceback
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.checkpoint_io import DIGESTS_NAME, INDEX_NAME
from leank_convert.errors import LeanKError
from leank_convert.export import export_checkpoint
from leank_convert.inspection import inspect_artifact, render_inspection
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask, save_mask
from leank_convert.verify import verify_checkpoint
from tests.checks import provenance_of
from tests.tiny_families import tiny_model

MAX_MESSAGE = 600
MAX_SECONDS = 30
MAX_BYTES = 1 << 30
LOADED_SHARE = 0.1

DEEP, WIDE = "@deep@", "@wide@"  # stand for what only text can hold; see `to_text`
NASTY = [
    None, True, False, 0, -1, 1, 2, 3, 7, 16, 4097, 2**24 + 1, 2**31, 2**63, 2**64, 10**9, 10**30, 10**400,
    0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf"),
    "", "x", "1", "false", "null", "\0", "\ud800", "a\nb", "../x", "/etc/passwd", "é" * 9, "y" * 10**4, "{}",
    [], {}, [[]], [None], ["full_attention"], [1] * 9, [1.0] * 4, {"": 0}, {"a": {"b": []}}, DEEP, WIDE,
    "llama", "mixtral", "Llama", "leank_llama", "float16", "bfloat99", "yarn", "linear", "llama3", "dynamic",
    "longrope", "proportional", "gelu", "prelu", "eager", "deferred", "U8", "F4", "C64", "F64",
]  # fmt: skip
CONFIG_KEYS = (
    "quantization_config", "rope_scaling", "rope_parameters", "rope_theta", "layer_types", "head_dim",
    "to_dict", "per_layer_config", "attn_implementation", "auto_map", "sliding_window",
    "use_sliding_window", "num_labels", "max_window_layers", "mlp_bias", "attention_bias", "dtype",
    "torch_dtype", "partial_rotary_factor", "leank", "tie_word_embeddings",
    "original_max_position_embeddings", "text_config", "transformers_weights", "id2label",
    "architectures", "use_cache", "pad_token_id", "tokenizer_class", "sub_configs", "__class__",
    "_name_or_path", "metadata", "weight_map",
)  # fmt: skip


class TooSlow(BaseException):
    """Not an `Exception`, so that nothing on the way takes it for bad input."""


# --- mutations ---------------------------------------------------------------------------------------------


def nasty(rng):
    return rng.choice(NASTY)


def mutate(rng, value, keys=()):
    """A copy of a JSON object or list with one thing in it replaced, removed, renamed, nested or added."""
    value = holder = copy.deepcopy(value)
    while True:
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        item = holder[key]
        if not isinstance(item, dict | list) or not item or rng.random() < 0.3:
            break
        holder = item
    action = rng.random()
    if action < 0.5:
        holder[key] = nasty(rng)
    elif action < 0.6:
        del holder[key]
    elif action < 0.7 and isinstance(holder, dict):
        holder[rng.choice(("", "x", key.upper(), key + "s", "z" * 10**4, "a\nb", "\0"))] = holder.pop(key)
    elif action < 0.8:
        holder[key] = rng.choice(([item], {"x": item}, str(item), [item] * 3))
    elif action < 0.9 and isinstance(value, dict):
        value[rng.choice(keys or ("x",))] = nasty(rng)
    elif isinstance(item, int | float):
        holder[key] = rng.choice((-item, item + 1, item * 2, item // 2))
    else:
        holder[key] = nasty(rng)
    return value


def to_text(rng, value):
    """JSON of a mutated value, now and then with a key twice, or damaged as text."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.9 or "\\ud8" in json.dumps(value))
    depth = rng.choice((70, 900, 10**5))
    text = text.replace(f'"{DEEP}"', "[" * depth + "]" * depth)
    text = text.replace(f'"{WIDE}"', "[" + "[]," * 10**5 + "[]]")
    if rng.random() < 0.05 and ", " in text:
        first, _, rest = text[1:].partition(", ")
        text = f"{text[0]}{first}, {first}, {rest}"
    content = text.encode()
    return damage(rng, content) if rng.random() < 0.1 else content


def damage(rng, content):
    """Bytes flipped, cut off, put in or put twice."""
    at = rng.randrange(len(content))
    if rng.random() < 0.5:  # headers lie in front
        at = min(at, rng.randrange(200))
    before, after = content[:at], content[at + 1 :]
    whole = rng.choice((b"\xef\xbb\xbf" + content, content + b"\0", content + content, b"", content[::-1]))
    return rng.choice(
        (
            before,
            before + bytes([content[at] ^ (1 << rng.randrange(8))]) + after,
            before + rng.randbytes(rng.randrange(1, 9)) + content[at:],
            content[: at + 40] + content[at:],
            before + rng.choice((b"\xff", b"\0", b"{", b"9", b"(")) + after,
            whole,
        )
    )


def mutate_header(rng, content):
    """A safetensors file with another header, its texts of JSON mutated as JSON."""
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    metadata = header.get("__metadata__")
    if metadata and rng.random() < 0.7:
        key = rng.choice(list(metadata))
        try:
            inner = json.loads(metadata[key])
        except ValueError:
            inner = metadata[key]
        whole = mutate(rng, inner) if isinstance(inner, dict | list) and inner else nasty(rng)
        metadata[key] = rng.choice((to_text(rng, whole).decode(errors="replace"), whole))
    else:
        header = mutate(rng, header, ("__metadata__", "a", ""))
    text = to_text(rng, header)
    claim = len(text) if rng.random() < 0.95 else rng.choice((0, 1, len(text) + 1, 10**8, 2**63))
    if rng.random() < 0.1:
        data = rng.choice((data[:-1], data + b"\0", data[::-1], b""))
    return (claim % 2**64).to_bytes(8, "little") + text + data


# --- cases -------------------------------------------------------------------------------------------------


def rewrite_json(rng, path, keys=()):
    value = json.loads(path.read_text())
    for _ in range(rng.choice((1, 1, 2))):
        value = mutate(rng, value, keys) if isinstance(value, dict | list) and value else value
    path.write_bytes(to_text(rng, value))


def export_of_json(rng, folder):
    names = ("config.json",) * 16 + ("tokenizer_config.json", "generation_config.json") + (INDEX_NAME,) * 4
    rewrite_json(rng, folder / "source" / rng.choice(names), CONFIG_KEYS)
    return export_checkpoint(folder / "source", None, folder / "out", all_channels=True)


def export_of_header(rng, folder):
    shard = rng.choice(sorted((folder / "source").glob("*.safetensors")))
    content = shard.read_bytes()
    shard.write_bytes(damage(rng, content) if rng.random() < 0.2 else mutate_header(rng, content))
    return export_checkpoint(folder / "source", None, folder / "out", all_channels=True)


def export_of_mask(rng, folder):
    mask = folder / f"mask.{rng.choice(('safetensors', 'safetensors', 'safetensors', 'pth', 'npy'))}"
    tensor = torch.randint(0, 2, (2, 2, 8)).to(rng.choice((torch.bool, torch.float64, torch.complex64)))
    if mask.suffix == ".safetensors":
        shutil.move(folder / MASK_FILE_NAME, mask)
        if rng.random() < 0.7:
            mask.write_bytes(mutate_header(rng, mask.read_bytes()))
    elif mask.suffix == ".pth":
        torch.save(rng.choice((tensor, tensor.to_sparse(), tensor[0], {"mask": tensor})), mask)
    else:
        np.save(mask, tensor.numpy())
        shape = rng.choice(("(2, 2, 8)", "(2, 2, 1000000000)", "(0, 2, 8)", "(-1, 2, 8)", "(2, 2, 8.0)", "x"))
        mask.write_bytes(mask.read_bytes().replace(b"(2, 2, 8)", shape.encode()))
    if rng.random() < 0.3:
        mask.write_bytes(damage(rng, mask.read_bytes()))
    render_inspection(inspect_artifact(mask))
    return export_checkpoint(folder / "source", mask, folder / "out")


def check_of_checkpoint(rng, folder):
    """Whatever changes in a checkpoint, `verify` says so, and `inspect` makes a sentence or a table of it."""
    checkpoint = folder / "checkpoint"
    path = rng.choice([*sorted(checkpoint.iterdir()), *[checkpoint / "config.json"] * 9])
    before = path.read_bytes()
    if path.suffix == ".json" and rng.random() < 0.8:
        if path.name == "config.json" and rng.random() < 0.7:
            value = json.loads(before)
            value["leank"] = mutate(rng, value["leank"], tuple(value["leank"]))
            path.write_bytes(to_text(rng, value))
        else:
            rewrite_json(rng, path, CONFIG_KEYS)
    elif path.suffix == ".safetensors" and rng.random() < 0.6:
        path.write_bytes(mutate_header(rng, before))
    else:
        path.write_bytes(damage(rng, before))
    inspected = None
    try:
        render_inspection(inspect_artifact(checkpoint))
    except LeanKError as error:
        inspected = error
    report = verify_checkpoint(checkpoint, folder / "source" if rng.random() < 0.3 else None)
    if report.ok and path.read_bytes() != before:
        # No digest can be of the list of digests itself.
        same = path.name == DIGESTS_NAME and json.loads(path.read_bytes()) == json.loads(before)
        assert same, f"verify accepts another `{path.name}`"
    for check in report.checks:
        assert check.ok or len(check.detail) <= MAX_MESSAGE, (
            f"{len(check.detail)} characters: {check.detail[:300]}"
        )
    if inspected is not None:
        raise inspected


CASES = {
    "json": (5, export_of_json),
    "header": (2, export_of_header),
    "mask": (4, export_of_mask),
    "checkpoint": (4, check_of_checkpoint),
}  # how many of all cases, and what is done with one


# --- what has to hold --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    """A model in several shards, a mask with all of its provenance, and a checkpoint of them."""
    folder = tmp_path_factory.mktemp("fuzzing") / "material"
    tiny_model("llama", head_dim=8).save_pretrained(folder / "source", max_shard_size="8KB")
    (folder / "source" / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    known = provenance_of(
        folder / "source", "a/model", pruning_ratio_asked=0.5, width_multiple=4, recipe="seed: 3\n", seed=3,
        made_by="somebody", source="somewhere", evaluation="somehow", key_mean_tokens=9,
    )  # fmt: skip
    mask = ChannelMask(torch.rand(2, 2, 8) < 0.5, torch.rand(2, 2, 8), known, torch.randn(2, 2, 8).half())
    save_mask(mask, folder / MASK_FILE_NAME)
    export_checkpoint(folder / "source", folder / MASK_FILE_NAME, folder / "checkpoint")
    return folder


def test_unchanged_material_is_fine(material):
    assert verify_checkpoint(material / "checkpoint", material / "source").ok
    mask = load_mask(material / MASK_FILE_NAME)
    assert mask.provenance is not None and mask.key_mean is not None


@contextmanager
def limits():
    """Memory and time of one case."""

    def stop(*_):
        raise TooSlow(f"more than {MAX_SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, hard))
    signal.alarm(MAX_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run_case(kind, seed, material, folder):
    """Run one case in a folder of its own; what is wrong with what came of it, None if nothing is."""
    rng = random.Random(seed)
    shutil.copytree(material, folder)
    out = None
    try:
        with limits():
            out = CASES[kind][1](rng, folder)
            if out is not None:
                report = verify_checkpoint(out, folder / "source")
                assert report.ok, [check.detail for check in report.checks if not check.ok][:1]
    except LeanKError as error:
        told = error.message
        try:  # a mistake of the user's, told in short
            assert 0 < len(told) <= MAX_MESSAGE and "\n" not in told, f"{len(told)} characters: {told[:300]}"
            assert error.exit_code == 2 and len(error.hint or "") <= MAX_MESSAGE
            left = sorted(path.name for path in folder.iterdir() if path.name.startswith((".out", "out")))
            assert out is not None or not left, f"left behind: {left}"
        except AssertionError as failure:
            return f"{failure} ({error!s:.300})"
        return None
    except (Exception, TooSlow) as error:
        return "".join(traceback.format_exception(error)[-3:])
    if out is not None and rng.random() < LOADED_SHARE:
        try:
            model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
            tokens = torch.tensor([[5, 6, 7]])
            cache = model(tokens, use_cache=True, output_attentions=False, return_dict=True)[CACHE]
            model(tokens[:, :1], cache=cache, use_cache=True, output_attentions=False)
        except Exception as error:
            return "written, but not to be used:\n" + "".join(traceback.format_exception(error)[-3:])
    return None


@pytest.mark.parametrize("kind", CASES)
def test_mutated_files_give_one_sentence_or_a_result_that_verifies(kind, material, tmp_path, pytestconfig):
    total, seed = pytestconfig.getoption("--fuzz-cases"), pytestconfig.getoption("--fuzz-seed")
    failures = []
    for number in range(max(1, total * CASES[kind][0] // sum(share for share, _ in CASES.values()))):
        folder = tmp_path / str(number)
        wrong = run_case(kind, f"{seed}-{kind}-{number}", material, folder)
        if wrong is None:
            shutil.rmtree(folder)
        else:
            failures.append(f"case {number} of seed {seed}, in {folder}: {wrong}")
        if len(failures) == 20:
            break
    assert not failures, "\n\n".join(failures)

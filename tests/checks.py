"""What tests of many rooms ask: a command's outcome, a checkpoint's failed checks, a model folder's facts."""

import hashlib
import json
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from leank_convert.architectures import read_model_facts
from leank_convert.checkpoint_io import DIGESTS_NAME, open_checkpoint
from leank_convert.cli import main
from leank_convert.digests import write_digests
from leank_convert.errors import LeanKError
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json, sha256_of
from leank_convert.mask import MASK_FILE_NAME, ChannelMask
from leank_convert.mask_provenance import MaskProvenance
from leank_convert.recipe import DataSection, Recipe
from leank_convert.value_weights import digest_values
from leank_convert.verify import verify_checkpoint


def run(*arguments):
    """Run the command line."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def done(*arguments):
    """Run a command that has to succeed; what it prints to stdout."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def rejected(*arguments):
    """Run a command that has to fail as the user's mistake; what it says on stderr."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr


@contextmanager
def refusal(message="", *hints, exit_code=2):
    """What is within has to be refused, in short: a pattern of what is told, and parts of the remedy."""
    with pytest.raises(LeanKError, match=message) as caught:
        yield caught
    error = caught.value
    assert all(hint in (error.hint or "") for hint in hints), error.hint
    assert error.exit_code == exit_code and len(error.message) < 600 and "\n" not in error.message


def refused(read, path, message):
    """Read a file that has to be refused in one sentence, which names it."""
    with refusal(f"(?s)^(?=.*{re.escape(message)}).*{re.escape(str(path))}"):
        read(path)


def refused_export(source, mask, out, message, *hints, **options):
    """Run an export that has to be refused and to leave its target as it was."""
    before = snapshot(out)
    with refusal(re.escape(message), *hints):
        export_checkpoint(source, mask, out, **options)
    assert snapshot(out) == before and not out.with_name(out.name + ".partial").exists()


def snapshot(folder):
    """Digests of all files of a folder by relative path; None where there is no folder."""
    if not folder.exists():
        return None
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def run_python(*arguments, **options):
    """Run Python in a process of its own: what it printed, and its exit code."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def edit_json(path, **changes):
    """Replace keys of a JSON file; a value of `...` removes the key."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def failed(folder, source=None):
    """What `verify` finds wrong with a checkpoint, by the names of its checks."""
    report = verify_checkpoint(folder, source)
    assert report.ok == all(check.ok for check in report.checks)
    return {check.name: check.detail for check in report.checks if not check.ok}


def bless(out):
    """Bring a checkpoint's list of digests up to date, so that what lies behind it is looked at alone."""
    (out / DIGESTS_NAME).unlink()
    write_digests(out, {})


def facts_of(folder):
    """The facts of a model's folder."""
    return read_model_facts(read_json(folder / "config.json"), origin="config.json")


def llama_facts(layers=3, heads=4, head_dim=12, **config):
    """The facts of a Llama of so many layers and KV heads, with twice as many query heads."""
    sizes = {"num_hidden_layers": layers, "num_key_value_heads": heads, "num_attention_heads": 2 * heads}
    known = {"model_type": "llama", **sizes, "head_dim": head_dim, "hidden_size": 2 * heads * head_dim}
    return read_model_facts({**known, **config}, origin="config.json")


def provenance_for(facts, model="a/b", **changes):
    """That of a mask that was learned for a model of these facts, with windows of 4, 16 and 4 tokens."""
    given = {"method": "leank", "sink_size": 4, "recent_size": 16, "flush_size": 4, **changes}
    return MaskProvenance.for_model(model, facts, **given)


def provenance_of(folder, model=None, **changes):
    """The same for a model's folder."""
    return provenance_for(facts_of(folder), model or folder.name, **changes)


def edit_tensors(path, metadata=(), **tensors):
    """Write a safetensors file again: tensors and metadata replaced, by a function too, or with None gone."""
    with safe_open(path, "pt") as file:
        said = {**(file.metadata() or {}), **dict(metadata)}
    held = load_file(path)
    for name, change in tensors.items():
        held[name] = change(held[name]).contiguous() if callable(change) else change
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, path, {key: value for key, value in said.items() if value is not None})


def changed(tensor, place, value):
    """A copy of a tensor with another value in one place."""
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


def ragged_mask(layers=3, heads=4, head_dim=12, seed=0):
    """Bool [layers, heads, head_dim] with widths that differ, an empty and a full head in every layer."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(layers, heads, head_dim, dtype=torch.bool)
    for layer in range(layers):
        widths = [head_dim, 0, *(torch.randint(1, head_dim, (heads - 2,), generator=generator).tolist())]
        order = torch.randperm(heads, generator=generator).tolist()
        for head, width in zip(order, widths, strict=True):
            mask[layer, head, torch.randperm(head_dim, generator=generator)[:width]] = True
    return mask


def fitting_mask(folder):
    """A ragged mask of the shape that a model folder needs."""
    return ChannelMask(ragged_mask(*facts_of(folder).mask_shape))


def say_in_block(out, key, value):
    """Put a value into a checkpoint's `leank` block, None for no key; what `verify` then finds."""
    config = read_json(out / "config.json")
    leank = {**config["leank"], key: value}
    if value is None:
        del leank[key]
    leank["files"] = {**leank["files"], MASK_FILE_NAME: sha256_of(out / MASK_FILE_NAME)}
    (out / "config.json").write_text(json.dumps({**config, "leank": leank}))
    bless(out)
    return failed(out)


def prune_values(mask, folder, **changes):
    """A mask of a model's folder that prunes V, too: a random basis, widths from 0 to all."""
    facts = facts_of(folder)
    head_dim, sees = facts.head_dim, mask.channel_mask.any(-1)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(*facts.mask_shape, head_dim, dtype=torch.float64, generator=generator)
    quarters = torch.randint(0, 5, sees.shape, generator=generator)
    known = mask.provenance or provenance_of(folder)
    digest = digest_values(open_checkpoint(folder), facts)
    return replace(
        mask,
        value_basis=torch.linalg.qr(noise)[0].float().contiguous(),
        value_widths=(quarters * sees * (head_dim // 4)).int(),
        provenance=replace(
            known, value_weights=digest, value_tokens=4321, value_pruning_ratio_asked=0.5, **changes
        ),
    )


def section(**values):
    """A recipe's data section of short samples."""
    return DataSection(**{"min_length": 2000, "max_length": 4000, **values})


def short_recipe(**changes):
    """A recipe of a few steps; keyword arguments replace top-level keys."""
    data = {"tasks": ["retrieval", "multi_value"], "wording": "testbed", "min_length": 200, "max_length": 280}
    values = {
        "windows": {"sink_size": 4, "recent_size": 16, "flush_size": 4},
        "width_multiple": 4,
        "data": data,
        "stage1": {"steps": 7, "learning_rate": 0.1, "l1_weight": 0.06},
        "stage2": {"steps": 6, "learning_rate": 0.05},
        "save_every": 3,
        "held_out_samples": 2,
        "trackers": (),
    }
    return Recipe(**{**values, **changes})


def write(name, content=""):
    """What puts a file into a folder, or another one in its place."""

    def tamper(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return tamper


def append(name):
    """What puts an empty line behind a file's content."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b"\n")


def remove(name):
    """What takes a file away."""
    return lambda folder: (folder / name).unlink()

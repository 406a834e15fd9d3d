"""Tiny models with a real tokenizer, and checkpoints made of them."""

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask
from tests.tiny_families import OPTIONS, random_mask, tiny_model, word_tokenizer

FULL = ["full_attention"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass
class Converted:
    """A checkpoint, the model it was made of, and its mask and mean of keys in that model's head order."""

    source: Path
    folder: Path
    channel_mask: torch.Tensor
    key_mean: torch.Tensor | None = None


def draw_mask(widths, seed, centred):
    """Channels [L, H_kv, D] that keep these widths, and a mean of keys or None."""
    mask = random_mask(widths, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return mask, (3 * torch.randn(mask.shape, generator=generator)).half() if centred else None


def convert(
    root, family="llama", widths=None, *, name="model", seed=0, sizes=(3, 6, 4), centred=False, **config
):
    """Write a random model and export it: `convert(folder, "qwen2", [[0, 8], [3, 16]])` keeps these widths.

    `centred=True` caches its keys less a large mean.
    """
    source, folder = root / f"{name}-source", root / name
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = tiny_model(family, seed=seed, **{"hidden_size": 64, **tokens, **config})
    for parameter in model.parameters():  # norms too
        parameter.normal_(0, 0.3)
    model.save_pretrained(source, max_shard_size="40KB")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(), **special)
    fast.chat_template = TEMPLATE
    fast.padding_side = "left"
    fast.save_pretrained(source)

    num_layers = {**OPTIONS.get(family, {}), **config}.get("layer_types", FULL * 2).count(*FULL)
    mask, key_mean = draw_mask([[16, 16]] * num_layers if widths is None else widths, seed, centred)
    windows = dict(zip(("sink_size", "recent_size", "flush_size"), sizes, strict=True))
    export_checkpoint(source, ChannelMask(mask, None, None, key_mean), folder, **windows)
    return Converted(source, folder, mask, key_mean)


@pytest.fixture
def converted(tmp_path):
    """`convert` in this test's own folder."""
    return functools.partial(convert, tmp_path)


@pytest.fixture(scope="session")
def example(once_per_run):
    """A checkpoint with a mean, both of whose layers change their head order; not to be changed."""
    widths = [[8, 0], [16, 3]]

    def get(family):
        folder = once_per_run(f"example-{family}", lambda out: convert(out, family, widths, centred=True))
        return Converted(folder / "model-source", folder / "model", *draw_mask(widths, 0, True))

    return get


@pytest.fixture
def load():
    """Load a checkpoint as a stranger does, through the auto classes."""
    stranger = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, trust_remote_code=True)
    return lambda folder, **kwargs: stranger(folder, **kwargs).eval()

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
WIDTHS = [[8, 0], [16, 3]]  # both layers change their head order
GREEDY = {"do_sample": False, "max_new_tokens": 16, "min_new_tokens": 16}
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass
class Converted:
    """A checkpoint, the model it was made of, and its mask in that model's head order."""

    source: Path
    folder: Path
    channel_mask: torch.Tensor


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
    mask = random_mask([[16, 16]] * num_layers if widths is None else widths, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    key_mean = (3 * torch.randn(mask.shape, generator=generator)).half() if centred else None
    windows = dict(zip(("sink_size", "recent_size", "flush_size"), sizes, strict=True))
    export_checkpoint(source, ChannelMask(mask, None, None, key_mean), folder, **windows)
    return Converted(source, folder, mask)


@pytest.fixture
def converted(tmp_path):
    """`convert` in this test's own folder."""
    return functools.partial(convert, tmp_path)


@pytest.fixture(scope="session")
def example(once_per_run):
    """A checkpoint with a mean, both of whose layers change their head order; not to be changed."""

    def get(family):
        folder = once_per_run(f"example-{family}", lambda out: convert(out, family, WIDTHS, centred=True))
        return Converted(folder / "model-source", folder / "model", random_mask(WIDTHS))

    return get


@pytest.fixture
def load():
    """Load a checkpoint as a stranger does, through the auto classes."""
    stranger = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, trust_remote_code=True)
    return lambda folder, **kwargs: stranger(folder, **kwargs).eval()

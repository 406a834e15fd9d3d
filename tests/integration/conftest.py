"""Tiny models with a real tokenizer, and checkpoints made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(60))]
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass
class Converted:
    """A checkpoint, the model it was made of, and its mask and mean of keys in that model's head order."""

    source: Path
    folder: Path
    channel_mask: torch.Tensor
    key_mean: torch.Tensor | None = None


@pytest.fixture
def converted(tmp_path):
    """Write a random model and export it: `converted("Qwen2", [[0, 8], [3, 16]])` keeps so many channels.

    `centred=True` caches its keys less a large mean.
    """

    def make(family="Llama", widths=None, *, name="model", seed=0, sizes=(3, 6, 4), centred=False, **config):
        torch.manual_seed(seed)
        options = {
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_hidden_layers": len(config.get("layer_types", range(2))),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": len(WORDS),
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 512,
        }
        if family == "Mistral":
            options["sliding_window"] = None
        options.update(config)
        model_class = getattr(transformers, f"{family}ForCausalLM")
        model = model_class(model_class.config_class(**options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        source, folder = tmp_path / f"{name}-source", tmp_path / name
        model.save_pretrained(source, max_shard_size="40KB")
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
        )
        fast.chat_template = TEMPLATE
        fast.padding_side = "left"
        fast.save_pretrained(source)

        generator = torch.Generator().manual_seed(seed)
        kinds = config.get("layer_types", ["full_attention"] * 2)
        layers, heads, head_dim = (
            kinds.count("full_attention"),
            options["num_key_value_heads"],
            options["head_dim"],
        )
        mask = torch.ones(layers, heads, head_dim, dtype=torch.bool)
        if widths is not None:
            mask.zero_()
            for layer, row in enumerate(widths):
                for head, width in enumerate(row):
                    mask[layer, head, torch.randperm(head_dim, generator=generator)[:width]] = True
        key_mean = (3 * torch.randn(mask.shape, generator=generator)).half() if centred else None
        sink, recent, flush = sizes
        export_checkpoint(
            source,
            ChannelMask(mask, None, None, key_mean),
            folder,
            sink_size=sink,
            recent_size=recent,
            flush_size=flush,
        )
        return Converted(source, folder, mask, key_mean)

    return make


@pytest.fixture
def load():
    """Load a checkpoint as a stranger does, through the auto classes."""

    def from_folder(folder, **kwargs):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, **kwargs
        ).eval()

    return from_folder

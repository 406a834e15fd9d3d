"""A basis of V in a checkpoint: folded into V and O, of any family, and found where it is another."""

import re
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from leank_convert.checkpoint_io import open_checkpoint
from leank_convert.export import export_checkpoint
from leank_convert.families import ARCHITECTURES
from leank_convert.files import read_json
from leank_convert.mask import ChannelMask
from leank_convert.value_weights import digest_values
from tests.checks import facts_of, failed, provenance_of
from tests.tiny_families import FAMILIES, batch, random_mask, tiny_model

WIDTHS = [[16, 0], [8, 16], [0, 5], [16, 2]]  # of K; heads change places
VALUES = [[8, 0], [4, 12], [0, 0], [16, 0]]


def pruned_mask(folder, **changes):
    """A mask of a tiny model's folder that prunes V, too, by a random basis."""
    facts = facts_of(folder)
    layers, heads, head_dim = facts.mask_shape
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(layers, heads, head_dim, head_dim, dtype=torch.float64, generator=generator)
    known = provenance_of(folder, value_weights=digest_values(open_checkpoint(folder), facts))
    values = {
        "value_basis": torch.linalg.qr(noise)[0].float(),
        "value_widths": torch.tensor(VALUES[:layers], dtype=torch.int32),
    }
    return ChannelMask(random_mask(WIDTHS[:layers], head_dim), provenance=known, **{**values, **changes})


@pytest.fixture
def folder_of(tmp_path):
    """Writes a tiny model of a family: `folder_of("llama", **config)`."""

    def write(family, **config):
        folder = tmp_path / "model"
        tiny_model(family, pad_token_id=0, **config).save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")
        return folder

    return write


def stock_logits(family, folder):
    """What the stock class computes with a folder's weights."""
    stock = getattr(transformers, ARCHITECTURES[family].causal_lm_class)
    config = stock.config_class.from_dict({**read_json(folder / "config.json"), "model_type": family})
    model = stock.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(**batch()).logits


@pytest.mark.parametrize("row", [case for case in FAMILIES if not case.values[0].gated])
def test_a_folded_model_computes_what_the_original_does(row, folder_of, tmp_path):
    family = row.model_type
    source = folder_of(family)
    out = export_checkpoint(source, pruned_mask(source), tmp_path / "out")
    assert not failed(out, source)
    expected = stock_logits(family, source)
    torch.testing.assert_close(stock_logits(family, out), expected, rtol=1e-4, atol=1e-4)
    plain = export_checkpoint(
        source, replace(pruned_mask(source), value_basis=None, value_widths=None), tmp_path / "p"
    )
    changed = {
        name
        for shard in out.glob("model*.safetensors")
        for name, tensor in load_file(shard).items()
        if not tensor.equal(load_file(plain / shard.name)[name])
    }
    assert changed and all(re.search(r"self_attn\.(v_proj|qkv_proj|o_proj)\.", name) for name in changed)

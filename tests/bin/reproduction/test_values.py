"""V pruned in memory: the same answers as by a checkpoint of the same mask."""

from dataclasses import replace

import pytest
import torch

from bin.reproduction.variants import PrunedValues, fold_values
from leank_convert.evaluate.loading import load_evaluated
from leank_convert.evaluate.prefill import decode_token, run_prefill
from leank_convert.evaluate.variants import Masked
from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask, save_mask
from tests.checks import facts_of, provenance_of, prune_values
from tests.tiny_families import random_mask

SIZES = {"sink_size": 4, "recent_size": 16, "flush_size": 4}


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_a_folded_model_and_pruned_values_answer_as_a_checkpoint_does(retriever_folder, tmp_path, kv_dtype):
    folder = retriever_folder
    layers, heads, head_dim = facts_of(folder).mask_shape
    widths = torch.randint(0, head_dim + 1, (layers, heads), generator=torch.Generator().manual_seed(5))
    own = ChannelMask(random_mask(widths.tolist(), head_dim), provenance=provenance_of(folder))
    mask = prune_values(own, folder)
    export_checkpoint(folder, mask, tmp_path / "out", **SIZES)
    save_mask(own, tmp_path / "mask.safetensors")
    device, ids = torch.device("cpu"), torch.arange(1, 61)[None]

    def answer(evaluated, variant):
        prefill = run_prefill(evaluated.model, ids, torch.ones_like(ids))
        model, cache = variant.start(prefill)
        seen, found = prefill.attention_mask, []
        for token in range(7, 19):  # some leave the window meanwhile
            logits, seen = decode_token(model, cache, torch.tensor([[token]]), seen)
            found.append(logits)
        return torch.cat(found)

    checkpoint = load_evaluated(tmp_path / "out", device)
    expected = answer(checkpoint, Masked("checkpoint", kv_dtype=kv_dtype))
    in_memory = load_evaluated(folder, device, mask=tmp_path / "mask.safetensors")
    in_memory = replace(in_memory, windows=checkpoint.windows)
    fold_values(in_memory, mask.value_basis)
    variant = PrunedValues(
        "values",
        own.channel_mask,
        kv_dtype=kv_dtype,
        windows=checkpoint.windows,
        value_widths=mask.value_widths,
    )
    torch.testing.assert_close(answer(in_memory, variant), expected, rtol=0, atol=1e-4)

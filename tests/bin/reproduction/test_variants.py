"""Prompts whose keys or values alone are rounded; V pruned in memory answers as a checkpoint does."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bin.reproduction.bench import PrunedValues, RoundedPrompt
from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.evaluate.loading import load_evaluated
from leank_convert.evaluate.prefill import run_prefill
from leank_convert.evaluate.variants import Masked
from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask, save_mask
from runtime.constants_leank import Constants
from runtime.tools import fork
from tests.checks import facts_of, provenance_of, prune_values
from tests.leank_convert.evaluate.conftest import feed_steps
from tests.runtime.conftest import build_pair
from tests.runtime.tiny_inputs import feed, ids
from tests.tiny_families import random_mask

SIZES = {"sink_size": 4, "recent_size": 16, "flush_size": 4}
MASKS = torch.arange(16).expand(2, 2, 16) < 7


@pytest.mark.parametrize("kv_dtype", ["fp8", "int4"])
@pytest.mark.parametrize("keys", [True, False])
def test_a_prompts_keys_or_values_alone_are_rounded_around_their_mean(kv_dtype, keys):
    model = build_pair(MASKS, "Qwen2", groups=2).leank
    prompt = feed(model, ids(2, 60), model.build_cache("deferred"))[CACHE]
    prefill = SimpleNamespace(model=model, fork=lambda windows: fork(prompt))
    mean = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(1)) * 5
    rounded = RoundedPrompt("rounded", MASKS, constants={"key_mean": mean}, rounded_to=kv_dtype, keys=keys)
    _, cache = rounded.start(prefill)
    for place, (layer, given) in enumerate(zip(cache.layers, prompt.layers, strict=True)):
        assert torch.equal(layer.channel_mask[0], MASKS[place])
        assert isinstance(layer.model_constants, Constants)
        assert torch.equal(layer.model_constants.key_mean[0], mean[place])
        changed = [not torch.equal(*pair) for pair in zip(layer.pending, given.pending, strict=True)]
        assert changed == [keys, not keys]
        number = 0 if keys else 1
        spread = (given.pending[number] - (mean[place][:, None] if keys else 0)).abs().amax()
        error = (layer.pending[number] - given.pending[number]).abs().amax()
        assert 0 < error <= spread / (13 if kv_dtype == "fp8" else 12)
    assert prompt.layers[0].model_constants.key_mean is None


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_values_pruned_in_memory_answer_as_a_checkpoint_does(retriever_folder, tmp_path, kv_dtype):
    folder = retriever_folder
    layers, heads, head_dim = facts_of(folder).mask_shape
    widths = torch.randint(0, head_dim + 1, (layers, heads), generator=torch.Generator().manual_seed(5))
    own = ChannelMask(random_mask(widths.tolist(), head_dim), provenance=provenance_of(folder))
    mask = prune_values(own, folder)
    export_checkpoint(folder, mask, tmp_path / "out", **SIZES)
    save_mask(own, tmp_path / "mask.safetensors")
    device, prompt = torch.device("cpu"), torch.arange(1, 61)[None]

    def answer(evaluated, variant):
        prefill = run_prefill(evaluated.model, prompt, torch.ones_like(prompt))
        tokens = torch.arange(7, 19).view(-1, 1, 1)  # some leave the window meanwhile
        return feed_steps(*variant.start(prefill), prefill.attention_mask, tokens)

    checkpoint = load_evaluated(tmp_path / "out", device)
    expected = answer(checkpoint, Masked("checkpoint", kv_dtype=kv_dtype))
    in_memory = load_evaluated(folder, device, mask=tmp_path / "mask.safetensors")
    in_memory = replace(in_memory, windows=checkpoint.windows)
    options = {"kv_dtype": kv_dtype, "windows": checkpoint.windows, "pruned_values": mask}
    variant = PrunedValues("values", own.channel_mask, **options)
    torch.testing.assert_close(answer(in_memory, variant), expected, rtol=0, atol=1e-4)

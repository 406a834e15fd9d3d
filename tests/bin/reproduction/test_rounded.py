"""Prompts whose keys or values alone are rounded."""

import pytest
import torch

from bin.reproduction.variants import RoundedPrompt
from runtime.constants_leank import Constants
from runtime.tools import fork
from tests.runtime.conftest import build_pair
from tests.runtime.tiny_inputs import ids

MASKS = torch.arange(16).expand(2, 2, 16) < 7


@pytest.fixture
def prefill():
    model = build_pair(MASKS, "Qwen2", groups=2).leank
    cache = model.build_cache("deferred")
    with torch.no_grad():
        model(ids(2, 60), cache=cache)

    class Prefill:
        def fork(self, windows):
            return fork(cache)

    found = Prefill()
    found.model, found.cache = model, cache
    return found


@pytest.mark.parametrize("kv_dtype", ["fp8", "int4"])
@pytest.mark.parametrize("keys", [True, False])
def test_a_prompts_keys_or_values_alone_are_rounded_around_their_mean(prefill, kv_dtype, keys):
    mean = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(1)) * 5
    rounded = RoundedPrompt("rounded", MASKS, constants={"key_mean": mean}, rounded_to=kv_dtype, keys=keys)
    _, cache = rounded.start(prefill)
    for place, (layer, given) in enumerate(zip(cache.layers, prefill.cache.layers, strict=True)):
        assert torch.equal(layer.channel_mask[0], MASKS[place])
        assert isinstance(layer.model_constants, Constants)
        assert torch.equal(layer.model_constants.key_mean[0], mean[place])
        changed = [not torch.equal(*pair) for pair in zip(layer.pending, given.pending, strict=True)]
        assert changed == [keys, not keys]
        number = 0 if keys else 1
        spread = (given.pending[number] - (mean[place][:, None] if keys else 0)).abs().amax()
        error = (layer.pending[number] - given.pending[number]).abs().amax()
        assert 0 < error <= spread / (13 if kv_dtype == "fp8" else 12)
    assert prefill.cache.layers[0].model_constants.key_mean is None

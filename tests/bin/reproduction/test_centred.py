"""The experiment on centred keys: what its tables say, and prompts whose keys or values alone are rounded."""

import json

import pytest
import torch

from bin.reproduction.centred import CentredKeys, CentredSizes
from bin.reproduction.rounded import RoundedPrompt
from runtime.constants_leank import Constants
from tests.runtime.conftest import build_pair
from tests.twin_caches import ids

MASKS = torch.arange(16).expand(2, 2, 16) < 7


@pytest.fixture
def prefill():
    model = build_pair(MASKS, "Qwen2", groups=2).leank
    cache = model.build_cache("deferred")
    with torch.no_grad():
        model(ids(2, 60), past_key_values=cache)

    class Prefill:
        def fork(self):
            return cache.fork()

    found = Prefill()
    found.model, found.cache = model, cache
    return found


@pytest.mark.parametrize("kv_dtype", ["fp8", "int4"])
@pytest.mark.parametrize("keys", [True, False])
def test_a_prompts_keys_or_values_alone_are_rounded_around_their_mean(prefill, kv_dtype, keys):
    mean = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(1)) * 5
    _, cache = RoundedPrompt("rounded", MASKS, mean, kv_dtype, keys=keys).start(prefill)
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


def test_tables_pair_answers_and_leave_out_what_the_dense_model_cannot_do(tmp_path):
    cells = {
        "vt-4096": {"dense": [1.0, 1.0, 0.0], "leank 70%": [1.0, 0.0, 0.0], "int4": [1.0]},
        "vt-8192": {"dense": [1.0, 0.5, 1.0], "leank 70%": [1.0, 1.0, 1.0]},
        "fwe-8192": {"dense": [0.0, 0.0, 0.5], "leank 70%": [1.0, 1.0, 1.0]},
    }
    for name, scores in cells.items():
        path = tmp_path / "ruler" / name / "scores.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(scores))
    text = {"documentation, 12": {"fp8": {"kl": 0.01234, "agreement": 0.5, "nll": 1.0, "dense_nll": 1.0}}}
    (tmp_path / "text.json").write_text(json.dumps(text))
    experiment = CentredKeys(tmp_path, CentredSizes(), "model", torch.device("cpu"))
    lines = experiment.report().splitlines()
    assert "| documentation, 12 | fp8 | 0.0123 | 50.0% |" in lines
    assert "| dense | 6 | 75.0% |  |" in lines
    assert any(line.startswith("| leank 70% | 6 | 66.7% | -8.3 [") for line in lines)
    assert any(line.startswith("| int4 | 1 | 100.0% | +0.0 [") for line in lines)
    assert any(line.startswith("| leank 70%, 8192 | 3 | 100.0% | +16.7 [") for line in lines)
    assert not any("fwe" in line for line in lines)


def test_rounds_ask_more_of_every_cell_one_after_the_other(tmp_path):
    sizes = CentredSizes(lengths=(4096,), tasks=("vt",), rounds=(2, 4), num_int4=2)
    units = {
        unit.name: unit for unit in CentredKeys(tmp_path, sizes, "model", torch.device("cpu"))._list_units()
    }
    first, second = units["ruler/vt-4096-2"], units["ruler/vt-4096-4"]
    assert first.name in second.needs and "masks/leank" in first.needs
    scores = dict.fromkeys(("dense", "leank 70%", "leank 80%", "fp8", "leank 70% x fp8"), [1.0] * 4)
    path = tmp_path / "ruler" / "vt-4096" / "scores.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(scores))
    assert second.is_done() and not first.is_done()  # which int4 has to answer, too

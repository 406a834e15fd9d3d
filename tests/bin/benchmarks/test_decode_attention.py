"""What decode attention has to read, by hand and as the cache counts it; what its result is held to."""

import torch

from bin.benchmarks.decode_attention import (
    FilledLayer,
    Pruning,
    attend_exactly,
    count_attention_bytes,
    pruned_length,
)
from bin.benchmarks.random_models import build_model, choose_setup
from runtime.layout_leank import ChunkLayout


def test_bytes_by_hand():
    # Heads of 0, 32 and 40 of 64 channels in chunks of 32; 30 tokens, 10 of them pruned.
    assert count_attention_bytes(ChunkLayout((0, 32, 40), 64, 32), 30, 10, element_bytes=2) == {
        "kept_keys": 30 * (1 + 2) * 32 * 2,
        "kept_values": 30 * 2 * 64 * 2,
        "window_keys": 20 * (2 + 1 + 1) * 32 * 2,
        "window_values": 20 * 1 * 64 * 2,
    }
    assert (
        sum(count_attention_bytes(ChunkLayout((0, 32, 64, 64), 64, 32), 50, 0, 2).values())
        == 2 * 50 * 4 * 64 * 2
    )


def test_a_filled_layer_holds_the_bytes_counted_and_attends_again_and_again():
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 8, 1, 64), (3, 4, 90, 64), (3, 4, 90, 64)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    setup = choose_setup(None, "tiny")
    model = build_model(setup, torch.device("meta"))
    pruned = pruned_length(90, setup.windows)
    for layer in range(2):
        filled = FilledLayer(model, layer, *inputs)
        memory = filled.cache.memory()
        # Widths are whole chunks here, so that no lane is padding.
        layout = ChunkLayout(setup.layout.widths[layer], 64, 16)
        counted = count_attention_bytes(layout, 3 * 90, 3 * pruned, 4)
        assert counted == {region: getattr(memory, region).used for region in counted}
        assert torch.equal(filled.attend(), filled.attend())
        pruning = Pruning(setup.channel_masks[layer], setup.windows.sink_size, pruned)
        truth = attend_exactly(*inputs, pruning)
        assert truth.check(filled.attend, inputs[0])["ok"]
        assert not truth.check(lambda: torch.full_like(inputs[0], float("nan")), inputs[0])["ok"]

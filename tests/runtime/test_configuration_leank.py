"""The `leank` block: what is wrong with it is said when the config is read."""

import pytest
import torch

from runtime.configuration_leank import (
    LeanKLlamaConfig,
    LeanKMistralConfig,
    LeanKQwen2Config,
    LeanKQwen3Config,
    read_settings,
)
from runtime.windows_leank import Windows


def block(**changes):
    good = {
        "format_version": 1,
        "widths": [[0, 16], [8, 8]],
        "channel_masks": ["0000ffff", "ff00aaaa"],
        "head_permutation": [[1, 0], [0, 1]],
        "sink_size": 128,
        "recent_size": 1024,
        "flush_size": 32,
        "prune": "eager",
        "pruning_ratio_asked": None,
        "pruning_ratio": 0.5,
        "width_multiple": None,
        "files": {},
    }
    return {key: value for key, value in {**good, **changes}.items() if value != "absent"}


def sizes(**changes):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return {"num_hidden_layers": 2, "hidden_size": 64, **heads, **changes}


def test_a_good_block_is_read_on_the_cpu_wherever_the_model_is_built():
    settings = read_settings(LeanKLlamaConfig(**sizes(), leank=block()))
    assert settings.widths == ((0, 16), (8, 8))
    assert settings.windows == Windows(128, 1024, 32, "eager")
    assert (settings.head_dim, settings.num_key_value_heads) == (16, 2)
    first_eight = torch.arange(16) < 8
    assert settings.channel_masks.tolist() == [
        [[False] * 16, [True] * 16],
        [first_eight.tolist(), [True, False] * 8],
    ]
    with torch.device("meta"):
        own = block(widths=[[0, 12], [1, 2]], channel_masks=["0000fff0", "80000030"])
        settings = read_settings(LeanKLlamaConfig(**sizes(head_dim=12), leank=own))
    assert settings.channel_masks.device.type == "cpu"
    assert settings.channel_masks[1].nonzero().tolist() == [[0, 0], [1, 10], [1, 11]]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format_version", 2, r"is 2, these runtime files read 1; load"),
        ("format_version", True, r"is True"),
        ("format_version", "absent", r"is None"),
        ("key_mean", False, r"is False, not true"),
        ("widths", 3, r"is 3, not 2 rows"),
        ("widths", [[0, 16]], r"is \[\[0, 16\]\], not 2 rows, one for each pruned layer"),
        ("widths", [[0, 16], [8]], r"\[1\]` is \[8\], not one integer for each of the 2 KV heads"),
        ("widths", [[0, 16], [8, 8.5]], r"\[1\]` is \[8, 8.5\], not one integer"),
        ("widths", [[0, 17], [8, 8]], r"\[0\]\[1\]` is 17, not in 0…16"),
        ("widths", [[-1, 16], [8, 8]], r"\[0\]\[0\]` is -1"),
        ("head_permutation", [[1, 1], [0, 1]], r"\[0\]` is \[1, 1\], not a permutation"),
        ("head_permutation", [[1, 0]], r"` is \[\[1, 0\]\], not 2 rows"),
        ("channel_masks", "0000ffff", r"is not a list of 2 strings"),
        ("channel_masks", ["0000ffff", "ff00aaa"], r"\[1\]` is not 8 hex digits"),
        ("channel_masks", ["0000fffg", "ff00aaaa"], r"\[0\]` is not 8 hex digits"),
        ("channel_masks", ["0000ffff", 1], r"\[1\]` is not 8 hex digits"),
        ("channel_masks", ["0000ffff", "ff00aaab"], r"\[1\]` keeps \[8, 9\] channels .* says \[8, 8\]"),
        ("sink_size", -1, r"is -1, not an integer from 0 to 16777216"),
        ("recent_size", 10**300, r"is 10+\.\.\.0+, not an integer from 0"),
        ("flush_size", 0, r"is 0, not an integer from 1 to 16777216"),
        ("flush_size", True, r"is True"),
        ("prune", "lazy", r"is 'lazy', not one of `eager`, `deferred`"),
        ("prune", "absent", r"lacks `prune`; export"),
    ],
    ids=str,
)
def test_a_bad_block_is_refused(key, value, message):
    with pytest.raises(ValueError, match=message) as caught:
        LeanKLlamaConfig(**sizes(), leank=block(**{key: value}))
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("config_class", "changes", "own", "message"),
    [
        (LeanKMistralConfig, {}, {}, r"layers` is None, the layers with full attention are \[\]"),
        (LeanKQwen2Config, {"use_sliding_window": True, "max_window_layers": 1}, {}, r"are \[0\]; export"),
        (LeanKQwen3Config, {}, {"layers": [1]}, r"`leank.layers` is \[1\], the layers .* are \[0, 1\]"),
        (
            LeanKLlamaConfig,
            {"head_dim": 12},
            {"widths": [[0, 12], [1, 2]], "channel_masks": ["0000fff0", "80000031"]},
            r"`leank.channel_masks\[1\]` keeps channels beyond the 12 of a head",
        ),
    ],
)
def test_a_block_that_does_not_fit_its_model_is_refused(config_class, changes, own, message):
    with pytest.raises(ValueError, match=message):
        config_class(**sizes(**changes), leank=block(**own))


def test_a_config_survives_saving_and_loading_and_may_have_no_head_dim(tmp_path):
    LeanKMistralConfig(**sizes(sliding_window=None), leank=block()).save_pretrained(tmp_path)
    again = LeanKMistralConfig.from_pretrained(tmp_path)
    assert again.leank == block()
    assert again.model_type == "leank_mistral"
    assert LeanKMistralConfig().leank is None
    config = LeanKQwen2Config(**{**sizes(), "head_dim": None}, leank=block())
    assert read_settings(config).head_dim == 16

"""Masks, tokens and settings of tiny models, how they are fed, and how close their logits have to be."""

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch

from leank_convert._runtime.configuration_leank import CACHE

VOCAB = 64
WIDTHS = [[0, 3, 16], [4, 8, 8]]
# Heads of 80 channels, in chunks of 16: groups of 32, of 16, of what is left, and lanes of padding.
INT4_WIDTHS = [[0, 7, 80], [16, 48, 33]]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "min_new_tokens": 24, "pad_token_id": 0}


ERRORS: WeakKeyDictionary[Any, float] = WeakKeyDictionary()


def ids(rows, length, seed=0):
    """Tokens `[rows, length]`."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(length, count=7, *others, rows=2):
    """A mask of rows, of which the second begins with so much padding, and has more in other columns."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[1, [*range(count), *others]] = 0
    return mask


def everything(layers=2, heads=2, head_dim=16):
    """Masks of which all channels are kept."""
    return torch.ones(layers, heads, head_dim, dtype=torch.bool)


def one_row(length=21):
    """The beginning of one prompt, as a batch."""
    return ids(1, length, 5)


@torch.no_grad()
def feed(model, tokens, cache=None, **options):
    """One pass of a model over tokens, with its cache."""
    return model(tokens, cache=cache, use_cache=True, **options)


def feed_turns(model, cache, turns, mask=None, *, tokens=None, embeds=False, positions=True, **options):
    """Feed rows turn by turn, two of any tokens unless they are given; logits of all columns."""
    tokens = (ids(2, sum(turns), 3) if tokens is None else tokens).to(model.device)
    logits, start = [], 0
    for count in turns:
        new, stop = tokens[:, start : start + count], start + count
        inputs = {"inputs_embeds": model.get_input_embeddings()(new)} if embeds else {"input_ids": new}
        if mask is not None:
            inputs["attention_mask"] = mask[:, :stop]
            inputs["position_ids"] = (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:]
        elif positions:
            inputs["position_ids"] = torch.arange(start, stop, device=model.device)[None]
        with torch.no_grad():
            output = model(**inputs, use_cache=True, **{CACHE: cache}, **options)
        cache, start = output[CACHE], stop
        logits.append(output.logits)
    return torch.cat(logits, 1)


def feed_both(model, turns, mask=None, **how):
    """Feed turns with graphs and without, and hold the one to the other; both caches."""
    cache, plain = model.build_cache(), model.build_cache(use_graphs=False)
    ours, eager = (feed_turns(model, each, turns, mask, **how) for each in (cache, plain))
    real = slice(None) if mask is None else mask[:, : sum(turns)].bool()
    assert_close(model, ours[real], eager[real])
    for name in ("lengths", "pruned_lengths"):
        assert torch.equal(getattr(cache.rows, name), getattr(plain.rows, name))
    assert cache.rows.max_length == plain.rows.max_length
    assert cache.get_seq_length() == plain.get_seq_length() == sum(turns)
    assert plain.graph.num_replays == 0
    return cache, plain


def relative_error(ours, expected):
    """The largest difference, relative to the largest number that is expected."""
    return float((ours.detach() - expected).abs().max() / expected.abs().max())


def torchs_error(model):
    """The error that plain torch makes in a model's dtype: its logits without a cache, against float64."""
    if model.dtype == torch.float64:
        return 5e-7  # of norms and rotary embeddings, which compute in float32
    if model not in ERRORS:
        tokens = ids(4, 64, 7).to(model.device)
        exact = copy.deepcopy(model).double()
        exact.set_experts_implementation("eager")  # the grouped product knows no float64
        with torch.no_grad():
            ERRORS[model] = relative_error(*(each(tokens, use_cache=False)[0] for each in (model, exact)))
    return ERRORS[model]


def assert_close(model, ours, expected):
    """Hold logits of a model to exact ones: at most twice the error that torch makes in that dtype."""
    assert ours.shape == expected.shape
    error, limit = relative_error(ours, expected), 2 * torchs_error(model)
    assert error <= limit, f"relative error {error:.2e}, twice torch's is {limit:.2e}"

"""Two caches of one model that are fed the same: one that rounds, and one that is handed what was rounded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.constants_leank import Constants, centre, choose_constants
from runtime.layer_leank import LeanKLayer
from runtime.store_leank import ChunkStore

POOLS = ("kept_keys", "values", "window_keys", "window_values")


# All numbers that e4m3 has, by the definition of its bits.
NUMBERS = sorted(
    {0.0}
    | {
        (8 * (exponent > 0) + fraction) * 2.0 ** (max(exponent, 1) - 10)
        for exponent in range(16)
        for fraction in range(8)
        if (exponent, fraction) != (15, 7)
    }
)


def ids(rows, length, seed=0):
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def in_eight_bits(numbers, scale):
    """Clamp and round to the nearest number of e4m3, of two as near to the one whose last bit is 0."""
    magnitude = (numbers.double() / scale.double()).abs().clamp(max=448)
    table = torch.tensor(NUMBERS, dtype=torch.float64)
    above = torch.searchsorted(table, magnitude.contiguous()).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    over, under = table[above] - magnitude, magnitude - table[below]
    place = torch.where((over < under) | ((over == under) & (above % 2 == 0)), above, below)
    nearest = torch.where(numbers.isnan(), torch.nan, table[place])
    return (nearest.copysign(numbers.double()) * scale.double()).to(numbers.dtype)


class HandedStore(ChunkStore):
    """A store that takes keys as they are to be stored."""

    def append(self, *arguments):
        constants, self.constants = self.constants, Constants()
        try:
            super().append(*arguments)
        finally:
            self.constants = constants

    def rounded(self, keys, values):
        return keys, values


class RoundedFirst(LeanKLayer):
    """A layer of an ordinary cache that is handed what a cache that centres and rounds would give back."""

    takes_mean = True
    """Whether every row's prompt gives a mean of keys where the model has none."""
    static = None
    of_rows: Sequence[torch.Tensor] = ()
    """What each row's numbers are rounded by, `[B, H_kv, D]` each."""

    def rounded(self, keys, values):
        """Return keys, which lack their mean, and values `[B, H_kv, S, D]` as they will be read."""
        return keys, values

    def prepare(self, keys, values, real):
        """Look at a prompt before it is rounded."""

    def select(self, rows):
        self.of_rows = [own[rows] for own in self.of_rows]
        super().select(rows)

    def split(self, step):
        keys, values = self.pending
        real = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool)
        if self.rows.padding is not None:
            real = self.rows.padding[:, : keys.shape[2]].bool()
        constants = self.model_constants
        mean = constants.key_mean
        if mean is None and self.takes_mean:
            mean = choose_constants(keys, values, real, "int4", Constants()).key_mean
        if mean is not None:
            keys = centre(keys, mean[:, :, None])
        self.prepare(keys, values, real)
        self.pending, self.model_constants = self.rounded(keys, values), Constants()
        super().split(step)
        self.model_constants = constants
        self.store.__class__, self.store.constants = HandedStore, Constants(mean)

    def decode(self, query, key, value, step, softmax_scale, sinks=None):
        mean = self.store.constants.key_mean
        key = key if mean is None else centre(key, mean[:, :, None])
        return super().decode(query, *self.rounded(key, value), step, softmax_scale, sinks)

    def kernels_for(self, query, sinks=None):
        return None


def restated(cache, kind):
    """Turn the layers of an ordinary cache into such as are handed what was rounded before."""
    for layer in cache.pruned_layers:
        layer.__class__ = kind
        if layer.store is not None:
            layer.store.__class__ = HandedStore
    return cache


class Both:
    """Feeds two caches the same, and holds the logits of one to the other's."""

    def __init__(self, model, caches, num_rows):
        self.model, self.caches = model, caches
        self.mask, self.seed = torch.zeros(num_rows, 0, dtype=torch.long), 0

    def feed(self, count, padding=None):
        self.seed += 1
        new = torch.ones(len(self.mask), count, dtype=torch.long)
        for row, padded in enumerate(padding or ()):
            new[row, :padded] = 0
        self.mask = torch.cat([self.mask, new], 1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -count:]
        logits = []
        for cache in self.caches:
            with torch.no_grad():
                output = self.model(
                    ids(len(new), count, self.seed),
                    attention_mask=None if self.mask.all() else self.mask,
                    position_ids=positions,
                    cache=cache,
                )
            logits.append(output.logits[new.bool()])
        # Alike but for the order in which a matrix product adds up; a number stored wrongly is 2e-2.
        assert (logits[0] - logits[1]).abs().max() <= 1e-6 * logits[1].abs().max()
        dtype = {"fp8": torch.float8_e4m3fn, "int4": torch.uint8, "auto": logits[0].dtype}
        dtype = dtype[self.caches[0].kv_dtype]
        for store in (layer.store for layer in self.caches[0].pruned_layers):
            assert store is None or {getattr(store, name).dtype for name in POOLS} == {dtype}

    def each(self, method, *arguments):
        for cache in self.caches:
            getattr(cache, method)(*arguments)

    def take_turns(self):
        """Decode tokens, drafts and turns of three rows with padding between, past flushes and a crop."""
        for count, padding in (
            (90, (0, 47, 88)),
            (1, None),
            (1, (0, 1, 0)),
            (5, (0, 2, 4)),
            (40, (3, 0, 30)),
        ):
            self.feed(count, padding)
        for _ in range(30):
            self.feed(1)
        self.each("crop", -3)
        self.mask = self.mask[:, :-3]
        for count in (1, 70, 1):
            self.feed(count)

    def move_rows(self):
        """Decode two rows of a prompt in parts, and reorder, repeat and select them."""
        self.feed(1)  # too short to prune
        self.feed(50, (0, 40))
        self.feed(1)
        for method, rows in (
            ("reorder_cache", torch.tensor([1, 0])),
            ("reorder_cache", torch.tensor([1, 1])),
            ("batch_repeat_interleave", 2),
            ("batch_select_indices", torch.tensor([3, 0, 2])),
        ):
            self.each(method, rows)
            self.mask = self.mask[:1].expand(self.caches[0].rows.batch_size, -1)
            self.feed(1)
            self.feed(3)
        self.each("reserve", 400)
        self.feed(1)


def fed_apart(model, make):
    """Feed three pairs of caches a row each, of other lengths; return those of either kind."""
    pairs = []
    for count in (70, 33, 34):
        one = Both(model, make(), 1)
        one.seed = count
        one.feed(count)
        one.feed(1)
        pairs.append(one.caches)
    return zip(*pairs, strict=True)


def feed_joined(model, caches):
    """Go on with what `fed_apart` fed, once its caches are joined."""
    both = Both(model, caches, 3)
    both.mask = torch.ones(3, 71, dtype=torch.long)
    both.mask[1, :37], both.mask[2, :36] = 0, 0
    for count in (1, 4, 50, 1):
        both.feed(count)

"""Conversations with a model, and DESIGN's decoding rule stated a second time, slowly and without a cache.

What a conversation feeds to a model, and what it does to the cache, it does to three lists of each row, too;
`check` then holds all logits to those of one pass over whole rows.
"""

import copy
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers import AttentionInterface

from bin.baselines.int4 import assign_chunks
from bin.baselines.int4 import quantise as emulate
from leank_convert._runtime.configuration_leank import CACHE
from runtime.fp8_leank import SCALE_NAMES
from runtime.tools import concatenate, fork
from tests.runtime.tiny_inputs import VOCAB, assert_close

HIDDEN, PRUNED, WHOLE = 0, 1, 2
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


@dataclass
class ModelPair:
    """A LeanK model and the stock dense model with the same weights, eval mode."""

    leank: Any
    dense: Any
    masks: torch.Tensor  # bool [L, H_kv, D]

    @cached_property
    def exact(self):
        """The dense model in float64, with the slow re-statement as its attention."""
        exact = copy.deepcopy(self.dense).double()
        exact.set_attn_implementation("slow_leank_restatement")
        return exact

    @property
    def sizes(self):
        block = self.leank.config.leank
        return block["sink_size"], block["recent_size"], block["flush_size"]


@dataclass
class Row:
    """The tokens of one row, and where the decoding rule has each of them."""

    sizes: tuple  # of sink, recent window and flush
    masks: torch.Tensor  # channels that it keeps, bool `[L, H_kv, D]`
    columns: list = field(default_factory=list)  # for each of the cache, whether it is a token of this row
    tokens: list = field(default_factory=list)  # what was fed
    logits: list = field(default_factory=list)  # what the model answered to each of them
    views: list = field(default_factory=list)  # of each token, the pruned and the whole tokens that it saw
    is_dense: list = field(default_factory=list)  # whether it saw keys and values as no cache changes them
    prompts: list = field(default_factory=list)  # tokens that its constants are of
    sink: list = field(default_factory=list)  # this and the next: tokens there, once the prompt is split
    pruned: list = field(default_factory=list)
    recent: list = field(default_factory=list)

    def copy(self):
        """One that goes on by itself: entries of lists are never changed."""
        return replace(self, **{name: [*held] for name, held in vars(self).items() if isinstance(held, list)})

    def look(self, others=(), is_dense=False):
        """Let the next token see what the regions hold, and others."""
        self.views.append(([*self.pruned], [*self.sink, *self.recent, *others]))
        self.is_dense.append(is_dense)

    def read(self, count, is_dense=True):
        """Take tokens of a prompt, which see one another."""
        for _ in range(count):
            self.look(range(len(self.views) + 1), is_dense)

    def split(self):
        """Prune the prompt."""
        sink_size, recent_size, _ = self.sizes
        rest = range(len(self.views))[sink_size:]
        num_recent = min(len(rest), recent_size)
        self.sink = [*range(len(self.views))[:sink_size]]
        self.pruned, self.recent = [*rest[: len(rest) - num_recent]], [*rest[len(rest) - num_recent :]]

    def append(self, token):
        """Put one token behind the others, as DESIGN says."""
        sink_size, recent_size, flush_size = self.sizes
        if len(self.sink) < sink_size:
            self.sink.append(token)
            return
        if len(self.recent) == recent_size + flush_size:
            for _ in range(flush_size):
                self.pruned.append(self.recent.pop(0))
        self.recent.append(token)

    def decode(self, count):
        """Take tokens of one pass once a prompt was pruned; of a row that starts late they are its prompt."""
        new = [*range(len(self.views), len(self.views) + count)]
        if new and new[0] == 0:
            self.read(count, is_dense=False)
            self.split()
        elif count == 1:
            self.append(new[0])
            self.look()
        else:
            for place in range(count):
                self.look(new[: place + 1])
            for token in new:
                self.append(token)

    def crop(self, num_columns):
        """Forget the tokens of the last columns."""
        for _ in range(sum(self.columns[len(self.columns) - num_columns :])):
            for region in (self.tokens, self.logits, self.views, self.is_dense):
                region.pop()
            if self.sink or self.recent:
                (self.recent or self.sink).pop()
        del self.columns[len(self.columns) - num_columns :]

    def view(self):
        """HIDDEN, PRUNED or WHOLE `[n, n]`, query by key."""
        view = torch.full((len(self.tokens), len(self.tokens)), HIDDEN)
        for query, (pruned, whole) in enumerate(self.views):
            view[query, pruned], view[query, whole] = PRUNED, WHOLE
        return view


class Conversation:
    """Rows that are fed to a LeanK model, and moved, cropped, forked and joined."""

    def __init__(self, pair, num_rows=1, side="left", seed=0, **options):
        """Begin with a cache of so many rows, padded on that side; `options` are those of the cache."""
        self.pair, self.side, self.seed = pair, side, seed
        self.cache = pair.leank.build_cache(**options)
        self.rows = [Row(pair.sizes, pair.masks) for _ in range(num_rows)]
        self.is_split, self.tells_padding = False, True

    def feed(self, *counts):
        """Feed so many new tokens to each row in one pass, or as many to all."""
        if len(counts) == 1:
            counts *= len(self.rows)
        width, start = max(counts), len(self.rows[0].columns)
        ids = torch.zeros(len(self.rows), width, dtype=torch.long)
        real = torch.zeros(len(self.rows), width, dtype=torch.bool)
        for index, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            self.seed += 1
            drawn = torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(self.seed))
            columns = slice(width - count, width) if self.side == "left" else slice(0, count)
            ids[index, columns], real[index, columns] = drawn, True
            row.tokens += drawn.tolist()
            row.columns += real[index].tolist()
        mask = torch.tensor([row.columns for row in self.rows]).long()
        told = None if mask.all() or not self.tells_padding else mask
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
        prefill_length = self.cache.prefill_length
        with torch.no_grad():
            logits = self.pair.leank(
                ids, attention_mask=told, position_ids=positions, use_cache=True, **{CACHE: self.cache}
            ).logits
        for row, own, columns in zip(self.rows, logits, real, strict=True):
            row.logits += own[columns]
        if prefill_length is not None and start < prefill_length < start + width:  # more than the prompt
            first = prefill_length - start
            self._restate([min(count, first) for count in counts], start, prefill_length)
            counts = tuple(max(count - first, 0) for count in counts)
            self._restate(counts, prefill_length, prefill_length)
        else:
            self._restate(counts, start, prefill_length)
        return self

    def turns(self, *passes):
        """Feed one pass after the other, each as `feed` takes it."""
        for counts in passes:
            self.feed(*([counts] if isinstance(counts, int) else counts))
        return self

    def _restate(self, counts, start, prefill_length):
        """Do to every row's lists what a pass does."""
        if not self.is_split:
            in_prompt = start < prefill_length if prefill_length is not None else max(counts) > 1 or not start
            if in_prompt:
                for row, count in zip(self.rows, counts, strict=True):
                    row.read(count)
            if not in_prompt or self.cache.prune == "eager":
                prompts = [row.tokens[: len(row.views)] for row in self.rows]
                for row, prompt in zip(self.rows, prompts, strict=True):
                    row.split()
                    row.prompts = [prompt] if prompt else [other for other in prompts if other]
                self.is_split = True
            if in_prompt:
                return
        for row, count in zip(self.rows, counts, strict=True):
            row.decode(count)

    def crop(self, num_columns):
        """Take columns back."""
        self.cache.crop(-num_columns)
        for row in self.rows:
            row.crop(num_columns)

    def move(self, method, argument, rows):
        """Call a method of the cache that leaves it with these rows of before."""
        getattr(self.cache, method)(argument)
        self.rows = [self.rows[row].copy() for row in rows]

    def reorder(self, *rows):
        """As beams are."""
        self.move("reorder_cache", torch.tensor(rows), rows)

    def choose_channels(self, masks):
        """Keep channels of every row's own, bool `[L, H_kv, D]` each."""
        for row, own in zip(self.rows, masks, strict=True):
            row.masks = own
        for index, layer in enumerate(self.cache.pruned_layers):
            layer.set_channel_mask(torch.stack([own[index] for own in masks]))

    def fork(self, **sizes):
        """Go on from here a second time, with other windows."""
        forked = copy.copy(self)
        forked.cache = fork(self.cache, **sizes)
        forked.rows = [row.copy() for row in self.rows]
        for row in forked.rows:
            given = zip(("sink_size", "recent_size", "flush_size"), row.sizes, strict=True)
            row.sizes = tuple(sizes.get(name, size) for name, size in given)
        return forked

    def join(self, *others, num_reserved=0):
        """Put the rows of several in one, shorter ones padded on the left."""
        self.cache = concatenate([talk.cache for talk in (self, *others)], num_reserved)
        self.rows = [row for talk in (self, *others) for row in talk.rows]
        longest = max(len(row.columns) for row in self.rows)
        for row in self.rows:
            row.columns = [False] * (longest - len(row.columns)) + row.columns
        return self

    def check(self):
        """Hold all logits to the rule, and what the cache holds to its dtype."""
        dtype = {"fp8": torch.float8_e4m3fn, "int4": torch.uint8, "auto": self.pair.leank.dtype}
        for layer in self.cache.pruned_layers:
            held = () if layer.store is None else layer.store.tensors[:4]
            assert {pool.dtype for pool in held} <= {dtype[self.cache.kv_dtype]}
        for row, expected in zip(self.rows, self.expected(), strict=True):
            if row.tokens:
                assert_close(self.pair.leank, torch.stack(row.logits), expected)

    def expected(self, masks=None):
        """Logits of every row by the rule, float64 `[n, vocab]`; of other masks if they are given."""
        restated = Restatement(self)
        if masks is not None:
            for row in restated.rows:
                row.masks = masks
        longest = max(len(row.tokens) for row in restated.rows)
        ids = torch.zeros(len(restated.rows), longest, dtype=torch.long)
        for index, row in enumerate(restated.rows):
            ids[index, : len(row.tokens)] = torch.tensor(row.tokens)
        with torch.no_grad():
            logits = self.pair.exact(ids, use_cache=False, restated=restated).logits
        return [own[: len(row.tokens)] for own, row in zip(logits, self.rows, strict=False)]


class Restatement:
    """What the slow attention is told: rows, and behind them the prompts that their constants are of."""

    def __init__(self, talk):
        self.model, self.cache = talk.pair.leank, talk.cache
        self.rows = [row.copy() for row in talk.rows]
        self.prompts: dict[tuple[int, ...], int] = {}
        for prompt in [prompt for row in talk.rows for prompt in row.prompts]:
            if self.prompts.setdefault(tuple(prompt), len(self.rows)) == len(self.rows):
                ghost = Row(talk.pair.sizes, talk.pair.masks, tokens=prompt)
                ghost.read(len(prompt))
                self.rows.append(ghost)
        self.layers = {layer.layer_idx: place for place, layer in enumerate(self.cache.pruned_layers)}
        self.views = [row.view() for row in self.rows]

    def kept_values(self, place):
        """Channels of V that pruned tokens keep, bool `[H_kv, D]`."""
        masks, block = self.rows[0].masks[place], self.model.config.leank
        widths = (
            torch.tensor(block["value_widths"][place]) if "value_widths" in block else masks.any(-1) * 2**16
        )
        return torch.arange(masks.shape[1]) < widths[:, None]

    def stored(self, index, layer_idx, key, value):
        """Keys and values `[H_kv, n, D]` of a row as its cache gives them back, and the mean they lack."""
        row, place = self.rows[index], self.layers[layer_idx]
        count, kv_dtype = len(row.tokens), self.cache.kv_dtype
        keys, values = key[index, :, :count], value[index, :, :count]
        if not row.prompts:
            return keys, values, None
        parts = [(self.prompts[tuple(prompt)], len(prompt)) for prompt in row.prompts]
        of_keys, of_values = (
            torch.cat([states[ghost, :, :length] for ghost, length in parts], 1) for states in (key, value)
        )
        attention = self.model.model.layers[layer_idx].self_attn
        static = [getattr(attention, name, None) for name in SCALE_NAMES]
        mean = None
        if self.model.key_means is not None:
            mean = self.model.key_means[place][0].double()
        elif kv_dtype != "auto" and static[0] is None:
            mean = of_keys.mean(1)
        held = self.cache.pruned_layers[place].store.tensors.key_mean
        assert (mean is None) == (held is None)
        if mean is not None and held is not None:
            held = held[index if len(held) > 1 else 0].double()
            torch.testing.assert_close(held, mean, rtol=1e-4, atol=1e-5)
            mean = held[:, None]  # rounded as theirs, so that no number is rounded apart
            keys, of_keys = keys - mean, of_keys - mean
        if kv_dtype == "fp8":
            scales = static if static[0] is not None else [slow_scale(of_keys, True), slow_scale(of_values)]
            keys, values = (
                in_eight_bits(states, scale[:, None])
                for states, scale in zip((keys, values), scales, strict=True)
            )
        elif kv_dtype == "int4":
            masks = row.masks[place], self.kept_values(place)
            keys, values = (
                emulate(states[None], assign_chunks(mask))[0]
                for states, mask in zip((keys, values), masks, strict=True)
            )
        return keys, values, mean


def slow_scale(states, is_shared=False):
    """Of every channel `[H_kv, D]`, number by number, or one that all of a head share."""
    largest = states.abs().amax(1)
    if is_shared:
        largest = largest.amax(1, keepdim=True).expand_as(largest)
    scale = torch.ones_like(largest)
    for place in largest.nonzero().tolist():
        power = math.ceil(math.log2(2 * float(largest[tuple(place)]) / 448))
        scale[tuple(place)] = 2.0 ** min(max(power, -14), 15)
    return scale


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


def slow_attention(module, query, key, value, _, **kwargs):
    """Attend over whole rows `[B, heads, n, D]`, pruned pairs by their kept channels alone, head by head.

    A layer with a sliding window sees the last tokens within it, whatever the others do.
    """
    restated: Restatement = kwargs["restated"]
    groups, sinks = query.shape[1] // key.shape[1], kwargs.get("s_aux")
    outputs = torch.zeros_like(query).transpose(1, 2)
    for index, row in enumerate(restated.rows):
        count = len(row.tokens)
        view, is_dense = restated.views[index], torch.tensor(row.is_dense)[:, None]
        is_kept = torch.ones_like(restated.rows[0].masks[0])  # of V's channels
        if module.layer_idx in restated.layers:
            is_kept = restated.kept_values(restated.layers[module.layer_idx])
            masks = row.masks[restated.layers[module.layer_idx]]
            of_keys, of_values, mean = restated.stored(index, module.layer_idx, key, value)
        else:
            age = torch.arange(count)[:, None] - torch.arange(count)
            view = torch.where((age >= 0) & (age < kwargs["sliding_window"]), WHOLE, HIDDEN)
            masks = torch.ones_like(restated.rows[0].masks[0])
            of_keys, of_values, mean = key[index, :, :count], value[index, :, :count], None
        for head in range(query.shape[1] if count else 0):
            of = head // groups
            q, k, v = query[index, head, :count], key[index, of, :count], value[index, of, :count]
            stored = torch.where(view == WHOLE, q @ of_keys[of].T, (q * masks[of]) @ of_keys[of].T)
            logits = torch.where(is_dense, q @ k.T, stored) * kwargs["scaling"]
            if not masks[of].any():
                logits = logits.masked_fill(view == PRUNED, -torch.inf)
            logits = logits.masked_fill(view == HIDDEN, -torch.inf)
            if sinks is not None:  # takes its share, adds nothing, and falls as logits without a mean do
                fallen = 0 if mean is None else torch.where(is_dense, 0, q @ mean[of].T)
                beside = sinks[head].expand(count, 1) - kwargs["scaling"] * fallen
                logits = torch.cat([logits, beside], -1)
            weights = logits.softmax(-1)[:, :count]
            kept, whole = of_values[of] * is_kept[of], torch.where(view == WHOLE, weights, 0)
            stored = weights @ kept + whole @ (of_values[of] - kept)
            outputs[index, :count, head] = torch.where(is_dense, weights @ v, stored)
    return outputs, None


AttentionInterface.register("slow_leank_restatement", slow_attention)

"""Every way of feeding a LeanK model, from every cache, gives what the slow restatement of the rule gives."""

from itertools import accumulate

import pytest
import torch

from runtime import graph_leank, pages_leank
from tests.runtime.conftest import coded_pair
from tests.runtime.conversation import Conversation
from tests.tiny_families import FAMILIES, OPTIONS, some_families

WIDTHS = {
    "mixed widths": [[0, 3, 16], [4, 8, 8]],
    "one bucket": [[8, 8, 8], [8, 8, 8]],
    "all width 0": [[0, 0, 0], [0, 0, 0]],
    "width 0 beside all kept": [[0, 16, 16], [16, 16, 16]],
    "odd widths": [[1, 5, 15], [2, 7, 9]],
    "unsorted buckets": [[8, 0, 8], [0, 5, 0]],
}
HUGE = 2**24
SIZES = {
    "usual": (3, 6, 4),
    "no sink": (0, 21, 14),
    "no recent": (3, 0, 2),
    "nothing but flush 1": (0, 0, 1),
    "flush longer than recent": (2, 3, 9),
    "long sink": (30, 3, 2),
    "wraps": (5, 12, 9),
    "huge ring": (3, HUGE, HUGE),
}
CODECS = [
    "auto", "auto centred", "auto values", "auto values rotated", "fp8", "fp8 static", "fp8 static centred",
    "fp8 values rotated", "int4", "int4 values",
]  # fmt: skip


def build(codec="auto", *family, widths="mixed widths", sizes="usual", **config):
    """A pair by names of what its cache codes, of the channels that it keeps and of window sizes."""
    sink, recent, flush = SIZES[sizes]
    return coded_pair(codec, WIDTHS[widths], *family, sink=sink, recent=recent, flush=flush, **config)


def tokens_one_by_one(start):
    return start(8, prune="eager").feed(31, 1, 2, 3, 9, 10, 13, 14).turns(*[1] * 25)


def turns_with_padding_between(start):
    """One row gets a token where others get several, one gets none, and two start late."""
    return start(6).turns(
        (90, 11, 1, 23, 0, 0),
        (9, 1, 6, 0, 1, 0),
        (1, 1, 1, 1, 1, 0),
        (1, 1, 1, 0, 1, 22),
        (40, 1, 3, 2, 5, 3),
        (1, 1, 1, 1, 1, 1),
    )


def drafts_of_any_length(start):
    uneven = (20, 14, 3), (5, 1, 0), (7, 7, 7), (2, 0, 32), (1, 1, 0), (40, 3, 2), (6, 6, 1)
    return start(3).turns(*uneven, 4, 3, 1, 4, 1, 1)


def chunks_of_a_prompt(start):
    """With padding that fills the first chunk, and a prompt that begins too short to be pruned."""
    return start(3, prune="deferred").turns((1, 1, 0), (50, 10, 20), 1, 1, 3, 1, 9, 1)


def tokens_that_are_taken_back(start):
    talk = start(2, prune="eager").feed(30, 17)
    for counts, dropped in (((4, 4), 3), ((3, 1), 1), ((1, 1), 1), ((4, 2), 4), ((1, 1), 0)):
        talk.feed(*counts)
        talk.crop(min(dropped, *(len(row.recent) for row in talk.rows)))
    return talk.feed(9)


def rows_that_move(start):
    """As beams, into more rows and into fewer; with room for more."""
    talk = start(4).feed(37, 3, 70, 18).feed(1)
    talk.reorder(2, 0, 3, 1)
    talk.feed(1).feed(3)
    talk.reorder(1, 1, 2, 3)
    talk.feed(1)
    talk.move("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2, 3, 3])
    talk.feed(1).feed(4)
    talk.move("batch_select_indices", torch.tensor([7, 0, 2, 1]), [7, 0, 2, 1])
    talk.move("batch_select_indices", torch.tensor([True, True, False, True]), [0, 1, 3])
    talk.cache.reserve(400)
    return talk.turns(*[1] * 7)


def caches_that_are_joined(start):
    """Of a prompt each, which decode already; they know their padding, and are told of it later."""
    talks = [start(1, seed=1000 * count).feed(count).feed(1) for count in (70, 33, 34)]
    talk = talks[0].join(talks[1]).join(talks[2], num_reserved=90)
    talk.tells_padding = False
    talk.feed(1).feed(4)
    talk.crop(min(3, *(len(row.recent) for row in talk.rows)))
    talk.feed(1).feed(9)
    talk.tells_padding = True
    return talk.feed(1).feed(1)


def prompts_that_wait_to_be_pruned(start):
    """Joined while they wait, then forked with other windows and channels of every row's own."""
    talks = [start(1, prune="deferred", seed=1000 * count).feed(count) for count in (20, 33, 5)]
    talk = talks[0].join(*talks[1:])
    talk.reorder(1, 2, 0)
    talk.crop(2)
    forks = [talk.fork(sink_size=1, recent_size=2, flush_size=2) for _ in range(2)]
    for seed, forked in enumerate(forks):
        shape = 3, *talk.pair.masks.shape
        order = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).argsort(-1)
        forked.choose_channels(talk.pair.masks.expand_as(order).gather(-1, order).unbind())
        forked.feed(1)
    talk.tells_padding = False
    for each in (forks[0].join(forks[1]), talk):
        each.turns(1, 3, 1)
        each.reorder(1, 1, *range(2, len(each.rows)))
        each.turns(*[1] * 9).check()
    return talk


WAYS = [
    tokens_one_by_one,
    turns_with_padding_between,
    drafts_of_any_length,
    chunks_of_a_prompt,
    tokens_that_are_taken_back,
    rows_that_move,
    caches_that_are_joined,
    prompts_that_wait_to_be_pruned,
]


def follow(way, pair, **options):
    """Feed a model in some way, and hold it to the rule; the conversation."""
    talk = way(lambda num_rows, **own: Conversation(pair, num_rows, **{**options, **own}))
    talk.check()
    return talk


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("codec", CODECS)
def test_every_way_from_every_cache_follows_the_rule(codec, way):
    follow(way, build(codec), kv_dtype=codec.split()[0])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("codec", ["auto", "auto centred", "fp8", "fp8 static centred"])
def test_captured_steps_of_kernels_follow_the_rule(codec, way, graphs, monkeypatch):
    if codec != "auto":
        monkeypatch.setattr(graph_leank, "fuse_weights", lambda *_: False)  # as the stock class computes
    talk = follow(way, build(codec), kv_dtype=codec.split()[0])
    assert talk.cache.graph.num_replays > 0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("sizes", "is_captured"),
    [(sizes, False) for sizes in SIZES if sizes != "usual"]
    + [(sizes, True) for sizes in ("nothing but flush 1", "long sink", "huge ring")],
)
def test_windows_of_every_size_follow_the_rule(sizes, way, is_captured, monkeypatch, request):
    """In pages of four tokens, so that sinks fill, rings go round and windows grow while decoding."""
    monkeypatch.setattr(pages_leank, "PAGE", 4)
    if is_captured:
        request.getfixturevalue("graphs")
    sink, recent, flush = SIZES[sizes]
    talk = follow(way, build(sizes=sizes), side="right")
    if talk.rows[0].sizes == SIZES[sizes]:
        most = -(-sink // 4) + (recent + flush + 32 + 2) // 4 + 1
        tables = talk.cache.rows.tables
        assert tables.window_runs == tuple(min(most, run) for run in tables.runs)


@pytest.mark.parametrize("widths", WIDTHS)
def test_channels_kept_of_any_number_follow_the_rule(widths):
    follow(turns_with_padding_between, build(widths=widths))
    follow(tokens_one_by_one, build(widths=widths, groups=1))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_follows_the_rule(architecture):
    options = OPTIONS.get(architecture.model_type, {})
    Conversation(build("auto", architecture.stem, 3, **options)).turns(29, *[1] * 12, 9).check()


# Whose attention differs in what a codec meets: biases, sinks, and layers beside pruned ones.
@pytest.mark.parametrize("architecture", some_families("qwen2", "phi3", "gpt_oss", "gemma3_text"))
@pytest.mark.parametrize("codec", ["auto centred", "fp8", "fp8 centred", "int4"])
def test_families_decode_from_every_cache(codec, architecture):
    pair = build(codec, architecture.stem, **OPTIONS.get(architecture.model_type, {}))
    # Sliding windows count padding between turns.
    Conversation(pair, 2, kv_dtype=codec.split()[0]).turns((40, 27), 1, 1, 5, 1).check()


@pytest.mark.parametrize("chunks", [[9, 9, 9], [26, 1], [1, 26], [13, 14]], ids=str)
def test_deferred_chunks_equal_one_prefill_where_its_length_is_known(chunks):
    talk, skipped = Conversation(build(), 2, prune="deferred"), 17  # its prompt is the last ten columns
    talk.cache.prefill_length = 27
    for first, last in zip([0, *accumulate(chunks)], accumulate(chunks), strict=False):
        talk.feed(last - first, max(last - max(first, skipped), 0))
    talk.turns(*[1] * 20).check()


@pytest.mark.parametrize("prune", ["eager", "deferred"])
def test_tokens_beyond_the_prompt_in_the_first_pass_are_decoded(prune):
    talk = Conversation(build(), prune=prune)
    talk.cache.prefill_length = 21
    talk.turns(26, 1, 1, 12).check()


def test_the_restatement_notices_pruned_channels():
    talk = Conversation(build()).turns(31, *[1] * 30)
    (pruned,), (dense,) = talk.expected(), talk.expected(torch.ones_like(talk.pair.masks))
    assert torch.equal(pruned[:31], dense[:31])
    assert (pruned[31:] - dense[31:]).abs().max() > 0.1 * dense.abs().max()

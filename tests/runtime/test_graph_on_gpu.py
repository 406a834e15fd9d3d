"""Captured decode steps on a CUDA device, with the real kernels: tokens, memory, waiting, two devices."""

import copy
import gc
from importlib.util import find_spec

import pytest
import torch

from leank_convert._runtime.configuration_leank import CACHE
from runtime import layer_leank
from runtime.tools import concatenate
from tests.runtime import tiny_inputs
from tests.runtime.conftest import coded_pair
from tests.runtime.on_gpu import MASK_WIDTHS, ids, no_waiting, padded
from tests.runtime.tiny_inputs import assert_close, feed_both, feed_turns
from tests.tiny_families import FAMILIES, OPTIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("tilelang") is None, reason="only steps that kernels serve are captured"),
]

GREEDY = {**tiny_inputs.GREEDY, "max_new_tokens": 40, "min_new_tokens": 40, "eos_token_id": None}


@pytest.fixture
def model(model_pair):
    return model_pair(MASK_WIDTHS, head_dim=64).leank.to("cuda", torch.float16)


def decode(model, cache, turns, mask=None) -> torch.Tensor:
    """Feed three rows turn by turn; logits of all columns."""
    return feed_turns(model, cache, turns, mask, tokens=ids(3, sum(turns), 3)).float()


def decode_both(model, turns, mask=None):
    """The same with graphs and without, held to one another; both caches."""
    return feed_both(model, turns, mask, tokens=ids(3, sum(turns), 3))


@pytest.mark.parametrize("is_padded", [False, True], ids=["one length", "padded"])
@pytest.mark.parametrize("sizes", [(3, 6, 4), (100, 2**24, 2**24), (3, 60, 40)], ids=str)
def test_replayed_steps_give_what_steps_give(sizes, is_padded, model_pair):
    sink, recent, flush = sizes
    pair = model_pair(MASK_WIDTHS, sink=sink, recent=recent, flush=flush, head_dim=64)
    model = pair.leank.to("cuda", torch.float16)
    # 64 tokens fit at first, so memory grows while decoding; then a second turn, and single tokens again.
    turns = [50, *[1] * 30, 5, *[1] * 10]
    mask = padded(sum(turns)) if is_padded else None
    cache, plain = decode_both(model, turns, mask)
    assert cache.graph.why_eager is None and cache.graph.num_replays >= 36
    for one, other in zip(cache.layers, plain.layers, strict=True):
        assert_close(model, one.store.tensors.window_keys, other.store.tensors.window_keys)


@pytest.mark.parametrize("is_padded", [False, True], ids=["one length", "padded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_fp8_cache_is_as_close_to_fp32_as_plain_torch_is(dtype, is_padded, model_pair, monkeypatch):
    """Keys that nearly agree are rounded apart, so torch's error is that of a cache in FP8, too."""
    model = model_pair(MASK_WIDTHS, head_dim=64).leank.to("cuda", dtype)
    turns = [90, *[1] * 30, 5, *[1] * 10, 40, 1]
    mask = padded(sum(turns)) if is_padded else None
    real = slice(None) if mask is None else mask.bool()

    def logits(model):
        cache = model.build_cache(kv_dtype="fp8")
        fed = decode(model, cache, turns, mask)[real]
        assert all(layer.store.tensors.values.dtype == torch.float8_e4m3fn for layer in cache.layers)
        return fed

    exact, ours = logits(copy.deepcopy(model).float()), logits(model)
    monkeypatch.setattr(layer_leank, "find_kernels", lambda *_, **__: None)
    plain = logits(model)
    assert (ours - exact).norm() <= 2 * (plain - exact).norm()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_steps_whose_v_is_rotated_are_replayed(kv_dtype):
    model = coded_pair("auto values rotated", MASK_WIDTHS, head_dim=64).leank.to("cuda", torch.float16)
    turns = [50, *[1] * 30, 5, *[1] * 10]
    cache = model.build_cache(kv_dtype=kv_dtype)
    ours = decode(model, cache, turns)
    assert cache.graph.why_eager is None and cache.graph.num_replays >= 36
    assert_close(model, ours, decode(model, model.build_cache(kv_dtype=kv_dtype, use_graphs=False), turns))
    if kv_dtype == "auto":  # others round what nearly agrees apart
        plain = copy.deepcopy(model).float()
        assert_close(model, ours, decode(plain, plain.build_cache(use_graphs=False), turns))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_familys_steps_are_replayed(architecture, model_pair):
    """Mixtures of experts by their grouped product: other ways to run them ask the device for lengths."""
    options = OPTIONS.get(architecture.model_type, {})
    model = model_pair(MASK_WIDTHS, architecture.stem, head_dim=64, **options).leank.to(
        "cuda", torch.bfloat16
    )
    if architecture.experts:
        model.set_experts_implementation("grouped_mm")
    turns = [50, *[1] * 20, 5, *[1] * 5]
    cache, _ = decode_both(model, turns)
    assert cache.graph.why_eager is None and cache.graph.num_replays >= 20


@pytest.mark.parametrize("is_padded", [False, True], ids=["one length", "padded"])
def test_replayed_drafts_give_what_drafts_give(is_padded, model):
    """Of all sizes, between single columns, while memory grows; crops take back what has not been pruned."""
    turns = [50, *[1, 4, 3, 8, 5, 1, 2, 2, 16, 11, 32, 20] * 2]
    mask = padded(sum(turns)) if is_padded else None
    cache, plain = decode_both(model, turns, mask)
    assert cache.graph.why_eager is None and cache.graph.num_replays == 24 - 6
    if not is_padded:
        for count, dropped in [(4, 3), (1, 0), (7, 2), (3, 1), (4, 4)]:
            tokens, logits = ids(3, count, count), []
            for each in (cache, plain):
                with torch.no_grad():
                    logits.append(model(tokens, cache=each).logits.float())
                each.crop(-dropped)
            assert_close(model, *logits)
    assert cache.rows.lengths.tolist() == plain.rows.lengths.tolist()
    assert cache.rows.pruned_lengths.tolist() == plain.rows.pruned_lengths.tolist()


def test_rows_of_mixed_lengths_decode_as_they_do_alone(model):
    """Pages run out for some rows before others; beams then copy them in place, or lay them out anew."""
    lengths, num_steps = [300, 20, 61, 130], 150
    prompts = [ids(1, length, seed) for seed, length in enumerate(lengths)]
    steps = [ids(1, num_steps, 10 + seed) for seed in range(4)]

    def decoded(cache, rows, places, positions):
        logits = []
        for place in range(*places):
            token = torch.cat([steps[row][:, place : place + 1] for row in rows])
            position = torch.tensor([[length + place] for length in positions], device="cuda")
            logits.append(model(token, position_ids=position, cache=cache).logits)
        return torch.cat(logits, 1).float()

    with torch.no_grad():
        caches = [model(prompt)[CACHE] for prompt in prompts]
        alone = copy.deepcopy(caches)
        joined = concatenate(caches)
        parts = [decoded(joined, range(4), (0, 100), lengths)]
        assert joined.graph.num_replays > 90 and joined.graph.num_captures > 1
        expected = [
            decoded(cache, [row], (0, num_steps), lengths[row : row + 1]) for row, cache in enumerate(alone)
        ]
        assert_close(model, parts[0], torch.cat([logits[:, :100] for logits in expected]))
        order = torch.tensor([3, 1, 0, 2], device="cuda")
        joined.reorder_cache(order)
        ours = decoded(joined, order.tolist(), (100, num_steps), [lengths[row] for row in order.tolist()])
    assert_close(model, ours, torch.cat([expected[row][:, 100:] for row in order.tolist()]))


# PyTorch calls the mode a prototype when it is switched on.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("is_padded", [False, True], ids=["one length", "padded"])
@pytest.mark.parametrize(
    ("first", "counts", "num_replays"),
    [([1, 1, 1], [1] * 40, 36), ([4, 3], [4, 3, 1, 4, 1, 3, 4], 4)],
    ids=["single columns", "drafts"],
)
def test_neither_capture_nor_replay_waits_for_the_device(first, counts, num_replays, is_padded, model):
    decode(model, model.build_cache(), [50, *first])  # finds kernels
    mask, cache, start = padded(90) if is_padded else None, model.build_cache(), 50
    if max(counts) > 1:
        cache.reserve(90)
    with torch.no_grad():
        model(ids(3, 50), attention_mask=None if mask is None else mask[:, :50], cache=cache)
        token, position = ids(3, 4), torch.arange(90, device="cuda")[None]
        with no_waiting():
            for count in counts:
                stop = start + count
                seen = None if mask is None else mask[:, :stop]
                columns = {"attention_mask": seen, "position_ids": position[:, start:stop]}
                model(token[:, :count], cache=cache, **columns)
                start = stop
    assert cache.graph.num_replays >= num_replays


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prefill_chunk_size": 16, "prune": "deferred"}, {"prompt_lookup_num_tokens": 4}],
    ids=str,
)
def test_generate_gives_the_same_tokens(options, model):
    prompt = {"input_ids": ids(3, 50), "attention_mask": padded(50)}
    if "prompt_lookup_num_tokens" in options:
        prompt = {"input_ids": ids(1, 10).repeat(1, 5)}
    results = []
    for use_graphs in (True, False):
        cache = model.build_cache(use_graphs=use_graphs)
        results.append(model.generate(**prompt, cache=cache, **{**GREEDY, **options}).tolist())
        assert use_graphs or cache.graph.num_replays == 0
        if use_graphs:
            assert cache.graph.num_replays >= (4 if "prompt_lookup_num_tokens" in options else 36)
    assert results[0] == results[1]


def test_inference_mode_and_no_grad_take_turns(model):
    cache, plain = model.build_cache(), model.build_cache(use_graphs=False)
    for each in (cache, plain):
        with torch.inference_mode():
            decode(model, each, [50, 1, 1, 1])
    token = ids(3, 1)
    for _ in range(4):
        with torch.no_grad():
            ours, eager = (model(token, cache=each).logits for each in (cache, plain))
        assert_close(model, ours, eager)
    with torch.inference_mode():
        for _ in range(3):
            model(token, cache=cache)
    assert cache.graph.num_replays >= 6


def test_a_capture_on_another_stream(model):
    expected = decode(model, model.build_cache(use_graphs=False), [50, *[1] * 10])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cache = model.build_cache()
        ours = decode(model, cache, [50, *[1] * 10])
    torch.cuda.current_stream().wait_stream(stream)
    assert cache.graph.num_replays == 9
    assert_close(model, ours, expected)


def test_sampling_goes_on_after_captures_and_after_a_failed_one(model, monkeypatch, caplog):
    settings = {**GREEDY, "do_sample": True}
    torch.manual_seed(0)
    expected = model.generate(ids(3, 50), cache=model.build_cache(use_graphs=False), **settings)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids(3, 50), **settings), expected)
    norm = type(model.model.norm).forward

    def asks(self, states):
        return norm(self, states) if float(states.sum()) else states

    monkeypatch.setattr(type(model.model.norm), "forward", asks)
    torch.manual_seed(0)
    cache = model.build_cache()
    assert torch.equal(model.generate(ids(3, 50), cache=cache, **settings), expected)
    assert cache.graph.num_replays == 0 and cache.graph.why_eager.startswith("capturing failed")
    monkeypatch.undo()
    torch.cuda.empty_cache()  # refused by an allocator that believes in a capture under way
    cache = model.build_cache()
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids(3, 50), cache=cache, **settings), expected)
    assert cache.graph.num_replays >= 36, cache.graph.why_eager


def test_a_copied_cache_decodes_on_by_itself(model):
    cache = model.build_cache()
    decode(model, cache, [50, 1, 1, 1])
    copied = copy.deepcopy(cache)
    ours, theirs = decode(model, cache, [1] * 5), decode(model, copied, [1] * 5)
    assert copied.layers[0].kernels is cache.layers[0].kernels is not None
    assert_close(model, ours, theirs)
    assert cache.rows.lengths.tolist() == copied.rows.lengths.tolist()


def test_a_cache_with_a_graph_gives_its_memory_back(model):
    def once() -> int:
        cache = model.build_cache()
        decode(model, cache, [50, 1, 1, 1, 1])
        assert cache.graph.num_replays >= 3
        del cache
        return torch.cuda.memory_reserved()

    once()
    gc.collect()
    held, reserved = torch.cuda.memory_allocated(), once()
    assert torch.cuda.memory_allocated() <= held + 2**20
    assert [once() for _ in range(10)][-1] <= reserved + 2**22


def test_a_prompt_never_lies_dense_in_all_layers(model_pair):
    heads, layers, length = 8, 16, 16384
    model = model_pair(
        [[0] * 4 + [16] * 4] * layers,
        head_dim=64,
        sink=16,
        recent=64,
        flush=16,
        max_position_embeddings=length,
    ).leank.to("cuda", torch.bfloat16)
    tokens = ids(1, length)
    dense = layers * heads * length * 64 * 2 * 2
    with torch.no_grad():
        model(tokens[:, :100], logits_to_keep=1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cache = model(tokens, logits_to_keep=1)[CACHE]
        peak = torch.cuda.max_memory_allocated() - before
    held = cache.memory().total.allocated
    one_layer = dense // layers
    assert held < 0.4 * dense
    # Beside the result: queries, keys, values, attention's output and rotary's copies of one layer.
    assert peak < held + 9 * one_layer < dense, (peak, held, one_layer)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("is_padded", [False, True], ids=["one length", "padded"])
def test_decoding_over_two_devices(is_padded, model):
    accelerate = pytest.importorskip("accelerate")
    turns = [50, *[1] * 30, 5, 1, 1]
    mask = padded(sum(turns)) if is_padded else None
    expected = decode(model, model.build_cache(use_graphs=False), turns, mask)
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1}
    places |= {"model.rotary_emb": 0, "lm_head": 1}
    whole = copy.deepcopy(model)
    model = accelerate.dispatch_model(model, device_map=places, skip_keys={"cache", CACHE})
    cache = model.build_cache()
    ours = decode(model, cache, turns, mask).cuda()
    real = slice(None) if mask is None else mask.bool()
    assert_close(whole, ours[real], expected[real])
    assert [layer.store.tensors.kept_keys.device.index for layer in cache.layers] == [0, 1]
    assert all(layer.kernels is not None for layer in cache.layers)
    assert cache.graph.num_replays == 0
    generated = model.generate(ids(3, 50), **GREEDY)
    assert generated.shape == (3, 90)

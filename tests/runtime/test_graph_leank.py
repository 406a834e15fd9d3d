"""Captured decode steps against eager ones; the `graphs` fixture records operations in place of a device."""

import copy
import gc
import weakref

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from runtime import layer_leank
from runtime.graph_leank import DecodeGraph
from tests.runtime.tiny_inputs import GREEDY, WIDTHS, assert_close, feed, feed_both, feed_turns, ids, padded


def step(model, cache, seed=0):
    """Feed one token to every row."""
    position = torch.full((1, 1), cache.get_seq_length())
    token = ids(cache.rows.lengths.shape[0], 1, seed)
    return feed(model, token, cache, position_ids=position).logits


def fed(model, turns, expect_replays, mask=None, **how):
    """Run turns with graphs and without; the cache that had them."""
    cache, _ = feed_both(model, turns, mask, **how)
    assert cache.graph.num_replays == expect_replays
    return cache


DRAFTS = [15, 1, 4, 1, 3, 4, 2, 7, 1, 2, 8, 5, 1, 4]


@pytest.mark.parametrize(
    "kwargs", [{}, {"embeds": True}, {"positions": False}, {"mask": padded(sum(DRAFTS))}], ids=str
)
def test_replayed_drafts_give_what_drafts_give(kwargs, graphs, model):
    """One graph for one column, one for two, one for three and four, one for five to eight."""
    cache = fed(model, DRAFTS, 9, **kwargs)
    assert cache.graph.num_captures == 4 and cache.graph.why_eager is None


def test_generate_replays_drafts(graphs, model_pair):
    model = model_pair(WIDTHS, sink=2, recent=12, flush=30).leank
    prompt = ids(1, 6).repeat(1, 4)
    expected = model.generate(prompt, cache=model.build_cache(use_graphs=False), **GREEDY)
    for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": copy.deepcopy(model)}):
        cache = model.build_cache()
        assert model.generate(prompt, cache=cache, **options, **GREEDY).tolist() == expected.tolist()
        assert [count for count in cache.graph._captured if count > 1] and cache.graph.num_replays > 0


def test_growth_in_the_middle_is_captured_anew(graphs, model):
    cache = fed(model, [60] + [1] * 20, 19)
    assert cache.graph.num_captures == 2
    cache, plain = model.build_cache(), model.build_cache(use_graphs=False)
    cache.reserve(80)
    assert_close(model, feed_turns(model, cache, [60] + [1] * 20), feed_turns(model, plain, [60] + [1] * 20))
    # Its kind of step was captured before, for the other cache: no warm-up.
    assert (cache.graph.num_captures, cache.graph.num_replays) == (1, 20)


def test_a_replay_by_itself_appends_what_the_host_does_not_count(graphs, model):
    cache = model.build_cache()
    assert cache.graph.captured_step is None
    cache.reserve(40)
    feed_turns(model, cache, [20, 1, 1])
    assert cache.rows.lengths.tolist() == [22, 22]
    with torch.no_grad():
        cache.graph.captured_step.replay()
    assert cache.rows.lengths.tolist() == [23, 23]
    assert cache.get_seq_length() == 22
    returned = [step(model, cache, seed) for seed in range(3)]  # the caller's, not the graph's
    assert len({logits.data_ptr() for logits in returned}) == 3 and not torch.equal(*returned[1:])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"prefill_chunk_size": 5, "prune": "deferred"},
        {"return_dict_in_generate": True, "output_logits": True},
        {"do_sample": True},
    ],
    ids=str,
)
def test_generate_gives_the_same_tokens(options, graphs, model):
    prompt = {"input_ids": ids(2, 21), "attention_mask": padded(21)}
    results, replays = [], []
    for use_graphs in (True, False):
        cache = model.build_cache(use_graphs=use_graphs)
        torch.manual_seed(0)
        result = model.generate(**prompt, cache=cache, **{**GREEDY, **options})
        results.append(result if isinstance(result, torch.Tensor) else result.sequences)
        replays.append(cache.graph.num_replays)
    assert results[0].tolist() == results[1].tolist()
    # A deferred prompt is split by the first token, which is no step of one column yet.
    assert replays == [21 if "prune" in options else 22, 0]


@pytest.fixture
def changed(graphs, model):
    """Change something between steps: they stay right; returns the cache that had graphs."""

    def check(change, replays_after, other=model):
        cache, plain = feed_both(model, [15, 1, 1, 1])
        assert cache.graph.num_replays == 2
        for each in (cache, plain):
            change(each)
        for seed in range(3):
            assert_close(other, step(other, cache, seed), step(other, plain, seed))
        assert cache.graph.num_replays == 2 + replays_after
        return cache

    return check


@pytest.mark.parametrize(
    "what", ["more rows", "rows in another order", "copied memory", "weights", "their memory"]
)
def test_after_a_change_steps_are_captured_anew(what, model, changed):
    """A new kind of step runs as it is once; rows in another order stay where they are."""
    layer, other = model.model.layers[1], torch.nn.Linear(48, 40, bias=False)
    weight = layer.self_attn.q_proj.weight
    change = {
        "more rows": lambda cache: cache.batch_repeat_interleave(2),
        "rows in another order": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        "copied memory": lambda cache: cache.layers[1].store.copy_memory(),
        "weights": lambda cache: setattr(layer.mlp, "up_proj", other),
        "their memory": lambda cache: setattr(weight, "data", weight * 2) if cache.graph.enabled else None,
    }[what]
    cache = changed(change, 2 if what == "more rows" else 3)
    assert cache.graph.num_captures == (1 if what == "rows in another order" else 2)


def test_another_model_of_the_same_masks_is_captured_by_itself(model_pair, changed):
    changed(lambda cache: None, 2, model_pair(WIDTHS, seed=5).leank)


@pytest.mark.parametrize("what", ["hook", "hook of all modules", "forward"])
def test_hooks_and_what_is_taken_away_again(what, model, changed):
    norm, handles = model.model.norm, []

    def put(cache):
        if what == "forward":
            norm.forward = norm.forward
        else:
            register = norm.register_forward_hook if what == "hook" else register_module_forward_hook
            handles.append(register(lambda *_: None))

    cache = changed(put, 0)
    told = "has a forward of its own" if what == "forward" else "a module has forward hooks"
    assert told in cache.graph.why_eager
    for handle in handles:
        handle.remove()
    vars(norm).pop("forward", None)
    for seed in range(3):
        step(model, cache, seed)
    assert cache.graph.why_eager is None and cache.graph.num_replays == 2 + 3


def test_a_reset_cache_begins_again(graphs, model):
    cache, turns = model.build_cache(), [15, 1, 1, 1]
    first = feed_turns(model, cache, turns)
    cache.reset()
    assert_close(model, feed_turns(model, cache, turns), first)
    assert cache.graph.num_captures == 2


class TestFailure:
    def test_a_failed_capture_leaves_everything_as_it_was(self, graphs, model):
        graphs.append(RuntimeError("operation not permitted"))
        cache = fed(model, [15] + [1] * 20, 0, mask=padded(35))
        assert cache.graph.why_eager == "capturing failed: RuntimeError: operation not permitted"
        assert not graphs

    def test_drafts_that_cannot_be_captured_leave_single_columns_alone(self, graphs, model):
        cache, plain = feed_both(model, [15, 1, 1, 3], positions=False)
        graphs.append(RuntimeError("operation not permitted"))
        for count in (3, 1, 4, 1, 2, 2):
            tokens = ids(2, count, count)
            assert_close(model, *(feed(model, tokens, each).logits for each in (cache, plain)))
        assert (cache.graph.num_captures, cache.graph.num_replays) == (2, 4)

    def test_a_step_that_asks_the_device_is_not_captured(self, graphs, model, monkeypatch):
        norm = type(model.model.norm).forward
        monkeypatch.setattr(
            type(model.model.norm), "forward", lambda self, x: norm(self, x) if x.sum().item() else x
        )
        cache = fed(model, [15] + [1] * 5, 0)
        assert "the host asked for a value" in cache.graph.why_eager

    def test_a_capture_without_memory_is_tried_again(self, graphs, model_pair):
        graphs.append(torch.OutOfMemoryError("no memory"))
        fed(model_pair(WIDTHS).leank, [15] + [1] * 5, 4)

    def test_a_capture_without_a_warm_up_that_fails_gets_one(self, graphs, model):
        fed(model, [15] + [1] * 5, 4)
        graphs.append(RuntimeError("not initialised"))
        # The first step fails to be captured, the second is.
        cache = fed(model, [15] + [1] * 5, 4)
        assert cache.graph.why_eager is None and not graphs

    def test_an_interrupted_capture_leaves_the_cache_as_it_was(self, graphs, model):
        cache, plain = feed_both(model, [15, 1])
        graphs.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            step(model, cache)
        assert cache.get_seq_length() == 16
        assert_close(model, step(model, cache), step(model, plain))

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_the_host_counts_a_replay_that_was_launched(self, error, graphs, model, monkeypatch):
        cache, plain = feed_both(model, [15, 1, 1])
        graph, is_launched = cache.graph.captured_step, error is KeyboardInterrupt
        replay = graph.replay

        def interrupted():
            if is_launched:
                replay()
            raise error

        monkeypatch.setattr(graph, "replay", interrupted)
        with pytest.raises(error):
            step(model, cache, 7)
        monkeypatch.undo()
        assert cache.get_seq_length() == 17 + is_launched
        if is_launched:
            step(model, plain, 7)
        assert_close(model, step(model, cache), step(model, plain))

    def test_an_error_in_the_step_itself_is_the_callers(self, graphs, model):
        cache = model.build_cache()
        feed_turns(model, cache, [15, 1])
        with pytest.raises((IndexError, RuntimeError)):
            feed(model, torch.full((2, 1), 999), cache)


def test_graphs_can_be_switched_off_and_on(graphs, model):
    cache = model.build_cache()
    feed_turns(model, cache, [15, 1, 1, 1])
    cache.graph.enabled = False
    step(model, cache)
    assert (cache.graph.num_replays, cache.graph.why_eager) == (2, "`use_graphs` is off")
    cache.graph.enabled = True
    step(model, cache)
    assert cache.graph.num_replays == 3


def test_plain_torch_is_not_captured(graphs, model_pair, monkeypatch):
    monkeypatch.setattr(layer_leank, "find_kernels", lambda device, dtype, **shape: None)
    cache = fed(model_pair(WIDTHS).leank, [15] + [1] * 5, 0)
    assert cache.graph.why_eager == "plain torch serves a layer"


def test_a_cache_with_a_graph_is_freed_with_its_last_name(graphs, model):
    """Not when the garbage collector comes: it holds gigabytes."""
    cache = model.build_cache()
    feed_turns(model, cache, [15, 1, 1, 1])
    assert cache.graph.num_replays == 2
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_a_model_and_a_graph_can_be_copied(model):
    model.graph_memory.pools[0, 0] = "pool", lambda: None
    assert not copy.deepcopy(model).graph_memory.pools
    assert copy.deepcopy(DecodeGraph(False)).enabled is False

"""Models with layers that are not pruned: these keep vLLM's own cache and attention beside a LeanK cache."""

from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.warmup import qwen_triton_warmup
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from leank_convert.vllm.beside import check_kinds, hide_prompts, lay_beside_states, lay_beside_windows
from leank_convert.vllm.configs import LINEAR as STATES
from leank_convert.vllm.configs import MIXED
from leank_convert.vllm.pages import ModelPages
from tests.vllm.conftest import LINEAR, NGRAMS, TWICE, answers_of, ask, hold_to_runtime, run_engines

LONG = {"lengths": tuple(range(90, 106, 2)), "new": 200}
SLIDING = [family for family in MIXED if family not in STATES]


@pytest.fixture(scope="module")
def said(random_checkpoint):
    """What engines say of mixed models."""
    small = {"num_gpu_blocks_override": 100, "max_model_len": 320, "enable_prefix_caching": False}
    chunks = {"rounds": TWICE, "max_num_batched_tokens": 128}
    runs = {family: ask(random_checkpoint(family, is_centred=True), **chunks) for family in SLIDING}
    runs["olmo3"]["options"]["speculative_config"] = NGRAMS
    return run_engines({**runs, "preempted": ask(random_checkpoint("gemma3_text"), **LONG, **small)})


@pytest.mark.parametrize("family", SLIDING)
def test_prompts_in_chunks_then_from_the_prefix_cache(said, random_checkpoint, family):
    answers = answers_of(random_checkpoint(family, is_centred=True))
    assert said[family]["answers"] == [answers] * 2 != [answers_of(random_checkpoint(family))] * 2
    assert min(said[family]["cached"][1][1:3]) > 0
    # Four layers, of which each group has as many as a block has pages.
    groups = [*[["SlidingWindowSpec", 32]] * 2, ["LeanKKeptSpec", 32], ["LeanKWindowSpec", 16]]
    assert said[family]["groups"] == groups


def test_requests_that_are_preempted_and_compute_their_answers_again(said, random_checkpoint):
    assert said["preempted"]["answers"] == [answers_of(random_checkpoint("gemma3_text"), **LONG)]
    assert said["preempted"]["preemptions"][0] > 2


def test_drafts_are_accepted(said):
    """By the engine that was asked for them, whose answers are held to the runtime's above."""
    assert said["olmo3"]["accepted"] > 0


@pytest.fixture(scope="module")
def said_of_states(random_checkpoint):
    """What engines say of models with states of linear attention."""
    chunks = {"rounds": TWICE, "max_num_batched_tokens": 256}
    return run_engines({family: ask(random_checkpoint(family), **LINEAR, **chunks) for family in STATES})


@pytest.mark.parametrize("family", STATES)
def test_states_of_linear_attention_in_chunks_then_from_the_prefix_cache(
    said_of_states, family, random_checkpoint
):
    said = said_of_states[family]
    # vLLM has states in float32 where the CPU has such instructions, so in larger pages.
    size = 160 if torch.cpu._is_avx512_bf16_supported() else 96
    assert said["cached"] == [[0, 0], [size, 480]]
    # Windows have pages of as many tokens as states, which are kept at the ends of these.
    assert said["groups"][-3:] == [["MambaSpec", size], ["LeanKKeptSpec", size], ["LeanKWindowSpec", size]]
    hold_to_runtime(random_checkpoint(family), said)


# What vLLM tells of a step.
Batch = make_dataclass("Batch", ["rswa_prefix_lens"])


class Stock(AttentionBackend):
    """A backend of vLLM's own, whose kernels take pages of some sizes."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [32, MultipleOf(64)]

    @staticmethod
    def get_builder_cls():
        return type("Builder", (), {"build": lambda self, prefix, batch, fast: batch})


def attention(layer, window):
    return SimpleNamespace(
        layer_name=f"model.layers.{layer}.self_attn.attn",
        sliding_window=window,
        num_kv_heads=2,
        head_size=64,
        kv_cache_torch_dtype=torch.bfloat16,
        attn_backend=Stock,
    )


def lay(block_size, widths=((32, 32),) * 4, num_others=8):
    """Lay such layers beside the pages of some widths."""
    cache = SimpleNamespace(block_size=block_size, user_specified_block_size=True)
    others = [attention(layer, 16) for layer in range(num_others)]
    return lay_beside_windows(ModelPages(widths, 64, 1, ((0, len(widths)),)), others, cache), others


def test_pages_of_others_are_as_large_as_those_of_the_pruned_layers():
    pages, others = lay(64)
    assert pages.num_parts == 4  # of a layer each, as all are alike
    shape = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    spec = SlidingWindowSpec(block_size=1, sliding_window=16, **shape)
    spec = others[0].attn_backend.customize_spec(spec)
    assert spec.page_size_bytes == 2 * pages.numbers_per_page(64) == 2 * 64 * (2 * 32 + 2 * 64)
    assert spec.block_size == 32 and spec.unpadded_page_size_bytes == 32 * 2 * 2 * 2 * 64
    assert len({other.attn_backend for other in others}) == 1


@pytest.mark.parametrize(
    ("block_size", "widths", "num_parts"),
    [
        (32, ((32, 32),) * 4, 2),  # the smallest page of another layer is too large for one's
        (64, ((0, 0), (64, 64), (64, 64), (0, 0)), 2),  # the widest beside the narrowest
        (64, ((32, 32),), 1),
    ],
)
def test_a_block_is_so_many_pages_as_cost_little(block_size, widths, num_parts):
    pages, _ = lay(block_size, widths)
    assert pages.num_parts == num_parts
    whole = ModelPages(widths, 64, 1, pages.stages).numbers_per_page(block_size)
    assert num_parts * pages.numbers_per_page(block_size) <= whole * 9 / 8
    assert len(set(pages.layout(0, pages.stages[0]).parts)) == num_parts


@pytest.mark.parametrize(("asked", "step"), [(None, 64), (48, 3 * 64)])
def test_a_page_holds_a_state(asked, step):
    """Of as many tokens as a dense layer keeps in its bytes: of two layers, as one keeps less.

    And of a multiple of those after which kernels leave states, as vLLM would make it one.
    """
    cache = SimpleNamespace(block_size=asked, user_specified_block_size=asked is not None)
    shapes = (3, 64), (4, 64, 64)
    state = SimpleNamespace(
        get_state_shape=lambda: shapes,
        get_state_dtype=lambda: (torch.bfloat16, torch.float32),
        get_prefill_checkpoint_alignment=lambda: 64,
    )
    pruned = SimpleNamespace(num_kv_heads=1, head_size=64, kv_cache_torch_dtype=torch.bfloat16)
    pages = ModelPages(((16,),) * 4, 64, 1, ((0, 4),))
    pages = lay_beside_states(pages, [state] * 4, pruned, cache)
    size = -(-5 * 64 // step) * step
    assert cache.block_size == pages.window_block_size(cache.block_size) == size
    assert pages.num_parts == 2
    assert 2 * pages.numbers_per_page(size) >= 2 * 3 * 64 + 4 * 4 * 64 * 64


def test_kernels_of_states_are_compiled_before_the_first_request(monkeypatch):
    found = []
    monkeypatch.setattr(qwen_triton_warmup, "_qwen_gdn_warmup_config", found.append)
    runner = SimpleNamespace(device=None, compilation_config=SimpleNamespace(static_forward_context={}))
    for model_type in ("leank_olmo3", "leank_qwen3_next"):
        own = SimpleNamespace(hf_text_config=SimpleNamespace(model_type=model_type))
        qwen_triton_warmup.qwen_triton_warmup(runner, own)
    assert found == [{}]


def test_other_layers_know_nothing_of_prompts():
    """To some backends their lengths are a window. Layers of a model that drafts keep their own pages."""
    _, (beside, *_) = lay(64)
    drafting, pruned = Attention.__new__(Attention), attention(0, None)
    drafting.__dict__["attn_backend"] = Stock
    hide_prompts([drafting, pruned])
    hidden = drafting.attn_backend
    hide_prompts([drafting, pruned])
    assert drafting.attn_backend is hidden and pruned.attn_backend is Stock
    for other in (beside, drafting):
        builder = other.attn_backend.get_builder_cls()()
        assert builder.build(0, Batch(torch.ones(3))) == Batch(None)


@pytest.mark.parametrize(("window", "said"), [(16, "0 .*16 tokens"), (None, "1 .*all tokens")])
def test_a_window_where_the_config_has_none_or_none_where_it_has_one_is_refused(window, said):
    with pytest.raises(ValueError, match=rf"^config\.json: layer {said} there; decode with"):
        check_kinds([attention(0, window), attention(1, window)], [0])

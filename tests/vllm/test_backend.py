"""What a step asks of the decode kernels, and that a captured step may be replayed: without a GPU."""

import sys
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

from vllm.v1.attention.backend import AttentionCGSupport

from leank_convert._runtime.fp8_leank import FP8, as_bytes
from leank_convert._runtime.layout_leank import ChunkLayout, order_channels
from leank_convert._runtime.windows_leank import Windows
from leank_convert.vllm import backend, prompt_attention
from leank_convert.vllm.attention import append_by_slot, attend_densely, gather_tokens
from leank_convert.vllm.backend import LeanKImpl, LeanKMetadataBuilder
from leank_convert.vllm.pages import Numbers, coming_block_size, numbers_of
from tests.runtime.stand_ins import PlainKernels

HEAD_DIM, GROUPS, SIZES = 32, 2, Windows(4, 8, 3)
LAYOUT = ChunkLayout((0, 16, 32), HEAD_DIM, 16)
NUM_HEADS, SCALE = len(LAYOUT.widths), 0.2
PAGE, MOST_PAGES = 16, 6


class Kernels(PlainKernels):
    """Stands for the compiled ones, and looks at what it is given."""

    def __init__(self):
        super().__init__(HEAD_DIM, GROUPS, LAYOUT.chunk_size)

    def attend(self, *given, out, **options):
        assert out is None or out.is_contiguous()
        return super().attend(*given, out=out, **options)


class PageKernels:
    """The same for those that write and gather prompts."""

    def append(self, keys, values, store, slots, window_slots):
        append_by_slot(keys, values, store, LAYOUT, slots, window_slots)

    def gather(self, store, requests, starts, longest, num_tokens):
        assert longest == int(starts.diff().max()) and num_tokens == int(starts[-1])
        rows = zip(requests.tolist(), starts.diff().tolist(), strict=True)
        parts = [gather_tokens(store, LAYOUT, *row, torch.float32) for row in rows]
        return [torch.cat(states) for states in zip(*parts, strict=True)]


def flash_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k, softmax_scale, causal, s_aux
):
    """Stands for vLLM's own, written out."""
    assert causal and (len(q), len(k), len(v)) == (cu_seqlens_q[-1], cu_seqlens_k[-1], cu_seqlens_k[-1])
    bounds = [[slice(*pair) for pair in pairwise(starts.tolist())] for starts in (cu_seqlens_q, cu_seqlens_k)]
    for queries, keys in zip(*bounds, strict=True):
        assert len(q[queries]) <= max_seqlen_q and len(k[keys]) <= max_seqlen_k
        out[queries] = attend_densely(q[queries], k[keys], v[keys], softmax_scale, s_aux)


def make_layer(kernels, is_fp8=False):
    generator = torch.Generator().manual_seed(0)
    mask = torch.stack([torch.randperm(HEAD_DIM, generator=generator) < width for width in LAYOUT.widths])
    pools = [torch.randn(50, 1, PAGE, count, generator=generator) for count in numbers_of(LAYOUT)]
    layer = SimpleNamespace(
        sizes=SIZES,
        layout=LAYOUT,
        start=Numbers(0, 0),
        first=None,
        window=SimpleNamespace(layer_name="window", kv_cache=pools[1]),
        chunk_index=LAYOUT.chunk_index(order_channels(mask)[None]),
        head_table=torch.tensor(LAYOUT.head_table, dtype=torch.int32),
        kernels=kernels,
        wide_kernels=kernels,
        page_kernels=kernels and PageKernels(),
        takes_over=True,
        most_keys=200,
        key_mean=torch.randn(1, NUM_HEADS, HEAD_DIM, generator=generator),
        value_basis=None,
        key_scale=None,
        value_scale=None,
    )
    if is_fp8:
        pools = [as_bytes(pool.to(FP8)) for pool in pools]
        layer.window.kv_cache = pools[1]
        exponents = (torch.randint(-7, -4, (1, NUM_HEADS, HEAD_DIM), generator=generator) for _ in range(2))
        layer.key_scale, layer.value_scale = (2.0**exponent for exponent in exponents)
    return layer, pools[0]


def make_config(layers=(), is_fp8=False, num_ranks=1, load_format="auto"):
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=dict(enumerate(layers))),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=num_ranks),
        cache_config=SimpleNamespace(cache_dtype="fp8" if is_fp8 else "auto"),
        load_config=SimpleNamespace(load_format=load_format),
    )


def make_builder(block_size=64, layers=(), is_fp8=False, **given):
    spec, config = SimpleNamespace(block_size=block_size), make_config(layers, is_fp8, **given)
    return LeanKMetadataBuilder(spec, [], config, torch.device("cpu"))


def batch(queries, lengths, prompts, first_page=1):
    """What vLLM says of a step, with pages in order from `first_page`."""
    starts = torch.tensor([0, *queries]).cumsum(0)
    table = torch.arange(len(lengths) * MOST_PAGES, dtype=torch.int32).view(-1, MOST_PAGES) + first_page
    slots = [-1] * sum(queries)
    for row, (query, length) in enumerate(zip(queries, lengths, strict=True)):
        for number in range(query if length else 0):
            place = length - query + number
            slots[int(starts[row]) + number] = int(table[row, place // PAGE]) * PAGE + place % PAGE
    return SimpleNamespace(
        num_reqs=len(lengths),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        rswa_prefix_lens=None if prompts is None else torch.tensor(prompts),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
    )


def draw_states(num_tokens):
    """Queries, keys and values of all heads."""
    generator = torch.Generator().manual_seed(1)
    counts = (NUM_HEADS * GROUPS, NUM_HEADS, NUM_HEADS)
    return [torch.randn(num_tokens, count, HEAD_DIM, generator=generator) for count in counts]


@pytest.fixture
def forward(monkeypatch):
    """Runs a step of a layer: its output, and the pages behind it but the first, which is nobody's."""

    def run(layer, kept, said, *states, is_fp8=False, of_window=None, **options):
        own, window = (make_builder(is_fp8=is_fp8).build(0, told) for told in (said, of_window or said))
        context = SimpleNamespace(attn_metadata={"window": window})
        monkeypatch.setattr(backend, "get_forward_context", lambda: context)
        impl = LeanKImpl(NUM_HEADS * GROUPS, HEAD_DIM, SCALE, NUM_HEADS, **options)
        impl.flash_attention = layer.kernels and flash_attention
        output = torch.zeros_like(states[0])
        impl.forward(layer, *states, kept, own, output)
        return output, [pool[1:] for pool in (kept, layer.window.kv_cache)]

    return run


@pytest.mark.parametrize(
    ("queries", "lengths", "prompts"),
    [
        ([1, 1, 1], [80, 20, 5], [30, 20, 4]),
        ([3, 3, 3], [80, 20, 5], [30, 10, 4]),
        ([2, 2, 2], [80, 20, 0], [30, 10, 0]),  # the last is a captured step's padding
        # The second computes 20 tokens of its prompt, 50 of its answer.
        ([1, 70, 3], [80, 90, 5], [30, 40, 4]),
        ([1, 2, 40, 33, 70, 35, 50], [30, 96, 40, 33, 80, 90, 50], [20, 90, 40, 33, 80, 95, 50]),
    ],
    ids=["one token each", "drafts", "padding", "mixed", "prompts, some in chunks"],
)
@pytest.mark.parametrize(
    ("is_fp8", "sinks"),
    [(False, None), (True, None), (False, torch.arange(NUM_HEADS * GROUPS) / 4)],
    ids=["as they come", "fp8", "sinks"],
)
def test_kernels_and_plain_torch_are_asked_the_same(queries, lengths, prompts, is_fp8, sinks, forward):
    said, states = batch(queries, lengths, prompts), draw_states(sum(queries))
    real = said.slot_mapping >= 0
    (expected, pools), (output, others) = (
        forward(*make_layer(kernels, is_fp8), said, *states, is_fp8=is_fp8, sinks=sinks)
        for kernels in (None, Kernels())
    )
    torch.testing.assert_close(output[real], expected[real])
    torch.testing.assert_close(others, pools)


@pytest.mark.parametrize("kernels", [None, Kernels()])
@pytest.mark.parametrize(
    ("queries", "lengths", "prompts", "padding"),
    [([1, 1, 1], [80, 80, 41], [80, 80, 30], 0), ([1, 40, 1, 2], [80, 80, 80, 60], [80, 80, 80, 50], 3)],
    ids=["one token each", "beside a prompt"],
)
def test_a_last_token_of_a_prompt_whose_pages_did_not_move_changes_nothing(
    queries, lengths, prompts, padding, kernels, forward
):
    """Of the first request; it attends as the answer's, and what the others do stays."""
    states = draw_states(sum(queries) + padding)
    said, of_window, plain = (batch(queries, lengths, own) for own in (prompts, prompts, [79, *prompts[1:]]))
    for step in (said, of_window, plain):
        step.num_actual_tokens += padding
        step.slot_mapping = torch.nn.functional.pad(step.slot_mapping, (0, padding), value=-1)
    of_window.block_table_tensor[0, 1:4] = 0
    found = forward(*make_layer(kernels), said, *states, of_window=of_window)
    layer, kept = make_layer(kernels)
    plain.slot_mapping[0], layer.takes_over = -1, False
    torch.testing.assert_close(found, forward(layer, kept, plain, *states))


@pytest.mark.parametrize("kernels", [None, Kernels()])
def test_v_that_is_rotated_attends_as_where_it_came_rotated(kernels, forward):
    """Of a layer with a basis, and of one whose weights have it: pages hold the same."""
    queries, lengths, prompts = [1, 2, 40, 33, 70], [30, 96, 40, 33, 80], [20, 90, 40, 33, 80]
    query, key, value = draw_states(sum(queries))
    generator = torch.Generator().manual_seed(2)
    basis = torch.linalg.qr(torch.randn(NUM_HEADS, HEAD_DIM, HEAD_DIM, generator=generator)).Q
    said, found = batch(queries, lengths, prompts), []
    for own, values in ((basis, value), (None, torch.einsum("thd,hde->the", value, basis))):
        layer, kept = make_layer(kernels)
        layer.value_basis = own
        found.append(forward(layer, kept, said, query, key, values))
    (output, pools), (rotated, others) = found
    back = torch.einsum("thge,hde->thgd", rotated.unflatten(1, (NUM_HEADS, -1)), basis).flatten(1, 2)
    torch.testing.assert_close(output, back)
    torch.testing.assert_close(pools, others)


def test_a_prompt_attends_to_what_it_is_not_to_what_pages_round_it_to(forward):
    """As in the runtime; what follows it in a further step attends to pages."""
    states, layer = draw_states(20), make_layer(None, is_fp8=True)
    expected = attend_densely(*states, SCALE)
    for first, stop in ((0, 20), (17, 20)):
        said = batch([stop - first], [stop], [stop])
        output, _ = forward(*layer, said, *(own[first:stop] for own in states), is_fp8=True)
        error = (output - expected[first:stop]).norm() / expected[first:stop].norm()
        assert error < 1e-6 if first == 0 else 1e-3 < error < 0.1


def test_what_a_captured_step_reads_of_the_builder_stays_where_it_is():
    builder = make_builder()
    first = builder.build(0, batch([1, 1], [80, 20], [30, 20]))
    second = builder.build(0, batch([1, 1], [31, 21], [15, 19]))
    assert first.prompts.data_ptr() == second.prompts.data_ptr() and second.prompts.tolist() == [15, 19]
    warming_up = builder.build(0, batch([1, 1, 1], [1, 1, 1], None))
    assert warming_up.num_columns == 1 and len(warming_up.prompts) == 3


def test_prompts_lengths_are_not_waited_for_where_the_host_is_told_them(monkeypatch):
    said, told, asked = batch([40, 1, 0], [40, 80, 0], [40, 20, 0]), [], []
    builder = make_builder(layers=[SimpleNamespace(told_prompts=told), SimpleNamespace(told_prompts=[3])])
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: asked.append(tensor) or [1, 2, 3])
    told[:] = [40, 20]
    assert builder.build(0, said).host_prompts == [40, 20] and not asked
    told.clear()
    assert builder.build(0, said).host_prompts == [1, 2, 3] and asked == [said.rswa_prefix_lens]
    assert builder.build(0, batch([40, 1], [40, 80], None)).host_prompts == [0, 0]


def test_the_memory_of_a_prompt_that_is_put_together_is_measured(monkeypatch):
    made, asked, both = [], [], torch.ones(2, 500, 3, HEAD_DIM)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda states, *size: made.append(size) or both)
    monkeypatch.setattr(backend, "attend_densely", lambda *given: asked.append(given))
    layer, output = SimpleNamespace(most_keys=500), torch.ones(7, 6, HEAD_DIM)
    impl = LeanKImpl(6, HEAD_DIM, 0.2, 3)
    given = layer, output, output[:, :3], output[:, :3], None, None, output
    assert not impl.forward(*given).any()
    assert made == [(2, 500, 3, HEAD_DIM)] and not asked
    # On a GPU that of torch's attention, too, where it reads prompts.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    impl.forward(*given)
    assert [states.shape[:2] for states in asked[0][:3]] == [(1, 6), (500, 3), (500, 3)]
    impl.flash_attention = len
    impl.forward(*given)
    assert len(made) == 3 and len(asked) == 1


def test_flash_attention_is_vllms_where_it_serves(monkeypatch, caplog):
    def find(head_size=128, dtype=torch.bfloat16, has_sinks=False):
        prompt_attention.find_flash_attention.cache_clear()
        return prompt_attention.find_flash_attention(4, 2, head_size, dtype, has_sinks)

    assert find() is None  # on a CPU
    here = SimpleNamespace(is_cuda=lambda: True, device_type="cpu")
    monkeypatch.setattr(prompt_attention, "current_platform", here)
    own = SimpleNamespace(
        flash_attn_varlen_func=lambda fa_version, **given: flash_attention(**given),
        get_flash_attn_version=lambda head_size: 3,
    )
    stock = SimpleNamespace(
        supported_dtypes=[torch.bfloat16],
        supports_head_size=lambda size: size == 128,
        supports_sink=lambda: True,
    )
    package = "vllm.v1.attention.backends"
    monkeypatch.setitem(sys.modules, f"{package}.fa_utils", own)
    monkeypatch.setitem(sys.modules, f"{package}.flash_attn", SimpleNamespace(FlashAttentionBackend=stock))
    assert find().keywords == find(has_sinks=True).keywords == {"fa_version": 3} and not caplog.records
    assert find(head_size=64) is None and "no heads of 64 channels" in caplog.text
    assert find(dtype=torch.float32) is None and "it takes no torch.float32" in caplog.text
    stock.supports_sink = lambda: False
    assert find(has_sinks=True) is None and "on this GPU it takes no attention sinks" in caplog.text
    own.flash_attn_varlen_func = lambda out, **given: None  # leaves what was there
    assert find() is None and "it disagrees with torch's by" in caplog.text
    own.flash_attn_varlen_func = lambda query: query
    assert find() is None and "TypeError" in caplog.text
    own.get_flash_attn_version = lambda head_size: None  # none for this device
    assert find() is None and "it has no version for this GPU" in caplog.text
    monkeypatch.setitem(sys.modules, f"{package}.fa_utils", None)  # its extensions are not there
    assert find() is None and "ModuleNotFoundError" in caplog.text
    prompt_attention.find_flash_attention.cache_clear()


def test_steps_are_captured_where_kernels_decode_every_layer_of_every_rank(monkeypatch):
    def support(*kernels, num_ranks=1):
        layers = {str(number): SimpleNamespace(kernels=kernel) for number, kernel in enumerate(kernels)}
        layers["window"] = SimpleNamespace()
        config = make_config(layers.values(), num_ranks=num_ranks)
        return LeanKMetadataBuilder.get_cudagraph_support(config, None)

    assert support(Kernels(), Kernels()) == AttentionCGSupport.UNIFORM_BATCH
    assert support(Kernels(), None) == support(None) == AttentionCGSupport.NEVER
    # Another rank may lack them, which is heard of before either runner makes graphs of that.
    lacks = Mock(side_effect=lambda layers: [setattr(layer, "kernels", None) for layer in layers])
    monkeypatch.setattr(backend, "agree_on_kernels", lacks)
    assert support(Kernels(), Kernels(), num_ranks=2) == AttentionCGSupport.NEVER


def test_kernels_are_compiled_for_the_pages_that_vllm_will_make():
    # Models are loaded while `block_size` is vLLM's own default, unless one was asked for.
    assert coming_block_size(SimpleNamespace(block_size=16, user_specified_block_size=False)) == 64
    assert coming_block_size(SimpleNamespace(block_size=32, user_specified_block_size=True)) == 32
    key, has_all = SimpleNamespace(load_tokens=64), {"lacks_constants": False}
    loading_64 = SimpleNamespace(kernels=SimpleNamespace(key=key), **has_all)
    layers = [SimpleNamespace(kernels=None, **has_all), SimpleNamespace(), loading_64]
    make_builder(128, layers)
    with pytest.raises(ValueError, match="load 64 tokens cannot read pages of 96; name the size"):
        make_builder(96, layers)


def test_a_way_to_load_that_brings_no_constants_is_refused_unless_weights_are_made_up():
    layers = [SimpleNamespace(kernels=None, lacks_constants=True)]
    make_builder(layers=layers, load_format="dummy")
    with pytest.raises(ValueError, match=r"^--load-format tensorizer: it brought no mean of keys"):
        make_builder(layers=layers, load_format="tensorizer")

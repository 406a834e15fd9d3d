"""The kernels on a GPU: hostile shapes against the reference, real masks, one compilation for all of them."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

tilelang = pytest.importorskip("tilelang")

from runtime import find_kernels_leank  # noqa: E402
from runtime.decode_kernels_leank import DecodeKernels  # noqa: E402
from runtime.find_kernels_leank import find_kernels  # noqa: E402
from runtime.fp8_leank import FP8  # noqa: E402
from runtime.kernel_key_leank import KernelKey  # noqa: E402
from runtime.layout_leank import cut_layers  # noqa: E402
from runtime.self_check_leank import disagreement  # noqa: E402
from tests.runtime.decode_cases import make_case, run_case, run_turn  # noqa: E402

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SINK, RECENT = 128, 1024
ROWS = [(n, 0) for n in (1, 2, 63, 64, 65, 127, 128, 129, 191, 1152, 1184)] + [
    (1153, 1), (1185, 32), (1300, 116), (1300, 148), (2300, 1150), (4500, 3340), (9000, 7816), (70, 0),
]  # fmt: skip
# Rows that hold several new tokens, some with a pruned length for the first column and one for the last.
DRAFT_ROWS = [
    (32, 0), (65, 0), (128, 0), (191, 0), (1184, 0), (1300, 116), (1300, 100, 116), (2300, 1024, 1150),
    (9000, 7800, 7816), (300, 0, 170),
]  # fmt: skip
HEAD_SIZES, IN_FP8 = (64, 96, 128, 192, 256), {"cache_dtype": FP8}
MASKS = [
    path
    for folder in (os.environ.get("LEANK_MASKS", ""), Path(__file__).parents[3] / "shared/masks")
    if str(folder)
    for path in sorted(Path(folder).glob("*.pth"))
][:2]


def layout_of(mask, values=None):
    """How a layer of these channels is cut, by the widths of V that are pruned."""
    return cut_layers([mask.sum(-1).tolist()], values and [values], mask.shape[1])[0]


def kernels_for(
    mask, groups=4, dtype=torch.bfloat16, num_columns=1, load_tokens=64, cache_dtype=None, values=None
):
    """What the finder has for a layer of these channels."""
    layout = layout_of(mask, values)
    return find_kernels(
        CUDA, dtype, head_dim=layout.head_dim, num_groups=groups, chunk_size=layout.chunk_size,
        max_chunks=layout.max_chunks, num_columns=num_columns, load_tokens=load_tokens,
        cache_dtype=cache_dtype, value_chunk=layout.value_chunk,
    )  # fmt: skip


def case_of(mask, rows, groups=4, dtype=torch.bfloat16, *, sink=SINK, values=None, **change):
    chunk_size = layout_of(mask, values).chunk_size
    return make_case(
        mask, rows, chunk_size=chunk_size, num_groups=groups, sink_size=sink, dtype=dtype, device=CUDA,
        value_widths=values, **change,
    )  # fmt: skip


def check(
    mask, groups=4, dtype=torch.bfloat16, rows=None, *, generic=False, kernels=None, num_columns=1,
    valid=None, page_sizes=(64, 64), run=run_case, cache_dtype=None, scales_per_row=True, values=None,
    **change,
):  # fmt: skip
    """Hold the kernel to the reference in fp64: at most twice the error of torch's in `dtype`.

    A cache of FP8 is taken for the numbers that it stores, and new tokens must be stored as torch does it.
    `generic` is the body for older GPUs.
    """
    rows = rows or (ROWS if num_columns == 1 else DRAFT_ROWS)
    load_tokens = min(64, *(size & -size for size in page_sizes))
    kernels = kernels or kernels_for(mask, groups, dtype, num_columns, load_tokens, cache_dtype, values)
    assert kernels is not None
    if generic:
        kernels = DecodeKernels(kernels.key, generic=True)
        assert disagreement(kernels) < 2 * torch.finfo(dtype).eps
    case = case_of(
        mask, rows, groups, dtype, num_columns=num_columns, valid=valid, page_sizes=page_sizes,
        cache_dtype=cache_dtype, values=values, **change,
    )  # fmt: skip
    if cache_dtype is not None or values is not None:
        case = case if scales_per_row else case.of_one_checkpoint()
        assert case.is_appended_by(kernels)
    scale = mask.shape[1] ** -0.5
    results = [case.expected(scale), run(kernels, case, scale), run(kernels, case, scale)]
    if valid is not None:
        results = [result.masked_fill(~valid[:, None, :, None], 0) for result in results]
    expected, actual, again = results
    assert not actual.isnan().any() and torch.equal(actual, again)
    error = (actual - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1).clamp(min=1e-30)
    assert (error <= 2 * torchs_own_error(mask, groups, dtype, rows)).all(), error


def torchs_own_error(mask, groups, dtype, rows):
    """The largest error of dense SDPA in `dtype` over these lengths, on random data."""
    num_heads, head_dim = mask.shape
    errors = []
    for length in sorted({max(row[0], 1) for row in rows}):
        torch.manual_seed(length)
        query = torch.randn(1, num_heads * groups, 1, head_dim, device="cuda").to(dtype)
        key, value = (torch.randn(1, num_heads, length, head_dim, device="cuda").to(dtype) for _ in range(2))
        ours, exact = (
            torch.nn.functional.scaled_dot_product_attention(
                *(tensor.to(kind) for tensor in (query, key, value)), enable_gqa=True
            ).double()
            for kind in (dtype, torch.float64)
        )
        errors.append(((ours - exact).norm() / exact.norm()).item())
    return max(errors)


def random_mask(heads, head_dim, seed, multiple=1):
    generator = torch.Generator().manual_seed(seed)
    widths = torch.randint(0, head_dim // multiple + 1, (heads,), generator=generator) * multiple
    return torch.stack([torch.randperm(head_dim, generator=generator) < width for width in widths])


@pytest.mark.skipif(not MASKS, reason="the real masks are not here")
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("path", MASKS, ids=lambda path: path.stem)
def test_every_layer_of_a_real_mask(path, cache_dtype):
    masks = torch.load(path, weights_only=True, map_location="cpu").bool()
    groups = {8: 4, 4: 7}[masks.shape[1]]
    for layer, mask in enumerate(masks):
        check(mask, groups, seed=layer, cache_dtype=cache_dtype, scales_per_row=layer % 2 == 0)


# Heads, their size, a seed, what widths are multiples of, query heads to each, and what else is not as usual.
SHAPES = [
    *((4, size, 1, 1, 4, {}) for size in HEAD_SIZES), *((4, size, 2, 32, 4, {}) for size in HEAD_SIZES),
    *((4, size, 1, 1, 4, {"dtype": torch.float16}) for size in HEAD_SIZES),
    *((3, 128, 3, 32, groups, {}) for groups in (1, 2, 3, 7, 8, 9, 16)),
    *(
        (4, size, 7, 32, groups, {"num_columns": count})
        for count in (2, 4, 8, 16, 32)
        for groups, size in ((1, 64), (4, 128), (7, 128), (4, 256), (16, 96))
    ),
    *((4, 128, 11, 32, 4, {"num_columns": count, **IN_FP8}) for count in (1, 4, 8, 16, 32)),
    (6, 64, 11, 16, 7, IN_FP8), (6, 96, 11, 16, 4, IN_FP8), (6, 192, 11, 32, 4, IN_FP8),
    (6, 256, 11, 32, 2, IN_FP8), (6, 128, 11, 16, 16, IN_FP8),
    *((4, 128, 11, 32, 4, {"page_sizes": (3 * tokens, tokens), **IN_FP8}) for tokens in (16, 32)),
    (4, 128, 11, 32, 4, {"dtype": torch.float16, **IN_FP8}),
    (6, 128, 11, 32, 4, {"generic": True, **IN_FP8}),
    (6, 64, 11, 32, 4, {"generic": True, "dtype": torch.float16, "num_columns": 8, **IN_FP8}),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "head_dim", "seed", "multiple", "groups", "options"), SHAPES, ids=str)
def test_every_shape_is_attended(heads, head_dim, seed, multiple, groups, options):
    check(random_mask(heads, head_dim, seed, multiple), groups, **options)


@pytest.mark.parametrize("kept", [0, 1, 127, 128])
def test_all_heads_of_one_width(kept):
    check(torch.arange(128).expand(5, 128) < kept)


@pytest.mark.parametrize("batch_size", [1, 2, 17, 64])
def test_batches_of_rows_of_very_different_lengths(batch_size):
    generator = torch.Generator().manual_seed(batch_size)
    lengths = torch.randint(1, 3000, (batch_size,), generator=generator).tolist()
    rows = [(n, max(n - SINK - RECENT, 0)) for n in lengths]
    check(random_mask(8, 128, batch_size, multiple=32), rows=rows)


@pytest.mark.parametrize("num_columns", [3, 16])
def test_padding_among_new_tokens(num_columns):
    rows = [(0, 0), *DRAFT_ROWS]
    valid = torch.rand(len(rows), num_columns, generator=torch.Generator().manual_seed(2)) < 0.5
    valid[0] = False
    valid[1:, 0] |= ~valid[1:].any(1)
    check(random_mask(4, 128, 8, multiple=32), rows=rows, num_columns=num_columns, valid=valid.cuda())


@pytest.mark.parametrize("num_columns", [33, 300])
@pytest.mark.parametrize(
    ("groups", "head_dim", "multiple", "change"),
    [
        (4, 128, 32, {}),
        (7, 128, 1, {"dtype": torch.float16}),
        (8, 64, 16, {"has_sinks": True}),
        (16, 96, 32, {}),
        (4, 128, 32, {"cache_dtype": FP8}),
        (4, 128, 32, {"values": (0, 64, 128, 64, 0)}),
    ],
)
def test_turns(groups, head_dim, multiple, change, num_columns):
    stored = [(0, 0), (1, 0), (63, 0), (200, 0), (1300, 116), (1300, 116), (1301, 117), (5000, 3848)]
    mask = random_mask(5, head_dim, 9, multiple)
    mask[0] = False
    rows = [(num_columns + tokens, pruned) for tokens, pruned in stored]
    options = {name: change[name] for name in ("dtype", "cache_dtype", "values") if name in change}
    kernels = kernels_for(mask, groups, **options)
    assert kernels.attends_turns == (head_dim != 96)
    check(mask, groups, rows=rows, num_columns=num_columns, run=run_turn, kernels=kernels, **change)


def run_side_by_side(kernels, case, softmax_scale):
    """Run a case with K and V of a page side by side, and tables that point nowhere where nothing is read."""
    pools = []
    for first in (0, 2):
        packed = torch.cat([pool.flatten(1) for pool in case.store[first : first + 2]], dim=1)
        start = 0
        for pool in case.store[first : first + 2]:
            size = pool[0].numel()
            pools.append(packed[:, start : start + size].unflatten(1, pool.shape[1:]))
            start += size
    assert not all(pool.is_contiguous() for pool in pools)
    window_table = case.store.window_table.clone()
    unused = window_table == window_table.max()
    window_table[unused] = torch.where(
        torch.arange(int(unused.sum()), device="cuda") % 2 == 0, -1, 2**30
    ).int()
    store = case.store._replace(window_table=window_table)
    store = store._replace(**dict(zip(store._fields, pools, strict=False)))
    plan = kernels.plan(case.seen, case.pruned, SINK)
    kernels.append(case.keys, case.values, store, case.seen, case.valid)
    return kernels.attend(
        case.query, store, case.seen, case.pruned, plan, sink_size=SINK, softmax_scale=softmax_scale
    )


@pytest.mark.parametrize("num_columns", [1, 8])
@pytest.mark.parametrize("page_sizes", [(64, 64), (128, 64), (32, 32), (16, 48), (48, 16)], ids=str)
@pytest.mark.parametrize("generic", [False, True], ids=["", "the body for older GPUs"])
def test_pages_of_an_engine(generic, page_sizes, num_columns):
    check(
        random_mask(4, 128, 6, multiple=32), rows=DRAFT_ROWS, generic=generic, num_columns=num_columns,
        page_sizes=page_sizes, run=run_side_by_side,
    )  # fmt: skip


def test_every_number_is_stored_in_fp8_as_torch_stores_it():
    """All of bfloat16 but NaN, of both signs: ties, numbers below the least, beyond the largest, infinity."""
    numbers = (torch.arange(1 << 16) << 16).to(torch.int32).view(torch.float32)
    numbers = numbers.masked_fill(numbers.isnan(), 0).bfloat16().view(-1, 4, 1, 128).cuda()
    mask = random_mask(4, 128, 16, multiple=32)
    case = case_of(mask, [(1, 0)] * len(numbers), cache_dtype=FP8)
    kernels = kernels_for(mask, cache_dtype=FP8)
    assert replace(case, keys=numbers, values=numbers.flip(0)).is_appended_by(kernels)


# Channels that heads keep of K, and of V, in chunks of so many.
VALUES = {
    "chunks of 64": ((0, 32, 64, 128), (0, 64, 128, 0)),
    "chunks of 32": ((0, 32, 64, 128, 96), (0, 32, 128, 0, 96)),
    "whole K, chunks of 64": ((128, 128), (64, 0)),
    "chunks of 48": ((0, 64, 32, 96), (0, 0, 48, 96)),
    "chunks of 16": ((0, 32, 64), (0, 16, 48)),
    "chunks of 96": ((32, 192, 64), (0, 192, 96)),
}


@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=["as they come", "fp8"])
@pytest.mark.parametrize(
    ("name", "num_columns"),
    [*((name, 1) for name in VALUES), *((name, count) for name in list(VALUES)[:2] for count in (4, 8, 16))],
)
def test_pruned_values(name, num_columns, cache_dtype):
    widths, values = VALUES[name]
    mask = torch.arange(max(*widths, *values)).flip(0) < torch.tensor(widths)[:, None]
    check(mask, num_columns=num_columns, cache_dtype=cache_dtype, values=values, page_sizes=(128, 64))


@pytest.mark.parametrize("num_columns", [1, 8])
@pytest.mark.parametrize("generic", [False, True], ids=["", "the body for older GPUs"])
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
def test_pruned_values_on_small_pages(cache_dtype, generic, num_columns):
    mask, values = torch.arange(128) < torch.tensor((0, 32, 64, 128))[:, None], (0, 64, 0, 128)
    check(
        mask, rows=DRAFT_ROWS, generic=generic, num_columns=num_columns, page_sizes=(48, 16),
        run=run_side_by_side, cache_dtype=cache_dtype, values=values,
    )  # fmt: skip


@pytest.mark.parametrize("sink", [0, 1, 65])
@pytest.mark.parametrize("recent", [0, 1, 63, 100])
def test_odd_windows(sink, recent):
    rows = [(n, max(n - sink - recent, 0)) for n in (1, 2, 64, 65, 66, 128, 129, 300, 1000)]
    check(random_mask(4, 128, 9, multiple=32), rows=rows, sink=sink)


@pytest.mark.parametrize(
    "sizes",
    [(128, 4, 32, 4, 8), (96, 4, 16, 6, 16), (64, 4, 32, 2, 32), (256, 4, 32, 8, 8), (128, 4, 32, 4, 64)],
    ids=str,
)
def test_the_body_for_older_gpus_agrees_too(sizes):
    head_dim, _, chunk_size, *_ = sizes
    kernels = DecodeKernels(KernelKey(CUDA, torch.bfloat16, *sizes), generic=True)
    assert disagreement(kernels) < 2 * torch.finfo(torch.bfloat16).eps
    mask = random_mask(6, head_dim, head_dim, multiple=chunk_size)
    if chunk_size == layout_of(mask).chunk_size:
        check(mask, kernels=kernels)


@pytest.mark.parametrize("generic", [False, True], ids=["this GPU's", "older"])
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("num_queries", [8, 32])
def test_attention_sinks_take_their_share(num_queries, cache_dtype, generic):
    sizes = (64, 8, 16, 5, num_queries, 64)  # GPT-OSS': heads of 64 channels, eight queries to a KV head
    key = KernelKey(CUDA, torch.bfloat16, *sizes, cache_dtype, has_sinks=True)
    assert disagreement(DecodeKernels(key, generic=generic)) < 2 * torch.finfo(torch.bfloat16).eps


def test_nothing_is_compiled_again_for_another_batch_length_or_layer(monkeypatch):
    compiled, counts, real = [], [], tilelang.compile

    def note(*args, **kwargs):
        compiled.append(real(*args, **kwargs))
        return compiled[-1]

    monkeypatch.setattr(tilelang, "compile", note)
    monkeypatch.setattr(find_kernels_leank, "_found", {})
    for seed, batch_size in enumerate((1, 3, 40)):
        rows = [(100 + 37 * row * seed, 0) for row in range(batch_size)]
        rows = [(n, max(n - SINK - RECENT, 0)) for n, _ in rows]
        check(random_mask(2 + seed, 128, seed, multiple=32), rows=rows)
        counts.append(len(compiled))
    assert counts[0] > 0 and counts == counts[:1] * 3
    sources = [kernel.adapter.get_device_source() for kernel in compiled]
    (attention,) = (source for source in sources if "leank_attention" in source)
    if torch.cuda.get_device_capability() == (9, 0):
        assert "wgmma_ss" in attention and "tma_load" in attention
        # Launches overlap.
        assert sum("cudaGridDependencySynchronize" in source for source in sources) == 12


def test_a_cuda_graph_replays_on_new_lengths():
    mask = random_mask(8, 128, 5, multiple=32)
    kernels, case = kernels_for(mask), case_of(mask, [(3000, 1816), (70, 0)])
    store = case.appended()

    def step():
        plan = kernels.plan(case.seen, case.pruned, SINK)
        out = [
            kernels.attend(case.query, store, case.seen, case.pruned, plan, sink_size=SINK, softmax_scale=0.1)
            for _ in range(3)  # the second reads the plan before the first has ended
        ]
        assert all(torch.equal(out[0], other) for other in out[1:]) if not capturing else True
        return out[-1]

    capturing = False
    step()
    graph = torch.cuda.CUDAGraph()
    capturing = True
    with torch.cuda.graph(graph):
        output = step()
    capturing = False
    for length in (2999, 2500, 1970, 1944):
        case.seen[0] = length
        graph.replay()
        torch.testing.assert_close(output, step(), rtol=0, atol=0)


SHAPE = {"head_dim": 128, "num_groups": 4, "chunk_size": 32, "max_chunks": 4}


@pytest.fixture
def warnings(monkeypatch, caplog):
    """What the finder, which has found nothing so far, warns of."""
    monkeypatch.setattr(find_kernels_leank, "_found", {})
    monkeypatch.setattr(find_kernels_leank.logger, "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_kernel_that_disagrees_is_not_used(warnings, monkeypatch):
    monkeypatch.setattr(find_kernels_leank, "disagreement", lambda kernels: 0.5)
    assert [find_kernels(CUDA, torch.bfloat16, **SHAPE) for _ in range(2)] == [None, None]
    assert ["disagrees" in warning for warning in warnings()] == [True]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "kernels serve bfloat16 and float16, not float32"),
        ({"chunk_size": 8}, "chunks of 16 or 32"),
        ({"num_groups": 32}, "at most 16 query heads"),
        ({"cache_dtype": torch.float8_e5m2}, "no kernels serve a cache of float8_e5m2"),
        ({"cache_dtype": torch.uint8}, "no kernels serve an int4 cache"),
        ({"value_chunk": 16}, "a multiple of 16 channels, 32 or more, not of 16"),
    ],
    ids=str,
)
def test_one_warning_names_why_no_kernel_serves(change, reason, warnings):
    given = {"dtype": torch.bfloat16, **SHAPE, **change}
    assert [find_kernels(torch.device("cuda"), **given) for _ in range(2)] == [None, None]
    assert [reason in warning for warning in warnings()] == [True]


def test_kernels_are_made_once_also_for_threads_at_once(warnings):
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(find_kernels, torch.device("cuda"), torch.bfloat16, **SHAPE) for _ in range(4)]
    found = [future.result() for future in asked]
    assert all(kernels is found[0] is not None for kernels in found) and not warnings()


def test_out_of_memory_is_the_callers_and_does_not_last(warnings, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(find_kernels_leank, "disagreement", Mock(side_effect=torch.OutOfMemoryError))
        find_kernels(torch.device("cuda"), torch.bfloat16, **SHAPE)
    assert find_kernels(torch.device("cuda"), torch.bfloat16, **SHAPE) is not None and not warnings()

"""The kernels on a GPU: hostile shapes against the reference, real masks, one compilation for all of them."""

import os
from pathlib import Path

import pytest
import torch

tilelang = pytest.importorskip("tilelang")

from runtime import find_kernels_leank  # noqa: E402
from runtime.decode_kernels_leank import DecodeKernels, KernelKey  # noqa: E402
from runtime.find_kernels_leank import disagreement, find_kernels, make_case, run_case  # noqa: E402
from runtime.layout_leank import choose_chunk_size  # noqa: E402

pytestmark = pytest.mark.gpu

SINK, RECENT, FLUSH = 128, 1024, 32
SLOTS = SINK + RECENT + FLUSH
ROWS = [(n, 0) for n in (1, 2, 63, 64, 65, 127, 128, 129, 191, 1152, 1184)] + [
    (1153, 1), (1185, 32), (1300, 116), (1300, 148), (2300, 1150), (4500, 3340), (9000, 7816), (70, 0),
]  # fmt: skip
MASKS = [
    path
    for folder in (os.environ.get("LEANK_MASKS", ""), Path(__file__).parents[3] / "shared/masks")
    if str(folder)
    for path in sorted(Path(folder).glob("*.pth"))
][:2]


def kernels_for(mask, groups, dtype, chunk_size):
    layout_chunks = max(
        -(-int(w) // chunk_size) + -(-(mask.shape[1] - int(w)) // chunk_size) for w in mask.sum(-1)
    )
    return find_kernels(
        torch.device("cuda", 0),
        dtype,
        head_dim=mask.shape[1],
        num_groups=groups,
        chunk_size=chunk_size,
        max_chunks=layout_chunks,
    )


def check(mask, groups, dtype, rows=ROWS, sink=SINK, slots=SLOTS, seed=0, kernels=None):
    """Hold the kernel to the reference in fp64: at most twice the error of torch's in `dtype`."""
    chunk_size = choose_chunk_size([[int(w) for w in mask.sum(-1)]], mask.shape[1])
    kernels = kernels or kernels_for(mask, groups, dtype, chunk_size)
    assert kernels is not None
    case = make_case(
        mask, rows, chunk_size=chunk_size, num_groups=groups, sink_size=sink, num_slots=slots, dtype=dtype,
        device=torch.device("cuda", 0), seed=seed,
    )  # fmt: skip
    scale = mask.shape[1] ** -0.5
    expected = case.expected(scale, torch.float64)
    actual = run_case(kernels, case, scale)
    assert not actual.isnan().any()
    error = (actual - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert (error <= 2 * torchs_own_error(mask, groups, dtype, rows)).all(), error
    again = run_case(kernels, case, scale)
    assert torch.equal(actual, again)


def torchs_own_error(mask, groups, dtype, rows):
    """The largest error of dense SDPA in `dtype` over these lengths, on random data."""
    num_heads, head_dim = mask.shape
    errors = []
    for length in sorted({length for length, _ in rows}):
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
@pytest.mark.parametrize("path", MASKS, ids=lambda path: path.stem)
def test_every_layer_of_a_real_mask(path):
    masks = torch.load(path, weights_only=True, map_location="cpu").bool()
    groups = {8: 4, 4: 7}[masks.shape[1]]
    for layer, mask in enumerate(masks):
        check(mask, groups, torch.bfloat16, seed=layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_head_sizes_and_dtypes(head_dim, dtype):
    check(random_mask(4, head_dim, 1), 4, dtype)
    if dtype == torch.bfloat16:
        check(random_mask(4, head_dim, 2, multiple=32), 4, dtype)


@pytest.mark.parametrize("groups", [1, 2, 3, 7, 8, 9, 16])
def test_query_heads_per_kv_head(groups):
    check(random_mask(3, 128, 3, multiple=32), groups, torch.bfloat16)


@pytest.mark.parametrize("kept", [0, 1, 127, 128])
def test_all_heads_of_one_width(kept):
    check(torch.arange(128).expand(5, 128) < kept, 4, torch.bfloat16)


@pytest.mark.parametrize("batch_size", [1, 2, 17, 64])
def test_batches_of_rows_of_very_different_lengths(batch_size):
    generator = torch.Generator().manual_seed(batch_size)
    lengths = torch.randint(1, 3000, (batch_size,), generator=generator).tolist()
    rows = [(n, max(n - SINK - RECENT, 0)) for n in lengths]
    check(random_mask(8, 128, batch_size, multiple=32), 4, torch.bfloat16, rows)


@pytest.mark.parametrize(("sink", "recent"), [(0, 1), (0, 64), (1, 100), (65, 63)])
def test_odd_windows(sink, recent):
    rows = [(n, max(n - sink - recent, 0)) for n in (1, 2, 64, 65, 66, 128, 129, 300, 1000)]
    check(random_mask(4, 128, 9, multiple=32), 4, torch.bfloat16, rows, sink, sink + recent)


def test_the_body_for_older_gpus_agrees_too():
    for head_dim, chunk_size in ((128, 32), (96, 16), (64, 32), (256, 32)):
        mask = random_mask(6, head_dim, head_dim, multiple=chunk_size)
        key = KernelKey(
            torch.device("cuda", 0), torch.bfloat16, head_dim, 4, chunk_size, head_dim // chunk_size
        )
        kernels = DecodeKernels(key, generic=True)
        assert disagreement(kernels) < 2 * torch.finfo(torch.bfloat16).eps
        if chunk_size == choose_chunk_size([[int(w) for w in mask.sum(-1)]], head_dim):
            check(mask, 4, torch.bfloat16, kernels=kernels)


def test_nothing_is_compiled_again_for_another_batch_length_or_layer(monkeypatch):
    compiled = []
    real = tilelang.compile
    monkeypatch.setattr(
        tilelang, "compile", lambda *args, **kwargs: compiled.append(1) or real(*args, **kwargs)
    )
    monkeypatch.setattr(find_kernels_leank, "_found", {})
    for seed, batch_size in enumerate((1, 3, 40)):
        rows = [(100 + 37 * row * seed, 0) for row in range(batch_size)]
        rows = [(n, max(n - SINK - RECENT, 0)) for n, _ in rows]
        check(random_mask(2 + seed, 128, seed, multiple=32), 4, torch.bfloat16, rows)
    assert len(compiled) == 7  # attention, merge, append, and what lies between products


@pytest.mark.parametrize("sizes", [(128, 2**25), (2000, 3000), (2**24, 3 * 2**24)], ids=str)
def test_a_window_that_is_not_whole_yet(sizes):
    pruned = 300 if sizes[0] == 128 else 0
    rows = [(1, 0), (64, 0), (70, 0), (1000, pruned), (1001, pruned)]
    check(random_mask(4, 128, 9, multiple=32), 4, torch.bfloat16, rows, *sizes)


def test_a_cuda_graph_replays_on_new_lengths():
    mask = random_mask(8, 128, 5, multiple=32)
    kernels = kernels_for(mask, 4, torch.bfloat16, 32)
    case = make_case(
        mask, [(3000, 1816), (70, 0)], chunk_size=32, num_groups=4, sink_size=SINK, num_slots=SLOTS,
        dtype=torch.bfloat16, device=torch.device("cuda", 0),
    )  # fmt: skip
    store = case.appended()

    def step():
        plan = kernels.plan(case.lengths, case.pruned_lengths, SINK, SLOTS)
        return kernels.attend(
            case.query, store, case.lengths, case.pruned_lengths, plan,
            sink_size=SINK, num_slots=SLOTS, softmax_scale=0.1,
        )  # fmt: skip

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    for length in (2999, 2500, 1900, 1817):
        case.lengths[0] = length
        graph.replay()
        torch.testing.assert_close(output, step(), rtol=0, atol=0)


def test_a_kernel_that_disagrees_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(find_kernels_leank, "_found", {})
    monkeypatch.setattr(find_kernels_leank, "disagreement", lambda kernels: 0.5)
    monkeypatch.setattr(find_kernels_leank.logger, "propagate", True)
    with caplog.at_level("WARNING", logger=find_kernels_leank.logger.name):
        assert kernels_for(random_mask(2, 128, 5, multiple=32), 4, torch.bfloat16, 32) is None
        assert kernels_for(random_mask(2, 128, 6, multiple=32), 4, torch.bfloat16, 32) is None
    ours = [record for record in caplog.records if record.name == find_kernels_leank.logger.name]
    assert ["disagrees" in record.getMessage() for record in ours] == [True]

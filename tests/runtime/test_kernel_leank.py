"""The kernels on TileLang's CPU target, against the reference."""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch

tilelang = pytest.importorskip("tilelang")

from runtime.decode_kernels_leank import DecodeKernels, KernelKey, plan_tiles  # noqa: E402
from runtime.find_kernels_leank import disagreement, in_parts, make_case, run_case  # noqa: E402
from runtime.kernel_attention_leank import generic_attention  # noqa: E402
from runtime.kernel_glue_leank import add_norm, append_tokens, rope_append, silu_mul  # noqa: E402
from runtime.kernel_leank import KernelShape, merge_parts  # noqa: E402
from runtime.kernel_product_leank import SIZES, product  # noqa: E402
from runtime.layout_leank import StoreTensors, order_channels  # noqa: E402

D, E, GROUPS, SINK, SLOTS = 64, 32, 2, 8, 88
SHAPE = KernelShape(D, GROUPS, E, D // E + 1, "float32", num_stages=1)
SCALE = 0.2
# One token, a full sink, tile borders, a ring that is full, that has gone round, that wraps inside a tile.
ROWS = [
    (1, 0),
    (8, 0),
    (9, 0),
    (64, 0),
    (65, 0),
    (88, 0),
    (72, 63),
    (73, 64),
    (137, 65),
    (500, 413),
    (333, 260),
]
WIDTHS = [(0, 16, 32, 64), (0, 0, 0), (64, 64), (1, 63, 17), (48,), (5, 0, 64, 20, 16)]


def _not_empty(tensor):
    return tensor if tensor.shape[1] else tensor.new_zeros(tensor.shape[0], 1, 1, tensor.shape[3])


class CpuKernels:
    """`DecodeKernels` on the CPU: the generic body, any number of program instances."""

    def __init__(self, attention, merge, append, rope_append, add_norm, silu_mul, product, num_programs):
        self.compiled = attention, merge, append
        self._rope_append, self._add_norm, self._silu_mul = rope_append, add_norm, silu_mul
        self._products, self._sizes = {8: product}, SIZES
        self._num_multiprocessors = num_programs
        self.num_programs = num_programs
        self.key = KernelKey(torch.device("cpu"), torch.float32, D, GROUPS, E, D // E + 1)
        self._all_valid = torch.ones(1, dtype=torch.uint8)

    plan = staticmethod(plan_tiles)
    product_rows = DecodeKernels.product_rows
    rope_append, add_norm, silu_mul, product = (
        DecodeKernels.rope_append,
        DecodeKernels.add_norm,
        DecodeKernels.silu_mul,
        DecodeKernels.product,
    )

    def append(self, keys, values, store, lengths, valid, sink_size, num_slots):
        valid = torch.ones(len(lengths), dtype=torch.uint8) if valid is None else valid.view(torch.uint8)
        self.compiled[2](
            keys[:, :, 0], values[:, :, 0], *store.map_memory(_not_empty), lengths, valid,
            sink_size, num_slots - sink_size,
        )  # fmt: skip

    def attend(self, query, store, lengths, pruned_lengths, plan, *, sink_size, num_slots, softmax_scale):
        parts = torch.full((self.num_programs, 2, SHAPE.num_queries, D), torch.nan)
        lse = torch.full((self.num_programs, 2, SHAPE.num_queries), torch.nan)
        output = torch.full_like(query[:, :, 0], torch.nan)
        self.compiled[0](
            query[:, :, 0], *store.map_memory(_not_empty), lengths, pruned_lengths, plan, parts, lse, output,
            sink_size, num_slots - sink_size, softmax_scale * 1.4426950408889634,
        )  # fmt: skip
        self.compiled[1](store.head_table, plan, parts, lse, output)
        return output[:, :, None]


@pytest.fixture(autouse=True)
def no_device_to_choose(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    functions = (
        generic_attention(SHAPE, cpu=True),
        merge_parts(SHAPE, cpu=True),
        append_tokens(SHAPE, cpu=True),
        rope_append(SHAPE, cpu=True),
        add_norm(SHAPE, cpu=True),
        silu_mul(SHAPE, cpu=True),
        product("float32", 8, cpu=True),
    )
    return [tilelang.compile(function, target="c", execution_backend="cython") for function in functions]


def masks(widths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(D, generator=generator) < width for width in widths])


def case_of(widths, rows, seed=0, sink=SINK, slots=SLOTS):
    return make_case(
        masks(widths, seed),
        rows,
        chunk_size=E,
        num_groups=GROUPS,
        sink_size=sink,
        num_slots=slots,
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=seed,
    )


@functools.cache
def torchs_error(scale):
    """The error of dense SDPA in float32, over a row as long as the longest here."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, 8, n, D, generator=generator) for n in (1, 500, 500))
    ours, exact = (
        torch.nn.functional.scaled_dot_product_attention(
            *(tensor.to(dtype) for tensor in (query, key, value)), scale=scale
        )
        for dtype in (torch.float32, torch.float64)
    )
    return float((ours - exact).abs().max())


def check(actual, case, scale=SCALE, rows=slice(None)):
    """Hold a kernel to the reference in float64: at most twice the error that torch makes in float32."""
    error = float((actual - case.expected(scale, torch.float64))[rows].abs().max())
    assert error <= 2 * torchs_error(scale), f"{error:.2e}, twice torch's is {2 * torchs_error(scale):.2e}"


@pytest.mark.parametrize("num_programs", [1, 3, 64])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_append_and_attention_equal_the_reference(widths, num_programs, compiled):
    case = case_of(widths, ROWS)
    actual = run_case(CpuKernels(*compiled, num_programs), case, SCALE)
    check(actual, case)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_alone_gives_what_it_gives_in_a_batch(row, compiled):
    case = case_of((0, 16, 40), [row])
    actual = run_case(CpuKernels(*compiled, 16), case, SCALE)
    check(actual, case)


@pytest.mark.parametrize("sizes", [(8, 2**25), (600, 700), (2**24, 3 * 2**24)], ids=str)
@pytest.mark.parametrize("rows", [[(1, 0), (64, 0), (70, 0)], [(71, 57), (70, 0), (137, 65)]], ids=str)
def test_a_window_that_is_not_whole_yet(sizes, rows, compiled):
    rows = [(length, pruned if sizes[0] == 8 else 0) for length, pruned in rows]
    case = case_of((0, 16, 40), rows, sink=sizes[0], slots=sizes[1])
    actual = run_case(CpuKernels(*compiled, 16), case, SCALE)
    check(actual, case)


def test_the_append_writes_the_new_token_and_nothing_else(compiled):
    case = case_of((0, 16, 40, 64), ROWS)
    store = case.store.map_memory(torch.clone)
    kernels = CpuKernels(*compiled, 1)
    kernels.append(
        case.keys, case.values, store, case.lengths, torch.zeros(len(ROWS), dtype=torch.bool), SINK, SLOTS
    )
    for tensor, before in zip(store, case.store, strict=True):
        assert torch.equal(tensor.nan_to_num(9e9), before.nan_to_num(9e9))
    kernels.append(case.keys, case.values, store, case.lengths, None, SINK, SLOTS)
    for tensor, expected in zip(store, case.appended(), strict=True):
        assert torch.equal(tensor.nan_to_num(9e9), expected.nan_to_num(9e9))


def test_a_row_without_tokens_gets_zeros_and_disturbs_no_other(compiled):
    case = case_of((0, 16, 40), [(70, 0), (0, 0), (500, 413), (0, 0)])
    actual = run_case(CpuKernels(*compiled, 5), case, SCALE)
    assert (actual[[1, 3]] == 0).all()
    check(actual, case, rows=[0, 2])


def test_a_huge_and_a_tiny_logit_do_not_overflow(compiled):
    case = case_of((0, 16, 40), [(300, 213)])
    actual = run_case(CpuKernels(*compiled, 7), case, 300.0)
    check(actual, case, 300.0)


def test_rows_that_keep_channels_of_their_own(compiled):
    case = case_of((0, 16, 40), ROWS)
    orders = [order_channels(masks((0, 16, 40), seed)) for seed in range(len(ROWS))]
    case = replace(case, store=case.store._replace(chunk_index=case.layout.chunk_index(torch.stack(orders))))
    rows = [
        replace(
            case,
            query=case.query[row : row + 1],
            keys=case.keys[row : row + 1],
            values=case.values[row : row + 1],
            store=StoreTensors(*(tensor[row : row + 1] for tensor in case.store[:5]), case.store.head_table),
            lengths=case.lengths[row : row + 1],
            pruned_lengths=case.pruned_lengths[row : row + 1],
        )
        for row in range(len(ROWS))
    ]
    actual = run_case(CpuKernels(*compiled, 16), case, SCALE)
    for row, alone in enumerate(rows):
        check(actual[row : row + 1], alone)


def test_the_check_on_first_use_is_exact_whatever_the_caller_has_switched_on(compiled):
    kernels = CpuKernels(*compiled, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert disagreement(kernels) < 1e-5
    kernels.compiled = (*compiled[:1], lambda *args: None, compiled[2])
    assert not disagreement(kernels) < 1e-2


@pytest.mark.parametrize("name", ["_rope_append", "_add_norm", "_silu_mul", "_products"])
def test_the_check_on_first_use_notices_every_kernel(name, compiled):
    kernels = CpuKernels(*compiled, 4)
    nothing = lambda *args: None  # noqa: E731
    setattr(kernels, name, {8: nothing} if name == "_products" else nothing)
    assert not disagreement(kernels) < 1e-2


def rotated(states, cos, sin):
    across = torch.cat([-states[..., D // 2 :], states[..., : D // 2]], dim=-1)
    return states * cos + across * sin


def normed(states, weight, eps):
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("has_norm", [False, True], ids=["as they are", "normed"])
@pytest.mark.parametrize("positions", ["one for all", "one each"])
@pytest.mark.parametrize("rows", [ROWS, [(500, 413)], [(1, 0), (88, 0), (0, 0)]], ids=len)
def test_rope_append_rotates_and_writes_the_new_token_and_nothing_else(rows, positions, has_norm, compiled):
    case = case_of((0, 16, 40, 64), rows)
    valid = torch.arange(len(rows)) % 3 != 1
    generator = torch.Generator().manual_seed(5)
    cos, sin = torch.randn(2, 1 if positions == "one for all" else len(rows), 1, D, generator=generator)
    weights = torch.randn(2, D, generator=generator)
    projected = torch.cat([case.query, case.keys, case.values], dim=1).view(len(rows), 1, -1)
    store = case.store.map_memory(torch.clone)
    query = CpuKernels(*compiled, 1).rope_append(
        in_parts(projected),
        cos,
        sin,
        (*weights, 0.1) if has_norm else None,
        store,
        case.lengths,
        valid,
        SINK,
        SLOTS,
    )
    expected = [
        rotated(normed(states, weight, 0.1) if has_norm else states, cos[:, None], sin[:, None])
        for states, weight in ((case.query.double(), weights[0]), (case.keys.double(), weights[1]))
    ]
    torch.testing.assert_close(query, expected[0].float())
    appended = replace(case, keys=expected[1].float()).appended()
    for tensor, before, after in zip(store[:4], case.store[:4], appended[:4], strict=True):
        stays = (before == after) | (before.isnan() & after.isnan()) | ~valid[:, None, None, None]
        assert torch.equal(tensor[stays].nan_to_num(9e9), before[stays].nan_to_num(9e9))
        torch.testing.assert_close(tensor[~stays], after[~stays])


@pytest.mark.parametrize("size", [8, 264, 4096, 4104, 16384])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_add_norm(num_rows, size, compiled):
    kernels, generator = CpuKernels(*compiled, 1), torch.Generator().manual_seed(size)
    hidden, delta = torch.randn(2, num_rows, 1, size, generator=generator)
    weight, before = torch.randn(size, generator=generator), hidden.clone()
    summed, ours = kernels.add_norm(hidden, in_parts(delta), weight, 0.1)
    assert torch.equal(summed, hidden + delta)
    torch.testing.assert_close(ours, normed(summed.double(), weight, 0.1).float())
    same, ours = kernels.add_norm(hidden, None, weight, 0.1)
    assert same is hidden and torch.equal(hidden, before)
    torch.testing.assert_close(ours, normed(hidden.double(), weight, 0.1).float())


@pytest.mark.parametrize("size", [8, 1032, 14336])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_silu_mul(num_rows, size, compiled):
    gate_up = torch.randn(num_rows, 1, 2 * size, generator=torch.Generator().manual_seed(size)) * 20
    gate, up = gate_up.double().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(CpuKernels(*compiled, 1).silu_mul(in_parts(gate_up)), expected.float())


@pytest.mark.parametrize("programs", [1, 3, 40])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 8, 8), (8, 200, 1032), (5, 1000, 264), (3, 64, 4104)]
)
def test_a_product_is_whole_however_it_is_cut(rows, outputs, inputs, programs, compiled):
    generator = torch.Generator().manual_seed(inputs)
    states, weight, bias = (
        torch.randn(shape, generator=generator)
        for shape in ((rows, 1, inputs), (outputs, inputs), (outputs,))
    )
    for added in (bias, None):
        product = CpuKernels(*compiled, programs).product(states, weight, added)
        expected = torch.nn.functional.linear(
            states.double(), weight.double(), None if added is None else added.double()
        )
        torch.testing.assert_close(product.outputs(), expected.float(), rtol=1e-4, atol=1e-3)


def test_more_rows_than_a_kernel_takes_are_the_librarys(compiled):
    states, weight = torch.randn(9, 1, 16), torch.randn(8, 16)
    product = CpuKernels(*compiled, 1).product(states, weight)
    assert torch.equal(product.outputs(), torch.nn.functional.linear(states, weight))

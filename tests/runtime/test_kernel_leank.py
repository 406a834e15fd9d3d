"""The kernels on TileLang's CPU target, against the naive reference.

Every shape is compiled, which takes long: the tests on a GPU have other head sizes, groups and pages.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tilelang")

from runtime.fp8_leank import FP8
from runtime.kernel_leank import KernelShape
from runtime.layout_leank import order_channels
from runtime.self_check_leank import disagreement, in_parts
from tests.runtime.cpu_kernels import CpuKernels, TurnKernels
from tests.runtime.decode_cases import make_case, run_case, run_turn
from tests.tiny_families import random_mask

pytestmark = pytest.mark.usefixtures("no_device_to_choose")
D, E, GROUPS, SINK = 64, 32, 2, 8
SCALE = 0.2
# One token, a full sink, tile borders, pruned tokens within a tile, whole tiles of them, at a tile's borders.
ROWS = [
    (1, 0), (8, 0), (9, 0), (64, 0), (65, 0), (88, 0), (72, 63), (73, 56), (137, 65), (500, 413), (333, 248),
    (200, 192),
]  # fmt: skip
# Rows as they are once several tokens are stored: none pruned, one number for all columns, one each.
DRAFT_ROWS = [
    (33, 0), (64, 0), (65, 8), (100, 40), (137, 65), (500, 413), (333, 200, 260), (160, 0, 120),
    (200, 120, 121),
]  # fmt: skip
WIDTHS = [(0, 16, 32, 64), (0, 0, 0), (64, 64), (1, 63, 17), (48,), (5, 0, 64, 20, 16)]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_cpu(num_programs, **change):
    shape = KernelShape(torch.device("cpu"), torch.float32, D, GROUPS, E, D // E + 1, 8, **change)
    return CpuKernels(shape, num_programs)


def case_of(widths, rows, *, sink=SINK, columns=1, **change):
    given = {"chunk_size": E, "num_groups": GROUPS, "dtype": torch.float32, "device": torch.device("cpu")}
    return make_case(
        random_mask([widths], D)[0], rows, sink_size=sink, num_columns=columns, **given, **change
    )


def kernels_for(case, num_programs):
    """So many program instances of the kernels that serve a case."""
    cache_dtype = None if case.store.key_scale is None else FP8
    beside = {"has_sinks": case.sinks is not None, "value_chunk": case.layout.value_chunk}
    return on_cpu(num_programs, cache_dtype=cache_dtype, **beside)


def hold(case, num_programs):
    """Hold what so many program instances store and attend to the rule."""
    kernels = kernels_for(case, num_programs)
    case.check(run_case(kernels, case, SCALE), SCALE)
    assert case.is_appended_by(kernels)


@pytest.mark.parametrize("num_programs", [1, 5])
@pytest.mark.parametrize("widths", [(0, 16, 32, 64), (1, 63, 17)], ids=str)
def test_a_cache_of_fp8_follows_the_rule_with_what_it_holds(widths, num_programs):
    case = case_of(widths, DRAFT_ROWS, cache_dtype=FP8).of_one_checkpoint()
    hold(case, num_programs)


def test_rows_of_fp8_have_scales_of_their_own():
    case = case_of((0, 16, 40, 64), DRAFT_ROWS, page_sizes=(64, 128), cache_dtype=FP8)
    hold(case, 7)


def test_every_number_is_stored_as_torch_stores_it():
    """All numbers of bfloat16, of both signs: ties, numbers below the least, beyond the largest, NaN."""
    numbers = (torch.arange(1 << 16) << 16).to(torch.int32).view(torch.float32).view(-1, 2, 4, D)
    case = case_of((16, 40), [(4, 0)] * len(numbers), columns=4, cache_dtype=FP8)
    case = replace(case, keys=numbers, values=numbers.flip(0))
    assert case.is_appended_by(kernels_for(case, 1))


@pytest.mark.parametrize("num_programs", [1, 5, 64])
def test_attention_sinks_take_their_share_once(num_programs):
    """However many program instances share a head; large ones too."""
    case = case_of((0, 16, 40, 64), DRAFT_ROWS, has_sinks=True, cache_dtype=FP8)
    case = replace(case, sinks=4 * case.sinks)
    hold(case, num_programs)
    expected, without = (each.expected(SCALE) for each in (case, replace(case, sinks=None)))
    assert (expected - without).norm() > 0.1 * without.norm()


@pytest.mark.parametrize(
    ("num_programs", "widths", "columns"),
    [
        *((count, widths, 1) for count in (1, 64) for widths in WIDTHS),
        *((count, widths, 4) for count in (1, 5, 64) for widths in ((0, 0, 0), (1, 63, 17))),
    ],
)
def test_append_and_attention_follow_the_rule(num_programs, widths, columns):
    hold(case_of(widths, ROWS if columns == 1 else DRAFT_ROWS, columns=columns), num_programs)


# Channels of K that heads keep, and of V, in chunks of 32: none, some, all; no K dropped; no V kept.
VALUES = [
    ((0, 16, 32, 64), (0, 0, 32, 64)), ((64, 64, 64), (32, 0, 64)), ((16, 64), (0, 0)), ((0, 0), (0, 0)),
    ((64, 32), (64, 64)),
]  # fmt: skip


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("num_programs", [1, 5, 64])
@pytest.mark.parametrize(("widths", "value_widths"), VALUES, ids=str)
def test_pruned_values_follow_the_rule(widths, value_widths, num_programs, columns):
    rows = ROWS if columns == 1 else DRAFT_ROWS
    case = case_of(widths, rows, columns=columns, value_widths=value_widths, page_sizes=(64, 128))
    hold(case, num_programs)


@pytest.mark.parametrize("sink", [0, 1, 64, 65, 130])
def test_sinks_and_recent_tokens_of_every_size(sink):
    sizes = [(1, 0), (2, 0), (64, 0), (65, 1), (129, 64), (200, 0), (300, 77), (500, 63)]
    rows = [(sink + n, pruned) for n, pruned in sizes] + [(sink + 130, 130)]  # nothing recent
    hold(case_of((0, 16, 40, 64), rows, sink=sink), 16)


def test_padding_among_new_tokens_is_neither_seen_nor_stored():
    generator = torch.Generator().manual_seed(1)
    rows = [(0, 0), (3, 0), *DRAFT_ROWS]
    valid = torch.rand(len(rows), 4, generator=generator) < 0.5
    valid[0], valid[1], valid[2], valid[3] = False, torch.tensor([0, 1, 0, 1]), True, False
    hold(case_of((0, 16, 40), rows, columns=4, valid=valid), 7)


@pytest.mark.parametrize(("page_sizes", "columns"), [((64, 128), 1), ((128, 64), 4)], ids=str)
def test_pages_of_an_engine(page_sizes, columns):
    """Of two sizes, and tables that say nothing where nothing is to be read."""
    case = case_of((0, 16, 40, 64), DRAFT_ROWS, columns=columns, page_sizes=page_sizes)
    store = case.store
    page_table, window_table = store.page_table.clone(), store.window_table.clone()
    page_table[page_table == page_table.max()] = 2**30
    unused = window_table == window_table.max()
    window_table[unused] = torch.where(torch.arange(int(unused.sum())) % 2 == 0, -1, 2**30).int()
    hostile = replace(case, store=store._replace(page_table=page_table, window_table=window_table))
    case.check(run_case(on_cpu(7), hostile, SCALE), SCALE)


def test_a_row_without_tokens_gets_zeros_and_disturbs_no_other():
    case = case_of((0, 16, 40), [(70, 0), (0, 0), (500, 413), (0, 0)])
    actual = run_case(on_cpu(5), case, SCALE)
    assert (actual[[1, 3]] == 0).all()
    case.check(actual, SCALE, rows=[0, 2])


def test_a_huge_and_a_tiny_logit_do_not_overflow():
    case = case_of((0, 16, 40), [(300, 213)])
    case.check(run_case(on_cpu(7), case, 300.0), 300.0)


def test_rows_that_keep_channels_of_their_own():
    case = case_of((0, 16, 40), ROWS)
    orders = [order_channels(random_mask([(0, 16, 40)], D, seed)[0]) for seed in range(len(ROWS))]
    case = replace(case, store=case.store._replace(chunk_index=case.layout.chunk_index(torch.stack(orders))))
    hold(case, 16)


@pytest.mark.parametrize("by_torch", [True, False], ids=["torch attends", "a kernel attends"])
@pytest.mark.parametrize(
    ("widths", "change"),
    [
        ((0, 16, 32, 64), {}),
        ((1, 63, 17), {"cache_dtype": FP8}),
        ((0, 0), {"has_sinks": True}),
        ((0, 32, 64), {"value_widths": (0, 32, 0)}),
    ],
    ids=str,
)
def test_turns(widths, change, by_torch):
    stored = [(0, 0), (1, 0), (70, 0), (200, 192), (300, 262), (300, 262), (500, 413)]
    for columns in (2, 70):
        case = case_of(
            widths, [(columns + held, pruned) for held, pruned in stored], columns=columns, **change
        )
        kernels = kernels_for(case, 1)
        ours = run_turn(kernels if by_torch else TurnKernels(kernels.key), case, SCALE)
        case.check(ours, SCALE)


def test_reading_ahead_of_the_last_kernel_begins_with_the_second_launch_on_a_plan():
    case, kernels = case_of((16, 40), ROWS), on_cpu(4)
    launched = []
    kernels._attention = lambda *arguments: launched.append(arguments[-1])
    plans = [kernels.plan(case.seen, case.pruned, SINK) for _ in range(2)]
    for plan in (plans[0], plans[0], plans[1], plans[1]):
        kernels.attend(
            case.query, case.store, case.seen, case.pruned, plan, sink_size=SINK, softmax_scale=SCALE
        )
    assert launched == [0, 1, 0, 1]


@pytest.mark.parametrize("value_chunk", [0, 32])
@pytest.mark.parametrize("cache_dtype", [None, FP8], ids=["as they come", "fp8"])
def test_the_check_on_first_use_is_exact_whatever_the_caller_has_switched_on(cache_dtype, value_chunk):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        assert disagreement(on_cpu(4, cache_dtype=cache_dtype, value_chunk=value_chunk)) < 1e-5


@pytest.mark.parametrize(
    "name",
    [
        *("_merge", "_append", "_attend_turn", "_rope_append", "_add_norm", "_silu_mul", "_copy_rows"),
        *("products", "gated_products"),
    ],
)
def test_the_check_on_first_use_notices_every_kernel(name):
    kernels = TurnKernels(on_cpu(4).key) if name == "_attend_turn" else on_cpu(4)
    assert disagreement(kernels) < 1e-5
    nothing = lambda *args: None  # noqa: E731
    made = getattr(kernels, name)
    setattr(kernels, name, dict.fromkeys(made, nothing) if isinstance(made, dict) else nothing)
    assert not disagreement(kernels) < 1e-2


def rotated(states, cos, sin):
    across = torch.cat([-states[..., D // 2 :], states[..., : D // 2]], dim=-1)
    return states * cos + across * sin


def normed(states, weight, eps):
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("has_norm", [False, True], ids=["as they are", "normed"])
@pytest.mark.parametrize(("positions", "columns"), [("one for all", 1), ("one each", 3)])
@pytest.mark.parametrize("rows", [ROWS, [(1, 0), (88, 0), (0, 0)]], ids=len)
def test_rope_append_rotates_and_writes_new_tokens_and_nothing_else(rows, columns, positions, has_norm):
    case = case_of((0, 16, 40, 64), rows, columns=columns)
    valid = (torch.arange(len(rows) * columns) % 3 != 1).view(-1, columns)
    generator = torch.Generator().manual_seed(5)
    cos, sin = torch.randn(2, 1 if positions == "one for all" else len(rows), columns, D, generator=generator)
    weights = torch.randn(2, D, generator=generator)
    projected = (
        torch.cat([case.query, case.keys, case.values], dim=1).transpose(1, 2).flatten(2).flatten(0, 1)
    )
    store = case.store.map_memory(torch.clone)
    query = on_cpu(1).rope_append(
        in_parts(projected), cos, sin, (*weights, 0.1) if has_norm else None, store, case.seen, valid
    )
    expected = [
        rotated(normed(states, weight, 0.1) if has_norm else states, cos[:, None], sin[:, None])
        for states, weight in ((case.query.double(), weights[0]), (case.keys.double(), weights[1]))
    ]
    torch.testing.assert_close(query, expected[0].float())
    appended = replace(case, keys=expected[1].float(), valid=valid).appended()
    for tensor, before, after in zip(store[:4], case.store[:4], appended[:4], strict=True):
        stays = (before == after) | (before.isnan() & after.isnan())
        assert torch.equal(tensor[stays].nan_to_num(9e9), before[stays].nan_to_num(9e9))
        torch.testing.assert_close(tensor[~stays], after[~stays])


@pytest.mark.parametrize(("num_rows", "size"), [(3, 8), (1, 264), (3, 4104)])
def test_add_norm(num_rows, size):
    kernels, generator = on_cpu(1), torch.Generator().manual_seed(size)
    hidden, delta = torch.randn(2, num_rows, size, generator=generator)
    weight, before = torch.randn(size, generator=generator), hidden.clone()
    summed, ours = kernels.add_norm(hidden, in_parts(delta), weight, 0.1)
    assert torch.equal(summed, hidden + delta)
    torch.testing.assert_close(ours, normed(summed.double(), weight, 0.1).float())
    same, ours = kernels.add_norm(hidden, None, weight, 0.1)
    assert same is hidden and torch.equal(hidden, before)
    torch.testing.assert_close(ours, normed(hidden.double(), weight, 0.1).float())


@pytest.mark.parametrize(("num_rows", "size"), [(1, 8), (3, 1032)])
def test_silu_mul(num_rows, size):
    gate_up = torch.randn(num_rows, 2 * size, generator=torch.Generator().manual_seed(size)) * 20
    gate, up = gate_up.double().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(on_cpu(1).silu_mul(in_parts(gate_up)), expected.float())


@pytest.mark.parametrize("programs", [1, 3, 40])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 8, 8), (8, 200, 1032), (3, 64, 4104)])
def test_a_product_is_whole_however_it_is_cut(rows, outputs, inputs, programs):
    generator = torch.Generator().manual_seed(inputs)
    shapes = (rows, inputs), (outputs, inputs), (outputs,)
    states, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    for added in (bias, None):
        product = on_cpu(programs).product(states, weight, added)
        expected = torch.nn.functional.linear(
            states.double(), weight.double(), None if added is None else added.double()
        )
        torch.testing.assert_close(product.outputs(), expected.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("programs", [1, 2, 4, 5])  # of 3 or 4 blocks
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 136, 8), (8, 200, 1032)])
def test_a_gated_product_is_that_of_two_modules(rows, outputs, inputs, biased, programs, monkeypatch):
    generator = torch.Generator().manual_seed(inputs)
    shapes = (rows, inputs), (2 * outputs, inputs), (2 * outputs,)
    states, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    kernels = on_cpu(programs)
    fits = programs <= -(-outputs // 64) <= 2 * programs
    if fits and not biased:
        monkeypatch.setattr(kernels, "_silu_mul", None)
    ours = kernels.gated_product(states, weight, bias if biased else None)
    both = torch.nn.functional.linear(states.double(), weight.double(), bias.double() if biased else None)
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(ours, (torch.nn.functional.silu(gate) * up).float(), rtol=1e-4, atol=1e-3)


def test_more_rows_than_a_kernel_takes_are_the_librarys():
    states, weight = torch.randn(17, 16), torch.randn(8, 16)
    product = on_cpu(1).product(states, weight)
    assert torch.equal(product.outputs(), torch.nn.functional.linear(states, weight))

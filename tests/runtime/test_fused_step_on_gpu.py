"""The fused step on a CUDA device: its kernels against the stock classes, whole steps, what it costs."""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from runtime.find_kernels_leank import find_kernels
from runtime.self_check_leank import in_parts
from tests.runtime.conftest import FUSED, fused_model
from tests.runtime.decode_cases import make_case
from tests.runtime.on_gpu import MASK_WIDTHS, ids, padded
from tests.runtime.tiny_inputs import feed_turns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("tilelang") is None, reason="kernels are compiled by tilelang"),
]

DTYPES = [torch.bfloat16, torch.float16]


def build(family="Llama", dtype=torch.bfloat16, layers=1, **config):
    return fused_model(MASK_WIDTHS * layers, family, head_dim=64, **config).to("cuda", dtype)


def kernels_of(dtype):
    shape = {"head_dim": 128, "num_groups": 4, "chunk_size": 32, "max_chunks": 4}
    found = find_kernels(torch.device("cuda", 0), dtype, **shape)
    assert found is not None
    return found


def random(*shape, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def assert_rounds_alike(ours, stock, share):
    """At most this share of the numbers are rounded otherwise: before the last product, and after it."""
    differ = ours != stock
    assert differ.float().mean() <= share
    tiny = torch.finfo(ours.dtype).tiny
    step = 2 * torch.finfo(ours.dtype).eps * stock.abs().float() + tiny
    assert ((ours.float() - stock.float()).abs() <= step).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2048, 3584, 4096, 5120, 8192, 16384])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_add_norm_rounds_as_the_stock_class(rows, size, dtype):
    kernels, norm = kernels_of(dtype), LlamaRMSNorm(size, 1e-5).to("cuda", dtype)
    torch.nn.init.normal_(norm.weight, 1.0)
    hidden, delta = random(2, rows, size, dtype=dtype)
    with torch.no_grad():
        summed, normed = kernels.add_norm(hidden, in_parts(delta), norm.weight, 1e-5)
        assert torch.equal(summed, hidden + delta)
        assert_rounds_alike(normed, norm(hidden + delta), 0.01)
        assert_rounds_alike(kernels.add_norm(hidden, None, norm.weight, 1e-5)[1], norm(hidden), 0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 1032, 14336, 18944])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_silu_mul_rounds_as_torch(rows, size, dtype):
    gate_up = random(rows, 2 * size, dtype=dtype) * 4
    gate, up = gate_up.chunk(2, -1)
    assert_rounds_alike(kernels_of(dtype).silu_mul(in_parts(gate_up)), functional.silu(gate) * up, 0.001)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (3584, 18944), (8, 1032)])
@pytest.mark.parametrize("rows", [1, 3, 16, 31, 64])
def test_a_product_is_as_exact_as_torchs(rows, outputs, inputs, dtype):
    states = random(rows, inputs, dtype=dtype)
    weight, bias = random(outputs, inputs, dtype=dtype, seed=1), random(outputs, dtype=dtype, seed=2)
    expected = functional.linear(states.double(), weight.double(), bias.double())
    found = (
        kernels_of(dtype).product(states, weight, bias).outputs().to(dtype),
        functional.linear(states, weight, bias),
    )
    ours, torchs = ((each.double() - expected).norm() / expected.norm() for each in found)
    assert ours <= 1.1 * torchs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(14336, 4096), (1000, 520), (18944, 3584)])
@pytest.mark.parametrize("rows", [1, 8, 16, 31, 64])
def test_a_gated_product_is_as_exact_as_torchs(rows, outputs, inputs, dtype, monkeypatch):
    kernels = kernels_of(dtype)
    if outputs == 14336 and rows != 16 and torch.cuda.get_device_capability() == (9, 0):
        monkeypatch.setattr(kernels, "_silu_mul", None)  # one kernel is enough
    states, weight = random(rows, inputs, dtype=dtype), random(2 * outputs, inputs, dtype=dtype, seed=1)

    def by_torch(states, weight):
        gate, up = functional.linear(states, weight).chunk(2, -1)
        return functional.silu(gate) * up

    weight /= inputs**0.5
    expected = by_torch(states.double(), weight.double())
    found = kernels.gated_product(states, weight), by_torch(states, weight)
    ours, torchs = ((each.double() - expected).norm() / expected.norm() for each in found)
    assert ours <= 1.1 * torchs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True], ids=["as they are", "normed"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 1), (64, 1), (3, 8)])
def test_rope_append_rounds_as_the_stock_classes(rows, columns, has_norm, dtype):
    lengths = [(1, 0), (88, 0), (500, 413), (73, 64)] * 16
    mask = torch.arange(128) < torch.tensor([0, 32, 96, 128])[:, None]
    case = make_case(
        mask, lengths[:rows], chunk_size=32, num_groups=4, sink_size=8, dtype=dtype,
        device=torch.device("cuda", 0), num_columns=columns,
    )  # fmt: skip
    kernels, norm = kernels_of(dtype), LlamaRMSNorm(128, 1e-6).to("cuda", dtype)
    torch.nn.init.normal_(norm.weight, 1.0)
    angle = random(rows, columns, 64, dtype=torch.float32).repeat(1, 1, 2) * 9
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    projected = torch.cat([case.query, case.keys, case.values], 1).transpose(1, 2).flatten(2).flatten(0, 1)
    appended, plain = case.store.map_memory(torch.clone), case.store.map_memory(torch.clone)
    with torch.no_grad():
        norms = (norm.weight, norm.weight, 1e-6) if has_norm else None
        ours = kernels.rope_append(in_parts(projected), cos, sin, norms, appended, case.seen, None)
        states = (norm(case.query), norm(case.keys)) if has_norm else (case.query, case.keys)
        query, keys = apply_rotary_pos_emb(*states, cos, sin)
        kernels.append(keys.contiguous(), case.values, plain, case.seen, None)
    # A norm that is rounded otherwise may change more than the last place after a sum.
    if has_norm:
        assert ((ours - query).float().norm() / query.float().norm()) < torch.finfo(dtype).eps / 4
    else:
        assert torch.equal(ours, query)
    for held, expected in zip(appended[:4], plain[:4], strict=True):
        held, expected = (tensor.float().nan_to_num(9e4) for tensor in (held, expected))
        assert (held - expected).norm() <= (torch.finfo(dtype).eps / 4 if has_norm else 0) * expected.norm()


def decode(model, cache, steps, mask=None, prompt=50, rows=3):
    """Logits of all decode steps `[B, steps, vocabulary]`."""
    turns = [prompt, *[1] * steps]
    return feed_turns(model, cache, turns, mask, tokens=ids(rows, prompt + steps, 3))[:, prompt:]


@pytest.mark.parametrize("is_padded", [False, True], ids=["one length", "padded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FUSED)
def test_replayed_steps_are_as_exact_as_stock_steps(family, dtype, is_padded):
    model, steps = build(family, dtype), 120
    mask = padded(50 + steps, 60) if is_padded else None
    real = slice(None) if mask is None else mask[:, 50:].bool()
    exact = copy.deepcopy(model).double()
    caches = model.build_cache(), model.build_cache(use_graphs=False), exact.build_cache()
    ours, stock, expected = (
        decode(each, cache, steps, mask)[real].double()
        for each, cache in zip((model, model, exact), caches, strict=True)
    )
    assert caches[0].graph.is_fused and caches[0].graph.num_replays >= steps - 8
    errors = [float((logits - expected).norm() / expected.norm()) for logits in (ours, stock)]
    assert errors[0] <= 2 * errors[1], errors
    # The same token wherever the two best are further apart than the stock step's own error.
    best, second = expected.topk(2).values.unbind(-1)
    clear = best - second > 4 * (stock - expected).abs().amax(-1)
    assert clear.float().mean() > 0.2
    assert torch.equal(ours.argmax(-1)[clear], stock.argmax(-1)[clear])


def test_a_fused_step_is_few_kernels():
    layers = 16
    model = build(layers=layers // 2)
    cache = model.build_cache()
    cache.reserve(200)
    decode(model, cache, 8)
    token = ids(3, 1)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.no_grad(), torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        model(token, cache=cache)
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    for name, count in (("rope_append", layers), ("add_norm", 2 * layers + 1), ("silu_mul", layers)):
        assert sum(f"leank_{name}" in event for event in names) == count
    # Four kernels of ours, attention and merge; cuBLAS splits products of so small a model in several.
    assert len(names) <= 20 * layers + 80, sorted(names)


def test_nothing_is_compiled_again_for_another_batch_length_or_size(monkeypatch):
    tilelang = pytest.importorskip("tilelang")
    decode(*(lambda model: (model, model.build_cache()))(build()), 4)
    compiled = []
    monkeypatch.setattr(tilelang, "compile", lambda *args, **kwargs: compiled.append(args))
    for rows, prompt, sizes in ((1, 20, {}), (40, 70, {}), (7, 33, {"intermediate_size": 1000})):
        model = build(**sizes)
        cache = model.build_cache()
        decode(model, cache, 4, prompt=prompt, rows=rows)
        assert cache.graph.is_fused and cache.graph.num_replays >= 2
    assert not compiled


def test_fused_weights_are_held_once():
    model = build(layers=4, hidden_size=1536, intermediate_size=8192)
    before = torch.cuda.memory_allocated()
    cache = model.build_cache()
    with torch.no_grad():
        model(ids(1, 20), cache=cache)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(ids(1, 1), cache=cache)
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    assert cache.graph.is_fused
    assert torch.cuda.max_memory_allocated() < held + layer + 2**22
    del cache
    assert torch.cuda.memory_allocated() < before + 2**22
    state, weights = model.state_dict(), dict(model.named_parameters())
    storages = [tensor.untyped_storage() for tensor in state.values()]
    assert len({(storage.data_ptr(), storage.nbytes()) for storage in storages}) == len(state)
    assert all(state[name].data_ptr() == weight.data_ptr() for name, weight in weights.items())
    assert all(torch.equal(state[name], weight) for name, weight in weights.items())
    assert torch.cuda.memory_allocated() < before + 2**22

"""The split attention against a re-statement that splits, folds and packs nothing."""

import itertools

import pytest
import torch

from leank_convert.train import fused
from leank_convert.train.packing import pack_sample
from leank_convert.train.split_attention import StoredContext, Student, plan_regions, split_attention
from leank_convert.windows import Windows
from tests.leank_convert.train.conftest import draw_sample


def naive_attention(query, key, value, factors, of_values, sees_middle, windows, scaling):
    """One question: K and V are scaled, not queries, and repeated to all heads; tensors are [.., N, S] whole.

    Of values there are a basis and factors of its directions, or nothing.
    """
    groups = query.shape[1] // key.shape[1]
    left = value
    if of_values:
        basis, gates = (part.to(value.dtype) for part in of_values)
        left = ((value @ basis * gates[:, None]) @ basis.mT).repeat_interleave(groups, dim=1)
    num_queries, num_tokens = query.shape[2], key.shape[2]
    p = torch.arange(num_tokens - num_queries, num_tokens)[:, None]
    j = torch.arange(num_tokens)[None]
    key, value, factors = (t.repeat_interleave(groups, dim=-3) for t in (key, value, factors[:, None]))
    logits = scaling * query @ key.mT
    if windows is not None:
        middle = scaling * query @ (key * factors.to(key.dtype)).mT
        hidden = ~sees_middle.repeat_interleave(groups)
        middle = middle.masked_fill(hidden[:, None, None], float("-inf"))
        full = (j < windows.sink_size) | (j >= p - windows.recent_size)
        logits = torch.where(full, logits, middle)
    weights = logits.masked_fill(j > p, float("-inf")).softmax(-1)
    output = weights @ value if not of_values else (weights * full) @ value + (weights * ~full) @ left
    return output.transpose(1, 2)


class Case:
    """A context of P tokens and questions on it, each (question tokens, answer tokens), of random numbers."""

    def __init__(self, num_context, questions, *, kv_heads=2, groups=3, head_dim=8, dtype=torch.float64):
        self.generator = torch.Generator().manual_seed(0)
        self.num_context, self.questions, self.dtype = num_context, questions, dtype
        self.kv_heads, self.head_dim = kv_heads, head_dim
        total = num_context + sum(asked + answered for asked, answered in questions)
        self.key = self.normal(kv_heads, total)
        self.value = self.normal(kv_heads, total)
        num_answers = sum(answered for _, answered in questions)
        self.query = self.normal(kv_heads * groups, num_answers)
        self.factors = torch.rand(kv_heads, head_dim, dtype=dtype, generator=self.generator)
        directions = torch.randn(kv_heads, head_dim, head_dim, dtype=dtype, generator=self.generator)
        gates = torch.rand(kv_heads, head_dim, dtype=dtype, generator=self.generator)
        self.of_values = torch.linalg.qr(directions).Q, gates.masked_fill_(gates < 0.3, 0)
        self.packed = pack_sample(draw_sample(num_context, questions))
        self.owners = self.packed.owners

    def normal(self, heads, length):
        shape = (1, heads, length, self.head_dim)
        return torch.randn(shape, dtype=self.dtype, generator=self.generator)

    def tensors(self):
        return self.query, self.key, self.value, self.factors

    def split(self, windows, sees=(True, True), scaling=0.3, tensors=None, offload=False):
        query, key, value, factors, *of_values = tensors or self.tensors()
        p = self.num_context
        context = StoredContext(p, offload)
        context.store(0, key[:, :, :p], value[:, :, :p])
        regions = plan_regions(self.packed, query.shape[2], windows, query.device)
        student = windows and Student(windows, factors, torch.as_tensor(sees), None, *of_values)
        own = key[:, :, p:], value[:, :, p:]
        return split_attention(query, *own, lambda: context.load(0), regions, scaling, student)

    def naive(self, windows, sees=(True, True), scaling=0.3, tensors=None):
        """Each question by itself behind the context."""
        query, key, value, factors, *of_values = tensors or self.tensors()
        outputs, row = [], 0
        for owner, (_, answered) in enumerate(self.questions):
            own = self.num_context + (self.owners == owner).nonzero()[:, 0].to(key.device)
            places = torch.cat([torch.arange(self.num_context, device=key.device), own])
            rows = query[:, :, row : row + answered]
            states = rows, key[:, :, places], value[:, :, places], factors
            outputs.append(naive_attention(*states, of_values, torch.as_tensor(sees), windows, scaling))
            row += answered
        return torch.cat(outputs, dim=1)


@pytest.fixture(autouse=True)
def _few_scores(monkeypatch):
    """Even a small middle takes several blocks of keys."""
    monkeypatch.setattr(fused, "_MAX_SCORES", 200)


PACKS = [
    (30, [(0, 1)]),  # a one-token answer
    (1, [(0, 1)]),
    (23, [(0, 11)]),
    (12, [(0, 12)]),
    (3, [(0, 20)]),
    (25, [(4, 6), (9, 2), (1, 5)]),
    (40, [(3, 7), (30, 1)]),  # a question longer than the recent window
]
WINDOWS = [*itertools.starmap(Windows, itertools.product((0, 1, 5, 40), (0, 1, 7, 40)))]


@pytest.mark.parametrize(("num_context", "questions"), PACKS)
@pytest.mark.parametrize(("groups", "kv_heads"), [(3, 2), (1, 3), (4, 1)])
def test_outputs_and_gradients_are_those_of_naive_attention_whatever_the_regions(
    num_context, questions, groups, kv_heads
):
    """Keys and values of the context have no gradients: it is dense, and stored."""
    case = Case(num_context, questions, groups=groups, kv_heads=kv_heads)
    torch.testing.assert_close(case.split(None), case.naive(None), rtol=1e-12, atol=1e-12)
    is_own = torch.arange(case.key.shape[2]) >= num_context
    heads_that_see = [torch.arange(kv_heads) % 2 >= n for n in (0, 1)]
    for windows, sees, of_values in itertools.product(WINDOWS, heads_that_see, [(), case.of_values]):
        outputs, gradients = [], []
        for function in (case.split, case.naive):
            tensors = [t.clone().requires_grad_() for t in (*case.tensors(), *of_values)]
            output = function(windows, sees, tensors=tensors)
            (output * torch.arange(output.numel()).view_as(output).sin()).sum().backward()
            query, key, value, factors, *_ = (tensor.grad for tensor in tensors)
            own = [part * is_own[:, None] for part in (key, value)]
            gates = [tensor.grad for tensor in tensors[5:]]
            outputs.append(output)
            gradients.append([query, *own, factors, *gates])
        torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
        for ours, naive in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, naive, rtol=1e-10, atol=1e-10)


def test_low_precision_inputs_are_attended_in_float32():
    case = Case(200, [(0, 4)], head_dim=64, dtype=torch.float32)
    query, key, value, factors = case.tensors()
    low = [t.bfloat16() for t in (query, key, value)]
    windows = Windows(4, 16)
    result = case.split(windows, scaling=0.125, tensors=(*low, torch.ones_like(factors)))
    exact = case.naive(windows, scaling=0.125, tensors=(*(t.float() for t in low), torch.ones_like(factors)))
    assert result.dtype == torch.bfloat16
    # Nothing is rounded but the result.
    torch.testing.assert_close(result, exact.bfloat16(), rtol=2**-7, atol=1e-6)


def test_no_tensor_has_a_score_for_every_key():
    """What autograd keeps is of the size of queries and outputs, whatever the context's length."""
    kept = []

    def note(tensor):
        kept.append(tensor.numel())
        return tensor

    sizes = []
    for num_context in (400, 4000):
        case = Case(num_context, [(2, 3)])
        tensors = [t.requires_grad_(i != 1 and i != 2) for i, t in enumerate(case.tensors())]
        tensors += [case.of_values[0], case.of_values[1].requires_grad_()]
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            case.split(Windows(4, 16), tensors=tensors)
        sizes.append(sum(kept))
    assert sizes[0] == sizes[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cudnn", "flash", None])
@pytest.mark.parametrize(("kv_heads", "groups"), [(2, 1), (2, 4)])
@pytest.mark.parametrize(("head_dim", "prunes"), [(64, [False]), (128, [False, True])])
def test_fused_kernels_are_as_exact_as_plain_torch_in_their_dtype(
    kernel, kv_heads, groups, head_dim, prunes, monkeypatch
):
    """Output and gradients in bfloat16 against float64, held to a naive attention's own bfloat16 error."""
    case = Case(3000, [(7, 20), (11, 40)], kv_heads=kv_heads, groups=groups, head_dim=head_dim)
    found = fused.fused_kernel
    if kernel == "cudnn":
        low = torch.zeros(1, 2, 64, head_dim, device="cuda", dtype=torch.bfloat16)
        assert found(low, low, low) == "cudnn"
    else:
        monkeypatch.setattr(fused, "fused_kernel", lambda *given, **options: kernel)
    windows, sees = Windows(16, 64), torch.tensor([True] + [False] * (kv_heads - 1)).cuda()
    scaling = head_dim**-0.5
    weights = case.normal(60, kv_heads * groups).cuda()

    def run(function, dtype, prunes_values):
        query, key, value, *learned, basis = (t.cuda() for t in (*case.tensors(), *case.of_values[::-1]))
        query, single = query.to(dtype).requires_grad_(), torch.promote_types(dtype, torch.float32)
        factors, gates = (part.to(single).requires_grad_() for part in learned)
        of_values = (basis.to(single), gates) if prunes_values else ()
        states = query, key.to(dtype), value.to(dtype), factors
        output = function(windows, sees, scaling, (*states, *of_values))
        (output.double() * weights).sum().backward()
        gradients = [part.grad.double() for part in (query, factors, gates) if part.grad is not None]
        return output.double(), *gradients

    def naive(windows, sees, scaling, tensors):
        with torch.device("cuda"):
            return case.naive(windows, sees, scaling, tensors)

    for prunes_values in prunes:
        exact = run(naive, torch.float64, prunes_values)
        own = run(naive, torch.bfloat16, prunes_values)
        ours = run(case.split, torch.bfloat16, prunes_values)
        for result, torchs, right in zip(ours, own, exact, strict=True):
            error, own_error = ((t - right).norm() / right.norm() for t in (result, torchs))
            assert error <= 2 * own_error

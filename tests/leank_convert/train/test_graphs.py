"""Steps launched as CUDA graphs against the same steps run as they are written."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from leank_convert.data import SampleSource
from leank_convert.methods.make import train_masks
from leank_convert.recipe_file import load_recipe
from leank_convert.train import graphs
from leank_convert.train.graphs import Gradients
from leank_convert.train.log import read_log
from leank_convert.train.model import find_model, load_model
from leank_convert.train.passes import Student
from leank_convert.train.scaling import initial_scaling_factors, straight_through
from leank_convert.windows import Windows

_SETTINGS = """
model: {id: testbed, dtype: float32}
windows: {sink_size: 16, recent_size: 64, flush_size: 16}
width_multiple: 16
pruning_ratio: [0.5, 0.7]
held_out_samples: 0
data: {wording: testbed, min_length: 300, max_length: 900, questions_per_context: 3}
stage1: {steps: 24, learning_rate: 0.05}
stage2: {steps: 12, learning_rate: 0.02, validation_contexts: 2}
"""


class Rerun:
    """Stands in for a graph where there is no GPU: runs its function again, on what lies in its place now."""

    def __init__(self, function):
        self._function = function

    def launch(self):
        return self._function()


@pytest.fixture
def mixed_folder(tmp_path, testbed_tokenizer):
    """A model of random weights that speaks the testbed's language; half of its layers have a window."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=len(testbed_tokenizer),
        max_position_embeddings=1024,
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_sliding_window=True,
        sliding_window=30,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "mixed")
    testbed_tokenizer.save_pretrained(tmp_path / "mixed")
    return tmp_path / "mixed"


@pytest.mark.parametrize("captures_context", [True, False])
@pytest.mark.parametrize("folder", ["retriever_folder", "mixed_folder"])
def test_what_is_recorded_serves_all_samples_and_students_of_its_size(
    folder, captures_context, short_recipe, request, monkeypatch
):
    recipe = short_recipe()
    files = find_model(request.getfixturevalue(folder), recipe)
    loaded = load_model(files, recipe, torch.device("cpu"))
    longest = recipe.data.max_length
    source = SampleSource(loaded.tokenizer, recipe.data, recipe.seed)
    written, captured = (Gradients(loaded.model, loaded.facts, longest) for _ in range(2))
    captured.captures, captured._captures_context = True, captures_context
    recorded = []
    monkeypatch.setattr(captured, "_capture", lambda function: recorded.append(1) or Rerun(function))
    generator = torch.Generator().manual_seed(0)
    written.key_mean = captured.key_mean = torch.randn(loaded.facts.mask_shape, generator=generator)
    factors = initial_scaling_factors(loaded.facts, torch.device("cpu"))
    num_losses = 0
    for index in range(24):
        sample = source.draw(index)
        with torch.no_grad():
            factors.copy_(torch.rand(factors.shape, generator=generator))
        kept = factors.detach() > 0.6
        kept[0, index % kept.shape[1]] = False
        student = {
            0: lambda: Student(Windows(4, 16), factors),
            1: lambda kept=kept: Student(Windows(4, 16), straight_through(factors, kept), kept.any(-1)),
            2: lambda: Student(Windows(4, 16), torch.ones_like(factors), gates=factors[..., 0]),
        }[index % 3]
        found = []
        for gradients in (captured, written):
            factors.grad = None
            if index % 5 == 4:
                found.append((gradients.loss(sample, student()).clone(), torch.zeros(())))
                assert factors.grad is None
                num_losses += 1
            else:
                found.append((gradients.add(sample, student(), 0.5).clone(), factors.grad))
        # Padding orders sums otherwise.
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4 * found[1][1].abs().max().item())
    assert num_losses and 2 <= len(recorded) <= 12


def test_graphs_are_bounded_and_a_context_that_overflowed_leaves_nothing(
    short_recipe, retriever_folder, monkeypatch
):
    recipe = short_recipe()
    loaded = load_model(find_model(retriever_folder, recipe), recipe, torch.device("cpu"))
    source = SampleSource(loaded.tokenizer, recipe.data, recipe.seed)
    samples = sorted((source.draw(index) for index in range(12)), key=lambda sample: len(sample.prefix_ids))
    gradients, plain = (Gradients(loaded.model, loaded.facts, recipe.data.max_length) for _ in range(2))
    gradients.captures = True
    monkeypatch.setattr(gradients, "_capture", Rerun)
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 1)
    student = Student(Windows(4, 16), initial_scaling_factors(loaded.facts, torch.device("cpu")))
    gradients.add(samples[-1], student, 1.0)
    for pair in gradients._room._pairs.values():
        for kept in pair:
            kept.fill_(float("nan"))
    for sample in (samples[0], samples[-1]) * 3:
        gradients.add(sample, student, 1.0)
        torch.testing.assert_close(gradients.loss(sample, student), plain.loss(sample, student))
        assert len(gradients._answers) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("testbed", "leank"),
        ("testbed", "duo-attention"),
        ("testbed", "duo-attention+leank"),
        ("mixed", "leank"),
    ],
)
def test_captured_steps_learn_what_steps_as_written_learn(model, method, mixed_folder, tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(_SETTINGS)
    recipe = load_recipe(tmp_path / "recipe.yaml", [f"method={method}", "heads.steps=24"])
    launches, launch = [], graphs._Graph.launch
    monkeypatch.setattr(graphs._Graph, "launch", lambda *given: launches.append(1) or launch(*given))
    masks, logs = [], []
    for folder in ("captured", "context as written", "written"):
        if folder != "captured":
            monkeypatch.setattr(graphs, "is_bound_by_host", lambda *_: False)
        if folder == "written":
            monkeypatch.setattr(graphs, "rotates_by_length", lambda *_: True)
        launches.clear()
        source = mixed_folder if model == "mixed" else model
        masks.append(train_masks(source, tmp_path / folder, recipe=recipe, device="cuda", progress=False))
        logs.append(read_log(tmp_path / folder / "leank" / "log.jsonl"))
        assert (len(launches) > 10) == (folder != "written")
    *ours, written = logs
    for log, made in zip(ours, masks, strict=False):
        # The first steps differ by rounding alone; what follows from them may drift.
        for step, own in list(zip(log, written, strict=True))[:12]:
            assert step.distillation == pytest.approx(own.distillation, rel=2e-3, abs=1e-9), step.step
            assert step.mean_factor == pytest.approx(own.mean_factor, rel=1e-3)
        for mask, own in zip(made.values(), masks[-1].values(), strict=True):
            assert (mask.channel_mask == own.channel_mask).float().mean() > 0.9

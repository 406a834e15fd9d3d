"""A run's plan: numbers worked out by hand, its verdicts, and a dry run that leaves nothing behind."""

import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from leank_convert.architectures import read_model_facts
from leank_convert.benchmark.geometries import GEOMETRIES
from leank_convert.cli import main
from leank_convert.errors import LeanKError
from leank_convert.recipe_file import load_recipe
from leank_convert.train import dry_run
from leank_convert.train.dry_run import plan_training
from leank_convert.train.plan import Pace, RunPlan, describe_seconds, fit_pace, need_memory

GB = 10**9
LLAMA = GEOMETRIES["llama-3.1-8b"]
WEIGHTS = 16_060_522_496


@pytest.fixture
def plan_llama():
    """The paper's recipe on one GPU of so many bytes, with changes."""

    def build(*overrides, capacity=80 * GB, pace=None, why="not asked for", processes=1, extra=0.0, **memory):
        recipe = load_recipe("llama-3.1-8b-instruct", overrides)
        need = need_memory(
            LLAMA.facts,
            LLAMA.config,
            recipe,
            weight_bytes=WEIGHTS,
            element_bytes=2,
            block_size=16384,
            capacity=capacity,
            **memory,
        )
        return RunPlan("llama", LLAMA.facts, recipe, processes, extra, need, "Some GPU", pace, why)

    return build


def test_the_papers_schedule_in_numbers(plan_llama):
    plan = plan_llama()
    assert plan.num_steps == plan.num_contexts == plan.num_questions == 2200
    assert plan.num_factors == 32 * 8 * 128
    assert plan.tokens_per_step == (16384 + 98304) / 2
    assert plan.seconds is None
    document = plan.to_dict()
    assert document["tokens"] == 2200 * 57344
    assert document["phases"] == [
        {"stage": 1, "pruning_ratio": None, "steps": 2000},
        {"stage": 2, "pruning_ratio": 0.7, "steps": 200},
    ]
    assert json.loads(json.dumps(document)) == document


def test_ratios_batches_questions_and_processes_count(plan_llama):
    pace = Pace(((1000, 1.0),), 1e-3, 0.0, 0.5)
    overrides = ["pruning_ratio=[0.5, 0.7]", "batch_size=4", "data.questions_per_context=8"]
    plan = plan_llama(*overrides, pace=pace, processes=2, extra=448.0)
    assert plan.num_steps == 2400
    assert plan.num_contexts == 9600
    assert plan.num_questions == 76800
    assert plan.tokens_per_step == 4 * (57344 + 448)
    # Each process has two contexts of a step.
    assert plan.seconds == pytest.approx(2400 * 2 * (57.344 + 0.5))
    text = plan.render()
    assert "2,400: 2,000 of stage 1, 200 of stage 2 at 50%, 200 of stage 2 at 70%" in text
    assert "4 a step, 9,600 in all; 16,384 to 98,304 tokens" in text
    assert "8 a context, 76,800 in all; tasks in turn: retrieval, multi_value" in text
    assert "with 2 processes, by this device's measured pace" in text


def test_a_short_run_is_told_as_exactly_as_a_long_one(plan_llama):
    text = plan_llama("stage1.steps=2", "stage2.steps=1", "pruning_ratio=0.625").render()
    assert "3: 2 of stage 1, 1 of stage 2 at 62.5%" in text
    assert "57,344 a step on average, 172,032 in all" in text


def test_memory_is_weights_keys_and_values_and_a_block_through_one_layer(plan_llama):
    memory = plan_llama().memory
    assert memory.weights == WEIGHTS
    assert memory.context == 2 * 32 * 8 * 128 * 2 * 98304
    assert memory.working == 16384 * (3 * 14336 + 2 * 4096) * 2
    assert memory.total == memory.weights + memory.context + memory.working
    assert (memory.host_context, memory.is_measured, memory.fits) == (0, False, True)
    measured = plan_llama(measured_working=2 * GB).memory
    assert (measured.working, measured.is_measured) == (2 * GB, True)
    short = plan_llama("data.min_length=2048", "data.max_length=4096").memory
    assert short.working == 4096 * (3 * 14336 + 2 * 4096) * 2


def test_offloaded_keys_and_values_lie_in_host_memory_but_for_a_layers(plan_llama):
    whole, offloaded = plan_llama(), plan_llama("offload_context=true")
    assert offloaded.memory.host_context == whole.memory.context
    assert offloaded.memory.context == whole.memory.context // 32
    assert "K/V of one layer 0.4 GB" in offloaded.render()
    assert "host: K/V of 98,304 tokens 12.9 GB" in offloaded.render()


def test_layers_are_shared_by_gpus(plan_llama):
    whole, shared = plan_llama(), plan_llama("model.device_map=auto", num_gpus=4)
    assert shared.memory.weights == -(-WEIGHTS // 4)
    assert shared.memory.context == whole.memory.context // 4


def test_a_model_that_fits_is_told_to(plan_llama):
    plan = plan_llama()
    assert plan.remedies() == []
    text = plan.render()
    assert "per GPU: weights 16.1 GB + K/V of 98,304 tokens 12.9 GB + working room 1.7 GB (estimated)" in text
    assert "fits: Some GPU has 80.0 GB" in text
    assert "not estimated: not asked for" in text


def test_what_does_not_fit_is_told_with_what_helps(plan_llama):
    plan = plan_llama(capacity=24 * GB)
    assert plan.memory.fits is False
    text = plan.render()
    assert "DOES NOT FIT: Some GPU has 24.0 GB; what helps:" in text
    # 24 GB without weights and working room, at 131,072 bytes a token.
    length = (24 * GB - WEIGHTS - plan.memory.working) // 131072 // 1024 * 1024
    assert plan.remedies() == [
        "`--set offload_context=true` keeps K/V in host memory",
        f"`--set data.max_length={length}` fits",
        "`--set model.device_map=auto` spreads weights and K/V over all GPUs",
    ]
    assert plan_llama(f"data.max_length={length}", capacity=24 * GB).memory.fits
    assert not plan_llama(f"data.max_length={length + 1024}", capacity=24 * GB).memory.fits
    assert plan_llama("offload_context=true", capacity=24 * GB).memory.fits


def test_only_what_helps_is_proposed(plan_llama):
    spread = "`--set model.device_map=auto` spreads weights and K/V over all GPUs"
    # Weights alone are too large.
    assert plan_llama(capacity=16 * GB).remedies() == [spread]
    # There is room for a layer's K/V, and for no context that the recipe may draw.
    assert plan_llama(capacity=19 * GB).remedies() == [
        "`--set offload_context=true` keeps K/V in host memory",
        spread,
    ]
    over = plan_llama("offload_context=true", "model.device_map=auto", capacity=3 * GB, num_gpus=2)
    assert over.remedies() == ["more GPUs, or larger ones"]


def test_on_the_cpu_nothing_is_judged(plan_llama):
    plan = plan_llama(capacity=None)
    assert plan.memory.fits is None
    assert plan.remedies() == []
    assert "not judged: `Some GPU` is no GPU" in plan.render()


def test_the_pace_goes_through_both_prefills_and_is_averaged_over_the_range():
    linear, quadratic = 3e-5, 4e-10
    timed = [(length, linear * length + quadratic * length**2) for length in (1000, 4000)]
    pace = fit_pace(timed, 0.25)
    assert (pace.linear, pace.quadratic) == pytest.approx((linear, quadratic))
    lengths = range(1000, 9001)
    mean = sum(linear * length + quadratic * length**2 for length in lengths) / len(lengths)
    assert pace.mean_prefill(1000, 9000) == pytest.approx(mean, rel=1e-3)
    assert pace.mean_context(1000, 9000) == pace.mean_prefill(1000, 9000) + 0.25
    assert pace.mean_prefill(4000, 4000) == pytest.approx(timed[1][1])


@pytest.mark.parametrize(
    ("prefills", "linear", "quadratic"),
    [
        ([(1000, 2.0)], 2e-3, 0.0),
        ([(1000, 2.0), (4000, 6.0)], 1.5e-3, 0.0),  # slower a token when short: no square at all
        ([(1000, 1.0), (4000, 32.0)], 0.0, 2e-6),  # grows faster than the square: nothing else
    ],
)
def test_neither_part_of_the_pace_is_negative(prefills, linear, quadratic):
    pace = fit_pace(prefills, 0.0)
    assert (pace.linear, pace.quadratic) == pytest.approx((linear, quadratic))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.21, "4.2 s"),
        (59.9, "59.9 s"),
        (61, "1 min"),
        (1080, "18 min"),
        (5040, "1 h 24 min"),
        (3590, "1 h 00 min"),
    ],
)
def test_times_are_told_as_people_do(seconds, text):
    assert describe_seconds(seconds) == text


def test_a_dry_run_measures_the_toy_and_writes_nothing(retriever_folder, tmp_path, monkeypatch, snapshot):
    monkeypatch.chdir(tmp_path)
    before = snapshot(retriever_folder)
    arguments = ["--recipe", "quickstart", "--set", "data.max_length=400", "--set", "data.min_length=260"]
    arguments += ["--set", "data.questions_per_context=3", "--dry-run", "--device", "cpu"]
    arguments += ["--set", "width_multiple=4", "--recent-size", "16", "--sink-size", "4"]
    command = ["train", str(retriever_folder), "-o", "out", *arguments]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "by this device's measured pace" in result.stdout
    assert list(tmp_path.iterdir()) == []
    assert snapshot(retriever_folder) == before
    result = CliRunner().invoke(main, [*command[:2], *arguments, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["scaling_factors"] == 2 * 2 * 16
    config = json.loads((retriever_folder / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert document["memory"]["context"] == 2 * 2 * 2 * 16 * 4 * 400
    lengths = [tokens for tokens, _ in document["pace"]["prefills"]]
    # The shortest, and the longest because it is less than four times as long; the questions follow them.
    assert 180 < lengths[0] < 260 < 300 < lengths[1] < 400
    assert document["seconds"] > 0
    assert document["tokens_per_step"] > 300
    assert list(tmp_path.iterdir()) == []


def test_weights_are_counted_in_the_dtype_they_are_trained_in(source_model, short_recipe, monkeypatch):
    folder = source_model("llama")
    numbers = sum(path.stat().st_size for path in folder.glob("*.safetensors")) // 4
    facts = read_model_facts(json.loads((folder / "config.json").read_text()), origin="config.json")
    checkpoint = dry_run.find_model(short_recipe(), str(folder)).checkpoint
    for dtype, size in (("auto", 4), ("float32", 4), ("bfloat16", 2)):
        recipe = short_recipe(model={"dtype": dtype})
        element_bytes, weight_bytes = dry_run._count_weights(checkpoint, facts, recipe)
        assert element_bytes == size
        # Files have headers beside their numbers.
        assert 0.7 * numbers * size < weight_bytes < numbers * size


def test_what_cannot_be_measured_leaves_the_rest_of_the_plan(retriever_folder, short_recipe, monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore of it")

    monkeypatch.setattr(dry_run, "load_subject", fail)
    plan = plan_training(short_recipe(), device="cpu", model_override=str(retriever_folder))
    assert plan.pace is None
    assert plan.num_steps == 13
    assert "not estimated: memory did not suffice to measure it: CUDA out of memory." in plan.render()


def test_weights_that_a_gpu_cannot_hold_are_not_loaded(retriever_folder, short_recipe, monkeypatch):
    monkeypatch.setattr(dry_run, "choose_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(dry_run, "load_subject", lambda *arguments: pytest.fail("loaded"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Toy GPU")
    small = SimpleNamespace(total_memory=40_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    plan = plan_training(short_recipe(), model_override=str(retriever_folder))
    text = plan.render()
    assert "DOES NOT FIT: Toy GPU has 0.0 MB" in text
    assert "not estimated: the weights do not fit, so nothing was measured" in text
    assert plan.tokens_per_step == 240


@pytest.mark.gpu
def test_on_a_gpu_working_room_is_measured(retriever_folder, short_recipe):
    plan = plan_training(short_recipe(), model_override=str(retriever_folder))
    assert plan.memory.is_measured
    assert plan.memory.fits
    assert plan.pace is not None


def test_what_training_refuses_a_dry_run_refuses(retriever_folder, short_recipe):
    def plan(recipe):
        return plan_training(recipe, device="cpu", model_override=str(retriever_folder))

    with pytest.raises(LeanKError, match="nothing is to be trained"):
        plan(short_recipe(mask="some/mask"))
    with pytest.raises(LeanKError, match="exceeds the model's `head_dim`"):
        plan(short_recipe(width_multiple=32))
    with pytest.raises(LeanKError, match="exceeds the 512 positions"):
        plan(short_recipe(data={"wording": "testbed", "min_length": 200, "max_length": 600}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "Missing option '-o' / '--out'"), (["-o", "out", "--json"], "--json goes with --dry-run")],
    ids=str,
)
def test_mistakes_with_the_flag_exit_2(retriever_folder, arguments, message):
    result = CliRunner().invoke(main, ["train", str(retriever_folder), "--recipe", "quickstart", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_one_of_several_processes_prints_the_plan(retriever_folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(main, ["train", str(retriever_folder), "--recipe", "quickstart", "--dry-run"])
    assert (result.exit_code, result.output) == (0, "")

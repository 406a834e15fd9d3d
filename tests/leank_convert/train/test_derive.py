"""Recipes for models without a packaged one: the rules, what fits a GPU, and runs that they repeat."""

from types import SimpleNamespace

import pytest
import torch

from leank_convert.inspection import inspect_artifact
from leank_convert.mask import load_mask
from leank_convert.methods.make import train_mask
from leank_convert.recipe_file import load_recipe
from leank_convert.train import derive as module
from leank_convert.train.choice import choose_recipe
from leank_convert.train.derive import derive_recipe
from leank_convert.train.model import count_bytes, find_model
from tests.checks import edit_json, run
from tests.tiny_families import tiny_folder

SHORT = ["data.questions_per_context=1", "data.min_length=1000", "data.max_length=1100", "stage1.steps=2"]
SHORT += ["stage2.steps=1", "held_out_samples=0", "trackers=[]"]
SETTINGS = [part for setting in SHORT for part in ("--set", setting)]


@pytest.fixture(scope="module")
def instructed(tmp_path_factory, byte_level_tokenizer):
    """Random weights, 2048 positions, a tokenizer with a chat template; no recipe knows it."""
    folder = tmp_path_factory.mktemp("instructed") / "model"
    return tiny_folder(folder, byte_level_tokenizer, max_position_embeddings=2048)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of so many free bytes, or of one that anything fits on."""

    def pretend(free=10**15):
        monkeypatch.setattr(module, "choose_device", lambda device: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Toy GPU")
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2 * free)
        )

    return pretend


def train(*arguments, exit_code=0):
    """What the command tells."""
    result = run("train", *arguments, "--device", "cpu")
    assert result.exit_code == exit_code, result.output
    return result.stderr


def in_brief(recipe):
    windows, data = recipe.windows, recipe.data
    sizes = windows.sink_size, windows.recent_size, windows.flush_size
    return *sizes, data.min_length, data.max_length, recipe.width_multiple


@pytest.mark.parametrize(
    ("positions", "head_dim", "expected"),
    [
        (2048, 16, (16, 64, 16, 960, 1920, 4)),
        (4096, 64, (32, 128, 32, 1024, 3840, 16)),
        (8192, 64, (64, 256, 32, 1024, 7680, 16)),
        (16384, 80, (128, 512, 32, 2048, 15360, 16)),
        (40960, 128, (128, 1024, 32, 4096, 32768, 32)),
        (131072, 128, (128, 1024, 32, 16384, 98304, 32)),
        (1024000, 64, (128, 1024, 32, 16384, 98304, 16)),
    ],
)
def test_windows_and_lengths_follow_from_positions_and_the_multiple_from_channels(
    positions, head_dim, expected, source_model, gpu
):
    gpu()
    model = source_model(head_dim=head_dim, max_position_embeddings=positions)
    recipe = derive_recipe(model)
    assert in_brief(recipe) == expected
    assert inspect_artifact(model)["windows"] == recipe.windows.model_dump()  # the forecast is of these
    assert (recipe.pruning_ratio, recipe.method, recipe.offload_context) == (0.7, "leank", False)


def test_on_a_cpu_a_run_is_shorter(source_model):
    for positions, lengths in ((8192, (1024, 2048)), (131072, (2304, 4608))):
        recipe = derive_recipe(source_model(max_position_embeddings=positions), device="cpu")
        assert (recipe.data.min_length, recipe.data.max_length) == lengths
        assert 100 < recipe.stage1.steps < 600


def test_contexts_are_shortened_or_leave_the_gpu_where_they_do_not_fit(source_model, gpu, monkeypatch):
    folder = source_model(max_position_embeddings=131072)

    def derive(free, *overrides):
        gpu(int(free / 0.9) + 1)
        return derive_recipe(folder, overrides)

    gpu()
    best = derive_recipe(folder)
    needed = count_bytes(find_model(folder, best), best, torch.device("cuda"))
    rest, context = needed["weights"] + needed["working"], needed["context"]
    assert in_brief(derive(rest + context)) == in_brief(best)
    shorter = derive(rest + 0.5 * context)
    assert (shorter.data.min_length, shorter.data.max_length) == (16384, 98304 // 2)
    assert shorter.offload_context is False
    moved = derive(rest + 0.34 * context, "model.dtype=float32", "data.min_length=17000")
    assert moved.data.max_length == 98304 * 5 // 16
    offloaded = derive(rest + 0.2 * context, "data.min_length=30000")  # which shorter ones contradict
    assert offloaded.offload_context is True
    assert offloaded.data.max_length < 98304  # of three layers, one's is more than a fifth
    hopeless = derive(rest / 10)
    assert in_brief(hopeless) == in_brief(best)
    assert hopeless.offload_context is False
    # What is set counts: half of the bytes are needed.
    assert in_brief(derive(rest + 0.5 * context, "model.dtype=bfloat16")) == in_brief(best)
    # Processes that train together count all memory, free or not: it is the same for each.
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert in_brief(derive(rest + 0.5 * context)) == in_brief(best)


def test_a_derived_recipe_is_shown_written_and_repeats_its_run(instructed, tmp_path):
    out, again = tmp_path / "out", tmp_path / "again"
    told = train(instructed, "-o", out, "--mask-only", "--pruning-ratio", 0.5, *SETTINGS)
    written = (out / "leank" / "recipe.yaml").read_text()
    assert written in told
    opening = written.partition("\n\n")[0]
    assert "no packaged recipe" in opening and "NOT EVALUATED" in opening
    assert "llama: 2 layers, 2 KV heads of 16 channels, 2048 positions" in opening
    recipe = load_recipe(out / "leank" / "recipe.yaml")
    assert (recipe.pruning_ratio, recipe.windows.recent_size, recipe.data.max_length) == (0.5, 64, 1100)
    train(instructed, "-o", again, "--mask-only", "--recipe", out / "leank" / "recipe.yaml")
    masks = [load_mask(folder / "channel_mask.safetensors") for folder in (out, again)]
    assert torch.equal(masks[0].channel_mask, masks[1].channel_mask)
    assert torch.equal(masks[0].scaling_factors, masks[1].scaling_factors)
    assert all("NOT EVALUATED" in mask.provenance.recipe for mask in masks)
    assert (again / "leank" / "recipe.yaml").read_text() == written


def test_a_run_goes_on_by_the_recipe_that_was_derived_when_it_began(instructed, monkeypatch, out):
    train(instructed, "-o", out, "--mask-only", *SETTINGS)
    written = (out / "leank" / "recipe.yaml").read_text()
    monkeypatch.setattr(module, "derive_recipe", lambda *_, **__: pytest.fail("derived anew"))
    train(instructed, "-o", out, "--mask-only", "--resume", *SETTINGS)
    assert (out / "leank" / "recipe.yaml").read_text() == written
    told = train(instructed, "-o", out, "--resume", "--set", "stage1.steps=3", exit_code=2)
    assert "recipe: stage1.steps was `2`, is `3`" in told
    assert train_mask(instructed, out, resume=True, progress=False).channel_mask.shape == (2, 2, 16)


def test_a_folder_whose_config_names_a_model_is_trained_by_that_models_recipe(source):
    edit_json(source / "config.json", _name_or_path="Qwen/Qwen3-4B")
    recipe = choose_recipe(None, source, training=True)
    assert recipe == load_recipe("qwen3-4b")
    assert recipe.derivation == ""


def test_what_nothing_can_be_derived_for_is_refused(source, source_model, instructed, copy_of, out):
    sliding = source_model("mistral", max_position_embeddings=8192, sliding_window=1024)
    mute = copy_of(instructed)
    (mute / "chat_template.jinja").unlink()
    for model, told in (
        (source, "has 512 positions (`max_position_embeddings`): too few"),
        (source, "--recipe FILE"),
        (sliding, "attend within a sliding window only"),
        (mute, "has no chat template"),
    ):
        assert told in train(model, "-o", out, exit_code=2)
    assert not out.exists()

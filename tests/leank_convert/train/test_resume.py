"""A run that dies anywhere and is resumed ends as if nothing had happened."""

import csv
import json
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.mask import load_mask
from leank_convert.recipe import Recipe
from leank_convert.train import TrainingDirectory, run, train_masks
from leank_convert.train.state import load_state

# Arguments: recipe as JSON, model, out, where to die, at which call.
DYING_RUN = """
import json, os, pathlib, signal, sys
import torch
torch.set_num_threads(1)
import leank_convert.train.loop as loop
import leank_convert.train.results as results
from leank_convert.recipe import Recipe
from leank_convert.train.run import Run

recipe, model, out, place, at = sys.argv[1:]
calls = 0

def dying(function):
    def wrapper(*args, **kwargs):
        global calls
        calls += 1
        if calls == int(at):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapper

if place == "step":
    Run.advance = dying(Run.advance)
elif place == "optimizer":
    torch.optim.Adam.step = dying(torch.optim.Adam.step)
elif place == "fsync":
    os.fsync = dying(os.fsync)
elif place == "rename":
    pathlib.Path.replace = dying(pathlib.Path.replace)
elif place == "mask":
    results.save_mask = dying(results.save_mask)
loop.train_masks(Recipe(**json.loads(recipe)), pathlib.Path(out), progress=False, model_override=model)
"""


def read_log(out):
    with (out / "leank" / "log.csv").open() as file:
        return list(csv.DictReader(file))


def without_times(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def recipe():
    return Recipe(
        windows={"sink_size": 4, "recent_size": 16, "flush_size": 4},
        width_multiple=4,
        data={
            "tasks": ["retrieval", "multi_value"],
            "wording": "testbed",
            "min_length": 200,
            "max_length": 280,
        },
        stage1={"steps": 7, "learning_rate": 0.1},
        stage2={"steps": 6, "learning_rate": 0.05},
        save_every=3,
    )


@pytest.fixture(scope="module")
def uninterrupted(recipe, retriever_folder, tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "uninterrupted"
    train_masks(recipe, out, progress=False, model_override=str(retriever_folder))
    torch.set_num_threads(before)
    return out


@pytest.mark.parametrize(
    ("place", "at"),
    [
        ("step", 1),  # nothing but the first state
        ("step", 6),  # between two saved states of stage 1
        ("step", 8),  # between the stages
        ("optimizer", 12),  # in the middle of a step of stage 2
        ("fsync", 8),  # a state is written but not renamed
        ("rename", 1),  # the recipe
        ("rename", 3),  # the log
        ("rename", 4),  # a state
        ("mask", 1),  # trained to the end, no mask yet
    ],
)
def test_killed_and_resumed_run_ends_with_the_same_bits(
    place, at, recipe, retriever_folder, uninterrupted, tmp_path
):
    out = tmp_path / "out"
    arguments = [json.dumps(recipe.model_dump(mode="json")), str(retriever_folder), str(out), place, str(at)]
    died = subprocess.run([sys.executable, "-c", DYING_RUN, *arguments], check=False, capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    assert not TrainingDirectory(out).mask.exists()
    train_masks(recipe, out, resume=True, progress=False, model_override=str(retriever_folder))
    assert TrainingDirectory(out).mask.read_bytes() == TrainingDirectory(uninterrupted).mask.read_bytes()
    assert without_times(read_log(out)) == without_times(read_log(uninterrupted))
    assert not list(out.rglob("*.partial"))


def test_two_runs_of_one_seed_are_bit_identical_and_of_two_seeds_differ(
    recipe, retriever_folder, uninterrupted, tmp_path
):
    train_masks(recipe, tmp_path / "same", progress=False, model_override=str(retriever_folder))
    same = TrainingDirectory(tmp_path / "same").mask
    assert same.read_bytes() == TrainingDirectory(uninterrupted).mask.read_bytes()
    other = recipe.model_copy(update={"seed": 1})
    out = tmp_path / "other"
    mask = train_masks(other, out, progress=False, model_override=str(retriever_folder))[out]
    assert not torch.equal(mask.scaling_factors, load_mask(same).scaling_factors)


@pytest.mark.parametrize("at", [7, 10, 13, 15])  # the beginning of each ratio's stage 2, and within it
def test_a_run_of_several_ratios_goes_on_from_any_of_them(
    at, recipe, retriever_folder, uninterrupted, tmp_path, monkeypatch
):
    several = recipe.model_copy(update={"pruning_ratio": (0.5, 0.7)})
    original, calls = run.distil, 0

    def failing(*given, **options):
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(*given, **options)

    monkeypatch.setattr(run, "distil", failing)
    with pytest.raises(LeanKError, match=f"step {at + 1}: memory does not suffice"):
        train_masks(several, tmp_path, progress=False, model_override=str(retriever_folder))
    masks = train_masks(several, tmp_path, resume=True, progress=False, model_override=str(retriever_folder))
    expected = load_mask(TrainingDirectory(uninterrupted).mask)
    assert torch.equal(masks[tmp_path / "ratio-0.7"].scaling_factors, expected.scaling_factors)
    assert not torch.equal(masks[tmp_path / "ratio-0.5"].scaling_factors, expected.scaling_factors)


def test_finished_run_resumed_gives_its_mask_again(recipe, retriever_folder, uninterrupted):
    path = TrainingDirectory(uninterrupted).mask
    before, log = path.read_bytes(), read_log(uninterrupted)
    train_masks(recipe, uninterrupted, resume=True, progress=False, model_override=str(retriever_folder))
    assert path.read_bytes() == before
    assert read_log(uninterrupted) == log


def test_existing_run_is_not_overwritten_without_resume(recipe, retriever_folder, uninterrupted):
    before = TrainingDirectory(uninterrupted).mask.read_bytes()
    with pytest.raises(LeanKError, match="already holds a training run") as caught:
        train_masks(recipe, uninterrupted, progress=False, model_override=str(retriever_folder))
    assert "--resume" in caught.value.hint
    assert TrainingDirectory(uninterrupted).mask.read_bytes() == before


# Arguments: recipe as JSON, model, out, the signal, the step it comes in, how often.
SIGNALLED_RUN = """
import json, os, pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background has it ignored
import torch
torch.set_num_threads(1)
import leank_convert.train.loop as loop
from leank_convert.errors import LeanKError
from leank_convert.recipe import Recipe
from leank_convert.train.run import Run

recipe, model, out, number, at, times = sys.argv[1:]
advance = Run.advance

def signalled(self, samples):
    if self.step == int(at):
        for _ in range(int(times)):
            os.kill(os.getpid(), int(number))
    return advance(self, samples)

Run.advance = signalled
try:
    loop.train_masks(Recipe(**json.loads(recipe)), pathlib.Path(out), progress=False, model_override=model)
except LeanKError as error:
    print(error, error.hint, sep=os.linesep)
    sys.exit(error.exit_code)
"""


def run_signalled(recipe, model, out, number, at, times=1):
    arguments = [json.dumps(recipe.model_dump(mode="json")), model, out, int(number), at, times]
    return subprocess.run(
        [sys.executable, "-c", SIGNALLED_RUN, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("number", "reason", "exit_code", "at"),
    [
        (signal.SIGINT, "Ctrl-C", 130, 4),  # stage 1, between two saved states
        (signal.SIGTERM, "SIGTERM", 143, 10),  # stage 2
    ],
)
def test_signalled_run_saves_its_state_and_resumes_with_the_same_bits(
    number, reason, exit_code, at, recipe, retriever_folder, uninterrupted, tmp_path
):
    out = tmp_path / "out"
    ended = run_signalled(recipe, retriever_folder, out, number, at)
    assert ended.returncode == exit_code, ended.stderr
    message, hint = ended.stdout.splitlines()
    assert message.startswith(f"{reason} ended the run; its state is saved in `{out / 'leank'}`")
    assert message.endswith(f" at step {at + 1} of 13")
    assert "--resume" in hint
    assert load_state(TrainingDirectory(out).state).step == at + 1
    assert len(read_log(out)) == at + 1
    train_masks(recipe, out, resume=True, progress=False, model_override=str(retriever_folder))
    assert TrainingDirectory(out).mask.read_bytes() == TrainingDirectory(uninterrupted).mask.read_bytes()
    assert without_times(read_log(out)) == without_times(read_log(uninterrupted))


def test_a_second_signal_ends_the_run_at_once(recipe, retriever_folder, tmp_path):
    ended = run_signalled(recipe, retriever_folder, tmp_path / "out", signal.SIGINT, at=4, times=2)
    assert "KeyboardInterrupt" in ended.stderr
    assert load_state(TrainingDirectory(tmp_path / "out").state).step == 3


def test_signal_handlers_are_put_back(recipe, retriever_folder, uninterrupted):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train_masks(recipe, uninterrupted, resume=True, progress=False, model_override=str(retriever_folder))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_training_works_outside_the_main_thread(recipe, retriever_folder, uninterrupted, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(
            train_masks, recipe, tmp_path, progress=False, model_override=str(retriever_folder)
        ).result()
    assert TrainingDirectory(tmp_path).mask.exists()


@pytest.mark.parametrize("torn", [b"x,1,retrieval,,,,,,,,,,\n", b"\0\0\0\0", b"3,1,ret", b'\xff\r,"\n'])
def test_torn_rows_of_the_log_are_ignored(torn, recipe, retriever_folder, uninterrupted, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(uninterrupted, out)
    with (out / "leank" / "log.csv").open("ab") as file:
        file.write(torn)
    train_masks(recipe, out, resume=True, progress=False, model_override=str(retriever_folder))
    assert read_log(out) == read_log(uninterrupted)


def test_resume_without_a_run_begins_one_with_a_warning(
    recipe, retriever_folder, uninterrupted, tmp_path, caplog
):
    train_masks(recipe, tmp_path, resume=True, progress=False, model_override=str(retriever_folder))
    told = [record.getMessage() for record in caplog.records if record.name == "leank_convert"]
    assert told == [f"no run in `{tmp_path}`; starting one"]
    caplog.clear()
    train_masks(recipe, tmp_path, resume=True, progress=False, model_override=str(retriever_folder))
    assert not [record for record in caplog.records if record.name == "leank_convert"]
    assert TrainingDirectory(tmp_path).mask.read_bytes() == TrainingDirectory(uninterrupted).mask.read_bytes()


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 3}, "recipe: seed was `0`, is `3`"),
        ({"stage1": {"steps": 8, "learning_rate": 0.1}}, "recipe: stage1.steps was `7`, is `8`"),
        ({"windows": {"sink_size": 5, "recent_size": 16}}, "recipe: windows.sink_size was `4`, is `5`"),
    ],
)
def test_resume_refuses_another_recipe_and_names_the_difference(
    change, difference, recipe, retriever_folder, uninterrupted
):
    other = Recipe(**{**recipe.model_dump(), **change})
    with pytest.raises(LeanKError) as caught:
        train_masks(other, uninterrupted, resume=True, progress=False, model_override=str(retriever_folder))
    assert difference in str(caught.value)


def copy_model(source, target):
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_resume_refuses_other_weights(recipe, retriever_folder, uninterrupted, tmp_path):
    other = copy_model(retriever_folder, tmp_path / "other")
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (other / "model.safetensors").write_bytes(content)
    with pytest.raises(LeanKError, match="model: weights was"):
        train_masks(recipe, uninterrupted, resume=True, progress=False, model_override=str(other))


def test_resume_refuses_another_config(recipe, retriever_folder, uninterrupted, tmp_path):
    other = copy_model(retriever_folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["rms_norm_eps"] = 1e-5
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(LeanKError, match=r"model: config.json: rms_norm_eps was `1e-06`, is `1e-05`"):
        train_masks(recipe, uninterrupted, resume=True, progress=False, model_override=str(other))


def test_resume_refuses_other_data(recipe, retriever_folder, uninterrupted, tmp_path):
    other = copy_model(retriever_folder, tmp_path / "other")
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"))
    with pytest.raises(LeanKError, match="data: first sample and haystack was"):
        train_masks(recipe, uninterrupted, resume=True, progress=False, model_override=str(other))


def test_moved_model_and_another_save_interval_may_resume(recipe, retriever_folder, uninterrupted, tmp_path):
    moved = copy_model(retriever_folder, tmp_path / "moved")
    other = recipe.model_copy(update={"save_every": 2})
    masks = train_masks(other, uninterrupted, resume=True, progress=False, model_override=str(moved))
    assert torch.equal(
        masks[uninterrupted].channel_mask, load_mask(TrainingDirectory(uninterrupted).mask).channel_mask
    )


def test_damaged_state_is_refused(recipe, retriever_folder, tmp_path):
    state = TrainingDirectory(tmp_path).state
    state.parent.mkdir(parents=True)
    state.write_bytes(b"nonsense")
    with pytest.raises(LeanKError, match=r"training_state.safetensors` is damaged"):
        train_masks(recipe, tmp_path, resume=True, progress=False, model_override=str(retriever_folder))


def test_state_holds_what_the_optimizer_needs(uninterrupted):
    state = load_state(TrainingDirectory(uninterrupted).state)
    assert state.step == 13
    assert sorted(state.optimizer) == ["exp_avg", "exp_avg_sq", "step"]
    assert state.optimizer["step"] == 6  # stage 2 begins with a fresh optimizer
    assert state.scaling_factors.dtype == torch.float32

"""The scripts in examples/ run on the shipped model, at little cost."""

import ast
import importlib.util
import json
import random
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bin.benchmarks.server import free_port
from leank_convert import export_checkpoint
from leank_convert.mask import ChannelMask
from leank_convert.testbed.tasks import build_sample

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
RECIPE = """\
model: {id: testbed}
method: static-norm
calibration_prompts: 2
pruning_ratio: 0.5
width_multiple: 16
windows: {sink_size: 16, recent_size: 64, flush_size: 16}
data: {wording: testbed, min_length: 256, max_length: 320}
stage1: {steps: 2}
stage2: {steps: 1}
held_out_samples: 1
"""
pytestmark = pytest.mark.usefixtures("without_report")
MISSING = [name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "small.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def run(monkeypatch, tmp_path, capfd):
    """Run a script in an empty folder and return what it printed."""
    monkeypatch.chdir(tmp_path)

    def run_script(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return run_script


def test_convert_and_chat_answers_in_several_turns_from_one_cache(run, recipe, tmp_path):
    (tmp_path / "out").mkdir()  # as one that was stopped leaves it
    sample = build_sample("retrieval", random.Random(1), 400)
    prompts = ("--prompt", sample.prompt, "--prompt", sample.prompt)
    printed = run("convert_and_chat.py", "--out", "out", "--recipe", recipe, *prompts)
    assert printed.startswith(f"{sample.answer}\n")
    assert "CacheMemory" in printed


def test_own_data_trains_on_a_text_file(run, recipe, tmp_path):
    (tmp_path / "notes.txt").write_text("One sentence of mine. Another one follows. " * 40)
    small = tmp_path / "trained.yaml"
    small.write_text(recipe.read_text().replace("method: static-norm\n", ""))
    assert run("own_data.py", "notes.txt", "--recipe", small, "--out", "mine").strip().endswith("mine")
    assert (tmp_path / "mine" / "config.json").is_file()


def test_compare_methods_prints_a_line_per_method(run, recipe):
    methods = ("static-norm", "random")
    printed = run("compare_methods.py", "--methods", *methods, "--recipe", recipe, "--num-samples", 4)
    assert [line.split()[0] for line in printed.splitlines()] == ["method", *methods]


@pytest.mark.skipif(bool(MISSING), reason=f"transformers serve needs {', '.join(MISSING)}")
def test_serve_answers_with_the_models_tokens_through_the_openai_client(run, tmp_path):
    """Of a checkpoint whose answer is wrong, as nothing but the pruned cache makes it."""
    mask = ChannelMask(torch.zeros(4, 4, 64, dtype=torch.bool))
    folder = export_checkpoint("testbed", mask, tmp_path / "blind", sink_size=4, recent_size=16, flush_size=4)
    told = run("serve.py", folder, "--port", free_port())
    sample = build_sample("retrieval", random.Random(0), 512)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    chat = [{"role": "user", "content": sample.prompt}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=True)
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=64)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer in told and sample.answer not in answer and len(answer.split()) > 1


def test_the_notebook_runs_from_top_to_bottom_and_is_stored_without_results(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
            assert not cell["outputs"] and cell["execution_count"] is None
    assert torch.equal(names["pruned"], names["dense"])
    assert {row["variant"] for row in names["found"].to_rows()} >= {"dense", "pruned"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_it_is_run(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert f"python examples/{path.name}" in ast.get_docstring(ast.parse(text))

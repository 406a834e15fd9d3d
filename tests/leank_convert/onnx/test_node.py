"""examples/onnx-node answers as the Python host does; skipped where Node or its onnxruntime is missing."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from leank_convert.onnx.leank_onnx import LeanKOnnx
from leank_convert.testbed.tasks import TASKS, build_sample

# bin/setup installs it there where there is an npm.
PACKAGES = Path(sys.prefix) / "node" / "node_modules"
ANSWERS = Path(__file__).parent / "node" / "answers.mjs"
TEXTS = ANSWERS.with_name("texts.mjs")
HOST = Path(__file__).parents[3] / "examples" / "onnx-node" / "leank_onnx.mjs"
TEXT_HOST = HOST.with_stem("leank_onnx_text")
# Prompt tokens and how many of them are read at a time: at once, in chunks, with a last chunk of one token,
# one token, fewer than the sink, as many as the window.
PROMPTS = [(37, 256), (37, 16), (33, 16), (1, 256), (2, 1), (13, 64)]

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(
        not (PACKAGES / "onnxruntime-node").is_dir() or not (PACKAGES / "@huggingface").is_dir(),
        reason="onnxruntime-node is not installed: bin/setup does it where there is npm",
    ),
]


def run_node(*arguments, cwd=None, stdin=None):
    return subprocess.run(
        ["node", *map(str, arguments)], input=stdin, capture_output=True, text=True, cwd=cwd, check=False
    )


def ask(host, cases):
    """What the host answers to cases of `answers.mjs`."""
    done = run_node(ANSWERS, stdin=json.dumps({"host": host.as_uri(), "cases": cases}))
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def tokens(length, seed=0):
    return np.random.default_rng(seed).integers(3, 64, length).tolist()


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The host beside the packages it imports: Node looks for them from the file's own folder upwards."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "node_modules").symlink_to(PACKAGES)
    shutil.copy(TEXT_HOST, folder)
    return Path(shutil.copy(HOST, folder))


def ask_for_long_answers(folder, host, prompts, num_tokens):
    """Compare answers to `prompts` (tokens, chunk) that no token ends, so that there are flushes."""
    model = LeanKOnnx(folder, threads=1)
    object.__setattr__(model.description, "eos_token_ids", frozenset())
    shared = {"folder": str(folder), "maxNewTokens": num_tokens, "endless": True}
    results = ask(host, [{"prompt": prompt, "promptChunk": chunk} | shared for prompt, chunk in prompts])
    expected = [model.generate([prompt], max_new_tokens=num_tokens)[0] for prompt, _ in prompts]
    assert [result["tokens"] for result in results] == expected
    return results


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_tokens_are_the_python_hosts_over_prompts_chunks_and_flushes(family, exported, host):
    prompts = [(tokens(length), chunk) for length, chunk in PROMPTS]
    ask_for_long_answers(exported(family).folder, host, prompts, 40)


@pytest.mark.parametrize("windows", [(2**24, 1, 1), (192, 3, 9), (3, 2**24, 2**24)], ids=str)
def test_a_window_larger_than_its_tokens_grows_with_them(windows, exported, host):
    prompts = [(tokens(60), 192), (tokens(192), 64)]
    ask_for_long_answers(exported(windows=windows).folder, host, prompts, 60)


def test_a_long_answer_moves_the_pruned_arrays_alone_and_only_when_they_grow(exported, host):
    (result,) = ask_for_long_answers(exported().folder, host, [(tokens(40), 256)], 131)
    num_windows, num_pruned = 2 * 2, 2 * (2 + 1)
    prompt_run, first, *decoding = result["moved"]
    assert prompt_run == first == num_windows + num_pruned
    # 161 tokens are pruned: room for 64 is made after the prompt, for 128 and 192 while decoding.
    assert [moved for moved in decoding if moved] == [num_pruned, num_pruned]


def test_the_shipped_model_answers_on_the_command_line_as_in_python(shipped_onnx, host):
    model = LeanKOnnx(shipped_onnx, threads=1)
    rng = random.Random(0)
    flushed = []
    for task, length in zip(TASKS, (600, 380, 470), strict=True):
        prompt = model.encode_chat([{"role": "user", "content": build_sample(task, rng, length).prompt}])
        session = model.start()
        (expected,) = session.generate([prompt], max_new_tokens=40)
        flushed.append(int(session.pruned_lengths[0]) > len(prompt) - 250)
        arguments = ["--tokens", ",".join(map(str, prompt)), "--max-new-tokens", 40, "--prompt-chunk", 100]
        done = run_node(host, shipped_onnx, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert [int(line) for line in done.stdout.splitlines()] == expected
        assert expected[-1] in model.description.eos_token_ids or len(expected) == 40
    # Tokens were flushed while an answer was decoded.
    assert any(flushed)


@pytest.mark.parametrize("plain", [False, True], ids=["as a chat", "plain"])
def test_a_text_is_answered_with_pythons_text(plain, shipped_onnx, host):
    model = LeanKOnnx(shipped_onnx, threads=1)
    text = build_sample(TASKS[0], random.Random(1), 200).prompt
    prompt = model.encode(text) if plain else model.encode_chat([{"role": "user", "content": text}])
    (expected,) = model.generate([prompt], max_new_tokens=8)
    arguments = ["--prompt", text, "--max-new-tokens", 8, *(["--plain"] if plain else [])]
    done = run_node(host, shipped_onnx, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == model.decode(expected) + "\n"
    assert done.stdout.strip()


def test_text_of_bytes_is_tokenized_as_in_python_and_streamed_in_whole_characters(tmp_path, host):
    texts = ["Größe: 1234 km, it's naïve", "東京は日本の首都です", "🙂🙃 a  b\n\n\tc   ", "<|begin|>hi"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<|begin|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    asked = {"host": host.with_name(TEXT_HOST.name).as_uri(), "folder": str(tmp_path), "texts": texts}
    done = run_node(TEXTS, stdin=json.dumps(asked))
    assert (done.returncode, done.stderr) == (0, "")
    for text, result in zip(texts, json.loads(done.stdout), strict=True):
        assert result["tokens"] == tokenizer.encode(text).ids
        assert "".join(result["pieces"]) == tokenizer.decode(result["tokens"])
        assert len(result["pieces"]) > 1
        assert "\ufffd" not in "".join(result["pieces"])


def test_what_a_chat_template_marks_and_asks_of_tools_is_as_in_python(copied, host):
    template = (
        "{% if tools is none and documents is none %}w1 {% endif %}{% generation %}w2{% endgeneration %}"
    )
    (copied / "chat_template.jinja").write_text(template)
    arguments = ["--max-new-tokens", 4]
    chat, plain = (
        run_node(host, copied, "--prompt", *rest, *arguments) for rest in (["w9"], ["w1 w2", "--plain"])
    )
    assert (chat.returncode, chat.stderr) == (0, "")
    assert chat.stdout == plain.stdout
    assert LeanKOnnx(copied).encode_chat([{"role": "user", "content": "w9"}]) == [5, 6]


def test_the_prompt_is_read_from_standard_input_and_help_asked_for_is_no_mistake(copied, host):
    told = run_node(host, copied, "--prompt", "w1 w2", "--max-new-tokens", 4)
    read = run_node(host, copied, "--prompt", "-", "--max-new-tokens", 4, stdin="w1 w2\n")
    assert (read.returncode, read.stdout, read.stderr) == (0, told.stdout, "")
    done = run_node(host, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: node leank_onnx.mjs FOLDER")


def test_more_tokens_than_the_model_has_positions_are_noted_and_answered(copied, host):
    model = json.loads((copied / "leank_onnx.json").read_text())["model"]
    spoil(copied, model=model | {"max_position_embeddings": 5})
    done = run_node(host, copied, "--tokens", "5,6", "--max-new-tokens", 4)
    assert (done.returncode, len(done.stdout.split())) == (0, 4)
    assert done.stderr.startswith("note: prompt and answer may have 6 tokens, the model's max_position_emb")
    assert run_node(host, copied, "--tokens", "5,6", "--max-new-tokens", 3).stderr == ""


def test_a_reader_that_has_enough_ends_the_command_without_a_trace(copied, host):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = ["node", host, copied, "--tokens", "5,6", "--max-new-tokens", "8"]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def spoil(folder, **changes):
    path = folder / "leank_onnx.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


MISTAKES = {
    "no folder": (
        lambda folder: (folder / "leank_onnx.json").unlink(),
        [],
        "leank_onnx.json` does not exist",
    ),
    "no JSON": (lambda folder: (folder / "leank_onnx.json").write_text("{"), [], "is no JSON"),
    "float16": (lambda folder: spoil(folder, dtype="float16"), [], "export with --dtype float32"),
    "no weights": (lambda folder: (folder / "model.onnx.data").unlink(), [], "model.onnx.data` is missing"),
    "a spoiled graph": (lambda folder: (folder / "model.onnx").write_bytes(b"x"), [], "cannot load"),
    "no size": (lambda folder: spoil(folder, sink_size="3"), [], 'sink_size is "3", not 0 or more'),
    "another graph's widths": (
        lambda folder: spoil(folder, buckets=[[{"width": 4, "heads": [0, 4]}]] * 2),
        [],
        "is not the graph that leank_onnx.json describes: `past_key_values.0.pruned.5.key` differs",
    ),
    "an unknown token": (None, ["--tokens", "3,64"], "token 64: the vocabulary is 0 to 63"),
    "no new tokens": (None, ["--max-new-tokens", "0"], "maxNewTokens is 0: pass 1 or more"),
    "no chunk": (None, ["--prompt-chunk", "0.5"], "promptChunk is 0.5: pass 1 or more"),
    "an unknown option": (None, ["--sample"], "--sample"),
    "tokens and text": (None, ["--prompt", "w1 w2"], "usage: node leank_onnx.mjs FOLDER (--tokens"),
}


@pytest.mark.parametrize("spoiling,arguments,message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_in_a_line_without_a_trace(spoiling, arguments, message, copied, host):
    if spoiling is not None:
        spoiling(copied)
    done = run_node(host, copied, "--tokens", "1,5,9", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "    at " not in done.stderr


TEXT_MISTAKES = {
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json` does not exist"),
    "a spoiled tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), "is no JSON"),
    "a config that is none": (
        lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
        "tokenizer_config.json` is no JSON object",
    ),
    "a template that refuses": (
        lambda folder: (folder / "chat_template.jinja").write_text("{{ raise_exception('no users') }}"),
        "no users",
    ),
}


@pytest.mark.parametrize("spoiling,message", TEXT_MISTAKES.values(), ids=TEXT_MISTAKES)
def test_a_text_that_cannot_be_read_is_named_in_a_line(spoiling, message, copied, host):
    spoiling(copied)
    done = run_node(host, copied, "--prompt", "w1 w2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "    at " not in done.stderr


def test_without_onnxruntime_it_says_how_to_install_it(copied, tmp_path):
    alone = Path(shutil.copy(HOST, tmp_path))
    done = run_node(alone, copied, "--tokens", "1")
    assert done.returncode == 2
    assert "`npm install onnxruntime-node`" in done.stderr

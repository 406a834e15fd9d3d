"""The shipped runner on its own: what it imports, text and chat templates, and what it says to mistakes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from leank_convert.onnx import leank_onnx
from leank_convert.onnx.leank_onnx import LeanKOnnx, LeanKOnnxError


def test_the_runner_imports_three_libraries_and_no_file_of_ours():
    imported = set()
    for node in ast.walk(ast.parse(Path(leank_onnx.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or ".").split(".")[0])
    # jinja2 inside `try`, as another test shows.
    libraries = {"numpy", "onnxruntime", "tokenizers", "jinja2"}
    assert imported - set(sys.stdlib_module_names) == libraries


def test_the_runner_is_a_script_and_a_module_of_any_name(copied, tmp_path):
    (tmp_path / "vendored.py").write_bytes((copied / "leank_onnx.py").read_bytes())
    for arguments, shown in (
        ([str(copied / "leank_onnx.py"), "--help"], "usage: leank_onnx.py"),
        (["-c", "import vendored; print(vendored.LeanKOnnx.__module__)"], "vendored\n"),
    ):
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(shown)


def change_description(folder: Path, **values: object) -> None:
    """Replace keys; of `model` those that are given."""
    path = folder / "leank_onnx.json"
    content = json.loads(path.read_text())
    model = content["model"] | values.pop("model", {})
    path.write_text(json.dumps(content | {"model": model} | values))


def test_a_conversation_without_a_chat_template_is_refused(copied):
    with pytest.raises(LeanKOnnxError, match="has no chat template"):
        LeanKOnnx(copied).encode_chat([{"role": "user", "content": "w0"}])


def test_a_conversation_that_is_a_string_is_refused(exported):
    with pytest.raises(LeanKOnnxError, match="messages is a string: pass a list"):
        exported().load().encode_chat("w0")


def test_the_text_of_a_later_turn_gets_no_special_tokens(copied):
    tokenizer = Tokenizer.from_file(str(copied / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $0", special_tokens=[("<s>", 1)])
    tokenizer.save(str(copied / "tokenizer.json"))
    model = LeanKOnnx(copied)
    texts, ids = model.start(), model.start()
    for text, row in (("w0 w1", [1, 4, 5]), ("w2 w3", [6, 7])):
        assert np.array_equal(texts.feed([text])[0], ids.feed([row])[0])


def test_of_several_chat_templates_the_default_one_is_taken(copied):
    templates = [{"name": "rag", "template": "w1"}, {"name": "default", "template": "w2"}]
    (copied / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert LeanKOnnx(copied).encode_chat([{"role": "user", "content": "w0"}]) == [6]


def test_a_chat_template_in_the_tokenizers_config_is_read_with_its_special_tokens(copied):
    template = "{{ bos_token }} {{ messages[0].content }} {% if tools is none %}{{ eos_token }}{% endif %}"
    config = {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    assert LeanKOnnx(copied).encode_chat([{"role": "user", "content": "w0"}]) == [1, 4, 2]


def test_a_chat_template_that_refuses_or_fails_is_told(copied):
    for template, message in (
        ("{{ raise_exception('no system role') }}", "the chat template says: no system role"),
        ("{% for %}", "the chat template of `.*` failed: "),
        ("{{ 1 / 0 }}", "the chat template of `.*` failed: division by zero"),
    ):
        (copied / "chat_template.jinja").write_text(template)
        with pytest.raises(LeanKOnnxError, match=message):
            LeanKOnnx(copied).encode_chat([{"role": "user", "content": "w0"}])


def test_what_a_chat_template_marks_for_training_stands_in_the_prompt(copied):
    template = "{% set w = 'w1' %}{% generation %}{% set w = 'w2' %}{{ w }} {% endgeneration %}{{ w }}"
    (copied / "chat_template.jinja").write_text(template)
    conversation = [{"role": "user", "content": "w0"}]
    stock = PreTrainedTokenizerFast(tokenizer_file=str(copied / "tokenizer.json"), chat_template=template)
    expected = stock.apply_chat_template(conversation, tokenize=False)
    assert expected == "w2 w1"
    assert LeanKOnnx(copied).encode_chat(conversation) == LeanKOnnx(copied).encode(expected)


def test_a_text_that_holds_bytes_which_are_no_characters_is_refused(exported):
    with pytest.raises(LeanKOnnxError, match=r"the text is not UTF-8: '\\udcff' at character 3"):
        exported().load().generate(["w1 \udcff"])


def test_missing_weights_are_named_before_onnxruntime_looks_for_them(copied):
    (copied / "model.onnx.data").unlink()
    with pytest.raises(LeanKOnnxError, match=r"model\.onnx\.data` is missing"):
        LeanKOnnx(copied)


def test_a_graph_that_onnxruntime_cannot_read_is_named(copied):
    (copied / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(LeanKOnnxError, match=r"cannot load `.*model\.onnx`"):
        LeanKOnnx(copied)


def test_changed_weights_are_found_by_their_digest(copied):
    model = LeanKOnnx(copied)
    model.check_files()
    path = copied / "model.onnx.data"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(LeanKOnnxError, match=r"model\.onnx\.data` differs"):
        model.check_files()


def test_a_missing_file_is_found_by_the_digests(copied):
    change_description(copied, files={"tokenizer.json": "0"})
    (copied / "tokenizer.json").unlink()
    with pytest.raises(LeanKOnnxError, match=r"tokenizer\.json` is missing: copy it again"):
        LeanKOnnx(copied).check_files()


@pytest.mark.parametrize(
    "name,message",
    [
        ("tokenizer.json", r"tokenizer\.json` cannot be read"),
        ("tokenizer_config.json", r"tokenizer_config\.json` is no JSON: "),
        ("chat_template.jinja", r"chat_template\.jinja` is no text: "),
    ],
)
def test_a_damaged_tokenizer_is_named(name, message, copied):
    (copied / name).write_bytes(b"{\xff")
    with pytest.raises(LeanKOnnxError, match=message):
        assert LeanKOnnx(copied).chat_template


@pytest.mark.parametrize("template", [[1, {"name": "default"}], [{"name": "rag", "template": "w1"}], 5])
def test_a_config_whose_chat_template_is_none_has_none(template, copied):
    (copied / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert LeanKOnnx(copied).chat_template is None


def test_a_config_of_the_tokenizer_that_is_no_object_is_named(copied):
    (copied / "tokenizer_config.json").write_text("[]")
    with pytest.raises(LeanKOnnxError, match=r"tokenizer_config\.json` is no JSON object"):
        assert LeanKOnnx(copied).chat_template


def test_another_format_or_dtype_is_refused(copied):
    change_description(copied, format_version=2)
    with pytest.raises(LeanKOnnxError, match=r"format_version is 2, this leank_onnx\.py reads 1"):
        LeanKOnnx(copied)
    change_description(copied, format_version=1, dtype="bfloat16")
    with pytest.raises(LeanKOnnxError, match="`dtype` is 'bfloat16', not one of float32, float16"):
        LeanKOnnx(copied)


def layers(*buckets):
    return [[{"width": width, "heads": heads} for width, heads in layer] for layer in buckets]


FIRST = [(0, [0, 1]), (5, [1, 3]), (16, [3, 4])]


@pytest.mark.parametrize(
    "changed,name",
    [
        ({"buckets": layers(FIRST, [(3, [0, 4])])}, r"past_key_values\.1\.pruned\.3\.key"),
        ({"buckets": layers(FIRST)}, r"past_key_values\.1\.pruned\.8\.key"),
        ({"dtype": "float16"}, r"past_key_values\.0\.window\.key"),
        ({"model": {"vocab_size": 65}}, "logits"),
    ],
)
def test_a_description_of_another_graph_is_refused(changed, name, copied):
    change_description(copied, **changed)
    with pytest.raises(LeanKOnnxError, match=f"not the graph .* describes: `{name}` differs"):
        LeanKOnnx(copied)


@pytest.mark.parametrize(
    "changed,message",
    [
        ({"sink_size": -1}, "`sink_size` is -1, not a whole number from 0 to 16777216"),
        ({"flush_size": True}, "`flush_size` is True, not a whole number from 1 to 16777216"),
        ({"recent_size": 2**24 + 1}, "`recent_size` is 16777217, not a whole number from 0 to 16777216"),
        ({"model": {"head_dim": "16"}}, "`model.head_dim` is '16', not a whole number from 1 up"),
        ({"eos_token_ids": ["</s>"]}, "`eos_token_ids.0` is '</s>', not a whole number from 0 up"),
        ({"buckets": layers([(-1, [0, 1]), *FIRST[1:]])}, "`buckets.0.0.width` is -1, not a whole"),
        ({"buckets": layers([(0, [0])])}, r"`buckets.0.0.heads` is \[0\], not a first head and"),
        ({"buckets": layers(FIRST[1:], FIRST)}, "`buckets.0` does not hold each of 4 heads once"),
        ({"buckets": layers(FIRST, FIRST[:2])}, "`buckets.1` does not hold each of 4 heads once"),
        ({"buckets": 3}, "`buckets` is 3, not a list"),
        ({"quantization": 3}, "`quantization` is 3, not an object"),
        ({"files": []}, r"`files` is \[\], not an object of file names"),
    ],
)
def test_a_description_whose_values_cannot_be_is_refused(changed, message, copied):
    change_description(copied, **changed)
    with pytest.raises(LeanKOnnxError, match=message):
        LeanKOnnx(copied)


def test_a_description_without_a_key_or_that_is_no_json_is_refused(copied):
    description = json.loads((copied / "leank_onnx.json").read_text())
    del description["sink_size"]
    (copied / "leank_onnx.json").write_text(json.dumps(description))
    with pytest.raises(LeanKOnnxError, match="lacks `sink_size`"):
        LeanKOnnx(copied)
    for content, message in (("{", "is no JSON: "), ("[]", "is no JSON object")):
        (copied / "leank_onnx.json").write_text(content)
        with pytest.raises(LeanKOnnxError, match=message):
            LeanKOnnx(copied)


NEEDS_MUCH = """
import re, resource, sys
from leank_onnx import LeanKOnnx, LeanKOnnxError
model = LeanKOnnx(".", threads=1)
size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20), resource.RLIM_INFINITY))
session = model.start()
try:
    session.feed([[5] * 4000], prompt_chunk=4000)
except MemoryError as error:
    print(error)
    print(isinstance(error, LeanKOnnxError))
session.feed([[5] * 4000], prompt_chunk=64)
print(session.lengths)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures and limits memory as Linux does")
def test_a_prompt_chunk_that_memory_does_not_suffice_for_is_told_and_a_smaller_one_read(copied):
    done = subprocess.run(
        [sys.executable, "-c", NEEDS_MUCH], capture_output=True, text=True, cwd=copied, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    message, is_own, lengths = done.stdout.splitlines()
    assert message.startswith("too little memory for 4000 new tokens of 1 rows at a time: pass a smaller")
    assert (is_own, lengths) == ("True", "[4000]")


@pytest.mark.parametrize(
    "options,message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": 0.7}, "temperature is 0.7, but nothing is drawn"),
        ({"seed": 1}, "seed is 1, but nothing is drawn"),
        ({"do_sample": True, "seed": -1}, "seed is -1: pass 0 or more, or None"),
        ({"do_sample": True, "temperature": 0.0}, "temperature is 0.0: pass more than 0"),
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        ({"prompt_chunk": 0}, "prompt_chunk is 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_the_prompt_is_read(options, message, exported):
    session = exported().load().start()
    with pytest.raises(LeanKOnnxError, match=message):
        session.generate([[5, 6]], **options)
    assert session.lengths.size == 0


@pytest.mark.parametrize(
    "prompts,message",
    [
        ([], "prompts is empty"),
        ([[5], []], r"prompts\[1\] is empty"),
        ("w1", "prompts is a string"),
        ([[5, 64]], r"prompts\[0\] has token 64: the vocabulary is 0 to 63"),
        ([5, 6], r"prompts\[0\] is 5: pass a text, or a list of whole numbers"),
        ([[5], [6.5]], r"prompts\[1\] is \[6.5\]: pass"),
    ],
)
def test_prompts_that_cannot_be_are_refused(prompts, message, exported):
    with pytest.raises(LeanKOnnxError, match=message):
        exported().load().generate(prompts)


def test_turns_that_do_not_fit_the_session_are_refused_and_leave_it_as_it_was(exported):
    session = exported().load().start()
    session.feed([[5, 6], [7]])
    with pytest.raises(LeanKOnnxError, match="the turn has 1 rows, the session 2"):
        session.feed([[5]])
    with pytest.raises(LeanKOnnxError, match="every row of the turn is empty"):
        session.feed([[], []])
    assert session.lengths.tolist() == [2, 1]


def test_threads_below_one_are_refused(exported):
    with pytest.raises(LeanKOnnxError, match="threads is 0"):
        LeanKOnnx(exported().folder, threads=0)


def test_without_a_tokenizer_tokens_are_answered_and_text_is_refused(copied):
    (copied / "tokenizer.json").unlink()
    model = LeanKOnnx(copied)
    assert len(model.generate([[5, 6]], max_new_tokens=3)[0]) == 3
    with pytest.raises(LeanKOnnxError, match=r"has no tokenizer\.json"):
        model.generate(["w1"])

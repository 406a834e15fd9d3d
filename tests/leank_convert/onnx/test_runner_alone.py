"""The shipped runner on its own, and its command: what it imports, reads, prints and says to mistakes."""

import ast
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from leank_convert.onnx import leank_onnx
from leank_convert.onnx.leank_onnx import LeanKOnnx, LeanKOnnxError
from tests.checks import run_python, snapshot
from tests.leank_convert.onnx.conftest import change_description

HOST = sorted(Path(leank_onnx.__file__).parent.glob("leank_onnx*.py"))
CONVERSATION = [{"role": "user", "content": "w0"}]


def test_the_runner_imports_three_libraries_and_its_own_files():
    imported = set()
    for path in HOST:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or ".").split(".")[0])
    # jinja2 inside `try`, as another test shows.
    others = {"numpy", "onnxruntime", "tokenizers", "jinja2"}
    assert imported - set(sys.stdlib_module_names) == others | {path.stem for path in HOST[1:]}


def test_the_runner_is_a_script_and_a_module_also_of_a_package(copied, tmp_path):
    (tmp_path / "vendored").mkdir()
    for path in copied.glob("leank_onnx*.py"):
        shutil.copy(path, tmp_path / "vendored")
    for arguments, shown in (
        ([str(copied / "leank_onnx.py"), "--help"], "usage: leank_onnx.py"),
        (["-c", "from vendored.leank_onnx import LeanKOnnx; print(LeanKOnnx.__module__)"], "vendored.leank_"),
        (["-c", "import sys; sys.path.append('copy'); import leank_onnx as m; print(m.__file__)"], "copy/"),
    ):
        done = run_python(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert shown in done.stdout


def test_the_text_of_a_later_turn_gets_no_special_tokens(copied):
    tokenizer = Tokenizer.from_file(str(copied / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $0", special_tokens=[("<s>", 1)])
    tokenizer.save(str(copied / "tokenizer.json"))
    model = LeanKOnnx(copied)
    texts, ids = model.start(), model.start()
    for text, row in (("w0 w1", [1, 4, 5]), ("w2 w3", [6, 7])):
        assert np.array_equal(texts.feed([text])[0], ids.feed([row])[0])


RAG = {"name": "rag", "template": "w1"}
TEMPLATES = {
    "the default one of several": ([RAG, {"name": "default", "template": "w2"}], [6]),
    "with special tokens": ("{{ bos_token }} w0 {% if tools is none %}{{ eos_token }}{% endif %}", [1, 4, 2]),
    "with JSON": ("{% if ['é'] | tojson(ensure_ascii=False) == '[\"é\"]' %}w1{% endif %}", [5]),
    "damaged": ([1, {"name": "default"}], None),
    "no default": ([RAG], None),
    "a number": (5, None),
}


@pytest.mark.parametrize(("config", "tokens"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_may_stand_in_the_tokenizers_config(config, tokens, copied):
    special = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (copied / "tokenizer_config.json").write_text(json.dumps({"chat_template": config, **special}))
    model = LeanKOnnx(copied)
    assert (model.chat_template is None) == (tokens is None)
    if tokens is not None:
        assert model.encode_chat(CONVERSATION) == tokens


def test_what_a_chat_template_marks_for_training_stands_in_the_prompt(copied):
    template = "{% set w = 'w1' %}{% generation %}{% set w = 'w2' %}{{ w }} {% endgeneration %}{{ w }}"
    (copied / "chat_template.jinja").write_text(template)
    stock = PreTrainedTokenizerFast(tokenizer_file=str(copied / "tokenizer.json"), chat_template=template)
    expected = stock.apply_chat_template(CONVERSATION, tokenize=False)
    assert expected == "w2 w1"
    assert LeanKOnnx(copied).encode_chat(CONVERSATION) == LeanKOnnx(copied).encode(expected)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", None, "has no chat template"),
        ("chat_template.jinja", b"{{ raise_exception('no system') }}", "the chat template says: no system"),
        ("chat_template.jinja", b"{% for %}", "the chat template of `.*` failed: "),
        ("chat_template.jinja", b"{\xff", r"chat_template\.jinja` is no text: "),
        ("tokenizer.json", b"{\xff", r"tokenizer\.json` cannot be read"),
        ("tokenizer_config.json", b"[" * 10**5, r"tokenizer_config\.json` is no JSON"),
        (
            "tokenizer_config.json",
            b'{"chat_template": "", "bos_token": {}}',
            "the chat template of `.*` failed: ",
        ),
        ("leank_onnx.json", None, r"leank_onnx\.json` does not exist: pass a folder that `leank-convert"),
        ("leank_onnx.json", b"{", r"leank_onnx\.json` is no JSON: "),
        ("leank_onnx.json", b'{"format_version": 1}', r"leank_onnx\.json` was changed: its `sha256` is not"),
        ("model.onnx.data", None, r"model\.onnx\.data` is missing: copy it again"),
        ("model.onnx", None, r"model\.onnx` is missing: copy it again"),
        ("model.onnx", b"another graph", r"model\.onnx` differs from what was exported: sha256 "),
    ],
)
def test_a_file_that_is_missing_or_damaged_is_named(name, content, message, copied):
    (copied / name).unlink(missing_ok=True)
    if content is not None:
        (copied / name).write_bytes(content)
    with pytest.raises(LeanKOnnxError, match=message):
        LeanKOnnx(copied).encode_chat(CONVERSATION)


def test_every_file_has_a_digest_that_finds_it_changed_or_missing(copied):
    digests = snapshot(copied)
    change_description(copied, files={key: digests[key] for key in digests.keys() - {"leank_onnx.json"}})
    check = LeanKOnnx(copied).description.check_file
    for name in ("model.onnx.data", "leank_onnx_cache.py", "tokenizer.json"):
        check(name)
        content = (copied / name).read_bytes()
        (copied / name).write_bytes(content[:-1])
        with pytest.raises(LeanKOnnxError, match=f"{name}` differs from what was exported"):
            check(name)
        (copied / name).unlink()
        with pytest.raises(LeanKOnnxError, match=f"{name}` is missing"):
            check(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version is 2, this program reads 1: use the leank_onnx.py that lies"),
        ({"dtype": "bfloat16"}, r"has one of no use \(KeyError: 'bfloat16'\); export the model again"),
        # Shapes that are not the graph's: of widths, layers, elements, logits.
        ({"buckets": [[{"width": 3, "heads": [0, 4]}]] * 2}, "onnxruntime cannot run the graph: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_description_by_which_nothing_can_be_decoded_is_refused(changes, message, copied):
    change_description(copied, **changes)
    with pytest.raises(LeanKOnnxError, match=message):
        LeanKOnnx(copied).generate([[5, 6]])


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
    done = run_python("-c", NEEDS_MUCH, cwd=copied)
    assert (done.returncode, done.stderr) == (0, "")
    message, is_own, lengths = done.stdout.splitlines()
    assert message.startswith("too little memory for 4000 new tokens of 1 rows at a time: pass a smaller")
    assert (is_own, lengths) == ("True", "[4000]")


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[5, 6]], {"temperature": 0.7}, "temperature is 0.7, but nothing is drawn"),
        ([[5, 6]], {"do_sample": True, "temperature": 0.0}, "temperature is 0.0: pass more than 0"),
        ([], {}, "prompts is empty"),
        ([[5], []], {}, r"prompts\[1\] is empty"),
        ("w1", {}, "prompts is no list"),
        ({"w1": 5}, {}, "prompts is no list"),
        (None, {}, "prompts is no list"),
        ([[5]], {"max_new_tokens": 2.5}, "max_new_tokens is 2.5: pass 1, 2 or more"),
        ([[5]], {"max_new_tokens": "8"}, "max_new_tokens is '8': pass 1, 2 or more"),
        ([[5]], {"do_sample": True, "temperature": "0.7"}, "temperature is '0.7': pass more than 0"),
        ([[5]], {"do_sample": True, "top_p": "0.9"}, "top_p is '0.9': pass more than 0"),
        ([[5]], {"do_sample": True, "seed": 1.5}, "seed is 1.5: pass a whole number"),
        ([[5]], {"prompt_chunk": 2.5}, "prompt_chunk is 2.5: pass a whole number, 1 or more"),
        (["w1 \udcff"], {}, r"the text is not UTF-8: '\\udcff' at character 3"),
        ([[5, 64]], {}, r"prompts\[0\] has token 64: the vocabulary is 0 to 63"),
        ([[5], [6.5]], {}, r"prompts\[1\] is \[6.5\]: pass"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_a_prompt_is_read(prompts, options, message, exported):
    session = exported().load().start()
    with pytest.raises(LeanKOnnxError, match=message):
        session.generate(prompts, **options)
    assert session.lengths.size == 0


def test_turns_that_do_not_fit_the_session_are_refused_and_leave_it_as_it_was(exported):
    model = exported().load()
    for messages in ("w0", {"role": "user", "content": "w0"}):
        with pytest.raises(LeanKOnnxError, match="messages is no list: pass one of role"):
            model.encode_chat(messages)
    session = model.start()
    session.feed([[5, 6], [7]])
    with pytest.raises(LeanKOnnxError, match="the turn has 1 rows, the session 2"):
        session.feed([[5]])
    with pytest.raises(LeanKOnnxError, match="every row of the turn is e"):
        session.feed([[], []])
    lengths = session.lengths
    session.feed([[5], [7]])
    assert (lengths.tolist(), session.lengths.tolist()) == ([2, 1], [3, 2])


def test_without_a_tokenizer_tokens_are_answered_and_text_is_refused(copied):
    (copied / "tokenizer.json").unlink()
    with pytest.raises(LeanKOnnxError, match="threads is '2': pass a whole number from 1 to 1024"):
        LeanKOnnx(copied, threads="2")
    model = LeanKOnnx(copied)
    assert len(model.generate([[5, 6]], max_new_tokens=3)[0]) == 3
    with pytest.raises(LeanKOnnxError, match=r"has no tokenizer\.json"):
        model.generate(["w1"])


TEMPLATE = "{% for message in messages %}w1 {{ message['content'] }} {% endfor %}"
BLOCKED = ("torch", "transformers", "leank_convert", "onnx", "onnxscript")


def run_alone(folder, arguments, blocked=BLOCKED, **options):
    """Run the folder's own leank_onnx.py, from elsewhere, where `blocked` cannot be imported."""
    script = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({list(blocked)!r}))\n"
        f"sys.path[0] = {str(folder)!r}\n"  # as Python does for a script
        f"sys.argv = {['leank_onnx.py', str(folder), *arguments]!r}\n"
        f"runpy.run_path({str(folder / 'leank_onnx.py')!r}, run_name='__main__')\n"
    )
    return run_python("-W", "error", "-c", script, cwd=folder.parent, **options)


def test_the_command_line_prints_the_answer_without_torch_and_writes_no_file(copied):
    before = snapshot(copied)
    done = run_alone(copied, ["w1 w2 w3", "--max-new-tokens", "12", "--threads", "1"])
    assert (done.returncode, done.stderr) == (0, "")
    assert snapshot(copied) == before
    model = LeanKOnnx(copied, threads=1)
    (answer,) = model.generate(["w1 w2 w3"], max_new_tokens=12)
    assert done.stdout == model.decode(answer) + "\n"


def test_the_command_line_shows_a_character_when_it_is_whole_or_the_answer_ends(copied, monkeypatch, capsys):
    texts = iter(["a\ufffd", "a\ufffd", "aé", "aéb\ufffd", "aéb\ufffd"])
    written = []
    monkeypatch.setattr(LeanKOnnx, "decode", lambda model, ids: next(texts))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "write", written.append)
    assert leank_onnx.main([str(copied), "w1", "--max-new-tokens", "4"]) == 0
    assert written == ["aé", "b\ufffd\n"]


@pytest.mark.parametrize(
    "error,code,printed",
    [
        (KeyboardInterrupt, 130, ("w1\n", "")),
        (MemoryError("cannot allocate 9 GiB"), 2, ("w1", "error: cannot allocate 9 GiB\n")),
    ],
    ids=["ctrl-c", "memory"],
)
def test_what_ends_an_answer_ends_the_command_line_without_a_traceback(
    error, code, printed, copied, monkeypatch, capsys
):
    def interrupted(*args, streamer, **kwargs):
        streamer(0, 5)
        raise error

    monkeypatch.setattr(LeanKOnnx, "generate", interrupted)
    assert leank_onnx.main([str(copied), "w1"]) == code
    assert capsys.readouterr() == printed


def test_the_command_line_puts_the_prompt_into_the_chat_template_unless_told_not_to(
    copied, monkeypatch, capsys
):
    (copied / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setattr(sys, "stdin", io.StringIO("w4 w5"))
    model = LeanKOnnx(copied)
    for options, text in ((["w2 w3"], "w1 w2 w3"), (["w2 w3", "--plain"], "w2 w3"), (["-"], "w1 w4 w5")):
        assert leank_onnx.main([str(copied), "--max-new-tokens", "6", *options]) == 0
        expected = model.decode(model.generate([text], max_new_tokens=6)[0])
        assert capsys.readouterr().out == expected + "\n"


def test_without_jinja2_a_chat_template_asks_for_plain_text(copied):
    (copied / "chat_template.jinja").write_text(TEMPLATE)
    done = run_alone(copied, ["w2 w3"], [*BLOCKED, "jinja2"])
    assert done.returncode == 2
    assert "needs jinja2, which is not installed" in done.stderr
    assert "--plain" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: folder, prompt"),
        (["FOLDER", "w1", "--threads", "x" * 10**4], "argument --threads: invalid int value: "),
        (["FOLDER", "w1", "--max-new-tokens", str(10**12)], "max_new_tokens is 1000000000000: the model's"),
        (["/dev/zero", "w1"], "`/dev/zero/leank_onnx.json` does not exist"),
        (["w" * 300, "w1"], "`" + "w" * 199),
    ],
    ids=lambda value: " ".join(value)[-20:] if isinstance(value, list) else "",
)
def test_arguments_that_make_no_sense_are_refused_in_a_line(arguments, message, copied, capsys):
    arguments = [str(copied) if argument == "FOLDER" else argument for argument in arguments]
    try:
        code = leank_onnx.main(arguments)
    except SystemExit as end:  # argparse's
        code = end.code
    told = capsys.readouterr()
    assert (code, told.out) == (2, "")
    assert told.err.startswith(f"error: {message}")
    assert len(told.err) < 500
    assert [line.partition(":")[0] for line in told.err.splitlines()] in (["error"], ["error", "hint"])


@pytest.mark.parametrize("given", [None, "endless"])
def test_standard_input_without_a_prompt_or_an_end_is_told(given, copied, monkeypatch, capsys):
    endless = io.StringIO()
    monkeypatch.setattr(endless, "read", lambda size: "a" * size)
    monkeypatch.setattr(sys, "stdin", given and endless)
    assert leank_onnx.main([str(copied), "-"]) == 2
    told = f"error: standard input {'has more than' if given else 'is clos'}"
    assert capsys.readouterr().err.startswith(told)


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])
def test_standard_input_that_is_no_text_is_told_in_a_line(encoding, copied):
    (copied / "noise").write_bytes(b"w1 \xff")
    with (copied / "noise").open() as noise:
        done = run_alone(copied, ["-"], stdin=noise, env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_full_disk_and_a_reader_that_has_enough_end_the_command_without_a_traceback(copied):
    (reading, closed), full = os.pipe(), os.open("/dev/full", os.O_WRONLY)
    os.close(reading)
    command = [sys.executable, copied / "leank_onnx.py", copied, "w1 w2", "--max-new-tokens", "8"]
    told = "error: `standard input or output`: No space left on device\n"
    for output, ended in ((full, (2, told)), (closed, (141, ""))):
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
        os.close(output)
        assert (done.returncode, done.stderr) == ended


def test_what_the_terminals_encoding_lacks_is_shown_as_a_question_mark(copied):
    (copied / "tokenizer.json").write_text(
        (copied / "tokenizer.json").read_text().replace('"w', '"é')  # every word that an answer may have
    )
    done = run_alone(copied, ["é1", "--max-new-tokens", "4"], env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("?")


def test_more_tokens_than_the_model_has_positions_are_noted_and_answered(copied, capsys):
    change_description(copied, model={"max_position_embeddings": 5})
    for num_tokens, noted in ((4, 1), (3, 0)):
        assert leank_onnx.main([str(copied), "w1 w2", "--max-new-tokens", str(num_tokens)]) == 0
        out, err = capsys.readouterr()
        assert len(out.split()) == num_tokens
        assert err.count("note: prompt and answer may have 6 tokens, the model's max_position_emb") == noted

"""The shipped runner's command: what it reads and prints, and how it ends."""

import io
import os
import subprocess
import sys

import pytest

from leank_convert.onnx import leank_onnx
from leank_convert.onnx.leank_onnx import LeanKOnnx
from tests.checks import run_python, snapshot
from tests.leank_convert.onnx.conftest import change_description

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

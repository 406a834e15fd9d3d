"""The `evaluate` command from end to end, on a tiny model that writes any text."""

import json
import os
import shutil

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from leank_convert.cli import main
from leank_convert.evaluate.text import NUM_TOKENS
from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask


@pytest.fixture(scope="module")
def writer(tmp_path_factory, byte_level_tokenizer):
    """A checkpoint of random weights with GPT-2's kind of tokenizer, all channels of its first head kept."""
    folder = tmp_path_factory.mktemp("writer")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=len(byte_level_tokenizer),
        bos_token_id=byte_level_tokenizer.bos_token_id,
        eos_token_id=byte_level_tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "source")
    byte_level_tokenizer.save_pretrained(folder / "source")
    mask = torch.zeros(2, 2, 16, dtype=torch.bool)
    mask[:, 0] = True
    windows = {"sink_size": 4, "recent_size": 16, "flush_size": 4}
    return export_checkpoint(folder / "source", ChannelMask(mask), folder / "out", **windows)


def run(*arguments):
    return CliRunner().invoke(main, ["evaluate", *map(str, arguments), "--device", "cpu"])


def test_rulers_tasks_are_answered_scored_and_kept(writer, tmp_path):
    options = ["--task", "vt", "--task", "niah_single_1", "--length", 1500, "--length", 1200, "-n", 2]
    options += ["--also", "think", "--also", "per-head-budget-dynamic", "-o", tmp_path / "results", "--json"]
    printed = run(writer, *options)
    assert printed.exit_code == 0, printed.output
    facts = json.loads(printed.stdout)
    assert [(row["length"], row["task"], row["n"]) for row in facts["scores"]] == [
        (1200, "vt", 2),
        (1200, "niah_single_1", 2),
        (1500, "vt", 2),
        (1500, "niah_single_1", 2),
    ]
    assert set(facts["total"]["means"]) == {"dense", "pruned", "think", "per-head-budget-dynamic"}
    answers = [json.loads(line) for line in (tmp_path / "results" / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 2 * 2 * 2 * 4
    assert all(answer["num_tokens"] <= answer["length"] for answer in answers)
    texts = {name: [a["text"] for a in answers if a["variant"] == name] for name in ("dense", "pruned")}
    assert texts["dense"] != texts["pruned"]
    assert json.loads((tmp_path / "results" / "results.json").read_text()) == facts


def test_a_text_is_compared_token_by_token(writer, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a progress bar, as on a terminal
    text = tmp_path / "text.txt"
    text.write_text("The quick courier left parcel 77 in the hall. " * 10)
    options = ["--text", text, "--prefix-tokens", 100, "--also", "window"]
    printed = run(writer, *options, "-o", tmp_path / "r", "--json")
    assert printed.exit_code == 0, printed.output
    facts = json.loads(printed.stdout)
    assert facts["prefix_tokens"] == 100
    assert set(facts["variants"]) == {"pruned", "window"}
    assert facts["variants"]["pruned"]["mean"]["kl"] > 0
    assert json.loads((tmp_path / "r" / "text.json").read_text()) == facts
    assert (tmp_path / "r" / "text.png").read_bytes().startswith(b"\x89PNG")
    assert f"{facts['num_tokens'] - 101}/{facts['num_tokens'] - 101}" in printed.stderr
    shown = run(writer, *options, "--num-tokens", 30).stdout
    assert f"30 of {facts['num_tokens'] - 101} tokens measured" in shown
    assert "KL (nats)" in shown


def test_of_a_long_text_2000_tokens_are_fed_unless_told(writer, tmp_path, monkeypatch):
    fed = []
    monkeypatch.setattr("leank_convert.evaluate.text._feed", lambda _, ids, prefix: fed.append(ids) or [])
    (tmp_path / "long.txt").write_text("The quick courier left parcel 77 in the hall. " * 2000)
    for options in ([], ["--num-tokens", 3000]):
        run(writer, "--text", tmp_path / "long.txt", "--prefix-tokens", 100, *options)
    assert [ids.shape[1] - 100 - 1 for ids in fed] == [NUM_TOKENS, 3000] == [2000, 3000]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flush_size": 10**9}, "`leank.flush_size` is 1000000000, not an integer from 1 to 16777216"),
        ({"recent_size": 10**30}, "`leank.recent_size` is "),
        ({"prune": "lazy"}, "`leank.prune` is "),
        ({"sink_size": ...}, "the `leank` block lacks `sink_size`"),
        ({"head_permutation": [[0, 0], [0, 1]]}, "`leank.head_permutation[0]` is [0, 0], not a permutation"),
    ],
    ids=str,
)
def test_a_leank_block_that_cannot_be_is_refused(changes, message, writer, tmp_path):
    shutil.copytree(writer, tmp_path / "out")
    config = json.loads((writer / "config.json").read_text())
    leank = {key: value for key, value in {**config["leank"], **changes}.items() if value is not ...}
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "leank": leank}))
    printed = run(tmp_path / "out", "--task", "vt", "--length", 1200, "-n", 2)
    assert printed.exit_code == 2, printed.output
    error, hint = printed.stderr.splitlines()
    assert error.startswith("error: `") and message in error and len(error) < 400
    assert hint.startswith("hint: ")


def test_a_text_that_is_none_is_named(writer, tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(b"\x89PNG\xff\xfe")
    printed = run(writer, "--text", path, "--prefix-tokens", 5)
    assert printed.exit_code == 2
    assert "image.png" in printed.stderr
    assert "UTF-8" in printed.stderr


def test_a_text_that_would_be_fed_for_ever_is_refused(writer, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long.txt").write_bytes(b"long " * 10**6)
    for name, message in (("pipe", "a pipe or a device"), ("long.txt", "is larger than 4 MB")):
        printed = run(writer, "--text", tmp_path / name, "--prefix-tokens", 5)
        assert printed.exit_code == 2
        assert f"{name}` is" in printed.stderr
        assert message in printed.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "vt", "--length", "16777216"], "`--length` 16777216 is more than 8 times the 2048"),
        (["--set", "data.max_length=16777216"], "`data.max_length` 16777216 is more than 8 times the 2048"),
    ],
)
def test_prompts_that_would_take_all_memory_are_refused_before_one_is_drawn(
    writer, options, message, monkeypatch
):
    for drawing in ("draw_prompts", "held_out_prompts"):
        monkeypatch.setattr(
            f"leank_convert.evaluate.session.{drawing}", lambda *_, **__: pytest.fail("drawn")
        )
    if "--set" in options:
        options = ["--recipe", "quickstart", *options]
    printed = run(writer, *options)
    assert printed.exit_code == 2
    assert message in printed.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "vt"], "--task and --length go together"),
        (["--length", "512"], "--task and --length go together"),
        (["--task", "vt", "--length", "512", "--recipe", "quickstart"], "--recipe and --set"),
        (["--haystack", "x.txt"], "--haystack and --questions go with --task"),
        (["--data", "x"], "--data goes with --task longbench or gsm-infinite"),
        (["--task", "longbench", "--data", "x", "--haystack", "y"], "RULER's tasks, not with --data"),
        (["--task", "longbench", "--data", "x", "--seed", "3"], "--seed has no effect with --data"),
        (["--text", "x.txt"], "--text and --prefix-tokens go together"),
        (["--prefix-tokens", "5"], "--text and --prefix-tokens go together"),
        (["--text", "x.txt", "--prefix-tokens", "5", "--against", "y"], "--text goes without"),
        (["--text", "x.txt", "--prefix-tokens", "5", "-n", "200"], "--text goes without -n"),
        (["--text", "x.txt", "--prefix-tokens", "5", "--seed", "3"], "--text goes without --seed"),
        (
            ["--text", "x.txt", "--prefix-tokens", "5", "--batch-size", "2"],
            "--text goes without --batch-size",
        ),
        (["--num-tokens", "5"], "--num-tokens goes with --text"),
        (["--also", "nothing"], "nothing"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    printed = run("out", *options)
    assert printed.exit_code == 2
    assert message in printed.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "longbench"], "task `longbench` needs the benchmark's published files"),
        (["--task", "longbench", "--task", "vt", "--data", "."], "published files and `longbench`, `vt`"),
        (["--task", "vt", "--length", 512, "--data", "."], "published files and `vt` do not go together"),
        (["--task", "gsm-infinite", "--length", 512, "--data", "."], "`gsm-infinite` takes no length"),
        (
            ["--task", "longbench", "--length", 9, "--length", 8, "--data", "."],
            "takes one length, not [9, 8]",
        ),
        (["--task", "longbench", "--data", "missing"], "data folder `missing` does not exist"),
        (
            ["--task", "longbench", "--length", 10**6, "--data", "."],
            "`--length` 1000000 is more than 8 times",
        ),
    ],
)
def test_published_files_go_with_a_benchmark_of_theirs(writer, options, message):
    printed = run(writer, *options)
    assert printed.exit_code == 2
    assert message in printed.stderr
    assert "hint: " in printed.stderr


def test_published_files_are_answered_scored_and_kept(writer, tmp_path):
    pytest.importorskip("datasets")
    record = {"input": "Who?", "context": "A fern is wet. " * 40, "answers": ["a fern"], "all_classes": None}
    (tmp_path / "triviaqa.jsonl").write_text(f"{json.dumps(record)}\n" * 3)
    options = ["--task", "longbench", "--data", tmp_path, "-n", 2, "-o", tmp_path / "results", "--json"]
    printed = run(writer, *options)
    assert printed.exit_code == 0, printed.output
    facts = json.loads(printed.stdout)
    assert facts["measure"] == "LongBench"
    assert [(row["length"], row["task"], row["n"]) for row in facts["scores"]] == [(2048, "triviaqa", 2)]
    assert facts["variants"] == ["dense", "pruned"]
    assert run(writer, *options).stdout == printed.stdout  # from the answers that were kept


def test_an_unknown_task_is_refused_by_name(writer):
    printed = run(writer, "--task", "niah_sinlge_1", "--length", 512)
    assert printed.exit_code == 2
    assert "`niah_sinlge_1`" in printed.stderr

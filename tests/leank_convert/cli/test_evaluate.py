"""The commands `evaluate` and `evaluate-text` from end to end, on a tiny model that writes any text."""

import json
import os
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from leank_convert.export import export_checkpoint
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask, save_mask
from tests.checks import done, rejected, run
from tests.tiny_families import tiny_folder


@pytest.fixture(scope="module")
def writer(tmp_path_factory, byte_level_tokenizer):
    """A checkpoint of random weights with GPT-2's kind of tokenizer, all channels of its first head kept."""
    folder = tmp_path_factory.mktemp("writer")
    mask = torch.zeros(2, 2, 16, dtype=torch.bool)
    mask[:, 0] = True
    windows = {"sink_size": 4, "recent_size": 16, "flush_size": 4}
    source = tiny_folder(folder / "source", byte_level_tokenizer, max_position_embeddings=2048)
    return export_checkpoint(source, ChannelMask(mask), folder / "out", **windows)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("The quick courier left parcel 77 in the hall. " * 10)
    return tmp_path / "text.txt"


def check_remedy(told):
    """A mistake of the user's is told in a sentence, with a remedy."""
    error, hint = told.splitlines()
    assert error.startswith("error: ") and hint.startswith("hint: ") and len(error) < 400


def test_rulers_tasks_are_answered_scored_and_kept(writer, tmp_path):
    options = ["--task", "vt", "--task", "niah_single_1", "--length", 1500, "--length", 1200, "-n", 2]
    options += ["--also", "think", "--also", "per-head-budget-dynamic", "-o", tmp_path / "results", "--json"]
    facts = json.loads(done("evaluate", writer, *options))
    scored = [(row["length"], row["task"], row["n"]) for row in facts["scores"]]
    assert scored == [(length, task, 2) for length in (1200, 1500) for task in ("vt", "niah_single_1")]
    assert set(facts["total"]["means"]) == {"dense", "pruned", "think", "per-head-budget-dynamic"}
    answers = [json.loads(line) for line in (tmp_path / "results" / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 2 * 2 * 2 * 4
    assert all(answer["num_tokens"] <= answer["length"] for answer in answers)
    texts = {name: [a["text"] for a in answers if a["variant"] == name] for name in ("dense", "pruned")}
    assert texts["dense"] != texts["pruned"]
    assert json.loads((tmp_path / "results" / "results.json").read_text()) == facts


def test_a_mask_loses_of_its_model_what_it_loses_as_a_checkpoint(writer, text, tmp_path):
    source, out = writer.parent / "source", tmp_path / "results"
    asked = ["--task", "vt", "--length", 1200, "-n", 2, "--also", "leank+fp8", "--json"]
    fed = ["--text", text, "--prefix-tokens", 100, "--num-tokens", 20, "--json"]
    by_mask = [source, "--mask", writer]
    expected, found = (json.loads(done("evaluate", *named, *asked)) for named in ([writer], by_mask))
    assert found == {**expected, "checkpoint": str(source)}
    expected, found = (json.loads(done("evaluate-text", *named, *fed)) for named in ([writer], by_mask))
    kl, kl_found = (told["variants"]["pruned"]["mean"]["kl"] for told in (expected, found))
    assert kl > 0.1 and kl_found == pytest.approx(kl, rel=1e-4)  # heads in another order round otherwise
    before = sorted(source.iterdir())
    done("evaluate", source, "--mask", writer, *asked, "-o", out)
    assert sorted(source.iterdir()) == before
    made = load_mask(writer / MASK_FILE_NAME)
    every = replace(made, channel_mask=torch.ones_like(made.channel_mask))
    save_mask(every, tmp_path / "every.safetensors")
    told = rejected("evaluate", source, "--mask", tmp_path / "every.safetensors", *asked, "-o", out)
    assert "`mask`" in told
    check_remedy(told)
    told = rejected("evaluate", writer, "--mask", tmp_path / "every.safetensors", *asked)
    assert "is a checkpoint, which has its mask" in told
    check_remedy(told)
    save_mask(ChannelMask(torch.ones(2, 2, 8, dtype=torch.bool)), tmp_path / "other.safetensors")
    check_remedy(rejected("evaluate", source, "--mask", tmp_path / "other.safetensors", *asked))


def test_a_text_is_compared_token_by_token(writer, text, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a progress bar, as on a terminal
    options = ["--text", text, "--prefix-tokens", 100, "--also", "window"]
    printed = run("evaluate-text", writer, *options, "-o", tmp_path / "r", "--json")
    assert printed.exit_code == 0, printed.output
    facts = json.loads(printed.stdout)
    assert facts["prefix_tokens"] == 100
    assert set(facts["variants"]) == {"pruned", "window"}
    assert facts["variants"]["pruned"]["mean"]["kl"] > 0
    assert json.loads((tmp_path / "r" / "text.json").read_text()) == facts
    assert (tmp_path / "r" / "text.png").read_bytes().startswith(b"\x89PNG")
    assert f"{facts['num_tokens'] - 101}/{facts['num_tokens'] - 101}" in printed.stderr
    for name in ("text.json", "text.png"):
        told = rejected("evaluate-text", writer, *options, "-o", tmp_path / "r")
        assert f"{name}` is the result of an earlier run" in told
        (tmp_path / "r" / name).unlink()
    shown = done("evaluate-text", writer, *options, "--num-tokens", 30)
    assert f"30 of {facts['num_tokens'] - 101} tokens measured" in shown
    assert "KL (nats)" in shown


def test_a_text_that_cannot_be_fed_is_refused(writer, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long.txt").write_bytes(b"long " * 10**6)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    for name, message in (
        ("pipe", "a pipe or a device"),
        ("long.txt", "is larger than 4 MB"),
        ("image.png", "can't decode byte 0x89"),
    ):
        told = rejected("evaluate-text", writer, "--text", tmp_path / name, "--prefix-tokens", 5)
        assert name in told and message in told


REFUSED = [
    # They contradict each other.
    (["--task", "vt"], "`--task` and `--length` go together"),
    (["--task", "vt", "--length", 512, "--recipe", "quickstart"], "`--recipe` and `--set` choose"),
    (["--set", "windows.recent_size=8"], "'windows.recent_size=8' has no effect"),
    (["--haystack", "x.txt"], "`--haystack` and `--questions` go with `--task`"),
    (["--task", "longbench", "--data", ".", "--questions", "y"], "`--haystack` and `--questions` go with"),
    (["--task", "longbench", "--data", ".", "--seed", 3], "`--seed` has no effect with `--data`"),
    (["--task", "longbench", "--task", "vt", "--data", "."], "published files and `longbench`, `vt`"),
    (["--task", "vt", "--length", 512, "--data", "."], "published files and `vt` do not go together"),
    (["--task", "longbench"], "task `longbench` needs the benchmark's published files"),
    (["--task", "gsm-infinite", "--length", 512, "--data", "."], "`gsm-infinite` takes no length"),
    (["--task", "longbench", "--length", 9, "--length", 8, "--data", "."], "takes one length, not [9, 8]"),
    # What they name is nowhere, or not to be had.
    (["--also", "nothing"], "`nothing` is not one of"),
    (["--task", "longbench", "--data", "missing"], "data folder `missing` does not exist"),
    (["--task", "niah_sinlge_1", "--length", 512], "`niah_sinlge_1`"),
    # Prompts would take all memory.
    (["--task", "vt", "--length", 16777216], "`--length` 16777216 is more than 8 times the 2048"),
    (["--task", "longbench", "--length", 10**6, "--data", "."], "`--length` 1000000 is more than 8 times"),
    (
        ["--recipe", "quickstart", "--set", "data.max_length=16777216"],
        "_length` 16777216 is more than 8 times",
    ),
]


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=lambda given: " ".join(map(str, given)) * isinstance(given, list)
)
def test_what_cannot_be_evaluated_is_refused_before_a_prompt_is_drawn(writer, options, message, monkeypatch):
    for reading in ("__call__", "apply_chat_template"):
        monkeypatch.setattr(PreTrainedTokenizerBase, reading, lambda *_, **__: pytest.fail("drawn"))
    told = rejected("evaluate", writer, *options)
    assert message in told
    check_remedy(told)


def test_published_files_are_answered_scored_and_kept(writer, tmp_path):
    pytest.importorskip("datasets")
    record = {"input": "Who?", "context": "A fern is wet. " * 40, "answers": ["a fern"], "all_classes": None}
    (tmp_path / "triviaqa.jsonl").write_text(f"{json.dumps(record)}\n" * 3)
    options = ["--task", "longbench", "--data", tmp_path, "-n", 2, "-o", tmp_path / "results", "--json"]
    printed = done("evaluate", writer, *options)
    facts = json.loads(printed)
    assert facts["measure"] == "LongBench"
    assert [(row["length"], row["task"], row["n"]) for row in facts["scores"]] == [(2048, "triviaqa", 2)]
    assert facts["variants"] == ["dense", "pruned"]
    assert done("evaluate", writer, *options) == printed  # from the answers that were kept

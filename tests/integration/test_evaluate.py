"""Evaluation of checkpoints of the shipped model: it tells a good mask from a useless one."""

import functools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.evaluate import evaluate_checkpoint
from leank_convert.evaluate.answering import answer_prompts
from leank_convert.evaluate.loading import load_evaluated
from leank_convert.evaluate.names import BASELINES
from leank_convert.evaluate.prompt import held_out_prompts
from leank_convert.evaluate.request import ANSWERS_NAME
from leank_convert.evaluate.variants import Dense, Masked
from leank_convert.export import export_checkpoint
from leank_convert.folders import LOCK_NAME
from leank_convert.mask import ChannelMask
from leank_convert.mask_tensor import in_checkpoint_order
from leank_convert.recipe_file import load_recipe
from leank_convert.testbed import MODEL_DIR
from leank_convert.windows import Windows
from tests.checks import edit_json, refusal

WEIGHTS_NAME = "model.safetensors"
RECIPE = load_recipe("quickstart", ["data.min_length=256", "data.max_length=384"])
DATA = RECIPE.data
WINDOWS = {"sink_size": 16, "recent_size": 64, "flush_size": 16}
ALL = torch.ones(4, 4, 64, dtype=torch.bool)


def half_mask():
    """Of heads 0 and 1 every second channel, of head 2 the first 16, of head 3 all."""
    mask = ALL.clone()
    mask[:, :2, ::2] = False
    mask[:, 2, 16:] = False
    return mask


@pytest.fixture(scope="module")
def convert(tmp_path_factory):
    @functools.cache
    def run(kind, **windows):
        mask = {"all": ALL, "none": ~ALL, "half": half_mask()}[kind]
        out = tmp_path_factory.mktemp("evaluate") / kind
        export_checkpoint("testbed", ChannelMask(mask), out, **(WINDOWS | windows))
        return out

    return run


@pytest.fixture
def exact(retriever_centred):
    """A checkpoint in float32, as graphs are: in bfloat16 a token may be another."""
    return retriever_centred / "checkpoint"


def compare(checkpoint, num_samples=6, **options):
    options = {"recipe": RECIPE, "device": "cpu", "batch_size": 4, **options}
    return evaluate_checkpoint(checkpoint, num_samples=num_samples, seed=7, **options)


def test_all_channels_lose_nothing_and_none_are_the_window_alone(convert):
    result = compare(convert("all"))
    assert result.total.n == 6
    assert set(result.by_task(384)) == set(DATA.tasks)
    assert result.total.means == {"dense": 1.0, "pruned": 1.0, "window": 0.0}
    assert result.cache.key_pruned == result.cache.key_dense
    assert result.cache.value_pruned == result.cache.value_dense
    result = compare(convert("none"))
    assert result.total.means == {"dense": 1.0, "pruned": 0.0, "window": 0.0}
    assert result.pruning_ratio == 1.0
    assert result.cache.key_pruned <= result.cache.key_dense * sum(WINDOWS.values()) / result.cache.num_tokens


def test_other_methods_answer_the_same_prompts_and_their_bytes_are_counted(convert):
    also = ["fp8", "leank+fp8", "int4", "leank+int4", *BASELINES]
    result = compare(convert("half"), num_samples=2, also=also)
    assert set(result.used) == set(result.variants) == set(result.total.means)
    held = {name: used.held for name, used in result.used.items()}
    assert held["leank+kivi+window"] < held["leank+kivi"] < held["pruned"] < held["dense"]
    assert held["kivi"] < held["dense"] == held["snapkv-2048"] < held["quest-64"] < held["quest-16"]
    assert held["fp8"] == held["dense"] / 2 and held["leank+fp8"] == held["pruned"] / 2
    assert held["leank+int4"] == held["leank+int4+hadamard"] < held["int4"] == held["int4+hadamard"]
    assert held["dense"] / 4 < held["int4"] < held["fp8"] and held["leank+int4"] < held["leank+fp8"]
    assert held["dense"] == result.cache.key_dense + result.cache.value_dense
    # What fits a budget is read whole.
    assert result.total.means["quest-16"] == result.total.means["snapkv-2048"] == 1.0


def test_think_beside_a_mask_that_prunes_values_keeps_them_whole():
    found = [
        compare("testbed", 1, mask=name, also=["think"]).used for name in ("testbed-70", "testbed-70-v50")
    ]
    assert found[0]["think"] == found[1]["think"] and found[0]["pruned"].held > found[1]["pruned"].held


def without(folder, *names):
    """A copy of a folder that lacks files."""
    for name in names:
        for path in folder.glob(name):
            path.unlink()
    return folder


def with_another_vocabulary(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["new"] = len(tokenizer["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_what_cannot_be_compared_is_refused_before_anything_is_answered(
    convert, exact, copy_of, tmp_path, monkeypatch
):
    monkeypatch.setattr("leank_convert.evaluate.run.answer_prompts", None)
    half, written, graph = convert("half"), tmp_path / "written", copy_of(exact.parent / "onnx")
    written.mkdir()
    (written / "results.csv").write_text("mine")
    no_task = {"recipe": "quickstart", "overrides": ["data.haystack.source=story.txt"]}
    no_tokenizer = r"the tokenizer of `.*` cannot be loaded"
    for checkpoint, options, message, hint in (
        (convert("all", recent_size=400), {}, "nothing of any prompt would be pruned", ""),
        (half, no_task, "none of the tasks", ""),
        (without(copy_of(half), "tokenizer*"), {}, no_tokenizer, "put its files into that folder"),
        (half, {"against": without(copy_of(MODEL_DIR), "tokenizer*")}, no_tokenizer, "put its files into"),
        (exact, {"against": without(graph, "model.onnx.data")}, r"model\.onnx\.data` is missing", ""),
        (half, {"against": with_another_vocabulary(copy_of(convert("all")))}, "another vocabulary", ""),
        (half, {"out": written}, r"results.csv` was not written by `evaluate`", ""),
    ):
        if "against" in options:
            options["against"] = str(options["against"])
        with refusal(message, hint):
            compare(checkpoint, **options)
    assert [path.read_text() for path in written.iterdir()] == ["mine"]


@pytest.mark.parametrize(("recent", "flush", "num_whole"), [(242, 6, 3), (231, 1, 0)])
def test_prompts_that_stay_within_the_window_with_their_answers_are_counted(
    convert, caplog, recent, flush, num_whole
):
    """Of 338, 246, 322, 258, 242 and 367 tokens, with answers of up to 7, 15, 12, 7, 11 and 12."""
    assert compare(convert("all", recent_size=recent, flush_size=flush)).num_whole == num_whole
    assert ("3 of 6 prompts" in caplog.text) == (num_whole == 3)


def test_masks_on_one_checkpoint_answer_as_checkpoints_of_their_own(convert):
    """Heads of another order, other channels, other windows: all of it is data of a fork."""
    plain, converted = (load_evaluated(convert(kind), torch.device("cpu")) for kind in ("all", "half"))
    order = plain.leank["head_permutation"]
    assert converted.leank["head_permutation"] != order
    prompts = held_out_prompts(plain.tokenizer, DATA, num_samples=5, seed=3)
    variants = [
        Dense(plain.dense),
        Masked("half", in_checkpoint_order(half_mask(), order)),
        Masked("all"),
        Masked("small", in_checkpoint_order(half_mask(), order), Windows(sink_size=0, recent_size=8)),
    ]
    together = texts(answer_prompts(plain, prompts, variants, batch_size=3))
    alone = texts(answer_prompts(converted, prompts, [Masked("half")], batch_size=1))
    assert together["half"] == alone["half"]
    assert together["all"] == together["dense"]
    assert together["small"] != together["half"] != together["dense"]


def test_dense_and_pruned_answers_end_at_the_same_tokens(convert, tmp_path):
    """`generation_config.json` may name more of them than config.json."""
    out = shutil.copytree(convert("all"), tmp_path / "out")
    plain = load_evaluated(convert("all"), torch.device("cpu"))
    prompts = held_out_prompts(plain.tokenizer, DATA, num_samples=4, seed=5)
    answered = texts(answer_prompts(plain, prompts, [Masked("all")], batch_size=4))["all"]
    first = plain.tokenizer(answered[0])["input_ids"][0]
    end = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    edit_json(out / "generation_config.json", eos_token_id=[end, first])
    evaluated = load_evaluated(out, torch.device("cpu"))
    ended = texts(answer_prompts(evaluated, prompts, [Dense(evaluated.dense), Masked("all")], batch_size=4))
    assert ended["dense"] == ended["all"]
    assert ended["dense"][0] == ""


def test_a_prompt_too_long_for_the_memory_is_told_of(convert, monkeypatch):
    error = torch.OutOfMemoryError("tried to allocate 80 GiB\nand more")
    monkeypatch.setattr("leank_convert.evaluate.answering.run_prefill", Mock(side_effect=error))
    with refusal(r"1 prompts of up to .*: tried to allocate 80 GiB", "take shorter prompts", exit_code=1):
        compare(convert("half"))


def test_a_stock_model_to_compare_with_answers_as_the_checkpoint_does_dense(convert):
    result = compare(convert("half"), against="testbed")
    assert result.baseline == "against"
    assert result.total.means["against"] == compare(convert("half")).total.means["dense"]


def test_another_checkpoint_to_compare_with_answers_pruned(convert):
    result = compare(convert("all"), against=str(convert("none")))
    assert result.total.means == {"against": 0.0, "pruned": 1.0, "window": 0.0}
    assert result.total.differences["pruned"].gained == 6


def test_an_onnx_folder_to_compare_with_answers_as_the_checkpoint_does(exact, tmp_path):
    assert compare(exact, against=str(exact.parent / "onnx"), out=tmp_path).baseline == "against"
    answers = [json.loads(line) for line in (tmp_path / ANSWERS_NAME).read_text().splitlines()]
    texts = {
        name: {answer["prompt"]: answer["text"] for answer in answers if answer["variant"] == name}
        for name in ("against", "pruned")
    }
    assert len(texts["against"]) == 6
    assert texts["against"] == texts["pruned"]


def test_an_evaluation_that_was_killed_asks_only_what_is_missing(convert, tmp_path, monkeypatch):
    whole = compare(convert("half"), out=tmp_path / "whole")
    path = tmp_path / "half" / ANSWERS_NAME
    path.parent.mkdir()
    settings = (tmp_path / "whole" / "settings.json").read_bytes()
    assert WINDOWS.items() <= json.loads(settings).items()
    (path.parent / "settings.json").write_bytes(settings)
    lines = (tmp_path / "whole" / ANSWERS_NAME).read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: 4 * 3]) + lines[12][:9])  # the first batch, and a line that was cut off
    answer = Mock(wraps=answer_prompts)
    monkeypatch.setattr("leank_convert.evaluate.run.answer_prompts", answer)
    for num_samples, num_asked in ((6, 2), (6, 0), (7, 1)):
        answer.reset_mock()
        found = compare(convert("half"), num_samples, out=tmp_path / "half")
        assert found.outcomes[:6] == whole.outcomes
        assert sum(len(call.args[1]) for call in answer.call_args_list) == num_asked


def test_two_evaluations_never_write_to_one_folder(convert, tmp_path, monkeypatch):
    def answer_meanwhile(*given, **options):
        with ThreadPoolExecutor(1) as pool, pytest.raises(LeanKError, match="another evaluation writes to"):
            pool.submit(compare, convert("half"), out=tmp_path).result()
        return answer_prompts(*given, **options)

    monkeypatch.setattr("leank_convert.evaluate.run.answer_prompts", answer_meanwhile)
    compare(convert("half"), num_samples=2, out=tmp_path)
    assert LOCK_NAME not in {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("changed", "name"),
    [("checkpoint", WEIGHTS_NAME), ("against", WEIGHTS_NAME), ("checkpoint", "cache_leank.py")],
)
def test_answers_of_other_weights_or_code_are_refused(convert, tmp_path, changed, name):
    """As of another fine-tuning, converted with the same mask."""
    folder = shutil.copytree(convert("half") if changed == "checkpoint" else MODEL_DIR, tmp_path / "model")
    arguments = {"out": tmp_path / "out", "trust": True}
    checkpoint = folder
    if changed == "against":
        checkpoint, arguments["against"] = convert("half"), str(folder)
    compare(checkpoint, num_samples=2, **arguments)
    content = (folder / name).read_bytes()
    last = b"\n\n" if name.endswith(".py") else bytes([content[-1] ^ 1])
    (folder / name).write_bytes(content[:-1] + last)
    with refusal(f"`{changed}` was"):
        compare(checkpoint, num_samples=2, **arguments)


def test_a_model_to_compare_with_may_be_named_by_another_path(convert, tmp_path, monkeypatch):
    first = compare(convert("half"), num_samples=2, against=str(convert("none")), out=tmp_path)
    monkeypatch.chdir(convert("none"))
    assert compare(convert("half"), num_samples=2, against=".", out=tmp_path).outcomes == first.outcomes


def test_prompts_beyond_the_models_positions_are_told_of(convert, tmp_path, caplog):
    out = shutil.copytree(convert("half"), tmp_path / "out")
    compare(out, num_samples=1)
    assert "positions" not in caplog.text
    edit_json(out / "config.json", max_position_embeddings=200)
    compare(out, num_samples=1)
    assert "the model has 200 positions" in caplog.text


def texts(batches):
    """Answers by variant and prompt."""
    found = {}
    for answer in (answer for batch in batches for answer in batch):
        found.setdefault(answer.variant, {})[answer.index] = answer.text
    return found

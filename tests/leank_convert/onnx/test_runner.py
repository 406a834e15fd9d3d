"""The shipped runner reads, decodes and flushes as the PyTorch runtime does, whatever the rows and turns."""

import re

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from leank_convert.head_layout import list_value_widths
from runtime.configuration_leank import read_settings
from tests.leank_convert.onnx.conftest import Reference

# Lengths of the prompts, and how many tokens of them are read at a time.
PROMPTS = {
    "one prompt at once": ([37], 256),
    "unequal prompts in chunks": ([37, 5, 20], 16),
    "token by token": ([9, 14], 1),
    "a last chunk of one token": ([33, 17], 16),
    "prompts as long as the windows": ([3, 9, 10, 13], 64),
}
# All prompts of one model, one kind of the others, and the type of the graph.
RUNS = [("Llama", name, "float32") for name in PROMPTS] + [
    ("Qwen2", "unequal prompts in chunks", "float32"),
    ("Qwen3", "unequal prompts in chunks", "float32"),
    ("Mistral", "unequal prompts in chunks", "float32"),
    ("Llama, one layer", "unequal prompts in chunks", "float16"),
    ("Llama, V pruned", "prompts as long as the windows", "float32"),
    ("Olmo2", "unequal prompts in chunks", "float16"),
]


def tokens(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 64, length).tolist()


@pytest.mark.parametrize(("family", "prompts", "dtype"), RUNS)
def test_logits_are_as_close_to_exact_ones_as_the_runtimes_over_chunks_flushes_and_turns(
    family, prompts, dtype, exported
):
    model = exported(family, dtype)
    session, held = model.load().start(), Reference(model.leank, getattr(torch, dtype))
    lengths, chunk = PROMPTS[prompts]
    turns = [[tokens(length, seed) for seed, length in enumerate(lengths)]]
    turns += [[tokens(1, 100 * step + row) for row in range(len(lengths))] for step in range(22)]
    # A turn of many, one and no tokens: one token is decoded, several are seen by one another first.
    turns.append([tokens(count, 9) for count in (17, 1, 0, 2)][: len(lengths)])
    turns += [[tokens(1, 100 * step + row) for row in range(len(lengths))] for step in range(30, 41)]
    for index, turn in enumerate(turns):
        logits = session.feed(turn, prompt_chunk=256 if index else chunk, all_logits=True)
        assert {row.dtype for row in logits} == {np.dtype(dtype)}
        held.hold(logits, turn)
    held.settle()
    assert session.lengths.tolist() == [sum(map(len, row)) for row in zip(*turns, strict=True)]


@pytest.mark.parametrize("family", ["Llama", "Llama, V pruned"])
def test_the_cache_grows_by_a_sixteenth_and_is_written_in_place_between(family, exported):
    model = exported(family)
    ours, held = model.load().start(), Reference(model.leank)
    rows = [tokens(40), tokens(7, 1)]
    held.hold(ours.feed(rows, all_logits=True), rows)
    sizes = {ours.cache_bytes}
    for step in range(130):
        before = {name: array.ctypes.data for name, array in ours.cache.tensors().items()}
        new = [[3 + step % 60], [5 + step % 50]]
        held.hold(ours.feed(new), new)
        moved = {name for name, array in ours.cache.tensors().items() if array.ctypes.data != before[name]}
        if moved:
            assert moved == {name for name in before if ".pruned." in name}
        assert bool(moved) == (ours.cache_bytes not in sizes)
        sizes.add(ours.cache_bytes)
    held.settle()
    # 161 tokens are pruned in the longer row: room for 64, 128 and 192 was made.
    assert int(ours.pruned_lengths.max()) > 128
    assert len(sizes) == 3
    settings = read_settings(model.leank.config)
    kept = list_value_widths(settings.widths, 16, settings.value_widths)
    cache = ours.cache.tensors()
    stored = [cache[name].shape for name in cache if re.search(r"pruned.*value", name)]
    assert sum(heads * width for _, heads, width, _ in stored) == sum(kept)


@pytest.mark.parametrize(
    ("family", "sizes", "chunk"),
    [
        ("Llama, one layer", (2**24, 1, 1), 64),
        ("Llama, one layer", (192, 3, 9), 64),
        ("Llama, one layer", (192, 3, 9), 192),
        ("Llama", (3, 2**24, 2**24), 64),  # a graph that is there
    ],
    ids=str,
)
def test_a_window_larger_than_its_tokens_grows_with_them(family, sizes, chunk, exported):
    model = exported(family, windows=sizes)
    session, held = model.load().start(), Reference(model.leank)
    rows = [tokens(192), tokens(7, 1)]
    held.hold(session.feed(rows, prompt_chunk=chunk, all_logits=True), rows)
    turns = [[tokens(9, 2), []], *[[[3 + step], [5 + step]] for step in range(40)], [[4], tokens(100, 3)]]
    for turn in turns:
        held.hold(session.feed(turn, all_logits=True), turn)
    held.settle()
    num_heads = sum(map(len, model.leank.config.leank["widths"]))
    dense = 2 * num_heads * 16 * 4 * int(session.lengths.max()) * 2
    assert session.cache_bytes < 2 * dense


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral", "Llama, V pruned"])
def test_onnxruntime_multiplies_by_the_cache_where_it_lies(family, exported, tmp_path):
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # that the file is for this machine
    onnxruntime.InferenceSession(
        exported(family).folder / "model.onnx", options, providers=["CPUExecutionProvider"]
    )
    graph = onnx.load(options.optimized_model_filepath, load_external_data=False).graph
    names = [value.name for value in graph.input if value.name.startswith("past_key_values.")]
    readers = {
        name: {node.op_type for node in graph.node if name in node.input} - {"Shape"} for name in names
    }
    # Neither transposed nor copied before, as it would be by an operator of its own.
    assert readers
    assert all(operators == {"FusedMatMul"} for operators in readers.values()), readers


def test_sessions_of_one_model_do_not_mix(exported):
    model = exported("Qwen2").load()
    alone = [model.start(), model.start()]
    texts = [[tokens(17, seed)] + [[token] for token in tokens(9, seed + 2)] for seed in (0, 1)]
    expected = [
        [session.feed([turn])[0] for turn in text] for session, text in zip(alone, texts, strict=True)
    ]
    mixed = [model.start(), model.start()]
    for step in range(10):
        for session, text, logits in zip(mixed, texts, expected, strict=True):
            assert np.array_equal(session.feed([text[step]])[0], logits[step])


def test_rows_whose_answers_ended_early_go_on_as_they_do_alone(exported):
    model = exported("Qwen3").load()
    prompts, turns = [tokens(15, 4), tokens(26, 5), tokens(2, 6)], [tokens(3, 7), tokens(19, 8), tokens(1, 9)]
    model.description.eos_token_ids = frozenset()
    free = model.generate(prompts, max_new_tokens=20)
    model.description.eos_token_ids = frozenset({free[0][2], free[2][9]})
    together, told = model.start(), {}
    answers = [
        together.generate(
            rows, max_new_tokens=20, streamer=lambda row, token: told.setdefault(row, []).append(token)
        )
        for rows in (prompts, turns)
    ]
    assert told == {row: answers[0][row] + answers[1][row] for row in range(3)}
    assert len({len(answer) for answer in answers[0]}) > 1
    for row in range(3):
        alone = model.start()
        for turn, rows in enumerate((prompts, turns)):
            assert alone.generate([rows[row]], max_new_tokens=20) == [answers[turn][row]]


def test_a_row_without_a_turn_keeps_the_token_that_ended_its_answer(exported):
    model = exported().load()
    ours, reference = model.start(), model.start()
    first, second = ours.generate([tokens(12), tokens(7, 1)], max_new_tokens=3)
    (third, _) = ours.generate([tokens(4, 2), []], max_new_tokens=3)
    logits = ours.feed([[], tokens(5, 3)], all_logits=True)
    reference.feed([tokens(12), tokens(7, 1)])
    for step in range(2):
        reference.feed([[first[step]], [second[step]]])
    reference.feed([[first[2], *tokens(4, 2)], []])
    for token in third[:2]:
        reference.feed([[token], []])
    expected = reference.feed([[], [second[2], *tokens(5, 3)]], all_logits=True)
    assert [len(row) for row in logits] == [0, 6]
    assert np.array_equal(logits[1], expected[1])


def test_equal_seeds_draw_equal_tokens_and_the_least_top_p_or_temperature_is_greedy(exported):
    model = exported().load()

    def draw(**options):
        return model.generate([tokens(9)], max_new_tokens=20, do_sample=True, **options)

    assert draw(seed=1, temperature=3.0) == draw(seed=1, temperature=3.0) != draw(seed=2, temperature=3.0)
    greedy = model.generate([tokens(9)], max_new_tokens=20)
    assert draw(seed=0, top_p=1e-6) == draw(seed=0, temperature=1e-310) == greedy


def interrupt(session, monkeypatch, number):
    """Let the pass of this number end in the user's Ctrl-C, before what it computed is kept."""
    run, passes = session._run, []

    def interrupted(*args, **kwargs):
        passes.append(args)
        computed = run(*args, **kwargs)
        if len(passes) == number:
            raise KeyboardInterrupt
        return computed

    monkeypatch.setattr(session, "_run", interrupted)


def test_a_session_whose_prompt_was_interrupted_is_empty(exported, monkeypatch):
    model = exported().load()
    session = model.start()
    interrupt(session, monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        session.feed([tokens(30)], prompt_chunk=16)
    assert session.cache_bytes == 0
    assert np.array_equal(session.feed([tokens(30)])[0], model.start().feed([tokens(30)])[0])


@pytest.mark.parametrize(("number", "read"), [(1, 0), (3, 16)])
def test_an_interrupted_turn_is_read_as_far_as_lengths_say(number, read, exported, monkeypatch):
    model = exported().load()
    whole, session = model.start(), model.start()
    for each in (whole, session):
        each.generate([tokens(18)], max_new_tokens=4)
    turn = tokens(20, 1)
    expected = whole.feed([turn], prompt_chunk=8)
    interrupt(session, monkeypatch, number)
    with pytest.raises(KeyboardInterrupt):
        session.feed([turn], prompt_chunk=8)
    assert session.lengths.tolist() == [21 + read]
    # The answer's last token came first, if anything was read.
    rest = turn[max(read - 1, 0) :]
    assert np.array_equal(session.feed([rest], prompt_chunk=8)[0], expected[0])


@pytest.mark.parametrize("by", ["its streamer", "Ctrl-C"])
def test_an_answer_that_is_ended_from_outside_is_gone_on_with(by, exported, monkeypatch):
    model = exported().load()
    whole, session = model.start(), model.start()
    told = []

    def tell(_, token):
        told.append(token)
        if by == "its streamer" and len(told) == 5:
            raise KeyboardInterrupt

    if by == "Ctrl-C":
        interrupt(session, monkeypatch, 6)  # the prompt's is the first
    with pytest.raises(KeyboardInterrupt):
        session.generate([tokens(18)], max_new_tokens=40, streamer=tell)
    assert whole.generate([tokens(18)], max_new_tokens=5) == [told]
    assert np.array_equal(session.feed([tokens(3)])[0], whole.feed([tokens(3)])[0])

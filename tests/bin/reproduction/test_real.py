"""What a real model is asked besides the tables: what is said of it follows from the answers alone."""

import pytest
import torch

from bin.reproduction.answers import Scores
from bin.reproduction.plan import Cell, Entry, RealSizes
from bin.reproduction.real import RealResults
from bin.reproduction.real_report import _byte_grid, _judge_ruler, _weak_grid
from bin.reproduction.texts import DOCUMENTATION, compare_answers, find_kinds
from leank_convert.errors import LeanKError
from leank_convert.evaluate.used_bytes import UsedBytes
from leank_convert.mask import ChannelMask

MAIN, OTHER = Entry("leank", 0.7, run="leank"), Entry("think", 0.7, dynamic=True)
KIVI = Entry("kivi", 0.0, compared=True)
CELLS = (Cell("needle", 1024), Cell("needle", 4096))


def _scores(share, count):
    """So many prompts of each cell, the first of them right."""
    values = [float(place < share * count) for place in range(count)]
    cells = [(cell.task, cell.length) for cell in CELLS for _ in values]
    return Scores(tuple(cells), tuple(values * len(CELLS)))


def _results(main=0.9):
    return RealResults(
        sizes=RealSizes(ruler_lengths=(1024, 4096)),
        main=MAIN,
        entries=(MAIN, OTHER),
        floors={Cell("weak", 1024): 0.1, **dict.fromkeys(CELLS, 0.9)},
        strong=CELLS,
        ruler={
            None: _scores(0.9, 1000),
            MAIN: _scores(main, 1000),
            OTHER: _scores(0.5, 10),
        },
        compared={None: _scores(0.75, 20), MAIN: _scores(0.75, 20), KIVI: _scores(0.25, 20)},
        used={None: UsedBytes(8000, 8000), MAIN: UsedBytes(4800, 4800), KIVI: UsedBytes(1600, 800)},
        num_tokens=8,
        fed={DOCUMENTATION: {MAIN: {"kl": [0.01, 0.03]}, KIVI: {"kl": [0.1, 0.3]}}},
        answers={},
        staticity={},
        mask=ChannelMask(torch.ones(1, 1, 2, dtype=torch.bool)),
    )


@pytest.mark.parametrize(("main", "answer"), [(0.9, "yes"), (0.895, "yes"), (0.885, "no"), (0.8, "no")])
def test_ruler_is_kept_where_mean_and_interval_say_so(main, answer):
    assert _judge_ruler(_results(main=main)).answer == answer


def test_fewer_prompts_are_compared_with_the_dense_answers_to_the_same():
    scores, dense = _results().paired(OTHER)
    assert scores.cells == dense.cells
    assert dense.values == (1.0,) * 20


def test_bytes_stand_beside_the_score_on_prompts_that_all_answered():
    grid = _byte_grid(_results())
    assert "40 prompts" in grid.caption
    dense, leank, kivi = grid.cells
    assert dense == ("dense", "1,000", "100.0%", "100.0%", "75.0", "", "")
    assert leank == ("leank, 70%", "600", "60.0%", "60.0%", "75.0", "+0.0 [-4.7, +4.7]", "0.0200")
    assert (*kivi[:5], kivi[6]) == ("kivi", "200", "20.0%", "10.0%", "25.0", "0.2000")
    assert kivi[5].startswith("-50.0 [")


def test_what_the_dense_model_cannot_is_listed_as_left_out():
    assert _weak_grid(_results()).cells == [("weak", "1,024", "10.0")]


def test_answers_are_compared_token_by_token():
    dense = {"answers": [[1, 2, 3, 4], [5, 6]], "log_likelihood": [-1.0, -2.0]}
    pruned = {"answers": [[1, 2, 9, 4], [5, 6]], "log_likelihood": [-1.5, -2.0]}
    assert compare_answers(pruned, dense) == {
        "identical": 0.5,
        "first_difference": 2.0,
        "equal_tokens": 5 / 6,
        "tokens": 3.0,
        "log_likelihood": -1.75,
        "dense_log_likelihood": -1.5,
    }
    longer = {"answers": [[1, 2, 3, 4, 5], [5, 6]], "log_likelihood": [-1.0, -2.0]}
    assert compare_answers(longer, dense)["equal_tokens"] == 6 / 7


def test_kinds_of_text_are_those_that_were_fetched(tmp_path):
    assert find_kinds(None) == [DOCUMENTATION]
    with pytest.raises(LeanKError, match=r"holds neither `wikipedia.txt` nor `essays.txt`"):
        find_kinds(tmp_path)
    (tmp_path / "essays.txt").touch()
    assert find_kinds(tmp_path) == [DOCUMENTATION, "essays"]

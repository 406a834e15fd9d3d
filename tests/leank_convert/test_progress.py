"""What progress leaves in a file, by a clock that the test moves; a terminal has its bar."""

from unittest.mock import Mock

import pytest

from leank_convert.progress import progress_bar


def run(seconds, shown=True, **options):
    """Moves on once after each of these waits."""
    clock = Mock(return_value=1000.0)
    with progress_bar(shown, "answers", 10, clock=clock, **options) as advance:
        for wait in seconds:
            clock.return_value += wait
            advance(what="stage 1", figures="loss 0.5")


def test_a_line_comes_early_then_every_half_minute_and_at_the_end(capsys):
    run([3, 3, 3, 20, 20, 1])
    assert capsys.readouterr().err.splitlines() == [
        "stage 1: 2/10, 0:00:06 elapsed, 0:00:24 left  loss 0.5",
        "stage 1: 5/10, 0:00:49 elapsed, 0:00:49 left  loss 0.5",
        "stage 1: 6/10, 0:00:50 elapsed, 0:00:33 left  loss 0.5",
    ]
    run([1] * 10)
    assert capsys.readouterr().err.splitlines()[-1] == "stage 1: 10/10, 0:00:10 elapsed  loss 0.5"


def test_what_is_over_before_the_first_line_leaves_none_unless_it_stays(capsys):
    run([1, 1])
    assert capsys.readouterr().err == ""
    run([1, 1], stays=True)
    assert capsys.readouterr().err == "stage 1: 2/10, 0:00:02 elapsed, 0:00:08 left  loss 0.5\n"


def test_the_rate_is_that_of_this_run_and_nothing_done_has_none(capsys):
    run([10], done=7)
    assert "8/10, 0:00:10 elapsed, 0:00:20 left" in capsys.readouterr().err
    run([], done=7, stays=True)
    assert capsys.readouterr().err == "answers: 7/10, 0:00:00 elapsed\n"


def test_an_error_leaves_how_far_it_came(capsys):
    with pytest.raises(ValueError), progress_bar(True, "answers", 9, stays=True) as advance:
        advance()
        raise ValueError
    assert capsys.readouterr().err.startswith("answers: 1/9")


def test_nothing_is_shown_where_none_is_wanted(capsys):
    run([100], shown=False, stays=True)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_its_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    run([100, 100], stays=True)
    err = capsys.readouterr().err
    assert "2/10" in err and "loss 0.5" in err and "━" in err

"""A manager's sign of life."""

import os

from kvfleet.pulse import Pulse


def test_a_file_that_is_not_touched_for_too_long_is_no_sign_of_life(tmp_path):
    path = tmp_path / "node.json"
    path.touch()
    pulse = Pulse(path, 3.0)
    assert [pulse.beats(now) for now in (100.0, 102.0, 103.0, 103.1)] == [True, True, True, False]
    os.utime(path, (1, 1))  # whatever the time is
    assert [pulse.beats(now) for now in (104.0, 107.0, 107.1)] == [True, True, False]
    os.utime(path, (2, 2))
    assert pulse.beats(200.0)


def test_without_the_file_nothing_is_known(tmp_path):
    pulse = Pulse(tmp_path / "gone", 3.0)
    assert [pulse.beats(now) for now in (0.0, 100.0)] == [True, True]

"""What was learned of traffic that is over, and how soon it is given up."""

from __future__ import annotations

from kvfleet.core.reuse import ReuseModel
from kvfleet.core.reuseclasses import kind_of_turn
from kvfleet.core.surprise import Surprise

KIND = kind_of_turn(1, 1)


def lives(model: ReuseModel, minutes: range, used: int) -> None:
    """Each 10 s 18 lives begin, of which so many end: at ages of 20 to 190 s, one each."""
    for step in range(6 * minutes.start, 6 * minutes.stop):
        now = 10.0 * step
        for life in range(18):
            if (life * 7) % 18 < used:
                age_s = 20.0 + 10.0 * life
                model.forgotten(KIND, now - age_s)
                model.ended(KIND, age_s, follows=False)
            model.began(KIND, now)
        model.tick(now + 10.0)


def test_other_traffic_is_learned_soon() -> None:
    """After two hours in which hardly anything came back, nearly everything does."""
    model = ReuseModel(1000)
    lives(model, range(4, 124), 1)
    assert model.chance(KIND, 0.0) < 0.2
    lives(model, range(124, 139), 17)
    assert model.chance(KIND, 0.0) > 0.6


def test_the_same_traffic_is_no_surprise() -> None:
    model = ReuseModel(1000)
    for used in (6, 8):
        lives(model, range(4, 124), used)
        assert model._seen_s > 2300.0, "a half life of 1800 s, nothing given up"


def test_only_clear_differences_count() -> None:
    surprise = Surprise()
    for expected, came, clump, sure in (
        (100, 100, 1, False), (100, 149, 1, False), (100, 160, 1, True), (160, 100, 1, True),
        (0, 19, 1, False), (0, 21, 1, True), (1000, 1600, 10, True), (300, 480, 10, False),
    ):  # fmt: skip
        surprise.forget()
        surprise.note(expected, came, 1.0)
        assert surprise.sure(clump) == sure, (expected, came, clump)
    surprise.note(0, 0, 0.0)
    assert not surprise.sure(1)

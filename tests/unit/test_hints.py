"""What callers may say about a prefix, and which blocks are one session's alone."""

import pytest

from kvfleet import Hints
from kvfleet.core.hints import session_digest
from kvfleet.core.sessions import Sessions
from kvfleet.testing.policies import block_key

ONE, TWO = b"1" * 16, b"2" * 16


@pytest.mark.parametrize(
    "fields",
    [
        {"session": "text"},
        {"session": b"short"},
        {"turn": 0},
        {"turn": True},
        {"turn": "2"},
        {"turn": 1 << 40},
        {"final": 1},
        {"final": "no"},
        {"priority": 2},
        {"priority": True},
        {"priority": 0.5},
        {"priority": None},
    ],
)
def test_hints_of_wrong_kinds(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Hints(**fields)


@pytest.mark.parametrize("session", [7, None, ["a"]])
def test_a_session_of_the_wrong_kind(session):
    with pytest.raises(ValueError, match="session must be text or bytes"):
        Hints.of(session)


def test_sessions_are_digests():
    hints = Hints.of("chat 7", turn=2, final=True, priority=-1)
    assert (len(hints.session), hints.turn, hints.final, hints.priority) == (16, 2, True, -1)
    assert hints.session == session_digest(b"chat 7") != session_digest("chat 8")
    assert Hints.of("") == Hints()
    assert Hints.of("\ud800").session != b""


def test_tenants_have_sessions_of_their_own():
    hints = Hints.of("chat 7")
    assert len({hints.session, hints.within(b"a" * 16).session, hints.within(b"b" * 16).session}) == 3
    assert Hints(turn=3).within(b"a" * 16) == Hints(turn=3)


def test_fields_of_a_request():
    assert Hints.parse({"session": "chat 7", "turn": 2, "other": object()}) == Hints.of("chat 7", turn=2)
    assert Hints.parse({}) == Hints.parse({"session": None}) == Hints()
    for wrong in ({"session": 7}, {"turn": "2"}, {"final": "yes"}, {"priority": 9}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Hints.parse(wrong)


def keys(*numbers):
    return [block_key(number) for number in numbers]


def test_a_session_alone():
    sessions = Sessions(100)
    sessions.stored(ONE, keys(1, 2, 3), None)
    sessions.stored(ONE, keys(4, 5), block_key(3))
    assert sessions.retire(ONE) == keys(1, 2, 3, 4, 5)
    assert len(sessions) == 0
    assert sessions.retire(ONE) == []


def test_what_another_builds_on_is_shared_with_all_before_it():
    sessions = Sessions(100)
    sessions.stored(ONE, keys(1, 2, 3), None)
    sessions.stored(TWO, keys(10), block_key(2))
    assert [sessions.is_shared(key) for key in keys(1, 2, 3, 10)] == [True, True, False, False]
    assert sessions.retire(ONE) == keys(3)
    assert sessions.retire(TWO) == keys(10)
    sessions.stored(TWO, keys(1, 2, 11), None)
    assert sessions.retire(TWO) == keys(11), "what is shared stays so"


def test_stores_without_a_session_share():
    sessions = Sessions(100)
    sessions.stored(ONE, keys(1, 2), None)
    sessions.stored(b"", keys(1, 20), None)
    assert block_key(20) not in sessions
    assert sessions.retire(ONE) == keys(2)


def test_the_first_blocks_are_forgotten_when_there_are_too_many():
    sessions = Sessions(3)
    sessions.stored(ONE, keys(1, 2), None)
    sessions.stored(TWO, keys(3, 4), None)
    assert len(sessions) == 3
    assert sessions.retire(ONE) == keys(2)
    assert sessions.retire(TWO) == keys(3, 4)

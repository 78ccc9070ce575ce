"""What became of a request, in words."""

from __future__ import annotations

import pickle

import pytest

from kvfleet.core.block import KEY_BYTES
from kvfleet.core.directory import NodeId
from kvfleet.core.outcomes import Miss, Outcome, Source
from kvfleet.core.totals import UNCLAIMED
from kvfleet.explain import WORDS, Part, explain, show_time, words
from kvfleet.hits import HitRun, Loaded, PrefixHit
from tests.workload import model

LAYOUT = model().layout
NODES = tuple(NodeId(letter * 56) for letter in "abcdef")
HIT = PrefixHit(
    7 * 16,
    7,
    9,
    bytes(9 * KEY_BYTES),
    (
        HitRun(1, 3, local=True),
        HitRun(3, 6, local=False, nodes=NODES[:1], shared=True),
        HitRun(6, 7, local=False, pending=True),
    ),
    start_block=1,
    missing=Miss.EVICTED,
    label="r1",
    lookup_s=0.00025,
    calls=("locate",),
)


def loaded() -> Loaded:
    outcomes: list[Outcome] = [*[Source.DRAM] * 2, Source.PEER, Miss.TOO_SLOW, *[Miss.BEHIND_MISS] * 2]
    answer = Loaded.of(outcomes, LAYOUT)
    answer.hit, answer.load_s, answer.calls = HIT, 5.25, ("load",)
    return answer


def test_a_lookup_is_explained():
    explanation = explain(HIT, LAYOUT)
    assert explanation.parts == (
        Part(1, 3, "in this node's memory", None, 0, ""),
        Part(3, 6, "on node aaaaaaaa and in the shared tier", None, 0, ""),
        Part(6, 7, "being written on this node", None, 0, ""),
        Part(7, 9, "not found", Miss.EVICTED, 0, "it was there, and had to make room"),
    )
    assert (explanation.missing, explanation.loaded_blocks) == (Miss.EVICTED, None)


@pytest.mark.parametrize("sent", [False, True])
def test_a_load_is_explained(sent):
    answer = pickle.loads(pickle.dumps(loaded())) if sent else loaded()
    assert str(explain(answer, LAYOUT)).splitlines() == [
        "request r1: 8 blocks of 16 tokens asked for, 6 found, 3 loaded",
        "  blocks 1-2, 32 tokens: in this node's memory; came from this node's memory, 128.0 KiB",
        "  block 3, 16 tokens: on node aaaaaaaa and in the shared tier; came from another node, 64.0 KiB",
        "  block 4, 16 tokens: on node aaaaaaaa and in the shared tier; its holder sent nothing for too long",
        "  block 5, 16 tokens: on node aaaaaaaa and in the shared tier; "
        "it was found, but a block before it did not come",
        "  block 6, 16 tokens: being written on this node; it was found, but a block before it did not come",
        "  blocks 7-8, 32 tokens: not found; it was there, and had to make room",
        "lookup: 0.25 ms, asked the directory",
        "load: 5.25 s, asked this node's manager to bring blocks",
    ]


def test_a_request_that_found_all_of_it_here_took_no_call():
    hit = PrefixHit(32, 2, 2, bytes(2 * KEY_BYTES), (HitRun(0, 2, local=True),), lookup_s=0.00005)
    assert str(explain(hit, LAYOUT)).splitlines() == [
        "2 blocks of 16 tokens asked for, 2 found, not loaded",
        "  blocks 0-1, 32 tokens: in this node's memory",
        "lookup: 0.05 ms, no remote call",
    ]


def test_drives_are_named():
    hit = PrefixHit(32, 2, 2, bytes(2 * KEY_BYTES), (HitRun(0, 2, local=False, nvme=True),), lookup_s=0.00005)
    answer = Loaded.of([Source.NVME] * 2, LAYOUT)
    answer.hit = hit
    assert str(explain(answer, LAYOUT)).splitlines()[1] == (
        "  blocks 0-1, 32 tokens: on this node's drives; came from this node's drives, 128.0 KiB"
    )


def test_many_holders_are_not_all_named():
    hit = PrefixHit(16, 1, 1, bytes(KEY_BYTES), (HitRun(0, 1, local=False, nodes=NODES),))
    assert explain(hit, LAYOUT).parts[0].said == "on nodes aaaaaaaa, bbbbbbbb, cccccccc, dddddddd, ..."


def test_every_outcome_has_words():
    assert WORDS.keys() == {*(outcome.value for kind in (Source, Miss) for outcome in kind), UNCLAIMED}
    assert words(Miss.CORRUPT) == words("corrupt") == "its bytes were wrong"
    assert words(None) == ""


def test_times_are_shown():
    assert [show_time(seconds) for seconds in (0, 0.0123, 2)] == ["0.00 ms", "12.30 ms", "2.00 s"]

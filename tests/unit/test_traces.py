"""Trace files of others and of our own, and what is wrong with some."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvfleet.cli.main import app
from kvfleet.errors import ConfigError
from kvfleet.sim.trace import Request, load_trace, with_final, write_trace

MOONCAKE = {"timestamp": 27000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}
BAILIAN = {
    "chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 132,
    "type": "text", "turn": 1, "hash_ids": [1089, 1090, 6326],
}  # fmt: skip
OWN = {"format": "kvfleet-trace-1", "block_tokens": 256}
ASKED = {"time_s": 1.5, "prompt_tokens": 700, "output_tokens": 3, "keys": "00000000000000ff" + "0123456789abcdef"}


@pytest.fixture
def file(tmp_path):
    def write(*lines):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def test_mooncake(file):
    """The partial last block has an id in the file and no key: it is never stored."""
    later = MOONCAKE | {"timestamp": 30000, "input_length": 1536, "hash_ids": [46, 47, 9]}
    trace = load_trace(file(later, "", MOONCAKE))
    assert trace.block_tokens == 512
    assert trace.requests == [Request(27.0, (0, 1), 1100, 52), Request(30.0, (0, 1, 2), 1536, 52)]
    assert (trace.references, trace.distinct) == (6, 3)


def test_bailian(file):
    """Sessions have the name of their first request; one whose beginning is not in the file, that of what it names."""
    second = BAILIAN | {"chat_id": 160, "parent_chat_id": 159, "turn": 2, "timestamp": 70, "output_length": 1}
    third = second | {"chat_id": 161, "parent_chat_id": 160, "turn": 3, "timestamp": 80}
    other = second | {"chat_id": 200, "parent_chat_id": 7, "timestamp": 90, "hash_ids": [5, 1090]}
    trace = load_trace(file(BAILIAN, second, third, other))
    assert trace.block_tokens == 16
    assert [(one.session, one.turn) for one in trace.requests] == [("159", 1), ("159", 2), ("159", 3), ("7", 2)]
    assert [one.keys for one in trace.requests] == [(0, 1)] * 3 + [(2, 3)]  # 1090 behind another block is another one
    assert trace.requests[0] == Request(61.114, (0, 1), 40, 132, "159", 1)


def test_our_own(file):
    trace = load_trace(file(OWN, ASKED, ASKED | {"session": "s", "turn": 2, "final": True, "keys": "00" * 7 + "ff"}))
    assert trace.block_tokens == 256
    assert trace.requests == [Request(1.5, (0, 1), 700, 3), Request(1.5, (0,), 700, 3, "s", 2, final=True)]


def test_a_recording_tells_the_size_of_a_token(file):
    assert load_trace(file(OWN, ASKED)).token_bytes is None
    assert load_trace(file(OWN | {"token_bytes": 320}, ASKED)).token_bytes == 320


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "own.jsonl"
    requests = [
        Request(0.0, (0, 1), 40, 5),
        Request(1.25, (0, 2, 3), 48, 0, "a", 3, final=True),
        Request(2.0, (), 3, 1),
    ]
    assert write_trace(path, 16, requests) == 3
    assert load_trace(path).requests == requests


def test_requests_are_put_in_order(file):
    trace = load_trace(file(*(MOONCAKE | {"timestamp": at} for at in (3000, 1000, 2000))))
    assert [request.time_s for request in trace.requests] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["{"], "line 1: no JSON, or cut: it begins with '{'"),
        ([MOONCAKE, "", "\x00\x80garbage"], "line 3: no JSON"),
        ([MOONCAKE, "[1]"], "line 2: a JSON object is expected, is list"),
        ([{"hello": 1}], "line 1: it is of no known trace"),
        ([{"format": "kvfleet-trace-9"}], "line 1: format 'kvfleet-trace-9' is not known here"),
        ([{"format": OWN["format"]}], "line 1: block_tokens: a whole number from 1 to .* is expected, is missing"),
        ([OWN], "it has no requests"),
        ([""], "it has no requests"),
        ([MOONCAKE | {"timestamp": -1}], "line 1: timestamp: a time from 0 on is expected, is -1"),
        ([MOONCAKE | {"timestamp": float("nan")}], "line 1: timestamp: .* is nan"),
        ([MOONCAKE | {"timestamp": True}], "line 1: timestamp: .* is True"),
        ([MOONCAKE | {"input_length": 1.5}], "line 1: input_length: a whole number .* is 1.5"),
        ([{"hash_ids": []}], "line 1: input_length: .* is missing"),
        ([MOONCAKE | {"hash_ids": "1"}], "line 1: hash_ids: a list is expected"),
        ([MOONCAKE | {"hash_ids": [1, -2]}], "line 1: hash_ids: whole numbers"),
        ([MOONCAKE | {"hash_ids": [True]}], "line 1: hash_ids: whole numbers"),
        ([MOONCAKE | {"hash_ids": [2**64]}], "line 1: hash_ids: whole numbers"),
        ([MOONCAKE | {"hash_ids": [1, 2, 3, 4]}], "line 1: 4 blocks are too many for 1100 tokens, 512 of them"),
        ([MOONCAKE | {"input_length": 2**20}], "too few block ids for its prompts: its blocks are not of 512"),
        ([BAILIAN | {"turn": 0}], "line 1: turn: a whole number from 1"),
        ([BAILIAN | {"parent_chat_id": None}], "line 1: parent_chat_id"),
        ([OWN, ASKED | {"keys": "00"}], "line 2: keys: a string of 16 hex digits a block is expected"),
        ([OWN, ASKED | {"keys": "zz" * 8}], "line 2: keys: "),
        ([OWN, ASKED | {"keys": "00 " * 16}], "line 2: keys: "),
        ([OWN, ASKED | {"final": 1}], "line 2: session is a string, final true or false"),
        ([OWN, "{" * 20_000], "line 2: no JSON"),
    ],
)
def test_what_is_no_trace_is_refused(file, lines, problem):
    with pytest.raises(ConfigError, match=problem):
        load_trace(file(*lines))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.jsonl: No such file or directory"):
        load_trace(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(
    ("ids", "over"),
    [
        # the first is continued by the second, which is repeated; of these the later one is the last
        ([[1], [1, 2], [1, 2], [7], []], [False, False, True, True, False]),
        # an answer is asked for again, from the same beginning: the first is not the last that needs it
        ([[1, 2, 3], [1, 2, 4]], [False, True]),
        # what others have used too, as a system prompt, does not count
        ([[1, 2], [1, 3], [1, 4], [1, 3]], [False, False, True, True]),
        # only blocks that others continue: all of them count
        ([[1, 2], [1, 3], [1], [1]], [False, True, False, True]),
    ],
)
def test_requests_that_say_they_are_the_last(file, ids, over):
    trace = load_trace(file(*(MOONCAKE | {"input_length": 512 * len(one), "hash_ids": one} for one in ids)))
    assert [one.final for one in with_final(trace, 1.0).requests] == over


def test_a_share_of_the_requests_that_are_the_last(file):
    trace = load_trace(file(MOONCAKE))
    assert not any(one.final for one in with_final(trace, 0.0).requests)
    many = load_trace(file(*(MOONCAKE | {"hash_ids": [number, 0, 0]} for number in range(1000))))
    some = [one.final for one in with_final(many, 0.4, seed=3).requests]
    assert 350 < sum(some) < 450
    assert some == [one.final for one in with_final(many, 0.4, seed=3).requests]


def test_ends_that_are_told_make_room_for_what_goes_on(file):
    """`kvfleet bench policies`: a conversation goes on after a long prompt that ends. LRU keeps it if it knows that."""
    ids = [[1], [7, 8, 9], [5, 6], [1, 2]]
    path = file(*(MOONCAKE | {"timestamp": 1000 * at, "input_length": 512 * len(one), "hash_ids": one}
                  for at, one in enumerate(ids)))  # fmt: skip

    def hits(final):
        options = ["--policy", "lru", "--resident", "8", "--requests", "1", "--trace", str(path), "--capacity", "4"]
        result = CliRunner().invoke(app, ["bench", "policies", *options, "--final", final], env={"COLUMNS": "120"})
        assert result.exit_code == 0, result.output
        return result.output.splitlines()[-2]

    assert "0.0%" in hits("0")
    assert "12.5%" in hits("1")

"""Made-up traffic: the same for the same seed, and like what it is said to be."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from kvfleet.sim.generators import WORKLOADS, generate
from kvfleet.sim.optimum import best_hits_of
from kvfleet.sim.workloads import Chat, Unique, scaled

NUMBER = 1500


def made(name, **settings):
    return list(generate(WORKLOADS[name], requests=NUMBER, rate=4.0, **settings))


def sessions_of(requests):
    sessions = defaultdict(list)
    for request in requests:
        sessions[request.session].append(request)
    return sessions.values()


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_are_sound(name):
    requests = made(name, block_tokens=256)
    assert len(requests) == NUMBER
    assert all(one.time_s <= other.time_s for one, other in pairwise(requests))
    parents = {}
    for request in requests:
        assert len(request.keys) == request.prompt_tokens // 256
        assert 0 < request.prompt_tokens <= WORKLOADS[name].context_tokens
        assert request.output_tokens > 0
        for parent, key in pairwise((None, *request.keys)):
            assert parents.setdefault(key, parent) == parent, "equal ids mean equal prefixes"
    for session in sessions_of(requests):
        assert [request.turn for request in session] == list(range(1, len(session) + 1))
    assert made(name, block_tokens=256) == requests
    assert made(name, block_tokens=256, seed=1) != requests


def test_what_is_asked_again():
    """An endless cache hits most of agents' and of code's blocks, much of chat, some of documents, none of the rest."""
    shares = {}
    for name in WORKLOADS:
        requests = made(name)
        shares[name] = best_hits_of(requests, 10**9) / sum(len(one.keys) for one in requests)
    assert shares["agents"] > 0.85
    assert 0.7 < shares["code"] < 0.95
    assert 0.5 < shares["chat"] < 0.85
    assert 0.2 < shares["rag"] < 0.6
    assert shares["unique"] == 0


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_a_turn_continues_what_was_before(name):
    for session in sessions_of(made(name)):
        for one, other in pairwise(session):
            assert other.keys[: len(one.keys)] == one.keys
            assert other.prompt_tokens >= one.prompt_tokens
            assert other.time_s > one.time_s


def test_the_rate_is_reached():
    requests = made("rag")
    assert 0.8 * NUMBER < 4.0 * requests[-1].time_s < 1.4 * NUMBER


def test_contexts_have_an_end():
    small = replace(Chat(), context_tokens=3000, turns_mean=30.0)
    assert max(one.prompt_tokens for one in generate(small, requests=500, rate=1.0)) <= 3000


def test_texts_can_be_longer():
    once, twice = Unique(), scaled(Unique(), 2.0)
    assert (twice.prompt_tokens, twice.context_tokens) == (8_000, 262_144)
    one, other = (next(generate(kind, requests=1, rate=1.0)).prompt_tokens for kind in (once, twice))
    assert abs(other - 2 * one) <= 1


def test_some_say_they_are_the_last():
    requests = made("chat", final_share=0.5)
    last = {id(session[-1]) for session in sessions_of(requests)}
    said = [request for request in requests if request.final]
    assert all(id(request) in last for request in said)
    assert 0.35 < len(said) / len(last) < 0.6
    assert not any(request.final for request in made("chat"))

"""Hints on their way to the nodes: a session that ends leaves first, wherever its blocks are."""

import pytest

from kvfleet import Hints
from kvfleet.config import MIB, DriveConfig
from kvfleet.core.block import split
from kvfleet.node.messages import HintRequest
from tests.rig import Rig
from tests.workload import kv, load, model, prompt, store

SPEC = model()


def hinted(client, tokens, hints, start_block=0):
    source = kv(SPEC, tokens)[:, :, :, start_block * 16 :]
    result = client.store(tokens, source, start_block=start_block, hints=hints).wait(60)
    assert (result.dropped, result.published) == (0, True), result


def leaving(rig, number, count):
    """The next blocks that a node would evict."""
    placement = rig.part(number).dram.placement
    policy = placement._residents.policy(SPEC.layout.block_bytes)
    return [] if policy is None else policy.victims(count, lambda _: 1)


def test_an_ended_session_goes_first(arena_root):
    with Rig(arena_root) as rig:
        client = rig.client(SPEC)
        chat, other = prompt(6), prompt(3, 1)
        hinted(client, chat[: 3 * 16], Hints.of("chat", turn=1))
        hinted(client, chat, Hints.of("chat", turn=2), start_block=3)
        store(client, other)
        load(client, other)
        load(client, chat)
        assert client.retire("another").wait(10).published
        assert client.retire("chat").wait(10).published
        assert leaving(rig, 0, 6) == split(SPEC.keys(chat))[::-1]
        assert load(client, chat) == 6 * 16, "said, not done"


def test_what_sessions_share_stays(arena_root):
    with Rig(arena_root) as rig:
        client = rig.client(SPEC)
        one, two = prompt(4), prompt(4)
        two[2 * 16 :] += 1 << 20
        hinted(client, one, Hints.of("one"))
        hinted(client, two, Hints.of("two"))
        assert client.retire("one").wait(10).published
        assert leaving(rig, 0, 2) == split(SPEC.keys(one))[:1:-1]


def test_a_final_turn_ends_its_session(arena_root):
    with Rig(arena_root) as rig:
        client = rig.client(SPEC)
        chat, other = prompt(4), prompt(2, 1)
        store(client, other)
        hinted(client, chat[: 2 * 16], Hints.of("chat"))
        hinted(client, chat, Hints.of("chat", final=True), start_block=2)
        assert leaving(rig, 0, 4) == split(SPEC.keys(chat))[::-1]


@pytest.mark.parametrize("session", ["chat", ""])
def test_a_prompt_that_is_all_here_has_its_end_told(arena_root, session):
    """Nothing of it is written, so that no reserve brings its hints."""
    with Rig(arena_root) as rig:
        client = rig.client(SPEC)
        chat, other = prompt(4), prompt(2, 1)
        store(client, chat)
        store(client, other)
        again = client.store(chat, kv(SPEC, chat), hints=Hints.of(session, turn=1)).wait(10)
        assert (again.already, rig.part(0).writers.retired_blocks) == (4, 0)
        again = client.store(chat, kv(SPEC, chat), hints=Hints.of(session, final=True)).wait(10)
        assert (again.stored, again.already, again.published) == (0, 4, True)
        assert leaving(rig, 0, 4) == split(SPEC.keys(chat))[::-1]
        assert rig.part(0).status().retired_blocks == 4


def test_what_was_only_loaded_is_hinted(arena_root):
    with Rig(arena_root) as rig:
        client = rig.client(SPEC)
        chat, other = prompt(4), prompt(2, 1)
        store(client, chat)
        store(client, other)
        assert load(client, chat) == 4 * 16
        told = client.hint(SPEC.keys(chat), Hints.of(final=True)).wait(10)
        assert (told.already, told.published) == (4, True)
        assert leaving(rig, 0, 4) == split(SPEC.keys(chat))[::-1]
        with pytest.raises(TypeError, match="hints"):
            client.hint(SPEC.keys(chat), "final")


def test_an_ended_session_goes_first_from_drives(arena_root, tmp_path, wait_for_condition):
    drives = (DriveConfig(directory=str(tmp_path), max_bytes=16 * MIB, dwpd=1000.0),)
    with Rig(arena_root, nvme=drives) as rig:
        part, client = rig.part(0), rig.client(SPEC)
        wait_for_condition(part.nvme.opened.is_set, "the drive was tried")
        chat, other = prompt(3), prompt(2, 1)
        hinted(client, chat, Hints.of("chat"))
        store(client, other)
        load(client, chat)
        wait_for_condition(lambda: not part.dram.placement.num_unsaved("nvme"), "all is on the drive")
        books = part.nvme._bays[0].at_work.drive.books
        [policy] = books.placement._residents._policies.values()
        assert client.retire("chat").wait(10).published
        assert policy.victims(3, lambda _: 1) == split(SPEC.keys(chat))[::-1]


def test_parents_in_a_circle_end(arena_root):
    """As a client says that has a bug: the manager must not hang."""
    with Rig(arena_root) as rig:
        client, keys = rig.client(SPEC), split(SPEC.keys(prompt(3)))
        store(client, prompt(2))
        writers, blocks = rig.part(0).writers, rig.part(0).dram.placement._residents.blocks
        blocks[keys[0]].parent = keys[1]
        writers._note(Hints.of("chat"), keys[2:], keys[1])
        ended = HintRequest(b"", b"", Hints.of("chat", final=True))
        assert [writers.hint(ended), len(writers._sessions)] == [3, 0]


def test_other_nodes_hear_of_it(arena_root, wait_for_condition):
    """A session that moved: the node where it ends has what came from the first one, and had it told."""
    with Rig(arena_root, num_nodes=2) as rig:
        first, second = rig.client(SPEC, 0), rig.client(SPEC, 1)
        chat, other = prompt(5), prompt(2, 1)
        store(first, other)
        hinted(first, chat[: 3 * 16], Hints.of("chat"))
        assert load(second, chat[: 3 * 16]) == 3 * 16
        hinted(second, chat, Hints.of("chat"), start_block=3)
        load(first, chat[: 3 * 16])
        assert second.retire("chat").wait(10).published
        assert leaving(rig, 1, 5) == split(SPEC.keys(chat))[::-1]
        ended = split(SPEC.keys(chat[: 3 * 16]))[::-1]
        wait_for_condition(lambda: leaving(rig, 0, 3) == ended, "the first node has heard")


def test_sessions_of_tenants_are_apart(arena_root):
    with Rig(arena_root) as rig:
        client, stranger = rig.client(SPEC), rig.client(model(name="another"))
        hinted(client, prompt(3), Hints.of("chat"))
        store(client, prompt(2, 1))
        assert stranger.retire("chat").wait(10).published
        assert len(rig.part(0).writers._sessions) == 3
        assert client.retire("chat").wait(10).published
        assert leaving(rig, 0, 3) == split(SPEC.keys(prompt(3)))[::-1]


def test_wrong_hints_are_mistakes_of_the_caller(arena_root):
    with Rig(arena_root) as rig:
        client = rig.client(SPEC)
        with pytest.raises(TypeError, match="hints must be a Hints"):
            client.store(prompt(1), kv(SPEC, prompt(1)), hints={"final": True})
        for session in ("", 7):
            with pytest.raises(ValueError, match="session must"):
                client.retire(session)


def test_wrong_hints_cost_a_hit_and_nothing_else(arena_root):
    """All is said to be final, and is used again: what there is room for is found, with the right bytes."""
    with Rig(arena_root, dram_bytes=MIB) as rig:
        client = rig.client(SPEC)
        for round_ in range(3):
            for number in range(4):
                client.store(prompt(6, number), kv(SPEC, prompt(6, number)), hints=Hints.of("x", final=True)).wait(60)
                assert load(client, prompt(6, number)) in (0, *range(16, 97, 16)), round_
        assert rig.part(0).dram.placement.audit() == []


def test_a_retirement_that_nobody_hears(arena_root):
    with Rig(arena_root, attach_timeout_s=0.5, lookup_timeout_s=0.5) as rig:
        client = rig.client(SPEC)
        hinted(client, prompt(2), Hints.of("chat"))
        rig.kill(0)
        result = client.retire("chat").wait(30)
        assert (result.published, result.reason) == (False, "manager_unavailable")
        client.close()
        assert client.retire("chat").wait(1).reason == "closed"

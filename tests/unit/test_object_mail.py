"""What managers say of shared objects on its way to the catalog: the outbox, the directory's election and mailbox."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvfleet.config import FleetConfig
from kvfleet.core.directory import Delta, InventoryPage, NodeId
from kvfleet.core.objectrows import SharedObject, gone_rows
from kvfleet.node import directory as directory_module
from kvfleet.node.directory import DirectoryService
from kvfleet.node.directorylink import DeltaReply, ObjectRequest
from kvfleet.node.outbox import USE_S, Outbox, Uses

A, B = NodeId("a" * 32), NodeId("b" * 32)


def thing(number: int) -> SharedObject:
    return SharedObject(bytes(16), number.to_bytes(2, "big") * 8, 0, 1, 100 + number, 0, 0)


def rows(*numbers: int) -> bytes:
    return b"".join(thing(number).row(stored_at=1, last_used=1) for number in numbers)


def records(*numbers: int) -> bytes:
    return b"".join(thing(number).record for number in numbers)


def put(box: Outbox, *numbers: int) -> None:
    for number in numbers:
        box.put(thing(number).record, rows(number))


# --- the outbox


def test_rows_are_kept_until_they_are_written_down():
    box = Outbox()
    put(box, 1, 2, 3)
    assert box.take(2) == rows(1, 2)
    assert (len(box), box.num_waiting) == (3, 3)
    assert box.landed(7, 2, 0) == []
    assert (len(box), box.num_waiting) == (3, 1)
    assert box.take(2) == rows(3)
    assert box.landed(7, 3, 2) == []
    assert (len(box), box.num_waiting) == (1, 0)
    assert box.take(2) == b""
    assert box.landed(7, 3, 3) == []
    assert len(box) == 0


def test_a_mailbox_that_is_full_or_lost_gets_them_again():
    box = Outbox()
    put(box, 1, 2)
    assert box.take(9) == rows(1, 2)
    box.landed(7, None, 0)
    assert box.take(9) == rows(1, 2)
    box.lost()
    put(box, 3)
    assert box.take(9) == rows(1, 2, 3)
    box.landed(7, 3, 0)
    put(box, 4)
    box.take(9)
    assert sorted(box.landed(8, 1, 0)) == [thing(n).record for n in (1, 2, 3)]
    assert box.take(9) == rows(1, 2, 3)


def test_the_last_row_of_a_record_is_said_and_none_of_one_that_is_gone():
    box = Outbox()
    put(box, 1, 2)
    later = thing(1).row(stored_at=5, last_used=5)
    box.put(thing(1).record, later)
    box.forget(thing(2).record)
    assert box.take(9) == later


def test_what_has_gone_since_is_not_said_again_to_a_directory_that_starts_empty():
    box = Outbox()
    put(box, 1, 2, 3, 4)
    box.take(3)
    box.landed(7, 3, 0)
    box.take(1)
    box.forget(thing(1).record)  # posted
    box.heard_gone(records(2, 4))  # the second is on its way: the directory cannot have meant that
    put(box, 2)  # it was stored again
    box.lost()
    assert sorted(box.landed(8, None, 0)) == [thing(n).record for n in (2, 3)]
    assert sorted(box.take(9)) == sorted(rows(2, 3, 4))


def test_what_was_being_told_as_its_directory_went_is_told_to_the_next_one():
    """The last one may have known the object from a delta before: that is gone with it."""
    box = Outbox()
    put(box, 1, 2)
    box.put(thing(3).record, thing(3).row(stored_at=0, last_used=1))
    assert len(box.take(9)) == len(rows(1, 2, 3))
    box.forget(thing(2).record)
    assert box.lost() == [thing(1).record]
    assert box.num_waiting == 2


def test_what_goes_while_it_is_told_is_not_told_again():
    box = Outbox()
    put(box, 1, 2)
    box.take(9)
    box.forget(thing(1).record)
    box.lost()
    assert box.take(9) == rows(2)
    box.landed(7, 1, 1)
    put(box, 1)
    assert box.take(9) == rows(1)


def test_a_use_is_said_again_but_does_not_tell_that_the_object_is_there():
    box = Outbox()
    put(box, 1)
    use = thing(2).row(stored_at=0, last_used=1)
    box.put(thing(2).record, use)
    box.take(9)
    box.landed(7, 2, 0)
    assert box.landed(8, 0, 0) == [thing(1).record]
    assert box.take(9) == rows(1) + use


def test_an_outbox_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvfleet.node.outbox._RECORDS_MAX", 3)
    box = Outbox()
    put(box, 1, 2, 3, 4)
    assert (len(box), box.dropped) == (3, 1)
    put(box, 3)
    assert (len(box), box.dropped) == (3, 1)


def test_a_use_is_told_once_an_hour(monkeypatch: pytest.MonkeyPatch):
    uses = Uses()
    assert [uses.is_news(b"a", at) for at in (0, 1, USE_S - 1, USE_S, USE_S + 1)] == [True, False, False, True, False]
    assert uses.is_news(b"b", 1)
    monkeypatch.setattr("kvfleet.node.outbox._RECORDS_MAX", 2)
    assert uses.is_news(b"c", USE_S + 2)  # "a", told longest ago, is forgotten
    assert uses.is_news(b"a", USE_S + 3)


# --- the directory


def run(work: Callable[[DirectoryService], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        config = FleetConfig(**{"shared_url": "memory://x", "heartbeat_s": 0.01, **settings})
        service = DirectoryService(config, lambda: frozenset((A, B)))
        try:
            await work(service)
        finally:
            service._watch.cancel()

    asyncio.run(main())


async def say(service: DirectoryService, node: NodeId, seq: int, epoch: int = 1, **fields: Any) -> DeltaReply:
    if seq == 1:
        await service.inventory(InventoryPage(node, epoch, 0, 0, last=True, records=b""))
    return await service.apply(Delta(node, epoch, seq, **fields))


def ask(node: NodeId, life: int = 0, written: int = 0, position: int = 0, epoch: int = 1) -> ObjectRequest:
    return ObjectRequest(node, epoch, life, written, position, 100)


def test_one_manager_keeps_the_catalog_as_long_as_it_speaks(monkeypatch: pytest.MonkeyPatch):
    async def work(service: DirectoryService) -> None:
        assert (await say(service, A, 1)).keeper
        assert not (await say(service, B, 1)).keeper
        assert (await say(service, A, 2)).keeper
        assert (await say(service, A, 1, epoch=2)).keeper  # it has started again
        assert not (await say(service, A, 3)).keeper
        assert await service.objects(ask(A)) is None
        assert await service.objects(ask(A, epoch=2)) is not None
        service._keeper_until = 0.0
        assert (await say(service, B, 2)).keeper
        assert not (await say(service, A, 2, epoch=2)).keeper
        assert await service.objects(ask(A, epoch=2)) is None

    run(work)


def test_who_does_not_reach_the_shared_tier_is_not_named():
    async def work(service: DirectoryService) -> None:
        assert not (await say(service, A, 1, may_keep=False)).keeper
        assert (await say(service, B, 1)).keeper
        assert not (await say(service, A, 2)).keeper

    run(work)


def test_without_a_shared_tier_nobody_keeps_it():
    async def work(service: DirectoryService) -> None:
        reply = await say(service, A, 1, objects=rows(1))
        assert (reply.keeper, reply.told) == (False, True)
        assert len(service._mailbox) == 0

    run(work, shared_url=None)


def test_a_dead_keeper_is_replaced():
    async def work(service: DirectoryService) -> None:
        assert (await say(service, A, 1)).keeper
        service._live_nodes = lambda: frozenset((B,))
        for _ in range(2):  # the first answer may be an older one
            await service._follow_nodes()
        assert (await say(service, B, 1)).keeper

    run(work)


def test_what_is_said_waits_for_the_keeper_until_it_is_written_down():
    async def work(service: DirectoryService) -> None:
        first = await say(service, A, 1, objects=rows(1, 2))
        second = await say(service, B, 1, objects=rows(3), shared_removed=records(9, 8), shared_dropped=records(8))
        assert (first.position, second.position, second.written) == (2, 3, 0)
        page = await service.objects(ask(A))
        assert page is not None
        assert (page.rows, page.position) == (rows(1, 2, 3) + gone_rows(records(9)), 4)
        again = await service.objects(ask(A))
        assert again == page
        assert len(service._mailbox) == 4
        rest = await service.objects(ask(A, page.life, 2, 4))
        assert rest is not None
        assert (rest.rows, rest.position) == (b"", 4)
        assert (await say(service, B, 2)).written == 2
        late = await service.objects(ask(A, page.life, 0, 2))  # an old request: nothing is lost by it
        assert late is not None
        assert late.position == 4
        other = await service.objects(ask(A, page.life + 1, 4, 4))  # of another directory's positions
        assert other is not None
        assert (other.rows, service._mailbox.written) == (rows(3) + gone_rows(records(9)), 2)

    run(work)


def test_a_delta_that_comes_twice_is_posted_once():
    async def work(service: DirectoryService) -> None:
        await say(service, A, 1, objects=rows(1))
        assert (await say(service, A, 2, objects=rows(2))).position == 2
        assert (await say(service, A, 2, objects=rows(2))).position == 2
        assert (await service.apply(Delta(A, 1, 1, objects=rows(1)))).position is None
        assert len(service._mailbox) == 2

    run(work)


def test_a_full_mailbox_refuses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(directory_module, "_MAIL_ROWS_MAX", 2)

    async def work(service: DirectoryService) -> None:
        assert (await say(service, A, 1, objects=rows(1, 2, 3))).position is None
        assert (await say(service, A, 2, objects=rows(1, 2))).position == 2
        assert (await say(service, A, 3, shared_removed=records(7))).position == 2
        page = await service.objects(ask(A))
        assert page is not None
        assert page.rows == rows(1, 2)

    run(work)


def test_that_a_deleted_object_is_there_is_believed_of_the_keeper_alone():
    async def shared(service: DirectoryService) -> bytes:
        return (await service.claim(B, records(1, 2))).saved

    async def work(service: DirectoryService) -> None:
        await say(service, A, 1, shared_added=records(1, 2))
        await say(service, A, 2, shared_removed=records(1, 2), shared_dropped=records(1, 2))
        assert await shared(service) == b""
        reply = await say(service, B, 1, shared_added=records(1, 2), objects=rows(1, 2))  # it may be late
        assert (await shared(service), reply.position) == (b"", 2)
        await say(service, A, 3, shared_added=records(1))  # it has looked
        assert await shared(service) == records(1)
        await say(service, B, 2, shared_added=records(1, 2))
        assert await shared(service) == records(1)

    run(work)


def test_what_one_deletes_who_is_the_keeper_no_more_is_still_there():
    async def work(service: DirectoryService) -> None:
        await say(service, A, 1, added=records(1), shared_added=records(1, 2, 3))
        gone = await say(service, B, 1, shared_removed=records(1, 2, 3), shared_dropped=records(1, 2))
        assert (gone.dropped, (await say(service, A, 2)).dropped) == (b"", b"")
        assert (await service.claim(A, records(1, 2, 3))).saved == records(1, 2)
        page = await service.objects(ask(A))
        assert page is not None
        assert page.rows == gone_rows(records(3))
        await say(service, B, 2, shared_added=records(1, 2, 3))
        assert (await service.claim(A, records(1, 2, 3))).saved == records(1, 2, 3)

    run(work)


def test_a_claim_that_is_given_back_is_anothers():
    async def work(service: DirectoryService) -> None:
        assert (await service.claim(A, records(1, 2))).taken == b""
        await say(service, A, 1, unclaimed=records(1))
        assert (await service.claim(B, records(1, 2))).taken == records(2)

    run(work)


def test_who_holds_what_the_keeper_deletes_is_told():
    async def work(service: DirectoryService) -> None:
        await say(service, A, 1, added=records(1, 2))
        await say(service, B, 1, added=records(1), shared_added=records(1, 2, 3))
        reply = await say(service, A, 2, shared_removed=records(1, 3), shared_dropped=records(1, 3))
        assert (reply.dropped, reply.lost) == (records(1), b"")
        assert (await say(service, B, 2)).dropped == records(1)
        assert (await say(service, B, 3)).dropped == b""

    run(work)

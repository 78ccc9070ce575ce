"""Bugs that production code does not have: each is put in by a test, to see that the simulation finds it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from typing_extensions import override

from kvfleet import calls
from kvfleet.core.block import KEY_BYTES
from kvfleet.core.breaker import ProbedBreaker
from kvfleet.core.directory import Directory
from kvfleet.core.placement import Placement
from kvfleet.core.postponed import Postponed
from kvfleet.errors import TierError
from kvfleet.node import landing, loading, publishing, records, serving
from kvfleet.node.arenadir import FileLock
from kvfleet.node.catalog import CatalogKeeper
from kvfleet.node.dram import DramTier
from kvfleet.node.holdings import Holdings
from kvfleet.node.mirror import Mirror
from kvfleet.node.saving import Saver
from kvfleet.node.shared import SharedTier
from kvfleet.node.spilling import Spiller

__all__ = ["PLANTED", "Planted"]


@dataclass(frozen=True)
class Planted:
    """A bug, put in by `plant`; schedules show it seldom before the `first`."""

    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    first: int = 0

    @override
    def __str__(self) -> str:
        return self.name


PLANTED: list[Planted] = []
# Where to look for bugs that few schedules show: a little before the first one that did when they were planted.
_FIRST = {
    "a_restarted_manager_forgets_who_is_writing": 150,
    "a_message_of_an_earlier_life_counts": 200,
    "a_new_directory_is_not_told_what_the_shared_tier_has": 275,
}


def bug(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    PLANTED.append(Planted(plant.__name__, plant, _FIRST.get(plant.__name__, 0)))
    return plant


# --- bytes


@bug
def a_reader_does_not_look_at_the_generation_again(patch):
    patch.setattr(records.RecordTable, "unchanged", lambda _, slots, generations: slots >= 0)


@bug
def a_slot_keeps_its_generation_until_it_is_written(patch):
    free, commit = records.RecordTable.free, records.RecordTable.commit

    def late_free(self, slot):
        generation = self._cells[slot * records.WORDS]
        if not generation or generation % 2:
            return free(self, slot)
        cells, base = self._cells, slot * records.WORDS
        low, high, shard = cells[base + 1], cells[base + 2], cells[base + 7] & 0xFFFF
        self._hints.unlink(low, high, shard, slot)
        return generation + 1

    def late_commit(self, slot, generation, checksum, now_ns):
        self._cells[slot * records.WORDS] = generation
        return commit(self, slot, generation, checksum, now_ns)

    patch.setattr(records.RecordTable, "free", late_free)
    patch.setattr(records.RecordTable, "commit", late_commit)


@bug
def a_block_is_visible_before_it_is_copied(patch):
    flush, commit = landing._Landing.flush, landing.BlockSlots.commit

    async def hasty(self):
        for filling in self._open:
            if filling.granted is not None and filling.num_bytes == self._slots.request.num_bytes:
                commit(self._slots, filling.granted, filling.checksum)
        return await flush(self)

    patch.setattr(landing._Landing, "flush", hasty)


@bug
def blocks_are_sent_without_a_hold_and_taken_without_a_checksum(patch):
    class Credulous(landing._Filling):
        @override
        def take(self, part):
            super().take(part)
            self.hasher = self

        def update(self, data):
            pass

        def intdigest(self):
            return self.checksum

    patch.setattr(landing, "_Filling", Credulous)
    patch.setattr(serving._Stream, "_release", lambda self, indexes: [self._held.pop(index) for index in indexes])
    hold = serving._Stream._hold

    def unheld(self, index):
        really, self._dram.hold = self._dram.hold, lambda key: None
        try:
            return hold(self, index)
        finally:
            self._dram.hold = really

    patch.setattr(serving._Stream, "_hold", unheld)


@bug
def slots_of_a_living_writer_are_given_away(patch):
    patch.setattr(FileLock, "held", staticmethod(lambda path: False))


@bug
def a_restarted_manager_forgets_who_is_writing(patch):
    live, recover = records.RecordTable.live, DramTier._recover

    def forgetful(self):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(records.RecordTable, "live", lambda table: [r for r in live(table) if r.committed])
            recover(self)

    patch.setattr(DramTier, "_recover", forgetful)


# --- the directory


@bug
def a_message_of_an_earlier_life_counts(patch):
    hear = Directory._hear

    def hear_all(self, node_id, epoch):
        node = self._nodes.get(node_id)
        return hear(self, node_id, epoch if node is None else max(epoch, node.epoch))

    patch.setattr(Directory, "_hear", hear_all)


@bug
def removals_are_not_told_and_digests_not_sent(patch):
    next_delta = publishing.Publisher._next_delta
    patch.setattr(publishing.Publisher, "_next_delta", lambda self: replace(next_delta(self), removed=b"", digest=None))


@bug
def changes_are_lost_with_a_call_and_nobody_counts(patch):
    next_delta, send, take_in = publishing.Publisher._next_delta, publishing.Publisher._send, Directory.apply

    async def careless(self):
        if self._unacked is not None:
            self._outbox.lost()
        self._unacked = None
        await send(self)

    def uncounted(self, delta):
        node = self._nodes.get(delta.node)
        return take_in(self, delta if node is None else replace(delta, seq=node.seq + 1))

    patch.setattr(publishing.Publisher, "_next_delta", lambda self: replace(next_delta(self), digest=None))
    patch.setattr(publishing.Publisher, "_send", careless)
    patch.setattr(Directory, "apply", uncounted)


@bug
def a_dead_node_keeps_its_rows(patch):
    patch.setattr(Directory, "drop_node", lambda self, node_id: None)


@bug
def a_lookup_goes_on_behind_a_hole(patch):
    locate = Directory.locate

    def leaping(self, keys, shard, num_shards):
        runs = locate(self, keys, shard, num_shards)
        stop = runs[-1].stop if runs else 0
        if stop * KEY_BYTES >= len(keys):
            return runs
        behind = leaping(self, keys[(stop + 1) * KEY_BYTES :], shard, num_shards)
        return [*runs, *(replace(r, start=stop + 1 + r.start, stop=stop + 1 + r.stop) for r in behind)]

    patch.setattr(Directory, "locate", leaping)


@bug
def a_save_counts_before_it_is_done(patch):
    write = SharedTier.write

    def optimistic(self, *args):
        try:
            return write(self, *args)
        except TierError:
            return 0

    patch.setattr(SharedTier, "write", optimistic)


# --- drives


@bug
def a_copy_that_a_drive_lost_is_counted_on(patch):
    patch.setattr(Placement, "lost", lambda self, key, shard, tier, *, again: None)


@bug
def a_spill_counts_before_it_is_done(patch):
    async def optimistic(self, transfer):
        return True

    patch.setattr(Spiller, "_write", optimistic)


@bug
def a_block_that_leaves_one_tier_of_a_node_is_said_to_leave_the_node(patch):
    changed = Holdings.changed

    def hasty(self, key, shard, *, present, tier):
        tiers = self._tiers
        try:
            self._tiers = tiers if present else []
            changed(self, key, shard, present=present, tier=tier)
        finally:
            self._tiers = tiers

    patch.setattr(Holdings, "changed", hasty)


@bug
def a_block_stays_in_the_table_of_the_drives(patch):
    note = Mirror.note

    def forgetful(self, stored, present):
        note(self, stored, present)
        if not present:
            note(self, stored, True)

    patch.setattr(Mirror, "note", forgetful)


# --- the catalog of the shared tier


@bug
def what_is_too_much_stays(patch):
    async def idle(self, book):
        pass

    patch.setattr(CatalogKeeper, "_trim", idle)


@bug
def a_new_directory_is_not_told_what_the_shared_tier_has(patch):
    async def silent(self, book):
        await self._link.listed(self._node, book.life, 1.0)
        book.told = True

    patch.setattr(CatalogKeeper, "_tell", silent)


@bug
def what_is_stored_again_while_it_is_deleted_is_believed_to_be_there(patch):
    patch.setattr(CatalogKeeper, "_is_there", lambda self, row: True)


# --- what is left over


@bug
def blocks_stay_held_when_their_reader_vanishes(patch):
    def close(self):
        self.closed = True

    patch.setattr(serving._Stream, "close", close)


@bug
def a_landing_that_fails_keeps_its_slots(patch):
    patch.setattr(landing._Landing, "abort", lambda self: None)


@bug
def a_load_that_dies_leaves_its_flights(patch):
    async def fly(self, run):
        loop = asyncio.get_running_loop()
        flights = {(key, self._request.shard): loop.create_future() for key in self._keys[run.start : run.stop]}
        self._loader.flights.update(flights)
        miss = await self._tries.bring(run)
        for record, flight in flights.items():
            if not flight.done():
                del self._loader.flights[record]
                flight.set_result(None)
        return miss

    patch.setattr(loading._Load, "_fly", fly)


@bug
def a_transfer_is_not_completed_when_its_write_fails(patch):
    complete = Saver._complete

    def forgetful(self, transfer, *, ok, again=True):
        if ok:
            complete(self, transfer, ok=ok)

    patch.setattr(Saver, "_complete", forgetful)


@bug
def a_block_whose_write_failed_is_not_tried_again(patch):
    patch.setattr(Postponed, "take_due", lambda self, now: [])
    patch.setattr(Saver, "_retry_all", lambda self, **_: None)


@bug
def a_shared_tier_that_is_back_is_left_alone(patch):
    answered = ProbedBreaker.answered

    def stay_open(self, now):
        was_open = self.is_open
        answered(self, now)
        self._open = was_open

    patch.setattr(ProbedBreaker, "answered", stay_open)


# --- time


@bug
def a_client_waits_as_long_as_it_takes(patch):
    patch.setattr(calls, "_left", lambda deadline: 3600.0)

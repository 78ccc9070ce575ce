"""`TierManager`: one a node. Owns the arena, carries out what placement decides, talks to the rest of the fleet.

It runs as an actor, but is a plain class. The work is in the parts that `Node` puts together: `DramTier` (the arena),
`Loader`, `Peers` and `Server` (blocks from and to other nodes), `LowerTiers` (the drives and the shared tier),
`Publisher` (the directory), `Writers` and `Holds` (the clients).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvfleet.config import FleetConfig
from kvfleet.core.block import BlockKey
from kvfleet.errors import KvFleetError, TierUnavailableError
from kvfleet.metrics import Sink
from kvfleet.node.arenadir import CLIENTS_DIR
from kvfleet.node.copies import Copy, copies_here, copies_shared
from kvfleet.node.doctoring import Checkup, check_node
from kvfleet.node.draining import Drained
from kvfleet.node.hostchecks import Check
from kvfleet.node.messages import (
    Attachment,
    CommitReply,
    CommitRequest,
    FetchRequest,
    HintRequest,
    HoldRequest,
    LoadProgress,
    LoadRequest,
    ReserveReply,
    ReserveRequest,
    Window,
)
from kvfleet.node.node import Node
from kvfleet.node.publishing import DirectoryLink
from kvfleet.node.recording import RecordReply
from kvfleet.node.startup import NodeHome, NodePlace, open_home, remove_home
from kvfleet.node.status import NodeStatus
from kvfleet.node.tallies import Request
from kvfleet.node.transport import Transport
from kvfleet.node.waiting import now
from kvfleet.node.windows import ByteBudget

__all__ = ["NodeStatus", "TierManager"]

_log = logging.getLogger(__name__)
_RETRY_S = 5.0


class TierManager:
    """The manager of one node.

    Constructing it never raises: without an arena it says why in `attach` and `status`.

    Threads: one event loop, which must be running when it is made. Blocking work runs in threads.
    """

    def __init__(
        self,
        config: FleetConfig,
        place: NodePlace,
        link: DirectoryLink,
        make_transport: Callable[[ByteBudget], Transport],
        sink: Sink | None = None,
    ) -> None:
        self._config = config
        self._place = place
        self._link = link
        self._make_transport = make_transport
        self._sink = sink or Sink()
        self._problem = ""
        self._retry_at = 0.0
        self._node: Node | None = None
        self._open()

    def _open(self) -> None:
        """Get an arena, or note why there is none; what is wrong may be mended while we run."""
        self._retry_at = now() + _RETRY_S
        home = None
        try:
            home = open_home(self._config, self._place)
            self._node = Node(self._config, self._place, home, self._link, self._make_transport, self._sink)
        except KvFleetError as error:
            self._problem = str(error)
        except Exception as error:  # noqa: BLE001  an actor whose constructor fails on a restart is dead for good
            _log.exception("no arena on this node")
            self._problem = f"unexpected: {error!r}"
        if self._node is None and home is not None:
            self._give_up(home)

    def _give_up(self, home: NodeHome) -> None:
        """Give back what `open_home` gave; an arena that was warm stays for the next try."""
        try:
            if home.warm:
                home.lock.release()
            else:
                remove_home(home)
        except OSError as error:
            _log.warning("the arena's directory could not be removed: %s", error)

    def _parts(self) -> Node:
        if self._node is None:
            raise TierUnavailableError("dram", self._problem)
        return self._node

    async def attach(self) -> Attachment:
        """What a client needs to use this node."""
        if self._node is None and now() >= self._retry_at:
            self._open()
        if self._node is None:
            return Attachment("", 0, "", b"", "", self._problem)
        home = self._node.home
        return Attachment(
            home.node_id, home.epoch, str(home.arena.path), home.arena.arena_id, str(home.directory / CLIENTS_DIR),
            speeds=self._node.loader.sources.speeds.speeds(),
        )  # fmt: skip

    async def reserve(self, request: ReserveRequest) -> ReserveReply:
        """Slots for blocks a client wants to store."""
        node = self._parts()
        return await node.writers.reserve(request, draining=node.draining)

    async def commit(self, request: CommitRequest) -> CommitReply:
        """Make written slots visible, here and in the directory."""
        return await self._parts().writers.commit(request)

    async def load(self, request: LoadRequest) -> AsyncGenerator[LoadProgress, None]:
        """Bring blocks into the arena."""
        async with aclosing(self._parts().loader.load(request)) as steps:
            async for progress in steps:
                yield progress

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[Window, None]:
        """Send blocks to another node."""
        async with aclosing(self._parts().server.fetch(request)) as windows:
            async for window in windows:
                yield window

    async def ping(self) -> None:
        """Answer another manager that wants to know whether this node can send blocks.

        Raises:
            TierUnavailableError: it has no arena.
        """
        self._parts()

    async def hold(self, request: HoldRequest) -> int:
        """Keep blocks for a client. Returns how many of the first ones are held."""
        return self._parts().holds.hold(request)

    async def release(self, client_id: int, number: int) -> None:
        """End a client's hold."""
        self._parts().holds.release(client_id, number)

    async def hint(self, request: HintRequest) -> int:
        """See `HintRequest`. Returns how many blocks are the first to go now, on all nodes if a session has ended."""
        return self._parts().writers.hint(request)

    async def status(self) -> NodeStatus:
        """How this node is doing."""
        if self._node is None:
            return NodeStatus(self._place.ray_node_id, 0, self._problem)
        return self._node.status()

    async def requests(self, wanted: str, limit: int) -> list[Request]:
        """The newest requests of this node's clients; see `TallyBook.requests`."""
        return [] if self._node is None else self._node.tallies.requests(wanted, limit)

    async def record(self, recorder: bytes, *, ends: bool) -> RecordReply:
        """What was looked up on this node since the last time; see `Recording.turn`."""
        if self._node is None:
            return RecordReply()
        try:
            return await asyncio.to_thread(self._node.recording.turn, recorder, now(), ends=ends)
        except OSError as error:
            return RecordReply(problem=f"{error.filename}: {error.strerror}")

    async def copies(self, key: bytes, *, shared: bool) -> list[Copy]:
        """Read and verify the copies of a block that are on this node, or those in the shared tier."""
        node = self._parts()
        if not shared:
            return await copies_here(node, BlockKey(key))
        return [] if node.shared is None else await copies_shared(self._config, BlockKey(key))

    async def doctor(self, seconds: float, *, repair: bool) -> Checkup:
        """Look this node over; see `check_node`."""
        if self._node is None:
            return Checkup(self._place.ray_node_id, (Check("arena", "bad", self._problem),), time.time())
        return await check_node(self._node, self._link, seconds, repair=repair)

    async def flush(self, timeout_s: float) -> int:
        """Copy to the tiers below what is not there yet, for at most `timeout_s`; the node may be stopped then.

        Returns:
            See `num_unsaved`.
        """
        return await self._node.flush(timeout_s) if self._node is not None else 0

    async def num_unsaved(self) -> int:
        """How many blocks have no copy in any tier below and wait for one.

        Not those that the tiers did not take, or have dropped, as too many or worth too little.
        """
        return self._node.num_unsaved if self._node is not None else 0

    async def drain(self, timeout_s: float, bytes_max: int | None) -> Drained:
        """Take no more stores, and save the most valuable of what is unsaved, in memory and on drives. Loads go on.

        It stays like this through restarts, until `resume`; asked again it goes on with a new budget.

        Args:
            timeout_s: no write begins after it.
            bytes_max: of blocks written; None for no limit.
        """
        return await self._parts().drain(timeout_s, bytes_max)

    async def resume(self) -> None:
        """Take stores again, and save as before."""
        self._parts().resume()

    async def shutdown(self) -> None:
        """Stop the background work and remove the arena. Clients that have it mapped can still read it."""
        if self._node is not None:
            node, self._node = self._node, None
            self._retry_at = float("inf")
            self._problem = "the node's manager was shut down"
            await node.shutdown()

"""Tells a directory that has lost it what the shared tier holds."""

from __future__ import annotations

import asyncio
import logging

from kvfleet.config import FleetConfig
from kvfleet.core.directory import NodeId
from kvfleet.errors import DirectoryUnavailableError, KvFleetError
from kvfleet.node.publishing import DirectoryLink, Publisher
from kvfleet.node.shared import SharedTier
from kvfleet.node.waiting import now

__all__ = ["list_shared"]

_log = logging.getLogger(__name__)
_PAUSE_MAX_S = 30.0


async def list_shared(
    node: NodeId, shared: SharedTier, publisher: Publisher, link: DirectoryLink, config: FleetConfig
) -> None:
    """List the shared tier and report it in pages; again after a pause, until it was done once."""
    pause_s = config.heartbeat_s
    while True:
        try:
            started, count, life = now(), 0, publisher.directory_life
            pages = shared.list(config.listing_records_max)
            while (page := await asyncio.to_thread(next, pages, None)) is not None:
                count += publisher.shared_page(page)
                if not await publisher.flush(config.shared_timeout_s):
                    raise DirectoryUnavailableError("it was told of a part only")
            if not await link.listed(node, life, config.shared_timeout_s):
                raise DirectoryUnavailableError("it started again meanwhile")
        except KvFleetError as error:
            _log.warning("shared tier not listed, next try in %.0f s: %s", pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(_PAUSE_MAX_S, 2 * pause_s)
        else:
            _log.info("shared tier: %d blocks listed in %.1f s", count, now() - started)
            return

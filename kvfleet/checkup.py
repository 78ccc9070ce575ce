"""Asking all managers of a fleet to look at what they hold, for an operator."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfleet import actors
from kvfleet.core.directory import NodeId
from kvfleet.node.copies import Copy
from kvfleet.node.doctoring import Checkup

__all__ = ["NodeCheckup", "ahead", "copies_of", "look_over"]

_PING_TIMEOUT_S = 10.0
_SHARED_TRIES = 3
_TIMEOUT_S = 600.0  # drives are read whole, as long as they give an answer at all


@dataclass(frozen=True, slots=True)
class NodeCheckup:
    """What became of looking a node over.

    Attributes:
        node_id: Ray's.
        checkup: None if its manager did not answer.
        ahead_s: how far its clock is ahead of this machine's at least; less than 0: behind.
    """

    node_id: NodeId
    checkup: Checkup | None
    ahead_s: float = 0.0


def copies_of(fleet: str, key: bytes) -> tuple[list[Copy], list[NodeId]]:
    """Every copy of a block in a fleet, read and verified, and the nodes that did not answer.

    The shared tier is asked by one of the nodes, which has what it takes to reach it.
    """
    managers = actors.managers(fleet)
    living = _answering(managers)
    calls = {node: manager.copies.remote(key, shared=False) for node, manager in living.items()}
    answers = actors.collect(calls, _TIMEOUT_S)
    copies: list[Copy] = []
    for answer in answers.values():
        copies += answer or []
    able = [node for node, answer in answers.items() if answer is not None]
    for node in able[:_SHARED_TRIES]:
        shared = actors.collect({node: managers[node].copies.remote(key, shared=True)}, _TIMEOUT_S).get(node)
        if shared is not None:
            copies += shared
            break
    else:
        copies += [Copy("", "shared", 0, 0, "", "it gave no answer")] if able else []
    return copies, [node for node in managers if answers.get(node) is None]


def look_over(fleet: str, seconds: float, *, repair: bool) -> list[NodeCheckup]:
    """Look all nodes over, all at once.

    Args:
        fleet: its name.
        seconds: longest time each node reads its arena.
        repair: mend what can be.
    """
    managers = actors.managers(fleet)
    living = _answering(managers)
    begun, wall_s = time.monotonic(), time.time()
    calls = {node: manager.doctor.remote(seconds, repair=repair) for node, manager in living.items()}
    answers = actors.collect(calls, seconds + _TIMEOUT_S)
    took_s = time.monotonic() - begun
    return [NodeCheckup(node, answers.get(node), ahead(answers.get(node), wall_s, took_s)) for node in managers]


def ahead(found: Checkup | None, wall_s: float, took_s: float) -> float:
    """How far a node's clock is ahead at least, when it was looked at some time within a call.

    Args:
        found: what the node has said.
        wall_s: what our clock said when the call began.
        took_s: by the call.
    """
    if found is None:
        return 0.0
    most = found.wall_s - wall_s
    return max(0.0, most - took_s) if most > 0 else most


def _answering(managers: Mapping[NodeId, Any]) -> dict[NodeId, Any]:
    """Those of some managers that are not hung: the others are not waited for as long as work may take."""
    answered = actors.collect({node: manager.ping.remote() for node, manager in managers.items()}, _PING_TIMEOUT_S)
    return {node: manager for node, manager in managers.items() if node in answered}

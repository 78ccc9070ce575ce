"""For tests of kvfleet and of what plugs into it: contract suites, a clock that is set by hand, a simulated fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfleet.testing.fleet import LocalFleet

__all__ = ["LocalFleet"]


def __getattr__(name: str) -> object:
    """`LocalFleet`, when it is asked for: it needs greenlet."""
    if name == "LocalFleet":
        from kvfleet.testing.fleet import LocalFleet

        return LocalFleet
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Every error kvfleet raises.

    KvFleetError
      ConfigError (ValueError)          a setting cannot work; the message says what to set
      LayoutMismatchError (ValueError)  KV of another shape, dtype or inner order than the namespace's
      TierError                         a tier could not do what it was asked
        TierFullError                   no room, and nothing may be evicted
        TierUnavailableError            the medium or the service behind the tier failed
          ManagerAvoidedError           the node's manager was not asked
        CorruptBlockError               bytes are there, but not the block's
      StaleEpochError                   a message from an earlier life of a node
      DirectoryUnavailableError         the directory did not answer
        DirectoryAvoidedError           it was not asked
      DeadlineExceededError (TimeoutError)

A miss is a value, never an exception.  Fields are positional and handed to ``super().__init__`` so that they
survive pickling and Ray's exception wrapping.
"""

from __future__ import annotations

from typing_extensions import override

__all__ = [
    "ConfigError",
    "CorruptBlockError",
    "DeadlineExceededError",
    "DirectoryAvoidedError",
    "DirectoryUnavailableError",
    "KvFleetError",
    "LayoutMismatchError",
    "ManagerAvoidedError",
    "StaleEpochError",
    "TierError",
    "TierFullError",
    "TierUnavailableError",
]


class KvFleetError(Exception):
    """Base of all errors raised by kvfleet."""


class ConfigError(KvFleetError, ValueError):
    """A setting cannot work.  Nothing was started.

    Attributes:
        setting: its name, or "" where the problem is not that of one setting.
        problem: what is wrong with it, and what to do.
    """

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(setting, problem)
        self.setting = setting
        self.problem = problem

    @override
    def __str__(self) -> str:
        return f"{self.setting}: {self.problem}" if self.setting else self.problem


class LayoutMismatchError(KvFleetError, ValueError):
    """KV of another layout was offered or asked for.  Nothing was read or written."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(expected, got)
        self.expected = expected
        self.got = got

    @override
    def __str__(self) -> str:
        return f"expected {self.expected}, got {self.got}"


class TierError(KvFleetError):
    """A tier could not do what it was asked.  The tier is unchanged."""

    def __init__(self, tier: str, detail: str) -> None:
        super().__init__(tier, detail)
        self.tier = tier
        self.detail = detail

    @override
    def __str__(self) -> str:
        return f"{self.tier}: {self.detail}"


class TierFullError(TierError):
    """No room, and nothing may be evicted.  The tier is unchanged."""


class TierUnavailableError(TierError):
    """The medium or the service behind the tier failed.  The tier is unchanged."""


class ManagerAvoidedError(TierUnavailableError):
    """The node's manager was not asked: it is known not to answer, or the client is of no use any more."""


class CorruptBlockError(TierError):
    """The bytes found are not the block's.  They were not used; a bad shared object or DRAM copy is removed."""


class StaleEpochError(KvFleetError):
    """A message from an earlier life of a node.  It was ignored."""

    def __init__(self, node: str, epoch: int, current: int) -> None:
        super().__init__(node, epoch, current)
        self.node = node
        self.epoch = epoch
        self.current = current

    @override
    def __str__(self) -> str:
        return f"node {self.node} sent epoch {self.epoch}, current is {self.current}"


class DirectoryUnavailableError(KvFleetError):
    """The directory did not answer.  Lookups go on with what this node holds."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail

    @override
    def __str__(self) -> str:
        return f"directory unavailable: {self.detail}"


class DirectoryAvoidedError(DirectoryUnavailableError):
    """The directory was not asked: it did not answer a moment ago."""


class DeadlineExceededError(KvFleetError, TimeoutError):
    """A wait ran out.  What had arrived by then is kept."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what, seconds)
        self.what = what
        self.seconds = seconds

    @override
    def __str__(self) -> str:
        return f"{self.what} took longer than {self.seconds:.3f} s"

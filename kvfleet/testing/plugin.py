"""What pytest loads wherever kvfleet is installed: assertions of the contract suites tell what they compared."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "kvfleet.testing.policies", "kvfleet.testing.tierfaults", "kvfleet.testing.tiers", "kvfleet.testing.tiersuite"
)

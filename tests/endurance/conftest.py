"""Fleets on a Ray cluster, for the tests here that need one."""

from __future__ import annotations

from tests.cluster.conftest import make_fleet

__all__ = ["make_fleet"]

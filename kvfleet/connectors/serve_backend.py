"""What Ray Serve LLM has a replica do before its engine starts.

The engine runs in children of the replica, which do not know the replica's Ray: they are told which cluster, and
which of its nodes. In prefill/decode serving nothing is handed over: blocks are found by what they hold.
"""

from __future__ import annotations

import logging

import ray
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import BaseConnectorBackend, DefaultPDProtocolMixin
from typing_extensions import override

import kvfleet
from kvfleet.calls import ManagerCalls
from kvfleet.connectors.vllm.joining import Settings
from kvfleet.errors import ConfigError, KvFleetError

__all__ = ["KVFleetConnectorBackend"]

_log = logging.getLogger(__name__)


class KVFleetConnectorBackend(DefaultPDProtocolMixin, BaseConnectorBackend):
    """One replica's way to the fleet; its P/D protocol is Ray's default one."""

    @override
    def setup(self) -> None:
        """Tell the engine where the fleet is, and start this node's manager, so that no request has to wait for it.

        Without a fleet the engine starts all the same, and looks for one again.

        Raises:
            ConfigError: a setting that does not exist, or a value that cannot be.
        """
        here = ray.get_runtime_context()
        extra = self.kv_transfer_config.setdefault("kv_connector_extra_config", {})
        extra.setdefault("address", here.gcs_address)
        extra.setdefault("node_id", here.get_node_id())
        settings = Settings.read(extra)
        try:
            _start_manager(settings.fleet, here.get_node_id())
        except KvFleetError as error:
            _log.warning("this replica starts without a KV cache: %s", error)


def _start_manager(fleet: str, node: str) -> None:
    config = kvfleet.connect(fleet).config
    attachment = ManagerCalls(config, node).attach(config.attach_timeout_s)
    if attachment.problem:
        raise ConfigError("", attachment.problem)

"""Ray Serve LLM over a fleet: each replica reuses what any of them has computed, on whichever node.

One command starts the replicas and the fleet:

    serve run kvfleet.connectors.serve:app model=HuggingFaceTB/SmolLM2-135M-Instruct replicas=2 dram=8GiB

For an `LLMConfig` of your own, one engine argument joins its replicas to a fleet that runs (`kvfleet up`):

    LLMConfig(..., engine_kwargs={"kv_transfer_config": kv_transfer_config()})
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
import typer

import kvfleet
from kvfleet.cli.console import parse_bytes
from kvfleet.config import DriveConfig, FleetConfig
from kvfleet.connectors.vllm.joining import Settings
from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.llm import LLMConfig

__all__ = ["app", "kv_transfer_config", "llm_config"]

_log = logging.getLogger(__name__)
_CONNECTOR = "KVFleetConnector"
_BACKEND = "kvfleet.connectors.serve_backend:KVFleetConnectorBackend"


def app(args: Mapping[str, Any]) -> Application:
    """What `serve run kvfleet.connectors.serve:app name=value ...` serves: one model, over one fleet.

    Connects to Ray if this process is not; a Ray cluster that runs is taken, `RAY_ADDRESS` names another. With `dram`,
    `nvme` or `shared`, the fleet is started with them, or joined if it runs with just these. With none of these, any
    fleet of that name that runs is joined, and one with default settings started if there is none. It outlives the
    application: `kvfleet down` ends it.

    Args:
        args: values as text, or as they are in a configuration file:
            `model`: a name at Hugging Face, or a directory that all nodes have; the only one that must be given;
            `replicas`: how many; default 1;
            `fleet`: its name; default `default`;
            `dram`: size of each node's arena, like 8GiB;
            `nvme`: directories on drives that each node has there, separated by commas;
            `shared`: URL of the shared tier, like s3://bucket/prefix;
            `max_model_len`, `dtype`, `block_size`, `tensor_parallel`: as vLLM's options, with vLLM's defaults;
            `engine_kwargs`: further engine arguments of vLLM, as a JSON object.

    Raises:
        ConfigError: an argument that does not exist or cannot be; or the fleet cannot be started, see `kvfleet.start`.
    """
    config = llm_config(args)
    values = _read(args)
    fleet = FleetConfig(
        name=values.get("fleet", "default"),
        dram_bytes=values.get("dram"),
        nvme=values.get("nvme", ()),
        shared_url=values.get("shared"),
    )
    _join_or_start(fleet, [field for name, field in _FLEET_SETTINGS.items() if name in values])
    from ray.serve.llm import build_openai_app

    return build_openai_app({"llm_configs": [config]})


def _join_or_start(config: FleetConfig, asked: Sequence[str]) -> None:
    """Join a fleet that runs, if what is asked for is as it has it, whatever its other settings are; else start one."""
    if not ray.is_initialized():
        ray.init()
    try:
        fleet = kvfleet.connect(config.name)
    except ConfigError as error:
        _log.info("starting it: %s", error)
        kvfleet.start(config)
        return
    for name in asked:
        if getattr(fleet.config, name) != getattr(config, name):
            raise ConfigError(name, f"a fleet {config.name!r} runs with other settings: leave it out, or stop it first")


def llm_config(args: Mapping[str, Any]) -> LLMConfig:
    """The configuration that `app` serves, for those who want to change it before they build an application from it.

    The computing is done on GPUs, or on CPUs if the vLLM that is installed is one for CPUs.

    Args:
        args: as for `app`. `dram`, `nvme` and `shared` are checked and not used: no fleet is started.

    Raises:
        ConfigError: an argument that does not exist or cannot be.
    """
    values = _read(args)
    from ray.serve.llm import LLMConfig
    from vllm.platforms import current_platform

    engine = dict(values.get("engine_kwargs", {}))
    engine.update({theirs: values[ours] for ours, theirs in _ENGINE_ARGUMENTS.items() if ours in values})
    engine["kv_transfer_config"] = kv_transfer_config(fleet=values.get("fleet", "default"))
    accelerator: Any = {"kind": "cpu" if current_platform.is_cpu() else "gpu"}  # Ray makes one of its classes of it
    return LLMConfig(
        model_loading_config={"model_id": values["model"]},
        deployment_config={"num_replicas": values.get("replicas", 1)},
        accelerator_config=accelerator,
        engine_kwargs=engine,
    )


def kv_transfer_config(**settings: Any) -> dict[str, Any]:  # noqa: ANN401  see `Settings`
    """The engine argument `kv_transfer_config` that joins the replicas of an `LLMConfig` to a fleet.

    Call it before the application is deployed: it also tells Ray Serve LLM what to do before an engine starts. In
    `build_pd_openai_app`, both configurations take it.

    Args:
        settings: see `kvfleet.connectors.vllm.joining.Settings`; `address` and `node_id` are each replica's own, and
            found by it.

    Raises:
        ConfigError: a setting that does not exist, or a value that cannot be.
    """
    Settings.read(settings)
    _register()
    return {
        "kv_connector": _CONNECTOR,
        "kv_connector_module_path": "kvfleet.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


def _register() -> None:
    """Tell Ray Serve LLM of our backend. Without it, connectors look for Ray themselves."""
    try:
        from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
    except ImportError as error:  # not a public module
        _log.warning("this Ray has no place for a connector's backend (%s); one Ray node a machine is assumed", error)
        return
    if KVConnectorBackendFactory.is_registered(_CONNECTOR):
        # Maybe by this process when it was connected to another cluster, which is all that the factory remembers.
        KVConnectorBackendFactory.unregister_backend(_CONNECTOR)
    KVConnectorBackendFactory.register_backend(_CONNECTOR, _BACKEND)


# --- arguments

_FLEET_SETTINGS = {"dram": "dram_bytes", "nvme": "nvme", "shared": "shared_url"}
_ENGINE_ARGUMENTS = {
    "max_model_len": "max_model_len",
    "dtype": "dtype",
    "block_size": "block_size",
    "tensor_parallel": "tensor_parallel_size",
}


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be text")
    return value


def _count(value: object) -> int:
    number = str(value)
    if not number.isdecimal() or int(number) < 1:
        raise ValueError("must be a positive integer")
    return int(number)


def _size(value: object) -> int:
    try:
        return parse_bytes(str(value))
    except typer.BadParameter as error:
        raise ValueError("must be a size like 48GiB or 512MiB") from error


def _drives(value: object) -> tuple[DriveConfig, ...]:
    return tuple(DriveConfig(directory=directory.strip()) for directory in _text(value).split(","))


def _engine_arguments(value: object) -> dict[str, Any]:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"must be a JSON object ({error})") from error
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object")  # noqa: TRY004  turned into a ConfigError below
    if taken := sorted(found.keys() & {"kv_transfer_config", *_ENGINE_ARGUMENTS.values()}):
        raise ValueError(f"must not hold {', '.join(taken)}, which are set otherwise")
    return found


_ARGUMENTS: Mapping[str, Callable[[object], Any]] = {
    "model": _text,
    "replicas": _count,
    "fleet": _text,
    "dram": _size,
    "nvme": _drives,
    "shared": _text,
    "max_model_len": _count,
    "dtype": _text,
    "block_size": _count,
    "tensor_parallel": _count,
    "engine_kwargs": _engine_arguments,
}


def _read(args: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments that are given, as what they mean.

    Raises:
        ConfigError: one that does not exist or cannot be, or no model.
    """
    if unknown := sorted(args.keys() - _ARGUMENTS.keys()):
        raise ConfigError(", ".join(unknown), f"no such argument; there are {', '.join(_ARGUMENTS)}")
    if "model" not in args:
        raise ConfigError("model", "must be given: a name at Hugging Face, or a directory")
    values = {}
    for name, value in args.items():
        try:
            values[name] = _ARGUMENTS[name](value)
        except ValueError as error:
            raise ConfigError(name, f"{error}, is {value!r}") from error
    return values

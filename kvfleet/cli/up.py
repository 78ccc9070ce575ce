"""`kvfleet up`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvfleet.cli.console import Address, Name, parse_bytes, plain_errors
from kvfleet.cli.status import show_nodes
from kvfleet.config import DriveConfig, FleetConfig
from kvfleet.core.policies import POLICIES
from kvfleet.errors import ConfigError

if TYPE_CHECKING:
    from kvfleet.operating import FleetStatus

__all__ = ["up"]

_FLEET, _DRIVE = FleetConfig(), DriveConfig(directory="/")
# What settings are called here, by their names in messages, also in those of nodes.
_OPTIONS = {
    "dram_bytes": "--dram-bytes",
    "arena_root": "--arena-root",
    "nvme": "--nvme",
    "nvme_codec": "--nvme-codec",
    "max_bytes": "--nvme-bytes",
    "dwpd": "--nvme-dwpd",
    "shared_url": "--shared",
    "shared_codec": "--shared-codec",
    "shared_bytes_max": "--shared-bytes",
}
_SETTING = re.compile(rf"(?<![\w./-])({'|'.join(_OPTIONS)})(?=: | of )")
_CODECS = "How blocks are kept {}: raw, or zstd, which is smaller and slower."
_Dram = Annotated[
    int | None,
    typer.Option(
        parser=parse_bytes,
        metavar="SIZE",
        help="Of each node's arena, like 48GiB. Default: 4GiB, or half of what is free if that is less.",
    ),
]
_Nvme = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIR",
        help="A directory on a drive that each node has there, for a tier below its memory; once a drive. It must "
        "exist. `$NAME` is what the environment of Ray's workers on the node says.",
    ),
]
_NvmeBytes = Annotated[
    int | None,
    typer.Option(
        parser=parse_bytes, metavar="SIZE", help="To use of each drive. Default: nine tenths of what is free there."
    ),
]
_NvmeDwpd = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        help=f"Writes of its whole capacity a day that each drive is rated for. Default: {_DRIVE.dwpd:g}.",
    ),
]
_SharedBytes = Annotated[
    int | None,
    typer.Option(parser=parse_bytes, metavar="SIZE", help="Of the shared tier, at most. Default: no limit of ours."),
]


def up(  # noqa: PLR0913  an option each
    name: Name = "default",
    address: Address = "auto",
    dram_bytes: _Dram = None,
    arena_root: Annotated[str, typer.Option(help="Where arenas live.")] = _FLEET.arena_root,
    policy: Annotated[str, typer.Option(help=f"What a node keeps: {', '.join(POLICIES)}.")] = _FLEET.policy,
    shared: Annotated[
        str | None, typer.Option(metavar="URL", help="Of the shared tier, like s3://bucket/prefix.")
    ] = None,
    nvme: _Nvme = None,
    nvme_bytes: _NvmeBytes = None,
    nvme_dwpd: _NvmeDwpd = None,
    nvme_codec: Annotated[str, typer.Option(help=_CODECS.format("on drives"))] = _FLEET.nvme_codec,
    shared_codec: Annotated[str, typer.Option(help=_CODECS.format("in the shared tier"))] = _FLEET.shared_codec,
    shared_bytes: _SharedBytes = None,
) -> None:
    """Start a fleet on every node of a running Ray cluster. Nodes that have their manager keep it.

    The exit status is 1 if a drive, or the shared tier, can be used on no node at all.
    """
    with plain_errors(), _options_named():
        import kvfleet

        for option, value in (("--nvme-bytes", nvme_bytes), ("--nvme-dwpd", nvme_dwpd)):
            if value is not None and not nvme:
                raise ConfigError(option, "is about drives, and there are none: name them by --nvme DIR")
        dwpd = _DRIVE.dwpd if nvme_dwpd is None else nvme_dwpd
        config = FleetConfig(
            name=name,
            dram_bytes=dram_bytes,
            arena_root=arena_root,
            policy=policy,
            nvme=tuple(DriveConfig(directory=path, max_bytes=nvme_bytes, dwpd=dwpd) for path in nvme or ()),
            nvme_codec=nvme_codec,
            shared_url=shared,
            shared_codec=shared_codec,
            shared_bytes_max=shared_bytes,
        )
        fleet = kvfleet.start(config, address=address)
        with Console(stderr=True).status("waiting for nodes, their drives and storage"):
            found = fleet.up()
        show_nodes(Console(), found)
        useless = [*_useless_drives(found), *_useless_storage(found)]
        if useless:
            raise ConfigError("", f"the fleet is up, but {'; '.join(useless)}")


@contextmanager
def _options_named() -> Iterator[None]:
    """Name settings as the user has typed them."""
    try:
        yield
    except ConfigError as error:
        setting = _OPTIONS.get(error.setting, "--name" if error.setting == "name" else error.setting)
        raise ConfigError(setting, _SETTING.sub(lambda found: _OPTIONS[found[1]], error.problem)) from error


def _useless_drives(found: FleetStatus) -> list[str]:
    """Of drives that were tried on all nodes that answered, and work on none; with one node's reason."""
    by_drive: dict[str, list[str]] = {}
    working = set()
    for node in found.nodes:
        for drive in node.drives:
            by_drive.setdefault(drive.directory, []).append(drive.problem)
            if drive.works or not drive.tried:
                working.add(drive.directory)
    useless = [f"{path} ({problems[0]})" for path, problems in by_drive.items() if path not in working]
    drives = "this drive" if len(useless) == 1 else "these drives"
    return [f"{drives} can be used on no node: {'; '.join(useless)}"] if useless else []


def _useless_storage(found: FleetStatus) -> list[str]:
    """Of the shared tier, if all nodes that answered have tried it, and none can use it; with one node's reason."""
    problems = [node.shared_problem if node.shared_tried else "" for node in found.nodes if not node.problem]
    if not problems or not all(problems):
        return []
    return [
        f"the shared tier can be used on no node: {problems[0]} (credentials and AWS_ENDPOINT_URL count as they are in "
        "the environment that Ray was started in on each node; it is tried again all the time)"
    ]

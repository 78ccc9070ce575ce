"""Half-written files of dead writers, found a folder at a time: no listing of the shared tier comes along else."""

from __future__ import annotations

from collections.abc import Iterator

from kvfleet.errors import TierUnavailableError
from kvfleet.node.child import Child
from kvfleet.node.objects import ObjectStore

__all__ = ["sweep"]


def sweep(objects: ObjectStore) -> Iterator[TierUnavailableError | None]:
    """Look through all folders of blocks; those that `ObjectStore.children` finds to be left over are deleted.

    Yields what is wrong with a folder that cannot be looked through, else None, and goes on with the next one.

    Blocking: two listings for each step at most.

    Raises:
        TierUnavailableError: the storage does not answer.
    """
    for namespace in objects.children(""):
        folders: list[Child] = []
        if namespace.is_directory:
            try:
                folders = objects.children(namespace.name)
            except TierUnavailableError as error:
                yield error
        for folder in folders:
            if folder.is_directory:
                yield _swept(objects, f"{namespace.name}/{folder.name}")


def _swept(objects: ObjectStore, folder: str) -> TierUnavailableError | None:
    try:
        objects.children(folder)
    except TierUnavailableError as error:
        return error
    return None

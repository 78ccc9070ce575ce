"""Half-written files of dead writers, found a folder at a time: no listing of the shared tier comes along else."""

from __future__ import annotations

from collections.abc import Iterator

from kvfleet.node.objects import ObjectStore

__all__ = ["sweep"]


def sweep(objects: ObjectStore) -> Iterator[None]:
    """Look through all folders of blocks; those that `ObjectStore.children` finds to be left over are deleted.

    Blocking: two listings for each step at most.

    Raises:
        TierUnavailableError: the storage does not answer.
    """
    for namespace in objects.children(""):
        for folder in objects.children(namespace.name) if namespace.is_directory else ():
            if folder.is_directory:
                objects.children(f"{namespace.name}/{folder.name}")
            yield

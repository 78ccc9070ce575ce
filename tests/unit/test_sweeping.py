"""Looking for what dead writers have left."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from kvfleet.errors import TierUnavailableError
from kvfleet.node.child import Child
from kvfleet.node.objects import ObjectStore
from kvfleet.node.sweeping import sweep


class Faulty(ObjectStore):
    """Some folders cannot be listed."""

    def __init__(self, root: Path, *bad: str) -> None:
        super().__init__(f"file://{root}", {}, 5.0)
        self.listed: list[str] = []
        self._bad = bad

    @override
    def children(self, path: str) -> list[Child]:
        self.listed.append(path)
        if path in self._bad:
            raise TierUnavailableError("shared", path)
        return super().children(path)


def test_a_folder_that_cannot_be_listed_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    for name in ("a/1", "a/2", "b/1", "c/1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").touch()
    objects = Faulty(tmp_path, "a/1", "b")
    problems = [str(problem) if problem else "" for problem in sweep(objects)]
    assert objects.listed == ["", "a", "a/1", "a/2", "b", "c", "c/1"]
    assert [bool(problem) for problem in problems] == [True, False, True, False]

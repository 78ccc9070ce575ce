"""The benchmark of drives runs, at a size too small to say anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfleet.bench import nvme

MIB = 1 << 20


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_writes_and_reads_beside_their_floors(tmp_path: Path, codec: str) -> None:
    with nvme.open_site(tmp_path, 2, codec) as site:
        rows = nvme.rows(site, block_tokens=4, num_blocks=4, repeats=1)
        assert [(row.name, row.moved_bytes) for row in rows] == [
            (name, 2 * MIB) for name in ("O_DIRECT write", "write", "O_DIRECT read", "read")
        ]
        assert site.cpu.text().count(", ") == 3
    assert list(tmp_path.iterdir()) == []

"""A fleet that starts on a bucket with manifests of 100,000 blocks."""

from __future__ import annotations

import gc
from pathlib import Path

from tests.conftest import wait_for
from tests.manifest_fleet import SPEC, counted_bucket, fleet, write_manifests
from tests.workload import prompt

PROMPTS = 100
BLOCKS = 1000


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_hundred_thousand_blocks_are_found_without_a_listing(arena_root, monkeypatch, record_testsuite_property):
    with counted_bucket(monkeypatch) as proxy:
        write_manifests(proxy, PROMPTS, BLOCKS)
        before = resident_bytes()
        proxy.reset_counts()
        with fleet(arena_root, proxy) as rig:
            wait_for(lambda: rig.run(rig.at_directory("status")).shared_listed, "the directory was told of all blocks")
            client = rig.client(SPEC)
            for number in range(PROMPTS):
                assert client.lookup(prompt(BLOCKS, number)).num_blocks == BLOCKS, number
            assert proxy.counts["LIST"] == 0
            assert proxy.counts["GET"] < 30  # each node tries the bucket out; two files, and what may follow them
            (book,) = [book for n in range(2) if (book := rig.part(n).catalog._book) is not None]
            tables = (book.catalog._old, book.catalog._fresh)
            catalog_bytes = sum(table.ids.nbytes + table.rows.nbytes for table in tables)
            directory_bytes = rig.run(rig.at_directory("status")).stats.memory_bytes
            grown_bytes = resident_bytes() - before
            assert catalog_bytes == 89 * PROMPTS * BLOCKS
            assert directory_bytes <= 130 * PROMPTS * BLOCKS
            assert grown_bytes < 200 << 20  # 95 MiB: two managers, the directory, a client, Arrow
            for _ in range(2):
                rig.start_directory()
                wait_for(lambda: client.lookup(prompt(BLOCKS, 7)).num_blocks == BLOCKS, "a new directory knows them")
            assert proxy.counts["LIST"] == 0
        record_testsuite_property("grown_mib", grown_bytes >> 20)

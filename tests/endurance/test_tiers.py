"""The contract of tiers where it takes longer: drives that code their blocks, and a real S3 server."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from unittest import mock

import pytest
import s3fs
from typing_extensions import override

from kvfleet.testing.adapters import SharedBlocks
from tests.contract.test_tiers import BLOCK, SharedContract
from tests.contract.test_tiers import TestDrives as RawDrives
from tests.seaweed import Seaweed, seaweed


class TestCodedDrives(RawDrives):
    codec = "zstd"


@pytest.fixture(scope="module")
def server() -> Iterator[Seaweed]:
    with seaweed() as server:
        yield server


class TestS3(SharedContract):
    """Each test has a bucket prefix of its own."""

    @pytest.fixture(autouse=True)
    def _server(self, server, monkeypatch):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.options["secret"])
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        self.files = s3fs.S3FileSystem(**server.options, skip_instance_cache=True, use_listings_cache=False)

    def base(self, root):
        return f"contract/{root.name.replace('_', '-')}"

    @override
    def make(self, root):
        return SharedBlocks(f"s3://{self.base(root)}", BLOCK)

    def objects(self, root):
        base = self.base(root)
        with contextlib.suppress(FileNotFoundError):
            return {path[len(base) + 1 :]: self.files.cat_file(path) for path in self.files.find(base)}
        return {}

    def put(self, root, path, data):
        self.files.pipe_file(f"{self.base(root)}/{path}", data)

    @override
    def failing(self, tier):
        filesystem = tier.shared._objects._fs
        fail = mock.AsyncMock(side_effect=OSError(errno.EIO, "server"))
        stack = contextlib.ExitStack()
        for name in ("_pipe_file", "_call_s3", "_ls"):
            stack.enter_context(mock.patch.object(filesystem, name, fail))
        return stack

"""How s3fs is set up, and how its errors are read, for whole objects of some MiB."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["PUT_BYTES_MAX", "SCHEMES", "Body", "close", "error_code", "get", "tuned"]

SCHEMES = ("s3", "s3a")
# An object goes in one request up to S3's own limit. One put in parts and abandoned leaves the parts, unseen and paid
# for.
PUT_BYTES_MAX = 5 << 30
_AHEAD_BYTES = 1 << 20  # twice as much may have been received and not been taken before aiohttp stops receiving


class Body(io.BytesIO):
    """The body of a write.

    A buffer of many MiB given as it is goes to the socket in one piece, which holds up every other transfer: four of
    64 MiB at once stalled the event loop for 1.6 to 1.9 s and took 3.2 to 4.0 s of CPU time a GB, as files 0.4 to
    0.6 s and 1.6 (aiohttp 3.14, Python 3.11, loopback, 2 busy cores, 2026-11-30). Shares the bytes it is made of.
    """

    def __len__(self) -> int:
        return self.getbuffer().nbytes


def tuned(options: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Return options for s3fs: our settings, less those that `options` gives.

    `max_concurrency=1` makes a read one request, without a HEAD before it. Payloads are neither signed nor hashed by
    botocore: blocks have their own checksum, and it saves a third of the CPU time. Retries are few, because a miss is
    cheaper than a wait.
    """
    client = options.get("client_kwargs") or {}
    endpoints = (options.get("endpoint_url"), client.get("endpoint_url"), os.environ.get("AWS_ENDPOINT_URL"))
    config: dict[str, Any] = {
        "connect_timeout": min(2.0, timeout_s),
        "read_timeout": min(10.0, timeout_s),
        "max_pool_connections": 64,
        "tcp_keepalive": True,
        "retries": {"mode": "standard", "total_max_attempts": 2},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **(options.get("config_kwargs") or {}),
    }
    # Servers other than Amazon's seldom have a host name for each bucket.
    style = "path" if any(endpoints) else "auto"
    config["s3"] = {"payload_signing_enabled": False, "addressing_style": style, **(config.get("s3") or {})}
    return {"max_concurrency": 1, "session": _session(options), **options, "config_kwargs": config}


def _session(options: Mapping[str, Any]) -> Any:  # noqa: ANN401 - aiobotocore is untyped
    """A session that does not announce bodies: a server that ignores `Expect: 100-continue` would hang each write."""
    from aiobotocore.session import AioSession  # type: ignore[import-untyped]
    from botocore.handlers import add_expect_header  # type: ignore[import-untyped]

    session = AioSession(profile=options.get("profile"))
    session.unregister("before-call.s3", add_expect_header)
    return session


async def get(fs: Any, path: str, bytes_max: int, take: Callable[[bytes], object]) -> None:  # noqa: ANN401
    """Give `take` the first `bytes_max` bytes of an object in one request, piece by piece, until it returns False."""
    bucket, key, _ = fs.split_path(path)
    limits = f"bytes=0-{bytes_max - 1}"
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=limits, **fs.req_kw)
    body = answer["Body"]
    # As it was received: `body.read` cuts it and joins it again. That it is all there, aiohttp sees to as well.
    content = body.raw_stream.content
    content.set_read_chunk_size(_AHEAD_BYTES)
    try:
        async for piece, _ in content.iter_chunks():
            if take(piece) is False:
                return
    finally:
        body.close()


def close(fs: Any, timeout_s: float) -> None:  # noqa: ANN401 - s3fs is untyped
    """Close the connections of an s3fs filesystem, which by itself keeps them until the process ends.

    Raises:
        TimeoutError: it took too long.
    """
    from fsspec.asyn import sync

    client = fs._s3  # None until the first call; the public property would connect
    if client is not None:
        sync(fs.loop, client.close, timeout=timeout_s)


def error_code(error: BaseException) -> str:
    """The code in the S3 answer that s3fs made `error` of, or "" if it came from elsewhere."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))

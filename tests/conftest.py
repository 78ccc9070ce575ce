"""What all tests share: the rules of their layer, the leak checks, the seed, and small Ray clusters."""

from __future__ import annotations

import fcntl
import os
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hypothesis  # noqa: F401  its plugin imports it at the end otherwise, beside threads that tests left
import pytest
from typing_extensions import override
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

TESTS = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")
MIB = 1 << 20

# Layers whose tests use no cluster and wait for nothing.
ISOLATED_LAYERS = {"unit", "contract", "property"}

# Inherited by Ray's processes, so set before anything starts them or imports Ray.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
# Whoever else is on the network runs no code in the tests' clusters, and no token file of the user's is touched.
# Processes of the tests that import this module keep the token that they have inherited.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: `what` did not come true in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s} s still not true: {what}"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def wait_for_condition() -> Callable[..., None]:
    """`wait_for(condition, what, timeout_s)`: tests wait on conditions, they never just sleep."""
    return wait_for


# --- the seed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of the tests that draw random numbers")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(1 << 32)


@pytest.fixture
def seed(pytestconfig: pytest.Config) -> int:
    """A new number each run, printed when the test fails, repeated with `--seed`."""
    return int(pytestconfig.option.seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and "seed" in getattr(item, "fixturenames", ()):
        report.sections.append(("seed", f"repeat with --seed={item.config.option.seed}"))
    return report


# --- two processes, with `-n 2`


class ClusterFirst(LoadFileScheduling):  # type: ignore[misc]
    """Files stay whole; those of tests/cluster, which share a Ray cluster, go to one process."""

    @override
    def _split_scope(self, nodeid: str) -> str:
        return "cluster" if nodeid.startswith("tests/cluster/") else str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ClusterFirst:
    config.option.loadscopereorder = False
    return ClusterFirst(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest comes first if there are two processes, else what is told soonest."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith("tests/cluster/"))


# --- the rules of a layer


@pytest.fixture(autouse=True)
def _isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the isolated layers may not start Ray or sleep."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("a test of this layer may not start Ray or sleep")

    if request.path.relative_to(TESTS).parts[0] in ISOLATED_LAYERS:
        monkeypatch.setattr("ray.init", refuse)
        monkeypatch.setattr("time.sleep", refuse)


# --- leaks


def processes() -> set[int]:
    """Process ids of this machine."""
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208  twice as fast, for each test


def child_processes(among: set[int]) -> dict[int, str]:
    """Command lines of those processes that are running children of this one, by process id."""
    children = {}
    for pid in among:
        stat = Path(f"/proc/{pid}/stat")
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            command = stat.with_name("cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # Python's own resource tracker stays as long as this process does.
        if int(parent) == os.getpid() and state != "Z" and "resource_tracker" not in command:
            children[pid] = command
    return children


def abandoned_arenas() -> set[Path]:
    """Arena directories of this user that no manager has locked."""
    abandoned = set()
    for lock in SHARED_MEMORY.glob(f"kvfleet-{os.getuid()}/*/lock"):
        try:
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError):
            continue
        abandoned.add(lock.parent)
    return abandoned


@pytest.fixture(autouse=True)
def _no_leaked_processes() -> Iterator[None]:
    before = processes()
    yield
    wait_for(lambda: not child_processes(processes() - before), "all child processes of the test have ended")


@pytest.fixture(autouse=True, scope="session")
def _no_leaked_arenas() -> Iterator[None]:
    before = abandoned_arenas()
    yield
    # Another pytest beside this one may just have killed a manager of its own.
    with suppress(AssertionError):
        wait_for(lambda: abandoned_arenas() <= before, "nothing is left in shared memory", timeout_s=60)
    leaked = abandoned_arenas() - before
    assert not leaked, f"left in shared memory: {sorted(map(str, leaked))}"


@pytest.fixture
def arena_root() -> Iterator[Path]:
    """A directory in shared memory that is the test's own."""
    with tempfile.TemporaryDirectory(prefix="kvfleet-test-", dir=SHARED_MEMORY) as path:
        yield Path(path)


# --- Ray


@pytest.fixture(scope="session", autouse=True)
def _ray_directory() -> Iterator[None]:
    """Keep Ray's logs, sockets and notes about running clusters apart from those of other users of the machine."""
    # Short: a socket's path may have 107 characters.
    directory = tempfile.mkdtemp(prefix="kvr")
    os.environ["RAY_TMPDIR"] = directory
    yield
    del os.environ["RAY_TMPDIR"]
    shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def running_cluster(num_nodes: int, object_store_bytes: int) -> Iterator[Cluster]:
    """Start raylets on this machine and connect this process to the first."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(num_nodes):
            cluster.add_node(
                num_cpus=2,
                object_store_memory=object_store_bytes,
                include_dashboard=False,
            )
        ray.init(address=cluster.address)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """Two raylets with object stores of 256 MiB; this process is connected to the first. Not for tests that kill."""
    with running_cluster(num_nodes=2, object_store_bytes=256 * MIB) as cluster:
        yield cluster


@pytest.fixture
def fresh_cluster() -> Iterator[Cluster]:
    """Like `ray_cluster`, for a test that kills nodes. Meanwhile this process is not connected to `ray_cluster`."""
    import ray

    shared = ray.get_runtime_context().gcs_address if ray.is_initialized() else None
    ray.shutdown()
    with running_cluster(num_nodes=2, object_store_bytes=256 * MIB) as cluster:
        yield cluster
    if shared is not None:
        ray.init(address=shared)

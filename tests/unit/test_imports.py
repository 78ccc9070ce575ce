"""Imports point inward, few modules know Ray, and errors survive the way between processes."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

import kvfleet
from kvfleet import errors

PACKAGE = Path(kvfleet.__file__).parent
MODULES = sorted(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py"))

# Ring 0 is below everything, 1 the pure core, 2 what a node and an engine process run, 3 the edges.
RINGS = {
    "kvfleet.config": 0,
    "kvfleet.errors": 0,
    "kvfleet.core": 1,
    "kvfleet": 2,
    "kvfleet.bench": 3,
    "kvfleet.cli": 3,
    "kvfleet.connectors": 3,
    "kvfleet.sim": 3,
    "kvfleet.sizing": 3,
    "kvfleet.testing": 3,
}

# What the core may use besides itself: no clock, randomness, threads, files or network.
CORE_MAY_IMPORT = {
    "__future__", "abc", "array", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq",
    "hmac", "itertools", "json", "math", "numpy", "operator", "struct", "types", "typing", "typing_extensions",
}  # fmt: skip

MAY_IMPORT_RAY = {
    "kvfleet.actors",
    "kvfleet.calls",
    "kvfleet.fleet",
    "kvfleet.operating",
    "kvfleet.metrics",  # only where metrics are published
    "kvfleet.node.transport",
    # Ray Serve LLM.
    "kvfleet.connectors.serve",
    "kvfleet.connectors.serve_backend",
    # The callers of this one are actors.
    "kvfleet.bench.directory",
    # These two start raylets on this machine and place work on each.
    "kvfleet.bench.peer",
    "kvfleet.bench.planner",
    "kvfleet.bench.vllm",
    "kvfleet.cli.demo_cluster",
    # The simulated fleet takes Ray's place, and raises its errors.
    "kvfleet.testing.actors",
    "kvfleet.testing.stage",
    "kvfleet.testing.streams",
}

HEAVY = {"pyarrow", "ray", "s3fs", "torch", "transformers", "vllm"}


def ring(module: str) -> int:
    name = module
    while name not in RINGS:
        name = name.rpartition(".")[0]
    return RINGS[name]


def imports(module: str) -> set[str]:
    """Full names of all modules that a module imports, anywhere in its text, except for type checkers only."""
    tree = ast.parse(PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py").read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(names & set(MODULES) or {node.module})
    return found


def top(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("module", [m for m in MODULES if m != "kvfleet.__init__"])
def test_imports_point_inward(module):
    inner = {name for name in imports(module) if top(name) == "kvfleet"}
    assert not {name for name in inner if ring(name) > ring(module)}
    assert "kvfleet" not in inner or ring(module) == 3


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("kvfleet.core.")])
def test_the_core_is_pure(module):
    assert {top(name) for name in imports(module)} <= CORE_MAY_IMPORT | {"kvfleet"}


def test_only_the_named_modules_know_ray():
    assert {module for module in MODULES if "ray" in map(top, imports(module))} == MAY_IMPORT_RAY


def test_importing_kvfleet_is_light():
    program = f"import sys, kvfleet; print(*({HEAVY!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_public_names_are_sorted_and_there():
    assert list(kvfleet.__all__) == sorted(kvfleet.__all__)
    for name in kvfleet.__all__:
        assert getattr(kvfleet, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvfleet.nothing


def sample(error: type[errors.KvFleetError]) -> errors.KvFleetError:
    """An error with a value in each of its fields."""
    if error is errors.KvFleetError:
        return error("text")
    values = {"str": "text", "int": 7, "float": 0.5}
    parameters = inspect.signature(error).parameters
    return error(*(values[parameter.annotation] for parameter in parameters.values()))


ERRORS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("error", ERRORS)
def test_errors_survive_pickling(error):
    original = sample(error)
    copy = pickle.loads(pickle.dumps(original))
    assert type(copy) is error
    assert (str(copy), copy.args, vars(copy)) == (str(original), original.args, vars(original))


@pytest.mark.parametrize("error", ERRORS)
def test_errors_survive_ray(error):
    original = sample(error)
    raised = RayTaskError("fetch", "the remote traceback", original).as_instanceof_cause()
    assert isinstance(raised, error)
    for name, value in vars(original).items():
        assert getattr(raised, name) == value


def test_every_error_is_public():
    defined = {
        value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert defined == set(ERRORS)
    assert {error.__name__ for error in ERRORS} <= set(kvfleet.__all__)

"""Credentials come by the usual AWS chain, are refreshed, and are seen nowhere."""

from __future__ import annotations

import json
import logging
import pickle
import re
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from kvfleet.config import FleetConfig
from kvfleet.errors import TierUnavailableError
from kvfleet.node.shared import SharedTier
from tests.rig import Rig
from tests.scripted_server import Request, ScriptedServer, scripted_server
from tests.workload import model, prompt, store

SECRET = "hunter2/hunter2/hunter2"


@pytest.fixture(autouse=True)
def _no_credentials_of_the_users(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def nothing_there(request: Request) -> None:
    request.answer_error(404, "NoSuchKey")


def keys_used(server: ScriptedServer) -> list[str]:
    found = [re.search(r"Credential=([^/]*)/", request.headers["Authorization"]) for request in server.requests]
    return [match.group(1) for match in found if match]


def issue(path: Path, number: int, minutes: float) -> None:
    """Have the next credentials that are asked for be these."""
    expires = datetime.now(timezone.utc) + timedelta(minutes=minutes)
    answer = {"Version": 1, "AccessKeyId": f"AKIA{number}", "SecretAccessKey": SECRET, "SessionToken": f"token{number}"}
    path.write_text(json.dumps(answer | {"Expiration": expires.isoformat()}))


def test_credentials_are_refreshed_before_they_expire(tmp_path):
    issued = tmp_path / "issued"
    program = tmp_path / "issue.py"
    program.write_text(f"print(open({str(issued)!r}).read())")
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {program}\n")
    with scripted_server(nothing_there) as server:
        tier = SharedTier("s3://bucket/kv", {"endpoint_url": server.url}, timeout_s=30)
        for number, minutes in enumerate((2, 600, 600)):
            issue(issued, number, minutes)
            tier.probe_reads(30.0)
        tier.close()
        assert keys_used(server) == ["AKIA0", "AKIA1", "AKIA1"]
        assert server.requests[1].headers["X-Amz-Security-Token"] == "token1"


def test_a_profile_may_be_named(tmp_path, monkeypatch):
    (tmp_path / "credentials").write_text(f"[cache]\naws_access_key_id = AKIA7\naws_secret_access_key = {SECRET}\n")
    with scripted_server(nothing_there) as server:
        tier = SharedTier("s3://bucket/kv", {"endpoint_url": server.url, "profile": "cache"}, timeout_s=30)
        tier.probe_reads(30.0)
        tier.close()
        monkeypatch.setenv("AWS_PROFILE", "cache")
        tier = SharedTier("s3://bucket/kv", {"endpoint_url": server.url}, timeout_s=30)
        tier.probe_reads(30.0)
        tier.close()
        assert keys_used(server) == ["AKIA7", "AKIA7"]


def test_a_node_without_credentials_says_so_and_serves_from_memory(arena_root):
    with scripted_server(nothing_there) as server:
        options = {"endpoint_url": server.url}
        with Rig(arena_root, shared_url="s3://bucket/kv", shared_options=options, shared_probe_s=0.2) as rig:
            store(rig.client(model(64)), prompt(3))
            rig.run(rig.part(0).endpoint.tried.wait())
            assert "NoCredentialsError" in rig.status(0).shared_problem
            assert rig.status(0).unsaved_blocks == 3
        assert server.requests == []


def test_secrets_are_in_no_settings_message_or_log(arena_root, monkeypatch, caplog):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    caplog.set_level(logging.DEBUG, "kvfleet")
    with scripted_server(lambda request: request.answer_error(403, "AccessDenied")) as server:
        config = FleetConfig(shared_url="s3://bucket/kv", shared_options={"endpoint_url": server.url})
        options = dict(config.shared_options)
        with Rig(arena_root, shared_url="s3://bucket/kv", shared_options=options, shared_probe_s=0.2) as rig:
            store(rig.client(model(64)), prompt(3))
            rig.run(rig.part(0).endpoint.tried.wait())
            status, shared = rig.status(0), rig.part(0).shared
            said = f"{status!r} {shared!r} {config!r} {pickle.dumps(config)!r} {caplog.text}"
            assert "AccessDenied" in status.shared_problem
            with pytest.raises(TypeError, match="credentials"):
                pickle.dumps(shared)
            with pytest.raises(TierUnavailableError) as caught:
                shared.probe_reads(5.0)
    assert SECRET not in said + repr(caught.value)
    assert "hunter2" not in "".join(str(request.headers) + request.path for request in server.requests)

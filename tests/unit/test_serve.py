"""The arguments of the Ray Serve application: all are checked before Ray or vLLM is touched."""

from __future__ import annotations

import pytest

from kvfleet.config import DriveConfig
from kvfleet.connectors import serve
from kvfleet.errors import ConfigError

MODEL = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct"}


@pytest.mark.parametrize(
    ("args", "setting", "problem"),
    [
        ({}, "model", "must be given"),
        ({"model": ""}, "model", "must be text, is ''"),
        (MODEL | {"replicas": "0"}, "replicas", "must be a positive integer, is '0'"),
        (MODEL | {"replicas": "two"}, "replicas", "must be a positive integer, is 'two'"),
        (MODEL | {"replicas": 1.5}, "replicas", "must be a positive integer, is 1.5"),
        (MODEL | {"dram": "8GB"}, "dram", "must be a size like 48GiB or 512MiB, is '8GB'"),
        (MODEL | {"engine_kwargs": "{"}, "engine_kwargs", "must be a JSON object"),
        (MODEL | {"engine_kwargs": "[1]"}, "engine_kwargs", "must be a JSON object, is '[1]'"),
        (
            MODEL | {"engine_kwargs": '{"kv_transfer_config": {}, "dtype": "auto"}'},
            "engine_kwargs",
            "must not hold dtype, kv_transfer_config, which are set otherwise",
        ),
        (MODEL | {"sise": "1", "dramm": "8GiB"}, "dramm, sise", "no such argument; there are model, replicas, fleet,"),
    ],
)
def test_what_is_wrong_is_named(args, setting, problem):
    for build in (serve.app, serve.llm_config):
        with pytest.raises(ConfigError) as caught:
            build(args)
        assert caught.value.setting == setting
        assert caught.value.problem.startswith(problem)


def test_values_are_text_on_a_command_line_and_typed_in_a_file():
    text = {
        "model": "m",
        "replicas": "2",
        "fleet": "f",
        "dram": "8GiB",
        "nvme": "/mnt/a, $DRIVE/b",
        "shared": "s3://bucket/prefix",
        "max_model_len": "2048",
        "dtype": "float32",
        "block_size": "32",
        "tensor_parallel": "2",
        "engine_kwargs": '{"enforce_eager": true}',
    }
    typed = text | {
        "replicas": 2,
        "nvme": (DriveConfig(directory="/mnt/a"), DriveConfig(directory="$DRIVE/b")),
        "dram": 8 << 30,
        "max_model_len": 2048,
        "block_size": 32,
        "tensor_parallel": 2,
        "engine_kwargs": {"enforce_eager": True},
    }
    assert serve._read(text) == serve._read(typed | {"nvme": text["nvme"]}) == typed


def test_a_transfer_config_takes_the_connectors_settings_only():
    with pytest.raises(ConfigError, match="dram: no such setting"):
        serve.kv_transfer_config(dram="8GiB")
    with pytest.raises(ConfigError, match="block_tokens: must be a positive integer"):
        serve.kv_transfer_config(block_tokens=0)

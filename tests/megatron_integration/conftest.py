"""A Megatron world of one rank for each file here, and the models that most of them test."""

import contextlib

import pytest

with contextlib.suppress(pytest.skip.Exception):  # where there is no Megatron every file that needs it skips itself
    from tests import megatron_world


@pytest.fixture(scope="module")
def device():
    with megatron_world.world() as device:
        yield device


@pytest.fixture(params=["untied", "tied"])
def model(request, device):
    return megatron_world.build(device, tied=request.param == "tied")


@pytest.fixture
def untied(device):
    return megatron_world.build(device)


@pytest.fixture
def tensors(device):
    return megatron_world.inputs(device)[0]


@pytest.fixture
def labels(device):
    return megatron_world.inputs(device)[1]

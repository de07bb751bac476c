"""A Megatron world of one rank for each file here, and the models that most of them test."""

import pytest


@pytest.fixture(scope="module")
def device():
    from tests import megatron_world  # imports Megatron, which is not everywhere

    with megatron_world.world() as device:
        yield device


@pytest.fixture(params=["untied", "tied"])
def model(request, device):
    from tests import megatron_world

    return megatron_world.build(device, tied=request.param == "tied")


@pytest.fixture
def untied(device):
    from tests import megatron_world

    return megatron_world.build(device)


@pytest.fixture
def inputs(device):
    from tests import megatron_world

    return megatron_world.inputs(device)


@pytest.fixture
def tensors(inputs):
    return inputs[0]


@pytest.fixture
def labels(inputs):
    return inputs[1]

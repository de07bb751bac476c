"""A Megatron world of one rank for each file here, and the models that most of them test."""

import pytest


@pytest.fixture(scope="module")
def device():
    from tests import megatron_world  # imports Megatron, which is not everywhere

    with megatron_world.world() as device:
        yield device


@pytest.fixture(params=["untied", "tied"])
def model(request, device):
    return _build(device, tied=request.param == "tied")


@pytest.fixture
def untied(device):
    return _build(device)


def _build(device, **settings):
    from scripts import megatron_runtime
    from tests import megatron_world

    return megatron_runtime.build_gpt(megatron_world.options(**settings), device=device)

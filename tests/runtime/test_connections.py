"""A worker's connections to models are as many as it uses, and a few."""

from aworld_runtime.messages import ModelSpec
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.nodes.connections import Connections


def spec(number: int) -> ModelSpec:
    return ModelSpec(model=f"m{number}", base_url="http://127.0.0.1:9/v1")


async def test_connections_used_last_are_kept_for_the_next_call() -> None:
    connections = Connections(keep=2)
    async with connections.borrowed(spec(1)) as first, connections.borrowed(spec(1)) as again:
        assert again is first
    async with connections.borrowed(spec(2)) as second:
        pass
    async with connections.borrowed(spec(3)) as third, connections.borrowed(spec(2)) as again:
        assert again is second, "used by nobody, but there was room in its time"
    async with connections.borrowed(spec(1)) as again:
        assert again is not first
    async with connections.borrowed(spec(2)) as again:
        assert again is second
    async with connections.borrowed(spec(3)) as again:
        assert again is not third
    await connections.aclose()


async def test_a_connection_in_use_stays_however_many_there_are() -> None:
    connections = Connections(keep=1)
    async with connections.borrowed(spec(0)) as mine:
        for number in range(1, 5):
            async with connections.borrowed(spec(number)):
                pass
        async with connections.borrowed(spec(0)) as again:
            assert again is mine
    await connections.aclose()


async def test_a_model_that_is_one_is_used_as_it_is() -> None:
    model = ScriptedModel(["done"])
    async with Connections().borrowed(model) as used:
        assert used is model

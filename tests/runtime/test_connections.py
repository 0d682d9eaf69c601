"""A worker's connections to models are as many as it uses, and a few."""

from aworld_runtime.messages import ModelSpec
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.nodes.connections import Connections


def spec(number: int) -> ModelSpec:
    return ModelSpec(model=f"m{number}", base_url="http://127.0.0.1:9/v1")


async def test_connections_used_last_are_kept_for_the_next_episode() -> None:
    connections = Connections(keep=2)
    async with connections.borrowed() as connect:
        first, second = connect(spec(1)), connect(spec(2))
        assert connect(spec(1)) is first
    async with connections.borrowed() as connect:
        third = connect(spec(3))
        assert connect(spec(2)) is second, "used by nobody, but there was room in its time"
    async with connections.borrowed() as connect:
        assert connect(spec(1)) is not first
        assert (connect(spec(2)), connect(spec(3))) == (second, third)
    await connections.aclose()


async def test_a_connection_in_use_stays_however_many_there_are() -> None:
    connections = Connections(keep=1)
    async with connections.borrowed() as connect:
        mine = connect(spec(0))
        for number in range(1, 5):
            async with connections.borrowed() as others:
                others(spec(number))
        assert connect(spec(0)) is mine
    await connections.aclose()


async def test_a_model_that_is_one_is_used_as_it_is() -> None:
    model = ScriptedModel(["done"])
    async with Connections().borrowed() as connect:
        assert connect(model) is model

"""A store of each kind, empty, for every test."""

import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest
from pymongo import AsyncMongoClient

from aworld_runtime.events import Registry
from aworld_runtime.store import Store, open_store
from tests.services import mongo_server, with_database


@pytest.fixture(scope="session")
async def mongo_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[str]:
    async with mongo_server(tmp_path_factory.mktemp("mongo")) as url:
        yield url


@pytest.fixture
async def mongo_database(mongo_url: str) -> AsyncGenerator[str]:
    """URL of a database of the test's own, dropped after it."""
    name = f"aworld_test_{uuid.uuid4().hex[:12]}"
    yield with_database(mongo_url, name)
    async with AsyncMongoClient[dict[str, object]](mongo_url) as client:
        await client.drop_database(name)


@pytest.fixture(params=["sqlite", "mongodb"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/folder/store.db"
    return request.getfixturevalue("mongo_database")


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    async with open_store(store_url, Registry()) as opened:
        yield opened

"""A run goes from a store of one kind to one of the other and back, as a file: what is there is the same, and replays."""

from pathlib import Path

from aworld_runtime.bus.base import read_all
from aworld_runtime.events import Registry
from aworld_runtime.names import episode_log, episode_of_log, run_log
from aworld_runtime.replay.export import export
from aworld_runtime.replay.exported import ExportedFile
from aworld_runtime.replay.importing import put_into
from aworld_runtime.replay.replay import replay
from aworld_runtime.runtime import Runtime
from aworld_runtime.store import Store, open_store
from tests.replayed import swarm


async def copy(source: Store, log: str, target: Store, file: Path) -> None:
    await export(source, log, file)
    with ExportedFile(file, Registry()) as exported:
        await exported.check()
        await put_into(target, exported)


async def test_a_run_replays_identically_in_the_other_kind_of_store_and_back(
    store: Store, tmp_path: Path
) -> None:
    recorded, back = (f"sqlite:///{tmp_path}/{name}.db" for name in ("recorded", "back"))
    async with Runtime(store=recorded) as runtime:
        episodes = [await runtime.run(swarm, "Add it all.") for _ in range(2)]
    log = run_log(runtime.run_id)
    logs = [episode_log(episode.id) for episode in episodes] + [log]
    async with open_store(recorded) as source, open_store(back) as last:
        await copy(source, log, store, tmp_path / "there.zip")
        await copy(store, log, last, tmp_path / "back.zip")
        for there in (store, last):
            assert await there.logs() == sorted(logs)
            for name in logs:
                assert await there.read(name) == await source.read(name)
            for episode in episodes:
                report = await replay(
                    await read_all(there, episode_log(episode.id)), swarm.program()
                )
                assert report.identical
                kept, expected = [await s.episode(episode.id) for s in (there, source)]
                assert expected is not None
                assert kept == expected.model_copy(update={"feed": None})
            assert await there.runs() == await source.runs()


async def test_an_imported_episode_is_forked_and_the_fork_replays_elsewhere(
    store: Store, store_url: str, tmp_path: Path
) -> None:
    recorded, elsewhere = (f"sqlite:///{tmp_path}/{name}.db" for name in ("recorded", "elsewhere"))
    async with Runtime(store=recorded) as runtime:
        episode = await runtime.run(swarm, "Add it all.")
    async with open_store(recorded) as source:
        await copy(source, episode_log(episode.id), store, tmp_path / "one.zip")
    async with Runtime(store=store_url) as runtime:
        forked = episode_log(await runtime.fork(episode.id, at=9, program=swarm))
        assert (await runtime.result(episode_of_log(forked) or "")).answer == episode.answer
    async with open_store(elsewhere) as last:
        await copy(store, forked, last, tmp_path / "fork.zip")
        assert len(await last.read(episode_log(episode.id))) == 9
        report = await replay(await read_all(last, forked), swarm.program())
        assert report.identical

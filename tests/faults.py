"""What can happen to a server."""

import signal

from aworld_runtime.bus.server import PrivateServer


async def kill(server: PrivateServer) -> None:
    """As `kill -9` does."""
    assert server.process is not None
    server.process.send_signal(signal.SIGKILL)
    await server.process.wait(deadline=5.0)


async def restart_empty(server: PrivateServer) -> None:
    """Kill it, throw its data away, and start it again on the same port."""
    await kill(server)
    for file in (server.folder / "appendonlydir").iterdir():
        file.unlink()
    await server.start()

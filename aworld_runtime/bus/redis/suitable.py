"""Whether a server will do, by what it says about itself."""

from __future__ import annotations

from aworld_runtime.errors import ConfigError

OLDEST_SERVER = (7, 0)


def check_server(url: str, info: bytes, *, clustered: bool) -> dict[str, str]:
    """The facts in the reply to INFO.

    Raises:
        ConfigError: it is too old, would lose events, or is a cluster's node where a single server was
            meant, or the other way round.
    """
    lines = info.decode(errors="replace").splitlines()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    version = facts.get("redis_version", "0.0")
    if tuple(map(int, version.split(".")[:2])) < OLDEST_SERVER:
        raise ConfigError(
            f"bus {url}: the server is version {version};"
            f" {OLDEST_SERVER[0]}.{OLDEST_SERVER[1]} or newer is needed"
        )
    is_node = facts.get("cluster_enabled", "0") == "1"
    if is_node and not clustered:
        raise ConfigError(
            f"bus {url}: the server is a node of a cluster: use redis+cluster://HOST:PORT"
        )
    if clustered and not is_node:
        raise ConfigError(f"bus {url}: the server belongs to no cluster: use redis://HOST:PORT")
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and facts.get("maxmemory", "0") != "0":
        raise ConfigError(
            f"bus {url}: the server's maxmemory-policy is {policy}, which deletes events"
            " when memory runs out; set it to noeviction"
        )
    return facts

"""The lint: what a replay can't repeat is found in agents, and nowhere where it does no harm."""

import json
from pathlib import Path
from textwrap import dedent

import pytest

from aworld_runtime.cli.command_line import main
from aworld_runtime.errors import NotFoundError, UsageError
from aworld_runtime.replay.lint import Finding, lint


def found(tmp_path: Path, source: str) -> list[Finding]:
    path = tmp_path / "agents.py"
    path.write_text(dedent(source))
    findings, files = lint([path])
    assert files == 1
    return findings


def in_handler(imports: str, line: str) -> str:
    return f"{imports}\nclass Node:\n    async def handle(self, ctx, event):\n        {line}\n"


@pytest.mark.parametrize(
    "imports, line, rule, name",
    [
        ("import time", "x = time.time()", "clock", "time.time()"),
        ("import time as t", "x = t.monotonic()", "clock", "time.monotonic()"),
        ("from time import time as now", "x = now()", "clock", "time.time()"),
        ("from time import time", "x = sorted([1], key=time)", "clock", "time.time"),
        ("import datetime", "x = datetime.date.today()", "clock", "datetime.date.today()"),
        ("from datetime import datetime", "x = datetime.now(None)", "clock", "datetime.datetime.now()"),
        ("import random", "x = random.choice([1, 2])", "random", "random.choice()"),
        ("from random import shuffle", "shuffle([])", "random", "random.shuffle()"),
        ("import random", "x = random.Random()", "random", "random.Random()"),
        ("import random", "x = sorted([1], key=random.random)", "random", "random.random"),
        ("import time", "x = getattr(time, 'time')()", "clock", "time.time()"),
        ("", "x = __import__('random').choice([1])", "random", "random.choice()"),
        ("import importlib", "x = importlib.import_module('uuid').uuid4()", "random", "uuid.uuid4()"),
        ("import numpy as np", "x = np.random.rand(3)", "random", "numpy.random.rand()"),
        ("import secrets", "x = secrets.token_hex(8)", "random", "secrets.token_hex()"),
        ("import os", "x = os.urandom(8)", "random", "os.urandom()"),
        ("from uuid import uuid4", "x = str(uuid4())", "random", "uuid.uuid4()"),
        ("import requests", "x = requests.get('http://x').json()", "network", "requests.get()"),
        ("from urllib import request", "request.urlopen('x')", "network", "urllib.request.urlopen()"),
        ("from openai import AsyncOpenAI", "x = AsyncOpenAI()", "network", "openai.AsyncOpenAI()"),
        ("", "import httpx; x = httpx.AsyncClient()", "network", "httpx.AsyncClient()"),
        ("import asyncio", "await asyncio.open_connection('x', 1)", "network", "asyncio.open_connection()"),
        ("from anyio import connect_tcp", "await connect_tcp('x', 1)", "network", "anyio.connect_tcp()"),
        ("", "await loop.create_connection(None, 'x', 1)", "network", "loop.create_connection()"),
        ("import litellm", "x = litellm.completion()", "network", "litellm.completion()"),
        ("import boto3, redis", "x = redis.Redis()", "network", "redis.Redis()"),
        ("import sqlalchemy", "x = sqlalchemy.create_engine('x')", "network", "sqlalchemy.create_engine()"),
        ("import subprocess", "subprocess.run(['curl'])", "network", "subprocess.run()"),
        ("", "x = await self.llm.complete(request)", "model", "llm.complete()"),
        ("from aworld_runtime import LLMClient", "x = await LLMClient().complete(request)", "model", "model.complete()"),
        ("import anyio", "await anyio.sleep(1)", "sleep", "anyio.sleep()"),
        ("", "x = [n for n in {1, 2}]", "order", "for … in set"),
        ("", "x = ', '.join(set('ab'))", "order", "join(set)"),
        ("import asyncio", "x = asyncio.as_completed([])", "order", "asyncio.as_completed()"),
    ],
)  # fmt: skip
def test_what_a_replay_cannot_repeat_is_found(
    tmp_path: Path, imports: str, line: str, rule: str, name: str
) -> None:
    (finding,) = found(tmp_path, in_handler(imports, line))
    assert (finding.rule, finding.name, finding.line) == (rule, name, 4)
    assert str(finding).startswith(f"{tmp_path / 'agents.py'}:4:")


@pytest.mark.parametrize(
    "imports, line",
    [
        ("import random", "x = random.Random(7).random()"),
        ("import random", "x = ctx.random.random()"),
        ("import random", "x = isinstance(ctx.random, random.Random)"),
        ("import datetime", "x = datetime.datetime(2026, 1, 1)"),
        ("import anyio", "await anyio.sleep(0)"),
        ("import time", "time = ctx.clock; x = time.time()"),
        ("import httpx", "x: httpx.Response | None = None"),
        ("import httpx", "x = await ctx.record('page', lambda: httpx.get('x'))"),
        ("", "x = await ctx.complete(self.llm)"),
        ("", "x = await self.ctx.complete(self.llm)"),
        ("", "await self.pages.complete()"),
        ("import sqlalchemy", "x = sqlalchemy.text('x')"),
        ("", "x = sorted(set('ab')); y = 'a' in {1}; z = len(set(x))"),
        ("import time", "x = time.time()  # aworld: allow: for a log line alone"),
    ],
)
def test_what_a_replay_can_repeat_is_not(tmp_path: Path, imports: str, line: str) -> None:
    assert found(tmp_path, in_handler(imports, line)) == []


def test_a_context_of_any_name_may_be_asked_for_a_completion(tmp_path: Path) -> None:
    source = """
        class Node:
            async def handle(self, it, event):
                await it.complete(self.llm)
                await self.answer(event, it)

            async def answer(self, event, hand: Context):
                await hand.complete(self.llm)
                await event.complete(self.llm)
    """
    assert [(f.rule, f.name) for f in found(tmp_path, source)] == [("model", "event.complete()")]


def test_what_answers_from_outside_may_use_it_all(tmp_path: Path) -> None:
    source = """
        import random, requests, time
        from aworld_runtime import Agent, BaseTool, tool

        @tool
        def look(page: str) -> str:
            return requests.get(page).text

        @tool(name="later")
        async def wait() -> None:
            time.sleep(1)

        def draw() -> float:
            return random.random()

        class Search(BaseTool):
            async def run(self, **arguments):
                return requests.get("x").text

        class Better(Search):
            async def run(self, **arguments):
                return time.time()

        class Model:
            async def complete(self, request):
                return requests.post("x")

        class Environment:
            def tasks(self, split):
                return random.sample([], 1)

            async def score(self, task, episode):
                return time.time()

        class Node:
            async def handle(self, ctx, event):
                async def fetch():
                    return requests.get("x").text
                await ctx.record("page", fetch)

        def ask(page: str) -> str:
            return requests.get(page).text

        def main():
            print(time.time())

        agent = Agent(tools=[look, draw])
        more = ["calculator", ask]
        other = Agent(tools=more)
        if __name__ == "__main__":
            main()
    """
    assert found(tmp_path, source) == []


def test_what_tools_alone_call_is_theirs(tmp_path: Path) -> None:
    source = """
        import requests, time
        from aworld_runtime import Agent, BaseTool, tool

        def fetch(page):
            return get(page).text

        def get(page):
            return requests.get(page)

        def shared():
            return time.time()

        def search(page):
            return requests.get(page)

        class Search(BaseTool):
            async def run(self, **arguments):
                return search("x")

        @tool
        def look(page: str) -> str:
            return fetch(page) + shared()

        class Node:
            async def handle(self, ctx, event):
                shared()

            def look(self):
                return time.time_ns()

        TOOLS = [look, shared]
        agent = Agent(tools=[look])
    """
    assert [finding.name for finding in found(tmp_path, source)] == [
        "time.time()",
        "time.time_ns()",
    ]


def test_an_agent_that_only_a_scripts_own_part_makes_is_looked_at(tmp_path: Path) -> None:
    source = """
        import random
        from aworld_runtime import Agent

        class Solver(Agent):
            async def handle(self, ctx, event):
                random.random()

        class Better(Solver):
            async def handle(self, ctx, event):
                random.choice([1])

        def main():
            Better(name=str(random.random())).run("x")

        if __name__ == "__main__":
            Solver().run("x")
            main()
    """
    assert [f.within for f in found(tmp_path, source)] == ["Solver.handle", "Better.handle"]


def test_a_prompt_that_is_made_at_import_is_looked_at(tmp_path: Path) -> None:
    source = """
        from datetime import date
        agent = Agent(system_prompt=f"Today is {date.today()}")
    """
    (finding,) = found(tmp_path, source)
    assert (finding.line, finding.rule) == (3, "clock")


def test_what_is_allowed_says_why(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "import time\nx = time.time()  # aworld: allow\n")
    assert (finding.rule, finding.line) == ("allow", 2)


def test_in_a_folder_agents_are_looked_at_and_what_they_import(tmp_path: Path) -> None:
    files = {
        "mine/agents.py": "import aworld_runtime\nfrom mine.dice import roll\nfrom . import coin\n",
        "mine/dice.py": "import random\ndef roll(): return random.random()\n",
        "mine/coin.py": "from random import choice\ndef toss(): return choice('ab')\n",
        "mine/unrelated.py": "import time\nprint(time.time())\n",
        "tests/test_agents.py": "import aworld_runtime, time\nprint(time.time())\n",
        ".venv/agents.py": "import aworld_runtime, time\nprint(time.time())\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    findings, count = lint([tmp_path])
    assert [Path(finding.file).name for finding in findings] == ["coin.py", "dice.py"]
    assert count == 3


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no file or folder"):
        lint([tmp_path / "nobody.py"])
    with pytest.raises(UsageError, match=r"agents\.py is no Python that can be read"):
        found(tmp_path, "def (")


def test_the_command_names_each_line_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agents.py").write_text("import time\nimport aworld_runtime\nBEGAN = time.time()\n")
    assert main(["lint"]) == 1
    line, count = capsys.readouterr().out.splitlines()
    assert line.startswith("agents.py:3:9 clock time.time(): a replay reads another time: use")
    assert count == "1 found in 1 file"
    assert main(["lint", "agents.py", "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)["findings"]
    assert (told["file"], told["line"], told["rule"]) == ("agents.py", 3, "clock")
    Path("agents.py").write_text("")
    assert main(["lint", "agents.py"]) == 0
    assert main(["lint", "nobody.py"]) == 2

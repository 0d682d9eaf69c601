"""What in agents and swarms a replay can't repeat, found by reading their source; nothing is imported or run.

    file ──▶ names, resolved through its imports ──▶ RULES ──▶ findings, less what is allowed by a comment

Tools, models and environments answer from outside, and their answers are recorded: they may do all of it, and so may
what `ctx.record` is given. So may a script's own part, under `if __name__ == "__main__"`.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Literal

from aworld_runtime.errors import NotFoundError, UsageError
from aworld_runtime.messages import Data
from aworld_runtime.replay.outside import (
    Function,
    is_main_guard,
    is_tool,
    last_name,
    outside_classes,
    outside_functions,
)

Rule = Literal["clock", "random", "sleep", "network", "model", "order", "allow"]
ADVICE: Mapping[Rule, str] = {
    "clock": "a replay reads another time: use await ctx.now()",
    "random": "a replay draws something else: use ctx.random or ctx.uuid()",
    "sleep": "a replay waits, too: use await ctx.sleep(seconds)",
    "network": "a replay asks again, and may get another answer: make it a tool, or use await ctx.record(kind, produce)",
    "model": "a replay refuses it: use await ctx.complete(model)",
    "order": "a set comes in another order each time: use sorted(…), or a task group",
    "allow": "say why it is allowed: # aworld: allow REASON",
}
CLOCK = """
    time.time time.time_ns time.monotonic time.monotonic_ns time.perf_counter time.perf_counter_ns time.process_time
    time.localtime time.gmtime time.ctime
    datetime.datetime.now datetime.datetime.utcnow datetime.datetime.today datetime.date.today
"""
RANDOM = "os.urandom os.getrandom uuid.uuid1 uuid.uuid4 uuid.uuid6 uuid.uuid7"
SLEEP = "time.sleep asyncio.sleep anyio.sleep"
ORDER = "asyncio.as_completed"
RANDOM_MODULES = "random secrets numpy.random"
NETWORK_MODULES = """
    requests httpx aiohttp urllib.request urllib3 http.client socket websockets grpc smtplib ftplib imaplib poplib paramiko
    boto3 redis pymongo psycopg openai anthropic litellm subprocess
"""
NETWORK = """
    asyncio.open_connection asyncio.open_unix_connection asyncio.create_subprocess_exec asyncio.create_subprocess_shell
    anyio.connect_tcp anyio.connect_unix anyio.open_process anyio.run_process os.system os.popen
    sqlalchemy.create_engine sqlalchemy.ext.asyncio.create_async_engine
"""
OF_LOOPS = frozenset({"create_connection", "create_unix_connection", "create_datagram_endpoint"})
"""Methods of event loops that connect."""
CONTEXTS = frozenset({"ctx", "context"})
"""What a handler's context is called where nothing else says that it is one."""


def _each(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


NAMES: Mapping[str, Rule] = {
    **_each("clock", CLOCK),
    **_each("random", RANDOM),
    **_each("sleep", SLEEP),
    **_each("network", NETWORK),
    **_each("order", ORDER),
}
MODULES: Mapping[str, Rule] = {
    **_each("random", RANDOM_MODULES),
    **_each("network", NETWORK_MODULES),
}
"""All that is called in them. Of randomness, what is given a seed may be."""
SEEDED = frozenset({"random.Random", "numpy.random.default_rng", "numpy.random.RandomState"})
ALLOW = re.compile(r"#\s*aworld:\s*allow\b[\s:,-]*(.*)")
SKIPPED = frozenset(
    {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist", "tests"}
)
"""Folders in which no agents are, with those whose names begin with a dot."""

Scope = dict[str, str | None]
"""Name → what it was imported as; None where it is something else here."""


class Finding(Data):
    """One use of what a replay can't repeat."""

    file: str
    line: int
    column: int
    rule: Rule
    name: str
    """As it is called by whoever wrote the module: `time.time`, whatever the file calls it."""
    within: str
    """The class and the function that it is in, `Solver.handle`; empty where it runs as the module is imported."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.rule} {self.name}: {ADVICE[self.rule]}"


def lint(paths: Iterable[Path]) -> tuple[list[Finding], int]:
    """What is found in these files and folders, and how many files were read.

    In a folder that is every file that imports this package, and what those import of the folder; tests are left out.

    Raises:
        NotFoundError: no such path.
        UsageError: a file is no Python that can be read.
    """
    files = list(dict.fromkeys(file for path in paths for file in _files(path)))
    return [finding for file in files for finding in lint_file(file)], len(files)


def lint_file(path: Path) -> list[Finding]:
    """As `lint`, of one file."""
    visitor = _Visitor(path, _parsed(path))
    allowed = dict(_allowed(_text(path)))
    found = [finding for finding in visitor.findings if finding.line not in allowed]
    bare = [
        Finding(file=str(path), line=line, column=1, rule="allow", name="aworld: allow", within="")
        for line, reason in allowed.items()
        if not reason
    ]
    return sorted([*found, *bare], key=lambda finding: (finding.line, finding.column))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise NotFoundError(f"no file or folder {path}")
    there = {file: _parsed(file) for file in sorted(path.rglob("*.py")) if _is_ours(file, path)}
    chosen = [file for file, tree in there.items() if "aworld_runtime" in _imported(tree)]
    for file in chosen:  # it grows meanwhile
        wanted = [name.replace(".", "/") for name in _imported(there[file])]
        endings = tuple(f"/{name}{end}" for name in wanted for end in (".py", "/__init__.py"))
        chosen += [f for f in there if f not in chosen and f"/{f.as_posix()}".endswith(endings)]
    return sorted(chosen)


def _is_ours(file: Path, root: Path) -> bool:
    folders = file.relative_to(root).parts[:-1]
    return not any(name in SKIPPED or name.startswith(".") for name in folders)


def _imported(tree: ast.Module) -> set[str]:
    """Modules, and what may be one; of this package only its name."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names)
            names.add(node.module or "")
    ours = any(name.split(".")[0] == "aworld_runtime" for name in names)
    others = {name for name in names if name and name.split(".")[0] != "aworld_runtime"}
    return others | {"aworld_runtime"} if ours else others


def _text(path: Path) -> str:
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{path} can't be read: {error}") from error


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(_text(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no Python that can be read: {error}") from error


def _allowed(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are allowed, and why."""
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type == tokenize.COMMENT and (found := ALLOW.search(token.string)):
            yield token.start[0], found[1].strip()


class _Visitor(ast.NodeVisitor):
    """Goes through one file, with what its names stand for."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.findings: list[Finding] = []
        self._path = str(path)
        self._scopes: list[Scope] = [{}]
        self._within: list[str] = []
        self._outside_classes = outside_classes(tree)
        self._outside_functions = outside_functions(tree, self._outside_classes)
        self._contexts: list[str] = []
        """Parameters that are a handler's context, of the functions that this is in."""
        self._in_class = False
        """Directly: what is defined there is a method."""
        self.visit(tree)

    # --- what names stand for ------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.split(".")[0]
            self._scopes[-1][alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            full = f"{node.module or ''}.{alias.name}"
            self._scopes[-1][alias.asname or alias.name] = full if not node.level else None

    def _resolved(self, node: ast.expr) -> str | None:
        """The dotted name that an expression is, as its module has it."""
        if isinstance(node, ast.Name):
            for scope in reversed(self._scopes):
                if node.id in scope:
                    return scope[node.id]
            return None
        if isinstance(node, ast.Attribute):
            base = self._resolved(node.value)
            return None if base is None else f"{base}.{node.attr}"
        if isinstance(node, ast.Call):
            return self._looked_up(node)
        return None

    def _looked_up(self, call: ast.Call) -> str | None:
        """What is imported, or got from a module, by a name in quotes."""
        match last_name(call.func), call.args:
            case (("__import__" | "import_module"), [ast.Constant(value=str(module)), *_]):
                return module
            case "getattr", [module, ast.Constant(value=str(name)), *_]:
                base = self._resolved(module)
                return None if base is None else f"{base}.{name}"
            case _:
                return None

    # --- what is left out ----------------------------------------------------------------------------------------------

    def visit_If(self, node: ast.If) -> None:
        if not is_main_guard(node):
            self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if node.name in self._outside_classes:
            return
        for base in (*node.bases, *(keyword.value for keyword in node.keywords)):
            self.visit(base)
        self._visit_body(node, in_class=True)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def _visit_function(self, node: Function) -> None:
        if is_tool(node) or (node.name in self._outside_functions and not self._in_class):
            return
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d)):
            self.visit(default)
        outer, self._contexts = self._contexts, [*self._contexts, *_contexts(node)]
        self._scopes.append(dict.fromkeys(_bound(node)))
        self._visit_body(node, in_class=False)
        self._scopes.pop()
        self._contexts = outer

    def _visit_body(self, node: Function | ast.ClassDef, *, in_class: bool) -> None:
        outer, self._in_class = self._in_class, in_class
        self._within.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._within.pop()
        self._in_class = outer

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._scopes.append(dict.fromkeys(_arguments(node.args)))
        self.visit(node.body)
        self._scopes.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:  # an annotation does nothing
            self.visit(node.value)

    # --- what is looked for --------------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        name = self._resolved(node.func)
        if name is not None and self._rule_of_call(name, node) is not None:
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                self.visit(argument)
            return
        if isinstance(node.func, ast.Attribute) and node.func.attr == "record":
            self.visit(node.func)  # what it is given answers from outside
            return
        if name is None and last_name(node.func) in OF_LOOPS:
            self._find(node, "network", f"loop.{last_name(node.func)}()")
        if _puts_in_order(node.func) and node.args and _is_set(node.args[0]):
            self._find(node, "order", f"{last_name(node.func)}(set)")
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        match node.value:
            case ast.Call(func=ast.Attribute(attr="complete", value=of), args=args, keywords=named):
                if (args or named) and not self._is_context(of):
                    self._find(node.value, "model", f"{last_name(of) or 'model'}.complete()")
            case _:
                pass
        self.generic_visit(node)

    def _is_context(self, node: ast.expr) -> bool:
        return last_name(node).strip("_") in CONTEXTS or (
            isinstance(node, ast.Name) and node.id in self._contexts
        )

    def _rule_of_call(self, name: str, node: ast.Call) -> Rule | None:
        """The rule that a call breaks, which is noted; None where it breaks none."""
        seeded = name in SEEDED and (node.args or node.keywords)
        sleeps_not = NAMES.get(name) == "sleep" and [_value(arg) for arg in node.args] == [0]
        rule: Rule | None = NAMES.get(name) or next(
            (its for module, its in MODULES.items() if name.startswith(f"{module}.")), None
        )
        if rule is None:
            return None
        if not seeded and not sleeps_not:
            self._find(node, rule, f"{name}()")
        return rule

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._refer(node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._refer(node)

    def _refer(self, node: ast.Attribute | ast.Name) -> None:
        """A function that is handed on will be called."""
        name = self._resolved(node)
        if name is None or not isinstance(node.ctx, ast.Load):
            return
        if name in NAMES:
            self._find(node, NAMES[name], name)
        elif name.rpartition(".")[0] in RANDOM_MODULES.split() and last_name(node).islower():
            self._find(node, "random", name)

    def visit_For(self, node: ast.For) -> None:
        self._iterate(node.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        for generator in node.generators:
            self._iterate(generator.iter)
        self.generic_visit(node)

    def _iterate(self, node: ast.expr) -> None:
        if _is_set(node):
            self._find(node, "order", "for … in set")

    def _find(self, node: ast.expr, rule: Rule, name: str) -> None:
        self.findings.append(
            Finding(
                file=self._path,
                line=node.lineno,
                column=node.col_offset + 1,
                rule=rule,
                name=name,
                within=".".join(self._within),
            )
        )


def _arguments(arguments: ast.arguments) -> list[str]:
    given = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    rest = (arguments.vararg, arguments.kwarg)
    return [arg.arg for arg in (*given, *(a for a in rest if a))]


def _contexts(function: Function) -> list[str]:
    """Its parameters that are a context by what they are said to be, or by their place in a node's `handle`."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    by_place = arguments[1:2] if function.name == "handle" else []
    said = [a for a in (*arguments, *function.args.kwonlyargs) if _annotated(a) == "Context"]
    return [argument.arg for argument in (*by_place, *said)]


def _annotated(argument: ast.arg) -> str:
    return last_name(argument.annotation) if argument.annotation else ""


def _bound(function: Function) -> set[str]:
    """Names that are the function's own; not those it imports, which come as it is gone through."""
    stored = {
        part.id
        for part in ast.walk(function)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
    return stored | set(_arguments(function.args))


def _puts_in_order(function: ast.expr) -> bool:
    return last_name(function) in {"list", "tuple", "enumerate", "join"}


def _is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in {"set", "frozenset"}
    return isinstance(node, ast.Set | ast.SetComp)


def _value(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None

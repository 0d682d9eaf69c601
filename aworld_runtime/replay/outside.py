"""Which functions and classes of a file answer from outside, so that their answers are recorded: the lint leaves them out."""

from __future__ import annotations

import ast

OUTSIDE = ("BaseTool", "RemoteTool", "ChatModel", "LLMClient", "ScriptedModel", "Environment")
"""Base classes of what answers from outside."""
OUTSIDES_METHODS = (frozenset({"complete"}), frozenset({"score", "tasks"}))
"""Whose class is a model, or an environment, whatever it is derived from."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def outside_classes(tree: ast.Module) -> set[str]:
    """Names of tools', models' and environments' classes."""
    names = {*OUTSIDE}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = {part.name for part in node.body if isinstance(part, Function)}
            answers = any(theirs <= methods for theirs in OUTSIDES_METHODS)
            if (answers and "handle" not in methods) or {*map(last_name, node.bases)} & names:
                names.add(node.name)
    return names


def outside_functions(tree: ast.Module, classes: set[str]) -> set[str]:
    """Names of functions that answer from outside, or are a script's own part: what is given as `tools=[…]` or to `ctx.record`,
    what stands under the main guard, and what these and the `classes` alone call.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "tools":
            names |= names_in(node.value)
        elif isinstance(node, ast.Call) and last_name(node.func) == "record":
            names |= {name for argument in node.args for name in names_in(argument)}
        elif isinstance(node, ast.If) and is_main_guard(node):
            names |= {name for statement in node.body for name in names_in(statement)}
        elif isinstance(node, Function) and is_tool(node):
            names.add(node.name)
    for node in ast.walk(tree):  # TOOLS = [look, draw]
        if isinstance(node, ast.Assign) and names & {*map(last_name, node.targets)}:
            names |= names_in(node.value)
    functions = {node.name for node in tree.body if isinstance(node, Function)}
    uses = [(_defined(node), names_in(node) & functions) for node in tree.body if _runs(node)]
    while True:
        outside = names | classes
        others = {name for user, used in uses if user not in outside for name in used - {user}}
        ours = {name for user, used in uses if user in outside for name in used}
        if ours - others <= names:
            return names
        names |= ours - others


def _runs(node: ast.stmt) -> bool:
    return not (isinstance(node, ast.If) and is_main_guard(node))


def _defined(node: ast.stmt) -> str:
    return node.name if isinstance(node, Function | ast.ClassDef) else ""


def is_tool(node: Function) -> bool:
    names = (last_name(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list)
    return "tool" in names


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def is_main_guard(node: ast.If) -> bool:
    return isinstance(node.test, ast.Compare) and "__name__" in names_in(node.test)


def last_name(node: ast.expr) -> str:
    """The last part of a dotted name."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")

"""`@tool`: a typed Python function becomes a tool.

The schema comes from the type hints; the description, and that of each argument, from the docstring
(Google style `Args:`) or from `Annotated[..., Field(description=...)]`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast, get_type_hints, overload

import pydantic_core
from anyio import to_thread
from pydantic import BaseModel, ConfigDict, Field, JsonValue, PydanticUserError, ValidationError
from pydantic import create_model as pydantic_model
from pydantic.fields import FieldInfo

from aworld_runtime.errors import ToolArgumentsError, ToolError
from aworld_runtime.messages import ToolSpec
from aworld_runtime.tools.base import BaseTool

AnyFunction = Callable[..., Any]
SECTIONS = re.compile(
    r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE
)


class FunctionTool(BaseTool):
    """A function as a tool. Calling it calls the function, as if it were not decorated."""

    def __init__(
        self,
        function: AnyFunction,
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float = BaseTool.timeout_s,
    ) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self._is_async = inspect.iscoroutinefunction(function)
        name = name or function.__name__
        summary, arguments = _read_docstring(inspect.getdoc(function) or "")
        self._arguments = _arguments_model(function, name, arguments)
        self._spec = ToolSpec(
            name=name, description=description or summary, parameters=_schema(self._arguments, name)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The plain function."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self._spec.name}({', '.join(self._arguments.model_fields)})>"

    def get_schema(self) -> ToolSpec:
        """Name, description and JSON schema of the arguments."""
        return self._spec

    async def run(self, **arguments: JsonValue) -> JsonValue:
        """Validate the arguments and call the function; one that isn't async runs in a thread.

        Raises:
            ToolArgumentsError: the arguments don't fit the type hints.
            ToolError: the function returned what can't be written as JSON.
        """
        try:
            model = self._arguments.model_validate(arguments)
        except ValidationError as error:
            raise ToolArgumentsError(_explain(error, self._spec.name)) from None
        # Not model_dump: the function gets the objects that its hints ask for, not dicts.
        values = {name: getattr(model, name) for name in type(model).model_fields}
        if self._is_async:
            result = await self.function(**values)
        else:
            result = await to_thread.run_sync(
                partial(self.function, **values), abandon_on_cancel=True
            )
        try:
            return pydantic_core.to_jsonable_python(result)
        except pydantic_core.PydanticSerializationError:
            raise ToolError(
                f"{self._spec.name} returned a {type(result).__name__}, which can't be written as"
                " JSON: return text, numbers, lists, dicts or pydantic models"
            ) from None


@overload
def tool(function: AnyFunction, /) -> FunctionTool: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = BaseTool.timeout_s,
) -> Callable[[AnyFunction], FunctionTool]: ...


def tool(
    function: AnyFunction | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = BaseTool.timeout_s,
) -> FunctionTool | Callable[[AnyFunction], FunctionTool]:
    """Make a tool of a typed function: `@tool`, or `@tool(name=..., timeout_s=...)`.

    Raises:
        ToolError: a parameter without a name or a type that JSON can carry.
    """
    make = partial(FunctionTool, name=name, description=description, timeout_s=timeout_s)
    return make if function is None else make(function)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What stands before the first section, and the arguments' descriptions."""
    summary, *sections = SECTIONS.split(text)
    arguments: dict[str, str] = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title in {"Args", "Arguments"}:
            for entry in re.split(r"\n(?=    ?\S| {2}\S)(?! {5})", body):
                if found := re.match(r"\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.+)", entry, re.DOTALL):
                    arguments[found[1]] = " ".join(found[2].split())
    return " ".join(summary.split()), arguments


def _arguments_model(
    function: AnyFunction, name: str, descriptions: dict[str, str]
) -> type[BaseModel]:
    """A pydantic model of the parameters."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolError(f"tool {name!r}: type hint {error.name!r} can't be resolved") from error
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
            raise ToolError(f"tool {name!r}: parameter {parameter} has no name to be called by")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = cast("FieldInfo", Field(default, description=descriptions.get(parameter.name)))
        fields[parameter.name] = (hints.get(parameter.name, JsonValue), field)
    try:
        return pydantic_model(
            name,
            __config__=ConfigDict(extra="forbid", protected_namespaces=()),
            **fields,
        )
    except (PydanticUserError, NameError) as error:
        raise ToolError(f"tool {name!r}: {error}") from error


def _schema(model: type[BaseModel], name: str) -> dict[str, JsonValue]:
    try:
        schema = model.model_json_schema()
    except PydanticUserError as error:
        raise ToolError(f"tool {name!r}: a type that JSON can't carry: {error.message}") from error
    for entry in (schema, *schema.get("properties", {}).values()):
        entry.pop("title", None)
    return schema


def _explain(error: ValidationError, name: str) -> str:
    """The first three faults, in one line."""
    faults = [
        f"{'.'.join(str(part) for part in fault['loc']) or 'arguments'}: {fault['msg']}"
        for fault in error.errors(include_url=False, include_context=False)[:3]
    ]
    return f"{name}: {'; '.join(faults)}"

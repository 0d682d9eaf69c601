"""Build hook: the wheel holds agents/, swarms/ and training/ inside aworld_runtime/.

A checkout keeps them at its top. An editable install copies nothing: there, `aworld_runtime/__init__.py`
finds them.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LAYERS = ("agents", "swarms", "training")


class LayersHook(BuildHookInterface[Any]):
    """Adds the three folders to a standard wheel, not to an editable one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Hatchling calls this before it builds; `version` is "standard" or "editable"."""
        if version == "editable":
            return
        root = Path(self.root)
        build_data["force_include"].update(
            {str(root / layer): f"aworld_runtime/{layer}" for layer in LAYERS}
        )

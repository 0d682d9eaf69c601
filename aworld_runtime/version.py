"""Which code this is: workers of one run must agree on it."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import aworld_runtime

LAYERS = ("agents", "swarms", "training")


@cache
def code_version() -> str:
    """The package's version and a hash over its Python files: equal exactly where the code is."""
    package = Path(aworld_runtime.__file__).parent
    # In a checkout the upper layers stand beside the package; a link to them inside it may be there or not.
    roots = {layer: package / layer for layer in LAYERS}
    roots |= {layer: package.parent / layer for layer in LAYERS if not roots[layer].is_dir()}
    files = {
        path.relative_to(package).as_posix(): path
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] not in LAYERS
    }
    for layer, root in roots.items():
        files |= {f"{layer}/{p.relative_to(root).as_posix()}": p for p in root.rglob("*.py")}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0".encode())
        digest.update(path.read_bytes())
    return f"{aworld_runtime.__version__}+{digest.hexdigest()[:12]}"

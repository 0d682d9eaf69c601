"""The code version: equal where the code is."""

import time

import aworld_runtime
from aworld_runtime.version import code_version


def test_code_version_names_the_package_version_and_is_quick() -> None:
    code_version.cache_clear()
    start = time.process_time()
    version = code_version()
    assert time.process_time() - start < 0.05
    assert version.startswith(f"{aworld_runtime.__version__}+")
    assert version == code_version()

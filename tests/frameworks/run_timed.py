"""time_verl.py with its arguments, which must not replace functions inside of what it times or measures.

torchrun --nproc-per-node 2 tests/frameworks/run_timed.py FOLDER ...
"""

import contextlib
import functools
from typing import Any
from unittest import mock

import time_verl

from benchmark import measure
from megatron_lce.plugins.patching import Plugin

measuring, replacing = [0], []


def measured(name: str) -> Any:
    own = getattr(measure, name)

    def call(*inputs: Any, **keywords: Any) -> Any:
        measuring[0] += 1
        try:
            return own(*inputs, **keywords)
        finally:
            measuring[0] -= 1

    return mock.patch.object(measure, name, call)


def noted(name: str) -> Any:
    own = getattr(Plugin, name)

    @functools.wraps(own)
    def call(*inputs: Any) -> None:
        replacing.append(measuring[0])
        own(*inputs)

    return mock.patch.object(Plugin, name, call)


if __name__ == "__main__":
    with contextlib.ExitStack() as opened:
        for patch in (*map(measured, ("time_ms", "peak_mib", "_once_ms")), *map(noted, ("install", "uninstall"))):
            opened.enter_context(patch)
        status = time_verl.main()
    assert replacing
    assert not any(replacing), f"{sum(map(bool, replacing))} of {len(replacing)} were measured"
    print(f"ok      {len(replacing)} replacements, none of them measured")
    raise SystemExit(status)

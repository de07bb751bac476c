"""Triton's interpreter at twice its speed for small kernels."""

import importlib.util


def prepare_once_a_launch() -> None:
    """Have `triton.language` prepared for a module's device functions once a launch.

    The interpreter replaces hundreds of its attributes by what computes in numpy, at every call of a device function:
    again and again the same, and half of the time that kernels of small shapes take.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[int] = set()

    def prepare_once(fn):
        if id(fn.__globals__) in prepared:
            return None  # calls of device functions do not look at what is returned
        prepared.add(id(fn.__globals__))
        return prepare(fn)

    def launch_afresh(self, *args, **kwargs):
        prepared.clear()  # the end of a launch undoes what its beginning did
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = prepare_once
    interpreter.GridExecutor.__call__ = launch_afresh

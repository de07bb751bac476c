"""Starts a program on several ranks as torchrun does, but forked from a process that has imported what they import.

A rank of its own spends most of its life importing torch and Megatron. Here `multiprocessing`'s fork server imports
them once, and every rank of every program is a copy of it.
"""

import functools
import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 5.0  # for the other ranks to say what they have to say, when one has failed


@functools.cache
def _server() -> ForkServerContext:
    """The fork server, its imports made as `--device cpu` wants them; Megatron's fused functions are not compiled."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.train_distill"])
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    settings["CUDA_VISIBLE_DEVICES"] = ""  # of a GPU that the imports look at, nothing is left after a fork
    with mock.patch.dict(os.environ, settings):
        forkserver.ensure_running()
    return context


def run_ranks(ranks: int, program: str, *arguments: object, timeout: float = 300) -> str:
    """Runs a module by its dotted name, or a file by its path, on `ranks` ranks; returns what they printed.

    Raises AssertionError with the end of that when a rank fails, or is not done in `timeout` seconds.
    """
    # The ranks meet at this process's store, as they do at torchrun's: its port is taken, not guessed.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    command = [program, *map(str, arguments)]
    with tempfile.NamedTemporaryFile("r") as output:
        processes = []
        for rank in range(ranks):
            environment = meeting | world | {"RANK": rank, "LOCAL_RANK": rank}
            environment = {name: str(value) for name, value in environment.items()}
            processes.append(_server().Process(target=_run, args=(command, environment, output.name), daemon=True))
            processes[-1].start()
        codes = _wait(processes, timeout)
        printed = output.read()
    assert codes == [0] * ranks, f"{' '.join(command)}: the ranks ended with {codes}\n{printed[-8000:]}"
    return printed


def _wait(processes: list[ForkServerProcess], timeout: float) -> list[int]:
    """Exit codes, once all have ended; those that outlive a failed rank or the timeout are ended."""
    end = time.monotonic() + timeout
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + GRACE_SECONDS)
        connection.wait([p.sentinel for p in processes if p.is_alive()], timeout=1.0)
    for process in processes:
        process.terminate()
        process.join()
    return [process.exitcode for process in processes]


def _run(command: list[str], environment: dict[str, str], output: str) -> None:
    """In the new process: what Python does with `command`, with its output in a file."""
    gc.freeze()  # what was imported: to look through it at every collection takes longer than most tests' steps
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.update(environment)
    del os.environ["TORCHDYNAMO_DISABLE"]  # what the program itself compiles is compiled
    torch._dynamo.config.disable = False
    os.chdir(ROOT)
    sys.argv = command
    if command[0].endswith(".py"):
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
    else:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)

"""A rank that is killed or raises: the others end with an error in time, and do nothing that comes behind.

    python torchrun_tests/run_failures.py --device cpu [--ranks 3] [--timeout 20]

No torchrun, which would end the others itself. Without a peer a collective of gloo fails at once. NCCL's watchdog
notices after the timeout of the process group, and sleeps before it aborts the process, whether it dumps or not: four
times `TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC`, by default a minute.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.context import ForkProcess
from pathlib import Path

import harness
import torch
import torch.distributed as dist

import megatron_lce
from scripts.ranks import device_of_rank

GRACE_SECONDS = 90  # to start, to notice and to end
WAYS = ("killed in forward", "killed in backward", "raises in forward", "raises in backward")


def train(way: str, seconds: int, device: str, world: dict[str, int | str], folder: Path) -> None:
    """Two steps of a head over all ranks; the last rank fails in front of a collective of the second one."""
    rank, ranks = int(world["RANK"]), int(world["WORLD_SIZE"])
    os.environ.update({name: str(value) for name, value in world.items()}, TORCH_NCCL_DUMP_ON_TIMEOUT="0")
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"
    os.dup2(os.open(folder.parent / f"{folder.name}.{rank}.log", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    torch.set_num_threads(1)
    on = device_of_rank(device)
    dist.init_process_group("nccl" if on.type == "cuda" else "gloo", timeout=timedelta(seconds=seconds))
    all_reduce, now = dist.all_reduce, "nowhere"

    def failing(*arguments: object, **keywords: object) -> object:
        if rank == ranks - 1 and way.endswith(now):
            if way.startswith("raises"):
                raise ValueError("this rank fails")
            os.kill(os.getpid(), signal.SIGKILL)
        return all_reduce(*arguments, **keywords)

    dist.all_reduce = failing
    hidden = torch.ones(16, 8, device=on, requires_grad=True)
    weight = torch.ones(8, 8, device=on, requires_grad=True)
    keywords = {"tp_group": dist.group.WORLD, "backend": "torch"}
    for step in ("first", "second"):
        now = "forward" if step == "second" else now
        out = megatron_lce.linear_cross_entropy(hidden, weight, torch.arange(16, device=on), **keywords)
        now = "backward" if step == "second" else now
        out.logprobs.sum().backward()
        assert hidden.grad.isfinite().all()  # waits for the device
        (folder / f"{step} {rank}").touch()


def start(way: str, seconds: int, ranks: int, device: str, folder: Path) -> list[ForkProcess]:
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    fork, processes = multiprocessing.get_context("fork"), []  # what takes long to import is there already
    for rank in range(ranks):
        of_rank = {**world, "RANK": rank, "LOCAL_RANK": rank}
        processes.append(fork.Process(target=train, args=(way, seconds, device, of_rank, folder), daemon=True))
        processes[-1].start()
    return processes


def check_way(way: str, processes: list[ForkProcess], end: float, folder: Path) -> bool:
    """Whether each rank ended with an error, and in the second step."""
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    failed_as_asked = codes[-1] == (-signal.SIGKILL if way.startswith("killed") else 1)
    expected = sorted(f"first {rank}" for rank in range(len(codes)))
    right = failed_as_asked and None not in codes and 0 not in codes and sorted(os.listdir(folder)) == expected
    print(f"{'ok     ' if right else 'FAILED '} {way}: exit codes {codes}, finished steps {sorted(os.listdir(folder))}")
    for log in sorted(folder.parent.glob(f"{folder.name}.*.log")) if not right else ():
        print(log.read_text()[-2000:])
    return right


def main() -> None:
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="Ranks of each run.")
    parser.add_argument("--timeout", type=int, default=20, help="Seconds of a collective.")
    arguments = parser.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.device_count() >= arguments.ranks else "cpu")
    with tempfile.TemporaryDirectory() as name:
        begin, runs = time.monotonic(), {}
        for index, way in enumerate(WAYS):
            folder = Path(name) / str(index)
            runs[way] = start(way, arguments.timeout, arguments.ranks, device, folder), folder
        end = begin + arguments.timeout + GRACE_SECONDS
        right = [check_way(way, processes, end, folder) for way, (processes, folder) in runs.items()]
        failed = right.count(False)
        print(f"{len(right)} compared, {failed} failed on {arguments.ranks} ranks in {time.monotonic() - begin:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

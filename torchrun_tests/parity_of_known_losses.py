"""The loss of an enabled model over ranks, which find out alike whether its upstream gradient is one number."""

from contextlib import nullcontext

import harness
import torch
import torch.distributed as dist
from harness import Report
from torch.distributed import ProcessGroup

from tests.cases import BF16
from tests.known_passes import Passes
from tests.problems import make_problem

COLUMNS = 140  # of a shard


def run_known_losses(group: ProcessGroup, device: torch.device, report: Report) -> None:
    """Microbatches whose masks differ, the first one all masked; then a loss that weights its tokens."""
    ranks = dist.get_world_size(group)
    tokens = 48 * ranks
    problem = make_problem(tokens, 8, COLUMNS * ranks, device, BF16)
    problem.labels[::7] = -100
    index, one = torch.arange(tokens, device=device), torch.full((tokens,), 0.5, device=device)
    weights = torch.linspace(0.5, 1.5, tokens, device=device)
    microbatches = {"all masked": index < 0, "found out": index % 3 > 0, "in forward": index % 2 > 0}
    for options in [{"sequence_parallel": sp, "skip_ignored": skip} for sp in (False, True) for skip in (False, True)]:
        passes = Passes(problem, group=group, **options)
        given = [(name, one * mask, mask) for name, mask in microbatches.items()]
        for name, upstream, mask in given:
            for what, error, allowed in passes.compare(upstream, mask):
                title = f"known loss, {name}, {options}: {what}"
                report.check(title, error <= allowed, f"error {error:.2e}, allowed {allowed:.1e}")
        report.check("known loss: known", passes.upstream.known is True)
        passes.checkpointed = True  # which counts as unknown
        for what, error, allowed in passes.compare(weights):
            report.check(f"known loss, checkpointed, {options}: {what}", error <= allowed, f"error {error:.2e}")
        passes.checkpointed = False
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with hooks if group.rank() == 0 else nullcontext():
            for what, error, allowed in passes.compare(torch.ones_like(weights)):
                report.check(f"known loss, one hooked, {options}: {what}", error <= allowed, f"error {error:.2e}")
        broken = all(gradient.isnan().all() for gradient in passes.run(weights)[1])
        message = harness.message_of(lambda passes=passes: passes.run(weights))
        report.check("known loss, weighted later", broken and "the last backward pass are NaN" in message, message)
        for what, error, allowed in passes.compare(weights):
            report.check(f"known loss, any upstream, {options}: {what}", error <= allowed, f"error {error:.2e}")

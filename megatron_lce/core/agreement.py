"""Ranks of a group compare what they call with, once for each configuration, and remember that they agreed."""

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core import collectives, validation

_Configuration = tuple[tuple[str, str], ...]

# For each group the configurations that its ranks have agreed on, and the columns of the largest shard under each. The
# rows of a shard are part of the key only where all shards are equal: the key must be new on all ranks or on none, and
# where shards are uneven another head may differ on some ranks alone.
_agreed: WeakKeyDictionary[ProcessGroup, dict[tuple[_Configuration, int | None], int]] = WeakKeyDictionary()


class Agreement:
    """Facts that the ranks of a group share."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.largest_shard: int | None = None  # columns of the largest shard, behind the context; None on one rank


@contextlib.contextmanager
def agreement(
    group: ProcessGroup | None,
    called_with: dict[str, Any],
    weight: Tensor,
    vocab_start: int | None = None,
    changing: dict[str, Any] | None = None,
    *,
    largest_shard: int | None = None,
    vocab_size: int | None = None,
    group_name: str = "tp_group",
) -> Iterator[Agreement]:
    """A rank checks its arguments inside. Where one of the group refuses its own, or they differ, all of them raise.

    Ranks that call with a new configuration exchange it, and each one's error. The exchange is one gather of small
    objects, for which the host waits. Later calls compare nothing. Only the largest shard is asked for at each call if
    a `vocab_start` is given and no `largest_shard`: the host waits for it. A rank that changes its configuration alone
    is not seen: it exchanges, and the others do not.

    Args:
        called_with: what every rank must call with.
        changing: what may change from call to call: it is compared under a new configuration, and not remembered.
        largest_shard: columns of the largest shard, if every rank knows it.

    Raises:
        TypeError, ValueError, NotImplementedError: on every rank, if one has an error or they differ; under a known
            configuration, on this rank alone.
    """
    agreed = Agreement(validation.check_group(group, group_name))
    error = None
    try:
        yield agreed
    except (TypeError, ValueError, NotImplementedError) as refusal:
        error = refusal
    if group is not None and agreed.ranks > 1:
        rows, known = validation.rows_of(weight), _agreed.setdefault(group, {})
        key = _in_words({**called_with, "largest shard": largest_shard}), rows if vocab_start is None else None
        if key not in known:
            mine = (key[0] + _in_words(changing or {}), rows, vocab_start, None if error is None else str(error))
            known[key] = _exchange(mine, error, group, group_name, vocab_size)
        elif error is None and vocab_start is not None and largest_shard is None and not collectives.is_captured():
            known[key] = collectives.largest_over_group(weight.shape[0], group, weight.device)
        agreed.largest_shard = known[key] if largest_shard is None else largest_shard
    if error is not None:
        raise error


def _in_words(values: dict[str, Any]) -> _Configuration:
    return tuple((name, repr(value)) for name, value in values.items())


def _exchange(
    mine: tuple[_Configuration, int | None, int | None, str | None],
    error: Exception | None,
    group: ProcessGroup,
    group_name: str,
    vocab_size: int | None,
) -> int:
    """Compare every rank's configuration and error, and return the columns of the group's largest shard."""
    everyone = collectives.gather_objects(mine, group)
    if error is not None:
        raise error
    for rank, (*_, message) in enumerate(everyone):
        if message is not None:
            raise ValueError(f"rank {rank} of {group_name} refuses its arguments: {message}")
    configurations, shards, starts, _ = zip(*everyone, strict=True)
    for (name, first), *others in zip(*configurations, strict=True):
        values = [first, *(value for _, value in others)]
        if len(set(values)) > 1:
            raise ValueError(f"{name} must be the same on every rank of {group_name}, got {', '.join(values)}")
    _check_shards(shards, starts)
    if None not in starts:
        validation.check_vocab_size(vocab_size, max(start + rows for start, rows in zip(starts, shards, strict=True)))
    return max(shards)


def _check_shards(shards: tuple[int, ...], starts: tuple[int | None, ...]) -> None:
    if None in starts:
        if any(start is not None for start in starts):
            raise ValueError(f"vocab_start must be given on every rank of tp_group or on none, got {list(starts)}")
        if len(set(shards)) > 1:
            raise ValueError(f"vocab_start must be given on every rank where shards differ, got rows {list(shards)}")
        return
    end = 0
    for start, rows in sorted(zip(starts, shards, strict=True)):
        if start is not None and start < end:
            raise ValueError(
                f"vocab_start must be where no other rank's shard lies, got {list(starts)} for rows {list(shards)}"
            )
        end = (start or 0) + rows

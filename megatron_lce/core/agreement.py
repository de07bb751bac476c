"""What the ranks of a group must have in common, looked at once for each configuration and remembered."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lce.core import collectives, validation
from megatron_lce.core.options import Options

_Checked = TypeVar("_Checked")
_Configuration = tuple[tuple[str, str], ...]

# For each group the configurations its ranks have agreed on, and the columns of the largest shard under each. With them
# the rows of a shard only where no vocab_start is given and all shards are equal: the key must be new on all ranks or
# on none, and where shards are uneven another head may differ on some ranks alone.
_agreed: WeakKeyDictionary[ProcessGroup, dict[tuple[_Configuration, int | None], int]] = WeakKeyDictionary()


def agreed_options(
    group: ProcessGroup | None,
    check: Callable[[int], Options],
    describe: Callable[[], dict[str, Any]],
    weight: Tensor,
    vocab_start: int | None,
    changing: dict[str, Any],
) -> Options:
    """`agreed`, with the columns of the group's largest shard."""
    options, largest_shard = agreed(group, check, describe, weight, vocab_start, changing)
    return options if largest_shard is None else replace(options, largest_shard=largest_shard)


def agreed(
    group: ProcessGroup | None,
    check: Callable[[int], _Checked],
    describe: Callable[[], dict[str, Any]],
    weight: Tensor,
    vocab_start: int | None = None,
    changing: dict[str, Any] | None = None,
    *,
    group_name: str = "tp_group",
    exchange: bool = True,
) -> tuple[_Checked, int | None]:
    """What `check(ranks)` makes of a call's arguments; and the columns of the largest shard, None without other ranks.

    `describe()`: what every rank must call with. It is asked even where this rank's arguments are refused.
    `changing`: the same of what changes from call to call: compared where the others are asked, and not remembered.
    `exchange`: whether the others are asked.

    Raises:
        TypeError, ValueError, NotImplementedError: on every rank, where any found an error or they differ; under a
            configuration that is known already, on this rank alone.
    """
    ranks = validation.check_group(group, group_name)
    error = None
    try:
        checked = check(ranks)
    except (TypeError, ValueError, NotImplementedError) as found:
        error = found
    largest_shard = None
    if exchange and group is not None and ranks > 1:
        agreement = Agreement(group, group_name, describe(), changing or {}, weight, vocab_start)
        largest_shard = agreement.settle(error)
    elif error is not None:
        raise error
    return checked, largest_shard


class Agreement:
    """One call's configuration: what it is, and whether the group has agreed on it before.

    Ranks that call with a new configuration exchange it, with what is wrong with it on each of them; all of them raise
    or none does. That is one gather of small objects, which synchronises; later calls find it here, but for the
    largest shard where a vocab_start is given. A rank that leaves a known configuration by itself is not seen: it
    exchanges, and the others do not.
    """

    def __init__(
        self,
        group: ProcessGroup,
        group_name: str,
        shared: dict[str, Any],
        changing: dict[str, Any],
        weight: Tensor,
        vocab_start: int | None,
    ) -> None:
        self._group, self._group_name = group, group_name
        self._shard_rows, self._vocab_start = validation.rows_of(weight), vocab_start
        self._device = getattr(weight, "device", None)
        self._configuration: _Configuration = tuple((name, repr(value)) for name, value in shared.items())
        self._changing: _Configuration = tuple((name, repr(value)) for name, value in changing.items())

    def settle(self, error: Exception | None) -> int:
        """The columns of the group's largest shard. `error`: what validation found on this rank.

        Raises:
            TypeError, ValueError: on every rank, where any found an error or their configurations differ; under a
                known configuration the error of this rank.
        """
        known = _agreed.setdefault(self._group, {})
        key = (self._configuration, self._shard_rows if self._vocab_start is None else None)
        if key not in known:
            known[key] = self._exchange(error)
            return known[key]
        if error is not None:
            raise error
        if self._vocab_start is not None and not collectives.is_captured():
            # Of uneven shards another head may be new on some ranks alone, and all of them plan by the largest.
            known[key] = collectives.largest_over_group(self._shard_rows or 0, self._group, self._device)
        return known[key]

    def _exchange(self, error: Exception | None) -> int:
        compared, message = self._configuration + self._changing, None if error is None else str(error)
        mine = (compared, self._shard_rows, self._vocab_start, message)
        everyone = collectives.gather_objects(mine, self._group)
        if error is not None:
            raise error
        for rank, (*_, message) in enumerate(everyone):
            if message is not None:
                raise ValueError(f"rank {rank} of {self._group_name} refuses its arguments: {message}")
        configurations, shards, starts, _ = zip(*everyone, strict=True)
        for (name, mine_is), *others in zip(*configurations, strict=True):
            values = [mine_is, *(value for _, value in others)]
            if len(set(values)) > 1:
                differing = ", ".join(values)
                raise ValueError(f"{name} must be the same on every rank of {self._group_name}, got {differing}")
        _check_shards(shards, starts)
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

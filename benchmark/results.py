"""The JSON document that a benchmark's measurements go into, one by one."""

import contextlib
import hashlib
import importlib.metadata
import json
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

import megatron_lce
from benchmark import ratios
from benchmark.measure import Timed

ROUNDS = 6  # of calls that take turns
PACKAGES = ("megatron-lce", "megatron-core", "torch", "triton", "nvidia-cutlass-dsl")


def as_text(document: dict) -> str:
    """The document as JSON, one record a line."""
    parts = []
    for name, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def as_cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value)


@dataclass
class Results:
    """A document that grows, written after every measurement.

    path    None: never written
    rounds  how often calls take turns
    quiet   nothing is printed (a rank that only helps)
    """

    device: torch.device
    dtype: torch.dtype
    path: Path | None
    settings: dict
    rounds: int = ROUNDS
    quiet: bool = False

    def __post_init__(self) -> None:
        settings = {"dtype": str(self.dtype), "settings": self.settings}
        self.document: dict[str, Any] = {"environment": environment(self.device), **settings}
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def section(self, name: str) -> list[dict]:
        return self.document.setdefault(name, [])

    def save(self) -> None:
        ratios.add_ratios(self.document)
        if self.path:
            self.path.write_text(as_text(self.document))

    def attempt(self, section: str, record: dict, measurement: Callable[[], dict]) -> None:
        """Adds the record with what `measurement` returns, or with why there is nothing."""
        record = dict(record)
        self.section(section).append(record)
        self._update(section, record, measurement)
        self._print(section, record)

    def take_turns(
        self, section: str, turns: list[tuple[dict, Timed]], start_round: Callable[[], None], **calls: Any
    ) -> None:
        """Adds the records with the times of their calls, `Timed.round`, in rounds: clocks fall as a GPU warms.

        In an order that is drawn for each round, the same on all ranks: where it went there and back again, two of four
        heads that launch the same kernels read 3 % more than the others, presumably by a swing of the clock.
        `start_round()` is the place for the yardstick, which is then taken at the same clocks.
        """
        unreached = {"status": "not reached"}  # by a run that is stopped
        for record, _ in turns:
            record |= unreached
            self.section(section).append(record)
        left = [x for x in turns if self._update(section, x[0], lambda timed=x[1]: timed.warm_up() | unreached)]
        order = random.Random(0)
        for _ in range(self.rounds):
            start_round()
            order.shuffle(left)
            left = [(x, timed) for x, timed in left if self._update(section, x, partial(timed.round, **calls))]
        for record, timed in turns:
            if record["status"] == "ok":
                self._update(section, record, partial(timed.finish, record))
            self._print(section, record)

    def _update(self, section: str, record: dict, measurement: Callable[[], dict]) -> bool:
        """Whether the measurement went well; the document has its result either way."""
        try:
            record |= {"status": "ok"} | measurement()
            return True
        except torch.OutOfMemoryError:
            record |= {"status": "out of memory"}
        except Exception as error:  # foreign code may raise anything: its failure is a result, and the others still run
            absent = section == "providers" and isinstance(error, ImportError)
            reason = str(error) if absent else f"{type(error).__name__}: {error}"
            record |= {"status": "not installed" if absent else "failed", "reason": reason[:500]}
        finally:
            self.save()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # raises, and ends the run, where the failure took the device along
        return False

    def _print(self, section: str, record: dict) -> None:
        if not self.quiet and not section.endswith("products"):  # those are one of each round
            values = (f"{key}={as_cell(value)}" for key, value in record.items() if not isinstance(value, list))
            print(f"{section}:", *values, file=sys.stderr, flush=True)

    def unsupported(self, section: str, record: dict, reason: str) -> None:
        self.section(section).append(record | {"status": "unsupported", "reason": reason})

    def load(self, providers: Iterable[Any], tp_group: Any = None) -> dict[str, Any]:
        """What `load` of `benchmark.providers.Provider` imports and returns; else the document has the reason."""
        loaded, group = {}, {} if tp_group is None else {"tp_group": tp_group}

        def measurement(provider: Any) -> dict:
            loaded[provider.name] = provider.load(**group)
            return {"version": importlib.metadata.version(provider.package) if provider.package else None}

        for provider in providers:
            record = {"provider": provider.name, "holds_logits": provider.holds_logits}
            record |= {"tp": tp_group.size()} if group else {}
            self.attempt("providers", record, partial(measurement, provider))
        return loaded


def source_digest() -> str:
    """Of the package's source files, so that results can be told to be of the same code, or of the code at hand."""
    digest = hashlib.sha256()
    package = Path(megatron_lce.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def environment(device: torch.device) -> dict:
    """Where and with what the numbers were taken."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if "megatron.core" in sys.modules:  # maybe a checkout in front of the installed one
        versions["megatron-core"] = sys.modules["megatron.core"].__version__
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "versions": versions,
        "megatron_lce_source": source_digest(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }

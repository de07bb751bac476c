"""A benchmark's JSON document: measurements are added one by one, and read as records by their fields.

Times are also given as multiples of cuBLAS's matmuls in the same run.
"""

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
from statistics import median
from typing import Any

import torch

import megatron_lce
from benchmark.measure import Timed

ROUNDS = 6  # of calls that take turns
PACKAGES = ("megatron-lce", "megatron-core", "torch", "transformer-engine", "triton", "nvidia-cutlass-dsl")


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


def measured(document: dict, section: str, **values: Any) -> list[dict]:
    """The records of a section that have a result, and these values."""
    values |= {"status": "ok"}
    return [x for x in document.get(section, []) if all(x.get(name) == value for name, value in values.items())]


def grouped(records: list[dict], *keys: str) -> dict[tuple, list[dict]]:
    """The records by the values of some of their fields, in the order in which these come."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    return groups


def extra_gib(record: dict) -> float:
    """Peak memory over the gradients, in GiB."""
    return (record["peak_mib"] - record["gradients_mib"]) / 1024


def products_ms(records: list[dict], *names: str) -> list[float]:
    """Median cuBLAS times over all records: the logits', by name, then those of both gradients; or nothing."""
    names += ("grad_hidden_ms", "grad_weight_ms")
    return [median(ms for record in records for ms in record[name]) for name in names] if records else []


def limits_ms(document: dict, record: dict) -> list[float]:
    """The time of the matmuls that the record's step needs, and with logits that are computed again; or nothing."""
    if "beta" in record:
        products = products_ms(measured(document, "jsd_products"), "student_logits_ms", "teacher_logits_ms")
    else:
        products = products_ms(measured(document, "products", shape=record["shape"]), "logits_ms")
    if record.get("mode") == "fwd":
        return products[:1]
    return [sum(products), sum(products) + sum(products[:-2])] if products else []


def add_ratios(document: dict) -> None:
    """Adds to every time its ratio to the matmuls that the mode cannot do without.

    over_products             F for mode `fwd`, else F + dX + dW; for a divergence Fs + Ft + dX + dW
    over_products_recomputed  2F + dX + dW: what a head must do that keeps no logits for its backward
    """
    for record in measured(document, "times") + measured(document, "jsd"):
        names = ("over_products", "over_products_recomputed")
        limits = zip(names, limits_ms(document, record), strict=False)
        record |= {name: record["time_ms"] / ms for name, ms in limits}


@dataclass
class Results:
    """A document that grows, written after every measurement.

    path    None: never written
    rounds  how often calls take turns
    quiet   nothing is printed (a rank that only helps)
    append  records are added to those of the file, which are of the same package
    """

    device: torch.device
    dtype: torch.dtype
    path: Path | None
    settings: dict
    rounds: int = ROUNDS
    quiet: bool = False
    append: bool = False

    def __post_init__(self) -> None:
        settings = {"dtype": str(self.dtype), "settings": self.settings}
        self.document: dict[str, Any] = {"environment": environment(self.device), **settings}
        if self.append and self.path:
            before = load(self.path)
            if before["environment"]["megatron_lce_source"] != self.document["environment"]["megatron_lce_source"]:
                raise ValueError(f"{self.path} was measured with another package")
            before["settings"].setdefault("appended", []).append(self.settings)
            self.document = before
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def section(self, name: str) -> list[dict]:
        return self.document.setdefault(name, [])

    def save(self) -> None:
        add_ratios(self.document)
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
            shown = {key: value for key, value in record.items() if not isinstance(value, list)}
            values = (
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in shown.items()
            )
            print(f"{section}:", *values, file=sys.stderr, flush=True)

    def unsupported(self, section: str, record: dict, reason: str) -> None:
        self.section(section).append(record | {"status": "unsupported", "reason": reason})

    def load(self, providers: Iterable[Any]) -> dict[str, Any]:
        """What `load` of `benchmark.providers.Provider` imports and returns; else the document has the reason."""
        loaded = {}

        def measurement(provider: Any) -> dict:
            loaded[provider.name] = provider.load()
            return {"version": importlib.metadata.version(provider.package) if provider.package else None}

        for provider in providers:
            record = {"provider": provider.name, "holds_logits": provider.holds_logits}
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

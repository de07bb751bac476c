"""Records of a document by their fields, and their times as multiples of the cuBLAS products of the same run."""

from math import dist
from statistics import median
from typing import Any


def measured(document: dict, section: str, **values: Any) -> list[dict]:
    """The records of a section that have a result, and these values."""
    records = (record for record in document.get(section, []) if record["status"] == "ok")
    return [x for x in records if all(x[name] == value for name, value in values.items())]


def grouped(records: list[dict], *keys: str) -> dict[tuple, list[dict]]:
    """The records by the values of some of their fields, in the order in which these come."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    return groups


def extra_gib(record: dict) -> float:
    """Peak memory over the gradients, and what the head holds outside of torch's allocator, in GiB."""
    return (record["peak_mib"] - record["gradients_mib"] + record.get("outside_mib", 0.0)) / 1024


def _median_ms(records: list[dict], *names: str) -> list[float]:
    """Of each of these times over all records; nothing where there are none."""
    return [median(ms for record in records for ms in record[name]) for name in names] if records else []


def products_ms(document: dict, shape: str) -> list[float]:
    """Median cuBLAS times of one shape in this run: logits, hidden's gradient, weight's gradient; or nothing."""
    return _median_ms(measured(document, "products", shape=shape), "logits_ms", "grad_hidden_ms", "grad_weight_ms")


def products_by(document: dict) -> str:
    """Whose products those are: torch.mm is cuBLAS on a GPU alone."""
    return "matmul" if document["environment"]["device"] == "CPU" else "cuBLAS"


def limits_ms(document: dict, shape: str, mode: str) -> dict[str, float]:
    """cuBLAS's time for the products that the mode needs, with and without computing the logits again; or nothing."""
    products = products_ms(document, shape)
    if not products or mode == "fwd":
        return {"F": products[0]} if products else {}
    return {"F+dX+dW": sum(products), "2F+dX+dW": products[0] + sum(products)}


def jsd_limits_ms(document: dict) -> dict[str, float]:
    """The same of a divergence and its gradients, from all measurements in the document."""
    names = ("student_logits_ms", "teacher_logits_ms", "grad_hidden_ms", "grad_weight_ms")
    products = _median_ms(measured(document, "jsd_products"), *names)
    return {"Fs+Ft+dX+dW": sum(products), "2(Fs+Ft)+dX+dW": sum(products) + sum(products[:2])} if products else {}


def add_ratios(document: dict) -> None:
    """Adds to every time its ratio to the products that the mode cannot do without.

    over_products             F for mode `fwd`, else F + dX + dW; for a divergence Fs + Ft + dX + dW
    over_products_recomputed  2F + dX + dW: what a head must do that keeps no logits for its backward
    over_token_loss           the flag's `known_loss` over `linear_token_loss` with the same workspace
    over_alone                the counted rows by themselves
    """
    timed = [
        (record, limits_ms(document, record["shape"], record["mode"]))
        for section in ("times", "cache", "workspace")
        for record in measured(document, section)
    ]
    timed += [(record, jsd_limits_ms(document)) for record in measured(document, "jsd")]
    for record, limits in timed:
        names = ("over_products", "over_products_recomputed")
        record |= {name: record["time_ms"] / ms for name, ms in zip(names, limits.values(), strict=False)}
    for records in grouped(measured(document, "times", mode="sft"), "shape").values():
        times = {record["provider"]: record["time_ms"] for record in records if "provider" in record}
        for record in records:
            if record.get("provider") == "ours-known-640" and "ours-token-640" in times:
                record["over_token_loss"] = record["time_ms"] / times["ours-token-640"]
    for records in grouped(measured(document, "rows"), "shape", "mode", "ignored", "layout").values():
        for alone in [record["time_ms"] for record in records if record["provider"] == "ours-alone"]:
            for record in records:
                record["over_alone"] = record["time_ms"] / alone
    for records in grouped(measured(document, "curves"), "masked").values():
        _add_differences(records)


def distance(losses: list[float], others: list[float]) -> float:
    """The root mean square of the differences over the steps of two training runs."""
    return dist(losses, others) / len(losses) ** 0.5


def _add_differences(records: list[dict]) -> None:
    """Adds to every training run how far its losses are from those of native runs with sums in other orders.

    difference_median, difference_largest  of the distances to each of them
    """
    native = [record for record in records if record["variant"] == "native-fused"]
    for record in records:
        others = [other["losses"] for other in native if other is not record]
        if others:
            apart = [distance(record["losses"], losses) for losses in others]
            record |= {"difference_median": median(apart), "difference_largest": max(apart)}

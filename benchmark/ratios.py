"""Records of a document by their fields, and their times as multiples of the cuBLAS products of the same run."""

from math import dist
from statistics import median
from typing import Any


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
    """Peak memory over the gradients, and what the head holds outside of torch's allocator, in GiB."""
    return (record["peak_mib"] - record["gradients_mib"] + record.get("outside_mib", 0.0)) / 1024


def products_ms(records: list[dict], *names: str) -> list[float]:
    """Median cuBLAS times over all records: the logits', by name, then those of both gradients; or nothing."""
    names += ("grad_hidden_ms", "grad_weight_ms")
    return [median(ms for record in records for ms in record[name]) for name in names] if records else []


def products_by(document: dict) -> str:
    """Whose products those are: torch.mm is cuBLAS on a GPU alone."""
    return "matmul" if document["environment"]["device"] == "CPU" else "cuBLAS"


def limits_ms(document: dict, shape: str, mode: str) -> dict[str, float]:
    """cuBLAS's time for the products that the mode needs, with and without computing the logits again; or nothing."""
    products = products_ms(measured(document, "products", shape=shape), "logits_ms")
    if not products or mode == "fwd":
        return {"F": products[0]} if products else {}
    return {"F+dX+dW": sum(products), "2F+dX+dW": products[0] + sum(products)}


def jsd_limits_ms(document: dict) -> dict[str, float]:
    """The same of a divergence and its gradients, from all measurements in the document."""
    products = products_ms(measured(document, "jsd_products"), "student_logits_ms", "teacher_logits_ms")
    return {"Fs+Ft+dX+dW": sum(products), "2(Fs+Ft)+dX+dW": sum(products) + sum(products[:2])} if products else {}


def add_ratios(document: dict) -> None:
    """Adds to every time its ratio to the products that the mode cannot do without.

    over_products             F for mode `fwd`, else F + dX + dW; for a divergence Fs + Ft + dX + dW
    over_products_recomputed  2F + dX + dW: what a head must do that keeps no logits for its backward
    over_token_loss           the flag's `known_loss` over `linear_token_loss` with the same workspace
    over_alone                the counted rows by themselves
    difference_median, difference_largest  of a training run's distances to native ones with sums in other orders
    """
    for section in ("times", "cache", "workspace", "jsd"):
        for x in measured(document, section):
            limits = jsd_limits_ms(document) if section == "jsd" else limits_ms(document, x["shape"], x["mode"])
            names = ("over_products", "over_products_recomputed")
            x |= {name: x["time_ms"] / ms for name, ms in zip(names, limits.values(), strict=False)}
    for known in measured(document, "times", provider="ours-known-640"):
        for told in measured(document, "times", provider="ours-token-640", shape=known["shape"], mode="sft"):
            known["over_token_loss"] = known["time_ms"] / told["time_ms"]
    for records in grouped(measured(document, "rows"), "shape", "mode", "ignored", "layout").values():
        for alone in [record["time_ms"] for record in records if record["provider"] == "ours-alone"]:
            for record in records:
                record["over_alone"] = record["time_ms"] / alone
    for record in measured(document, "curves"):
        native = measured(document, "curves", masked=record["masked"], variant="native-fused")
        if apart := distances([record], native):
            record |= dict(zip(("difference_median", "difference_largest"), apart, strict=True))


def distances(runs: list[dict], others: list[dict]) -> tuple[float, ...]:
    """Median and largest distance of a training run to one of the others; nothing where there is no such pair.

    It is the root mean square of the differences of losses over the steps.
    """
    pairs = [(a["losses"], b["losses"]) for a in runs for b in others if a is not b]
    apart = [dist(*pair) / len(pair[0]) ** 0.5 for pair in pairs]
    return (median(apart), max(apart)) if apart else ()

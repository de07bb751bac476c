"""Times as multiples of the cuBLAS products of the same run."""

from statistics import median


def products_ms(document: dict, shape: str) -> tuple[float, float, float] | None:
    """Median cuBLAS times of one shape in this run: logits, hidden's gradient, weight's gradient."""
    records = [
        record for record in document.get("products", []) if record["shape"] == shape and record["status"] == "ok"
    ]
    if not records:
        return None
    names = ("logits_ms", "grad_hidden_ms", "grad_weight_ms")
    logits, grad_hidden, grad_weight = (median(ms for record in records for ms in record[name]) for name in names)
    return logits, grad_hidden, grad_weight


def products_by(document: dict) -> str:
    """Whose products those are: torch.mm is cuBLAS on a GPU alone."""
    return "matmul" if document["environment"]["device"] == "CPU" else "cuBLAS"


def add_all(document: dict) -> None:
    add_ratios(document)
    add_ratios_of_rows(document)
    add_jsd_ratios(document)


def add_ratios(document: dict) -> None:
    """Adds to every time its ratio to the products the mode cannot do without.

    over_products             F for mode `fwd`, else F + dX + dW
    over_products_recomputed  2F + dX + dW: what a head must do that keeps no logits for its backward
    """
    for record in [x for section in ("times", "cache", "workspace") for x in document.get(section, [])]:
        products = products_ms(document, record["shape"])
        if record["status"] != "ok" or products is None:
            continue
        if record["mode"] == "fwd":
            record["over_products"] = record["time_ms"] / products[0]
        else:
            record["over_products"] = record["time_ms"] / sum(products)
            record["over_products_recomputed"] = record["time_ms"] / (products[0] + sum(products))


def add_ratios_of_rows(document: dict) -> None:
    """Adds to every time its ratio to that of the counted rows by themselves: `over_alone`."""

    def case(record: dict) -> tuple:
        return tuple(record[name] for name in ("shape", "mode", "ignored", "layout"))

    measured = [record for record in document.get("rows", []) if record["status"] == "ok"]
    alone = {case(record): record["time_ms"] for record in measured if record["provider"] == "ours-alone"}
    for record in measured:
        if case(record) in alone:
            record["over_alone"] = record["time_ms"] / alone[case(record)]


def jsd_limits_ms(document: dict) -> dict[str, float]:
    """cuBLAS time of the products that a divergence and its gradients take, from all measurements in the document.

    Where each head's logits are made once, and where backward makes them again; nothing where nothing was measured.
    """
    records = [record for record in document.get("jsd_products", []) if record["status"] == "ok"]
    if not records:
        return {}
    student, teacher, grad_hidden, grad_weight = (
        median(ms for record in records for ms in record[name])
        for name in ("student_logits_ms", "teacher_logits_ms", "grad_hidden_ms", "grad_weight_ms")
    )
    logits, gradients = student + teacher, grad_hidden + grad_weight
    return {"Fs+Ft+dX+dW": logits + gradients, "2(Fs+Ft)+dX+dW": 2 * logits + gradients}


def add_jsd_ratios(document: dict) -> None:
    """over_products            Fs + Ft + dX + dW
    over_products_recomputed  2 (Fs + Ft) + dX + dW: what a form must do that keeps no logits for its backward
    """
    limits = jsd_limits_ms(document)
    for record in document.get("jsd", []):
        if record["status"] == "ok" and limits:
            names = ("over_products", "over_products_recomputed")
            record |= {name: record["time_ms"] / ms for name, ms in zip(names, limits.values(), strict=True)}

"""Every kernel is compiled for a GPU that is not there, in a process of its own.

    TRITON_INTERPRET=0 python -m tests.compiled_ahead 80

The calls are those of users, on tensors without memory. What launchers ask of torch and of the driver is answered as
for that GPU, and nothing is launched. The process prints one line of JSON for each kernel.
"""

import argparse
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

import megatron_lce
from megatron_lce.api import linear_token_loss as token_loss
from megatron_lce.backends import choice
from megatron_lce.core.divergence_types import KINDS
from tests.operations import OPERATIONS, tensors_of

# KiB of shared memory that a program may have.
SHARED_KIB = {"80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "120": 99, "gfx942": 64}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPTIONS = ["", "no_entropy", "softcap", "telemetry", "cache", "softcap+telemetry", "softcap+cache", "cache+no_entropy"]
OPTIONS += ["mean", "mean+cache", "mean+softcap", "few", "few+softcap+telemetry", "token_loss", "candidates", "ids"]
OPTIONS += ["fp32_weight", "jsd", "jsd+softcap", "jsd+beta0", "jsd+loss", "jsd+beta0+loss"]
# Every kernel and option once.
SOME = [
    (BF16, "softcap"),
    (FP16, "telemetry+cache"),
    (BF16, "mean"),
    (BF16, "few+softcap+telemetry"),
    (FP32, ""),
    (BF16, "jsd"),
    (BF16, "jsd+loss"),
    (BF16, "candidates"),
    (BF16, "ids"),
]
SOME += [(BF16, "fp32_weight"), (BF16, "jsd+loss")]
# The kernels whose tiles, loads and shared memory differ from GPU to GPU.
PRODUCTS = [(BF16, "softcap"), (FP32, "")]


def driver(target: GPUTarget, shared_bytes: int) -> SimpleNamespace:
    """It answers what launchers ask of a GPU's driver, and forgets what it should launch."""
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": shared_bytes},
        load_binary=lambda *arguments: (1, 1, 0, 0, 1024),  # module, function, registers, spills, largest program
    )
    return SimpleNamespace(
        utils=utils,
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda source, metadata: lambda *arguments: None,
    )


def imitate(name: str) -> None:
    """Has torch and Triton answer, from now on, as if tensors of device "meta" were on that GPU."""
    amd = name.startswith("gfx")
    target = GPUTarget("hip", name, 64) if amd else GPUTarget("cuda", int(name), 32)
    triton.runtime.driver.set_active(driver(target, 1024 * SHARED_KIB[name]))
    torch.version.hip = "of an imitation" if amd else None
    torch.cuda.get_device_capability = lambda device=None: divmod(int(name), 10)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
    torch.is_autocast_enabled = lambda device_type: False
    choice.triton_obstacle = lambda backend, device: None
    # The host looks at a new loss, and these tensors have no values: none is new.
    token_loss.codes_inside = lambda loss: frozenset()
    token_loss._codes.add(frozenset())
    run = triton.JITFunction.run

    def say_whether_fused(kernel: Any, *arguments: Any, **keywords: Any) -> Any:
        assert "enable_fp_fusion" in keywords, f"{kernel.__name__} leaves it to Triton's version"
        return run(kernel, *arguments, **keywords)

    triton.JITFunction.run = say_whether_fused


def run(dtype: torch.dtype, option: str) -> None:
    """Call one operation, forward and backward."""
    options = option.split("+")
    num_rows = 64 if "few" in options else 256
    hidden = torch.empty(num_rows, 1024, dtype=dtype, device="meta", requires_grad=True)
    weight_dtype = FP32 if "fp32_weight" in options else dtype
    weight = torch.empty(4000, 1024, dtype=weight_dtype, device="meta", requires_grad=True)
    labels = torch.empty(num_rows, dtype=torch.int64, device="meta")
    softcap, name, keywords = 30.0 if "softcap" in options else None, "cross-entropy", {"backend": "triton"}
    heads = [(hidden, weight, labels)]
    if "jsd" in options:
        name = "jsd, known weights" if "loss" in options else "jsd"
        keywords |= {"student_softcap": softcap, "teacher_softcap": softcap, "beta": 0.0 if "beta0" in options else 0.5}
        keywords |= {"kinds": KINDS, "return_student": True} if "loss" in options else {}
    elif "candidates" in options:  # rows 1032 and 2064 apart
        name = "candidates"
        hidden, weight = (torch.empty(rows, 1032, dtype=dtype, device="meta") for rows in (256, 4000))
        heads = [(hidden[::step].requires_grad_(), weight, labels[::step]) for step in (1, 2)]
    elif "ids" in options:
        name = "support"
        keywords["empty_rows"] = False
        megatron_lce.linear_topk(hidden, weight, 64, backend="triton")
    else:
        keywords |= {"softcap": softcap, "telemetry": "mean_logit" if "mean" in options else "telemetry" in options}
        name = "token loss" if "token_loss" in options else name
        if name == "cross-entropy":
            cache = 2**30 if "cache" in options else 0
            keywords |= {"entropy": "no_entropy" not in options, "logits_cache_bytes": cache}
    for head in heads:
        found = tensors_of(OPERATIONS[name](*head, **keywords))
        sum(tensor.sum() for tensor in found if tensor.requires_grad).backward()


def describe(name: str, files: dict[str, str]) -> dict[str, Any]:
    """Return what the compiler says of a kernel, from the files in Triton's cache."""
    description = {"kernel": name, "shared_bytes": json.loads(Path(files[f"{name}.json"]).read_text())["shared"]}
    if f"{name}.ptx" not in files:
        return description
    ptx = Path(files[f"{name}.ptx"]).read_text()
    cuobjdump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", files[f"{name}.cubin"]]
    usage = subprocess.run(cuobjdump, check=True, capture_output=True, text=True).stdout
    return description | {
        "stack_bytes": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "narrow_loads": len(re.findall(r"\bld\.global(?:\.\w+)*\.[bsu]16\b", ptx)),
        "asynchronous_copies": len(re.findall(r"\bcp\.async\.(?:c[ag]\.shared|bulk\.tensor)", ptx)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpu", choices=SHARED_KIB)
    parser.add_argument("--calls", choices=("some", "products", "all"), default="some")
    given = parser.parse_args()
    imitate(given.gpu)
    every = [(dtype, option) for dtype in (BF16, FP16, FP32) for option in OPTIONS]
    for dtype, option in {"some": SOME, "products": PRODUCTS, "all": every}[given.calls]:

        def announce(module: Any, function: Any, name: str, files: dict, digest: str, call=f"{dtype} {option}") -> None:
            print(json.dumps({"call": call, **describe(name, files)}), flush=True)

        triton.knobs.runtime.kernel_load_end_hook.calls = [announce]
        run(dtype, option)


if __name__ == "__main__":
    main()

"""Who may import whom, what the package never does, what it imports without, and that keywords are the operations'."""

import ast
import functools
import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import megatron_lce
from megatron_lce.api.model_loss import model_loss
from megatron_lce.core.options import Options

PACKAGE = Path(__file__).resolve().parent.parent / "megatron_lce"
MODULES = sorted(PACKAGE.rglob("*.py"))
PLUGINS = PACKAGE / "plugins"
ON_TOP = (PACKAGE / "megatron", PACKAGE / "command", PLUGINS)
CORE = [
    path
    for path in MODULES
    if path.parent not in ON_TOP and path.name not in ("__init__.py", "__main__.py", "public.py")
]


def name_of(path):
    return str(path.relative_to(PACKAGE))


@functools.cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text())))


def every(kind, paths):
    """(file, node) of a kind of the files' syntax."""
    return [(path, node) for path in paths for node in nodes(path) if isinstance(node, kind)]


@functools.cache
def imports(path):
    """Full dotted names of everything a file imports, wherever in it."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_from(name, packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def imported(paths, packages):
    """(file, name) of what the files import of these packages."""
    return {(name_of(path), name) for path in paths for name in imports(path) if is_from(name, packages)}


def foreign(paths, *allowed):
    """(file, name) of what the files import besides these packages, torch and the standard library."""
    allowed = ("torch", *allowed, *sys.stdlib_module_names)
    return {(name_of(path), name) for path in paths for name in imports(path) if not is_from(name, allowed)}


def test_the_names_of_the_interface():
    operations = """linear_cross_entropy linear_divergence linear_divergence_loss linear_jsd linear_logits_at
        linear_token_loss linear_topk support_logprobs topk_divergence shift_labels check_labels
        FusedLinearHead compat"""
    of_megatron = """accept_head capture_lm_head enable_fused_linear_ce fused_output_processor"""
    types = """CapturedHead DivergenceLoss FusedLinearCE FusedOutputContext LinearCrossEntropyOutput
        LinearDivergenceOutput StoredHead TokenLoss TopK"""
    exported = {alias.name for _, node in every(ast.ImportFrom, [PACKAGE / "public.py"]) for alias in node.names}
    assert exported == {*operations.split(), *of_megatron.split(), *types.split()}
    assert set(megatron_lce.__all__) == exported <= set(dir(megatron_lce))
    with pytest.raises(AttributeError, match="module 'megatron_lce' has no attribute 'linear_cross'"):
        megatron_lce.linear_cross  # noqa: B018


def test_who_imports_whom():
    """Nobody what is not installed with the package, nor plugins; a folder what stands below it."""
    assert not imported(MODULES, ("tests", "torchrun_tests", "scripts", "benchmark", "conftest", "harness"))
    assert not imported([path for path in MODULES if path.parent != PLUGINS], ("megatron_lce.plugins",))
    assert not imported(CORE, ("megatron", "megatron_lce.megatron"))
    order = ("core", "backends", "checks", "compat", "api", "megatron", "command")  # api may know compat
    for folder in ("core", "backends", "checks", "api"):
        packages = tuple(f"megatron_lce.{other}" for other in order[order.index(folder) + 1 :])
        assert not imported(PACKAGE.glob(f"{folder}/**/*.py"), packages)


def test_plugins_know_what_users_call():
    found = foreign(PLUGINS.glob("*.py"), "megatron_lce.compat", "megatron_lce.plugins")
    assert {name for _, name in found} <= {"megatron_lce"}


def test_kernels_know_torch_triton_and_plans_only():
    kernels = sorted(PACKAGE.glob("backends/triton/*.py"))
    of_core = "plan matmul statistics options lm_head divergence_types"
    assert kernels
    assert not foreign(
        kernels, "triton", "megatron_lce.backends.triton", *(f"megatron_lce.core.{name}" for name in of_core.split())
    )
    assert not imported(kernels, ("torch.distributed",))


def test_the_reference_shares_no_code_with_the_backends():
    assert not foreign([PACKAGE.parent / "tests" / "reference.py"], "megatron_lce.core.options")


def test_collectives_hold_the_only_distributed_calls():
    types = {f"torch.distributed.{name}" for name in ("ProcessGroup", "tensor.DTensor")}
    found = imported([path for path in CORE if path.name != "collectives.py"], ("torch.distributed",))
    assert not [(file, name) for file, name in found if name not in types]


def test_no_environment_variables_and_no_broad_excepts():
    entry = PLUGINS / "verl_entry.py"  # reads verl's variable
    assert not imported([path for path in MODULES if path != entry], ("os",))
    for path, handler in every(ast.ExceptHandler, MODULES):
        assert handler.type is not None, path
        assert "Exception" not in ast.unparse(handler.type).split("."), path


def test_no_host_synchronisation_by_name():
    """What looks at the data: `check_labels`, `RowIndex.from_mask`, once for a new loss, and `UpstreamCheck`."""
    calls = {
        (name_of(path), node.func.attr)
        for path, function in every(ast.FunctionDef, CORE)
        if function.name not in ("check_labels", "from_mask", "check_tokens_apart", "find_out", "check_last_passes")
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    waits = {"item", "cpu", "tolist", "numpy", "nonzero", "synchronize"}
    assert not [(file, name) for file, name in calls if name in waits]


def files_imported(path):
    """Files of the package that a file imports, those for type checking included."""
    names = {name.removeprefix("megatron_lce.") for name in imports(path) if is_from(name, ("megatron_lce",))}
    dotted = {".".join(module.relative_to(PACKAGE).with_suffix("").parts): module for module in MODULES}
    return {dotted[own] for name in names for own in (name, name.rpartition(".")[0]) if own in dotted}


def test_no_file_imports_itself_over_others():
    graph = {path: files_imported(path) for path in MODULES if path.name != "__init__.py"}
    while leaves := [path for path, imported in graph.items() if not imported & graph.keys()]:
        for leaf in leaves:
            del graph[leaf]
    assert not sorted(map(name_of, graph))


def test_no_two_files_share_a_name():
    """But the two backends' answers to one protocol."""
    seen = [path.name for path in MODULES if path.name != "__init__.py" and path.parent.name != "triton"]
    assert sorted(seen) == sorted(set(seen))


CREATION = {"zeros", "ones", "empty", "full", "arange", "tensor", "rand", "randn", "linspace", "eye", "scalar_tensor"}
CREATION |= {"as_tensor", "empty_strided", "logspace", "normal", "range"}


def test_every_tensor_is_made_with_a_dtype():
    """Without one it takes torch's default, which training programs change; so does a choice between two numbers."""
    for path, node in every(ast.Call, MODULES):
        function = ast.unparse(node.func)
        if not function.startswith("torch."):
            continue
        if function.removeprefix("torch.") in CREATION:
            assert any(keyword.arg == "dtype" for keyword in node.keywords), (path, ast.unparse(node))
        elif function == "torch.where":
            assert not all(is_number(argument) for argument in node.args[1:3]), (path, ast.unparse(node))


def is_number(node):
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("float", "int")
    return ast.unparse(node).lstrip("-") in ("torch.nan", "torch.inf", "math.nan", "math.inf") or (
        isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))
    )


def test_every_folder_of_code_is_a_package():
    """What setuptools needs to find them, and the marker that ships the types."""
    assert all((path.parent / "__init__.py").exists() for path in MODULES)
    assert (PACKAGE / "py.typed").exists()


def test_works_with_neither_triton_nor_megatron():
    """Nor imports them or plugins. Every package imports, the operation runs, and what needs them says so."""
    program = """
        import importlib, sys
        import pytest, torch
        import megatron_lce
        assert megatron_lce.__all__  # loads the interface
        unused = ("megatron_lce.backends.triton.", "megatron_lce.plugins")
        assert not [name for name in sys.modules if name in ("triton", "megatron") or name.startswith(unused)]
        sys.modules["triton"] = sys.modules["megatron"] = None  # as if not installed
        for name in ("backends.triton", "megatron", "compat", "api.linear_divergence"):
            importlib.import_module(f"megatron_lce.{name}")
        hidden = torch.randn(3, 8, requires_grad=True)
        weight, labels = torch.randn(20, 8), torch.tensor([0, 5, 19])
        out = megatron_lce.linear_cross_entropy(hidden, weight, labels)
        out.logprobs.sum().backward()
        assert hidden.grad.isfinite().all()
        with pytest.raises(ValueError, match="triton is not installed"):
            megatron_lce.linear_cross_entropy(hidden, weight, labels, backend="triton")
        message = "megatron-core is not installed, .* extra: pip install 'megatron-lce.megatron.'; for other models"
        with pytest.raises(ImportError, match=message):
            megatron_lce.enable_fused_linear_ce(torch.nn.Linear(2, 2))
        with pytest.raises(ImportError, match=message), megatron_lce.capture_lm_head(torch.nn.Linear(2, 2)):
            pass
        off = megatron_lce.enable_fused_linear_ce(torch.nn.Linear(2, 2), False)
        assert off.reasons == ("use_fused_linear_ce is False",)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


def test_no_test_skips_for_want_of_a_module_of_ours():
    """`importorskip` of a module that has moved skips in silence; those of a backend need its library alone."""
    tests = Path(__file__).resolve().parent
    names = {
        name
        for path in tests.rglob("*.py")
        for name in re.findall(r'importorskip\("((?:megatron_lce|benchmark)\S+)"\)', path.read_text())
    }
    assert [name for name in names if importlib.util.find_spec(name) is None] == []


LABELS = {"ignore_index", "entropy", "telemetry", "candidates", "skip_ignored"}
CACHE = {"logits_cache_bytes"}
OF_DIVERGENCE = {"temperature", "tp_group", "sequence_parallel", "ignore_index", "vocab_start", "vocab_size"}
OF_DIVERGENCE |= {"skip_ignored", "workspace_bytes", "backend", "weight_grad_sink"}


def keyword_only(operation):
    """Types and defaults of an operation's own keywords, and the typed dict of the others."""
    parameters, hints = inspect.signature(operation).parameters.values(), get_type_hints(operation)
    own = {p.name: (hints[p.name], p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}
    others = [hints[p.name].__args__[0] for p in parameters if p.kind is p.VAR_KEYWORD]
    return own, others


def but(types, names):
    return {name: hint for name, hint in types.items() if name not in names}


def test_options_and_typed_keywords_are_those_of_the_operations():
    types = get_type_hints(Options)
    own, _ = keyword_only(megatron_lce.linear_cross_entropy)
    assert own == {field.name: (types[field.name], field.default) for field in fields(Options)}
    of_model, (other,) = keyword_only(model_loss)
    assert get_type_hints(other) | {name: hint for name, (hint, _) in of_model.items()} == types

    of_logits = but(types, LABELS | CACHE)
    divergence = {name: hint for name, hint in types.items() if name in OF_DIVERGENCE} | {
        "beta": float,
        "return_student": bool,
        "teacher_temperature": types["temperature"] | None,
        **{f"{role}_logits_scale": float for role in ("student", "teacher")},
        **{f"{role}_softcap": float | None for role in ("student", "teacher")},
    }
    for name, expected in {
        "linear_topk": but(of_logits, {"reduce_grad_hidden", "weight_grad_sink"}),
        "linear_logits_at": of_logits,
        "support_logprobs": of_logits,
        "linear_token_loss": but(types, CACHE),
        "linear_cross_entropy": types,
        "linear_divergence": divergence,
        "linear_divergence_loss": divergence,
        "linear_jsd": divergence,
    }.items():
        own, others = keyword_only(getattr(megatron_lce, name))
        assert all(get_type_hints(other) == expected for other in others)
        assert name == "linear_cross_entropy" or others
        of_captured, (other,) = keyword_only(getattr(megatron_lce.CapturedHead, name))
        found = get_type_hints(other) | {keyword: hint for keyword, (hint, _) in of_captured.items()}
        assert found == (
            expected if name == "linear_cross_entropy" else expected | {k: hint for k, (hint, _) in own.items()}
        )

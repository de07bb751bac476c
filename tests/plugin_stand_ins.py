"""Packages with the modules and functions that plugins ask of frameworks, on which they are tried.

They are made of the plugins' own tables; that these are right, `make test-frameworks` finds out.
"""

import functools
import importlib
import operator
import os
import sys
import textwrap
from unittest import mock

import pytest

from megatron_lce.plugins.patching import Plugin

PLUGIN_OF = {"swift": "ms_swift", "megatron.bridge": "bridge", "megatron.rl": "megatron_rl"}  # else named alike
FRAMEWORKS = ["verl", "slime", "miles", *PLUGIN_OF, "nemo_rl", "skyrl", "areal"]
STEPS = """
    import torch

    @torch.no_grad()
    def forward_only(f, args, model):
        return model[0]()

    def train_one_step(args, model):
        return model[0]()
"""
KERNEL = "verl.utils.kernel.linear_cross_entropy"
FILES = {  # those whose code runs in a test; the others hold functions that do nothing
    "verl": {
        "__init__.py": """
            import importlib.metadata

            __version__ = "7.8.9"
            for entry in importlib.metadata.entry_points(group="verl.plugins"):
                entry.load()
        """,
        "models/mcore/__init__.py": "from verl.models.mcore.registry import get_mcore_engine_forward_fn",
        "models/mcore/registry.py": """
            from verl.models.mcore.model_forward import gptmodel_forward_model_engine

            def get_mcore_engine_forward_fn():
                return gptmodel_forward_model_engine
        """,
        "models/mcore/model_forward.py": """
            def _build_mtp_loss_mask_nested(response_mask, input_ids_lengths, response_attention_mask): ...

            def gptmodel_forward_model_engine(model, logits_processor=None, logits_processor_args=None, vision=False):
                return "verl's own", model, logits_processor, logits_processor_args, vision
        """,
        "models/mcore/util.py": """
            def preprocess_thd_engine(input_ids, pre_process=True, need_roll=False):
                return input_ids, None

            def preprocess_bshd_engine(input_ids, pre_process=True): ...
        """,
        "models/mcore/model_forward_fused.py": f"from {KERNEL} import linear_cross_entropy",
        "utils/kernel/linear_cross_entropy.py": """
            class LinearCrossEntropy:
                apply = classmethod(len)

                @staticmethod
                def forward(
                    ctx, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None
                ): ...

            linear_cross_entropy = LinearCrossEntropy.apply
        """,
        "trainer/distillation/megatron/losses.py": """
            def compute_forward_kl_topk(student_logits, teacher_topk_log_probs, teacher_topk_ids, config, data_format):
                return "verl's own"
        """,
    },
    "slime": {"backends/megatron_utils/model.py": STEPS},
    "miles": {"backends/megatron_utils/model.py": STEPS},
    "megatron.bridge": {
        "training/gpt_step.py": """
            def get_batch(iterator):
                return "tokens", "labels", next(iterator)

            def _forward_step_common(state, data_iterator, model, *, _get_batch_fn=None):
                tokens, labels, mask = (_get_batch_fn or get_batch)(data_iterator)
                return model(tokens=tokens, labels=labels), mask
        """,
    },
}


def import_plugin(framework):
    return importlib.import_module(f"megatron_lce.plugins.{PLUGIN_OF.get(framework, framework)}")


@functools.cache
def plugin_of(framework):
    """The plugin, not installed."""
    with mock.patch.object(Plugin, "install"):
        plugin = import_plugin(framework).plugin
    forget(framework)
    return plugin


def by_name(framework):
    """A module of the stand-in that imports replaced functions by their names, and these."""
    functions = [x for x in plugin_of(framework).replacements if "." not in x.path]
    return f"{framework}.by_name", functions


def file_of(framework, module):
    return f"{module.removeprefix(framework + '.').replace('.', '/')}.py"


def sources(framework):
    """Text by file: functions with the parameters that the plugin names, and others where it leaves them open."""
    files, holder = {}, {}
    for function in plugin_of(framework).functions:
        file, (kind, _, name) = file_of(framework, function.module), function.path.rpartition(".")
        given = ", ".join("further=None" if x == "..." else x for x in function.parameters or ())
        text = files.get(file, "")
        if kind and holder.get(file) != kind:
            text += f"class {kind}:\n"
        holder[file] = kind
        files[file] = text + "    " * bool(kind) + f"def {name}({given}): ...\n"
    module, functions = by_name(framework)
    files[file_of(framework, module)] = "".join(f"from {x.module} import {x.path}\n" for x in functions)
    return files | {file: textwrap.dedent(text) for file, text in FILES.get(framework, {}).items()}


def forget(framework):
    """The framework and its plugin as if they had never been imported."""
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{framework}.")]:
        del sys.modules[name]
    plugin = sys.modules.pop(f"megatron_lce.plugins.{PLUGIN_OF.get(framework, framework)}", None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if plugin is None or finder is not plugin.plugin]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Writes a stand-in of a framework, with one part of its files replaced, and makes it importable."""
    made = []

    def write(framework, old="", new=""):
        folder = tmp_path.joinpath(*framework.split("."))
        for file, text in sources(framework).items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(old, new) if old else text)
        for package in [folder, *filter(os.path.isdir, folder.rglob("*"))]:
            (package / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        forget(framework)
        made.append(framework)
        return tmp_path

    yield write
    for framework in made:
        forget(framework)


def get(target):
    module, _, path = target.partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))


def is_ours(function):
    code = getattr(function, "__globals__", {"__name__": ""})
    return code["__name__"].startswith("megatron_lce.")

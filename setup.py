import re
from pathlib import Path

from setuptools import find_packages, setup

version = re.search(r'^__version__ = "(.+?)"', Path("megatron_lce/__init__.py").read_text(encoding="utf-8"), re.M)
assert version is not None

# An index shows no pictures and follows no links that are paths in the tree: it gets the words without them.
readme = Path("README.md").read_text(encoding="utf-8")
readme = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n", "", readme, flags=re.M)
readme = re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", readme)

extras = {
    "triton": ["triton>=3.5"],
    "megatron": ["megatron-core>=0.14"],
    "checkpoints": ["safetensors"],
    "scripts": ["matplotlib", "megatron-core>=0.14", "rich", "tokenizers", "tqdm"],  # make demo
    "benchmark": ["matplotlib"],
}
extras["dev"] = sorted(
    {
        "hypothesis",
        "mypy",
        "numpy",
        "pytest",
        "pytest-xdist",
        "ruff",
        *(requirement for extra in list(extras.values()) for requirement in extra),
    }
)

setup(
    name="megatron-lce",
    version=version[1],
    description="Fused linear cross-entropy for Megatron-LM: the loss of a vocab-sharded head without its logits",
    long_description=readme,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["Megatron-LM", "cross-entropy", "tensor parallel", "Triton", "GRPO", "distillation"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_lce", "megatron_lce.*"]),
    package_data={"megatron_lce": ["py.typed"]},
    entry_points={"console_scripts": ["megatron-lce = megatron_lce.__main__:main"]},
    install_requires=["torch>=2.9"],
    extras_require=extras,
)

from pathlib import Path

from setuptools import find_packages, setup

extras = {
    "triton": ["triton>=3.5"],
    "megatron": ["megatron-core>=0.14"],
    "scripts": ["matplotlib", "rich", "tokenizers", "tqdm"],
}
extras["dev"] = [
    *(requirement for extra in ("triton", "megatron", "scripts") for requirement in extras[extra]),
    "hypothesis",
    "mypy",
    "numpy",
    "pytest",
    "pytest-xdist",
    "ruff",
]

setup(
    name="megatron-lce",
    version="0.1.0",
    description="Fused linear cross-entropy for Megatron-LM: the loss of a vocab-sharded head without its logits",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_lce", "megatron_lce.*"]),
    package_data={"megatron_lce": ["py.typed"]},
    install_requires=["torch>=2.9"],
    extras_require=extras,
)

import re
from pathlib import Path

from setuptools import setup

# An index shows no pictures and follows no links that are paths in the tree: it gets the words without them.
readme = Path("README.md").read_text(encoding="utf-8")
readme = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n", "", readme, flags=re.M)
readme = re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", readme)

setup(long_description=readme, long_description_content_type="text/markdown")  # the rest is in pyproject.toml

"""What a table in pyproject.toml cannot say: recipes travel in the package, and the description has
no dead links.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithRecipes(build_py):
    """Copies recipes/, which lies where people read it, to where `reinforge train recipe:NAME`
    finds it.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "reinforge" / "recipes"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(ROOT / "recipes", target, ignore=shutil.ignore_patterns("__pycache__"))


def description() -> str:
    """README.md; a link into the repository, which leads nowhere on a package's page, becomes text
    and path.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[([^\]]*)\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)", _spelled, text)


def _spelled(link: re.Match[str]) -> str:
    words, path = link.groups()
    return words if words.strip("`") == path else f"{words} ({path})"


setup(
    cmdclass={"build_py": BuildWithRecipes},
    long_description=description(),
    long_description_content_type="text/markdown",
)

"""Puts the folders that lie next to locret/ in a checkout inside it in the wheel; all else is said in setup.cfg.

An editable install needs none of this: it puts the checkout on the path, where locret/shipped.py finds the folders.
"""

import shutil

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

CODE = ("train", "infer", "data")
FILES = {
    "recipes": ["*/*.yaml", "*/*.txt"],
    "checkpoints": ["tiny/*", "tiny-heads/*", "smollm2-heads/*", "qwen2.5-coder-0.5b-heads/*"],
}


class BuildPy(build_py):
    """Copies one package, `locret`, with code, recipes and the embedded backbone."""

    def finalize_options(self) -> None:
        """Add the folders to the packages of setup.cfg."""
        super().finalize_options()
        self.packages = list(self.packages)
        for folder in CODE:
            self.packages += [f"locret.{folder}", *(f"locret.{folder}.{name}" for name in find_packages(folder))]
        self.packages += [f"locret.{folder}" for folder in FILES]
        self.package_data = {**self.package_data, **{f"locret.{folder}": names for folder, names in FILES.items()}}
        self.package_dir.update({f"locret.{folder}": folder for folder in (*CODE, *FILES)})

    def run(self) -> None:
        """Copy into an empty folder: setuptools would ship what an earlier build has left, such as moved modules."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(cmdclass={"build_py": BuildPy})

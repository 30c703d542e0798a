"""What is imported when it is named: public names of our packages, and what other packages and files add.

A package with `on_demand` loads a name when it is first used, so that no command waits for torch to start. Classes of
others are named by `package.module:Class` or `file.py:Class`; a module is looked for where Python looks, and a file is
run only if its path is given.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from locret.base.nearest import nearest


def is_reference(name: str) -> bool:
    """Return whether a name is `module:Class` or `file.py:Class`, rather than a name of ours."""
    return ":" in name


def load(name: str, what: str) -> Any:
    """Return what `package.module:Class` or `path/file.py:Class` stands for; `what` is what messages call it."""
    what = f'{what} "{name}"'
    source, _, path = name.rpartition(":")
    try:
        module = _from_file(Path(source)) if source.endswith(".py") else _from_python(source)
    except LookupError as error:
        raise ValueError(f"{what}: {error.args[0]}") from None
    except (Exception, SystemExit) as error:  # whatever a stranger's module does when it is run
        reason = " ".join(str(error).split())
        raise ValueError(f"{what}: {source} cannot be imported ({type(error).__name__}: {reason})") from error
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            near = nearest(name, [one for one in vars(found) if not one.startswith("_")])
            hint = f"; did you mean {' or '.join(near)}?" if near else "; check the spelling"
            raise ValueError(f"{what}: {source} has no {name}{hint}")
        found = getattr(found, name)
    return found


def _from_python(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise LookupError(f"{name} is not the name of a module; give package.module:Class, or path/file.py:Class")
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name + ".").startswith(error.name + "."):
            raise LookupError(
                f"Python finds no module {error.name}; install its package, or give a file as path/file.py:Class"
            ) from None
        raise


def _from_file(path: Path) -> ModuleType:
    path = Path(os.path.expanduser(path))
    if not path.is_file():
        raise LookupError(f"there is no file {path}; check the path")
    return _run(path.resolve())


@cache
def _run(path: Path) -> ModuleType:
    # Under a name of its own: two files may be called alike, and a dataclass looks its module up by name.
    name = f"locret_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def install(extra: str) -> str:
    """Return how an extra is installed: no index has this package, but pip knows one that is installed already."""
    return f"run pip install 'locret[{extra}]' (in a clone: pip install -c constraints.txt '.[{extra}]')"


def on_demand(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, from the modules of its names; a name whose home is its own is a submodule."""

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module = import_module(homes[name])
        value = module if homes[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__

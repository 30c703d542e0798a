"""Recipes: YAML files of options. A key may stand once; numbers such as 1e-3 are numbers; dates and times are texts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from locret import shipped
from locret.base.nearest import nearest

_LARGEST_BYTES = 2**20
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_INT = re.compile(r"[-+]?[0-9][0-9_]{0,30}")
_PLAIN_SCALARS = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")


def read(name: str) -> dict[str, Any]:
    """Return what a recipe says: a file of the user's, else one that locret came with, in every folder."""
    try:
        content = Path(os.path.expanduser(shipped.find(name))).read_bytes()
        if len(content) > _LARGEST_BYTES:
            raise ValueError("it is larger than 1 MiB, which no recipe is")
        found = load(content.decode())
        if not isinstance(found, Mapping):
            raise ValueError("it does not hold options; write one per line, such as budget: 1024")
        return dict(found)
    except UnicodeDecodeError:
        raise ValueError(f"--config {name}: it is not UTF-8 text") from None
    except IsADirectoryError:
        raise ValueError(f"--config {name}: it is a folder; name a YAML file") from None
    except OSError as error:
        near = nearest(name, shipped.recipes()) if isinstance(error, FileNotFoundError) else []
        advice = f"did you mean {' or '.join(near)}?" if near else "name a YAML file"
        raise ValueError(f"--config {name}: {(error.strerror or str(error)).lower()}; {advice}") from None
    except ValueError as error:
        raise ValueError(f"--config {name}: {error}") from None


def load(text: str) -> Any:
    """Return the data of a YAML text; None for an empty one is an empty mapping."""
    import yaml

    try:
        found = yaml.load(text, _loader())  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        problem = problem or str(error).splitlines()[0]
        where = f"it is not YAML ({problem})" if mark is None else f"line {mark.line + 1}: {problem}"
        raise ValueError(where) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return {} if found is None else found


def scalar(text: str) -> Any:
    """Return what a text of the command line means as YAML; the text itself where it is none."""
    try:
        found = load(text) if text.strip() else text
    except ValueError:
        return text
    return text if found == {} and not text.strip().startswith("{") else found


def dump(options: Mapping[str, Any]) -> str:
    """Return options as a recipe that `load` reads back."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    _read_numbers_as_json(Dumper)
    return str(yaml.dump(dict(options), Dumper=Dumper, sort_keys=False, allow_unicode=True)) if options else ""


def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                # Merged keys (<<) may be set anew, and a list of them has no value of its own.
                if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise yaml.constructor.ConstructorError(
                            None, None, f"the key {key.value} stands twice", key.start_mark
                        )
                    seen.add(key.value)
            self.flatten_mapping(node)
            return yaml.constructor.BaseConstructor.construct_mapping(self, node, deep=deep)

    _read_numbers_as_json(Loader)
    Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(node.value.replace("_", "")))
    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
    return Loader


def _read_numbers_as_json(kind: Any) -> None:
    """Let 1e-3 be a number, and 12:30, 0o17 and 2026-01-01 texts."""
    kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _PLAIN_SCALARS]
        for first, resolvers in kind.yaml_implicit_resolvers.items()
    }
    kind.add_implicit_resolver(_PLAIN_SCALARS[1], re.compile(rf"^(?:{_INT.pattern})$"), list("-+0123456789"))
    kind.add_implicit_resolver(_PLAIN_SCALARS[0], re.compile(rf"^(?:{_FLOAT.pattern})$"), list("-+0123456789."))

"""Imports point one way: train and infer to data to locret, and inside locret from generation down to the backbone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("locret", "data", "train", "infer")
MAY_IMPORT = {"train": ("data", "locret"), "infer": ("data", "locret"), "data": ("locret",), "locret": ()}
STOREYS = (
    ("shipped", "backbone_names", "__main__", "_version", "environment", "pictures", "base", "cli", "hub"),
    ("backbone",),
    ("prefill_attention", "lookups"),
    ("policy",),
    ("labels",),
    ("heads", "distributed", "loading"),
    ("scorers", "mergers"),
    ("cache",),
    ("token_ids", "chunked_prefill", "generation"),
    ("conversation", "engines"),
)
"""The rooms of locret from the ground up; each may import those below it and its own storey."""
STOREY = {room: number for number, rooms in enumerate(STOREYS) for room in rooms}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(path): path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))}


def imported(path: Path, text: str | None = None) -> Iterator[str]:
    """Yield what a file imports, also late or by a text, `train` for `locret.train`; not what only type checkers do."""
    text, module = path.read_text() if text is None else text, module_of(path)
    module = f"locret.{module}" if within(module, *PACKAGES[1:]) else module
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        types_only = isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING"
        waiting += node.orelse if types_only else ast.iter_child_nodes(node)
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{home}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and last_name(node.func) in ("import_module", "__import__"):
            names = [resolve_name(str(one.value), package) for one in node.args[:1] if isinstance(one, ast.Constant)]
        elif isinstance(node, ast.Constant) and "on_demand(" in text and str(node.value).startswith("locret."):
            names = [str(node.value)]  # a home, wherever in the file the table of `on_demand` stands
        for name in names:
            inner = name.removeprefix("locret.")
            yield inner if within(inner, *PACKAGES[1:]) else name


def last_name(node: ast.expr) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))


def circles(imports: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Return the modules that import one another, by whatever way round."""
    reach = {module: set(others) for module, others in imports.items()}
    for middle in reach:
        for others in reach.values():
            others |= reach[middle] if middle in others else set()
    return {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in reach if a in reach[a]}


def within(name: str, *packages: str) -> bool:
    return any((name + ".").startswith(package + ".") for package in packages)


def objection(module: str, name: str) -> str | None:
    """Say why a module may not import a name."""
    (package, _, inner), (target, _, wanted) = module.partition("."), name.partition(".")
    if package in MAY_IMPORT and target in MAY_IMPORT and target not in (package, *MAY_IMPORT[package]):
        return f"{package} is below {target}, or beside it"
    if package == target == "locret" and inner:
        room, other = inner.split(".")[0], wanted.split(".")[0]
        if room not in STOREY or other not in STOREY:
            return "a room has no storey in this test"
        if STOREY[other] > STOREY[room]:
            return f"{room} is below {other}"
    return None


def test_no_file_has_more_than_600_lines_and_no_class_more_than_30_methods() -> None:
    texts = {path: path.read_text() for path in FILES.values()}
    classes = [(p, c) for p, text in texts.items() for c in ast.walk(ast.parse(text)) if isinstance(c, ast.ClassDef)]
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    methods = {f"{path}: {c.name}": sum(isinstance(one, kinds) for one in c.body) for path, c in classes}
    assert not [str(path) for path, text in texts.items() if text.count("\n") > 600]
    assert not [name for name, count in methods.items() if count > 30]


def test_imports_point_down() -> None:
    found = ((module, name, objection(module, name)) for module, path in FILES.items() for name in imported(path))
    wrong = [f"{module} imports {name}: {reason}" for module, name, reason in found if reason]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_one_another() -> None:
    def home(name: str) -> str:
        return name if name in FILES or not name else home(name.rpartition(".")[0])

    found = circles({module: {home(name) for name in imported(path)} & {*FILES} for module, path in FILES.items()})
    assert not found, "\n".join(map(" <-> ".join, found))
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}) == {("a", "b", "c")}


def test_an_import_that_points_up_is_seen() -> None:
    text = """if TYPE_CHECKING: import a
else: from ..generation import b
def late(): __import__("locret.train"), importlib.import_module("locret.infer.c")
from . import d; import locret.labels.f
on_demand(__name__, {"name": "locret.heads.e"})"""
    seen = {"locret.generation.b", "train", "infer.c", "locret.cache.d", "locret.heads.e", "locret.labels.f"}
    assert set(imported(FILES["locret.cache.cache"], text)) == seen
    assert objection("locret.backbone.rotary", "locret.cache.cache.RetentionCache") == "backbone is below cache"
    assert objection("data.tasks", "infer.command.main") == "data is below infer, or beside it"


def test_the_oracle_needs_only_torch() -> None:
    own = ("__future__", "collections", "dataclasses", "itertools", "math", "torch", "typing", "oracle")
    files = sorted((ROOT / "tests" / "oracle").glob("*.py"))
    foreign = [f"{path.name}: {name}" for path in files for name in imported(path) if not within(name, *own)]
    assert files
    assert not foreign


@pytest.mark.slow
def test_public_names_load_on_demand_nothing_heavy_before_and_no_module_hides_one() -> None:
    code = (
        "import pkgutil, sys, locret; heavy = {'torch', 'datasets', 'peft', 'matplotlib', 'tensorboard'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "import locret.chunked_prefill, locret.cache.cache;"
        "modules = {m.name for m in pkgutil.iter_modules(locret.__path__[:1])};"
        "print(sorted(modules & set(locret.__all__)), [n for n in locret.__all__ if not hasattr(locret, n)])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "['scorers'] []"

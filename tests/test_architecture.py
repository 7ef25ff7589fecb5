"""The package's rooms stand on floors: imports point down only, and what is private stays in its module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import nanoinfer

PACKAGE = Path(nanoinfer.__file__).parent
#: From the bottom up. A room may import rooms of lower floors, and no other room.
FLOORS = (
    ("errors", "log", "option_types"),
    ("store", "data", "show"),
    ("configs", "text", "sampling", "workload"),
    ("theory",),
    ("models",),
    ("measure", "cache"),
    ("optimize",),
    ("engines",),
    ("reply",),
    ("simulate", "parallel", "serve"),
    ("calibrate", "cluster"),
    ("bench",),
    ("predict", "book"),
    ("cli",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def room_of(module: str) -> str:
    """The room a module stands in; a module at the top is a room of its own."""
    return module.split(".")[1] if "." in module else ""


def imports(module: str) -> Iterator[tuple[str, str | None]]:
    """Each import of the package in a module, inside functions too: the module, and the name taken from it."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "nanoinfer")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "nanoinfer":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, None) if inner in MODULES else (node.module, alias.name)


def test_every_room_stands_on_a_floor() -> None:
    rooms = {room_of(module) for module in MODULES} - {"", "__main__"}
    assert rooms == set(FLOOR)


def test_imports_point_down_only() -> None:
    upward = [
        f"{module} imports {target}"
        for module in MODULES
        if (here := room_of(module)) in FLOOR
        for target, _ in imports(module)
        if (there := room_of(target)) in FLOOR and there != here and FLOOR[there] >= FLOOR[here]
    ]
    assert not upward, upward


def test_no_imports_run_in_a_circle() -> None:
    graph = {module: {target for target, _ in imports(module) if target in MODULES} for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in sorted(graph[module] - {module}):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_private_name_crosses_a_module() -> None:
    crossing = [
        f"{module} takes {target}.{name}"
        for module in MODULES
        for target, name in imports(module)
        if name is not None and name.startswith("_") and not name.startswith("__")
    ]
    for module, path in MODULES.items():
        modules = {}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (inner := f"{node.module}.{alias.name}") in MODULES:
                        modules[alias.asname or alias.name] = inner
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in modules
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
            ):
                crossing.append(f"{module} uses {modules[node.value.id]}.{node.attr}")
    assert not crossing, crossing


def test_no_two_public_classes_share_a_name() -> None:
    homes = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    shared = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert not shared, shared


def test_every_room_says_what_it_is() -> None:
    silent = [
        module
        for module, path in MODULES.items()
        if path.name == "__init__.py" and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent, silent


def test_configs_theory_and_what_answers_at_once_import_no_torch() -> None:
    modules = [
        module
        for module in MODULES
        if room_of(module) in ("configs", "theory", "workload", "show", "predict")
        or module in ("nanoinfer", "nanoinfer.cli.app", "nanoinfer.measure.metrics", "nanoinfer.measure.stats")
    ]
    code = f"import sys, importlib\nfor m in {modules}: importlib.import_module(m)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

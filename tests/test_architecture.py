"""The shape of the code, read from its imports: downwards only, and no input or output in the wire."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import checkmate

SOURCE = Path(checkmate.__file__).parent
ROOT = Path(__file__).parents[1]

#: From the bottom up. A module may import what stands below it, and of its own package what stands beside it.
LAYERS = (
    ("errors", "invariant"),
    ("values", "wire"),
    ("layout", "tensors"),
    ("partitions",),
    (
        "shadow.effects",
        "shadow.partition",
        "shadow.pieces",
        "shadow.replay",
        "shadow.slot",
        "shadow.stories",
        "transport",
    ),
    ("recovery", "switch"),
    ("shadow", "trainer"),
    ("lab", "doctor"),
    ("demo",),
    ("bench",),
    ("cli",),
    ("__main__", ""),
)
SANS_IO = (
    "wire", "invariant", "layout", "partitions", "shadow.effects", "shadow.partition", "shadow.repairs", "shadow.slot",
    "shadow.stories", "switch.rules", "lab.plan", "doctor.judge", "doctor.multicast_judge",
)  # fmt: skip
DOES_IO = frozenset(
    ("asyncio", "concurrent", "io", "logging", "multiprocessing", "os", "pathlib", "select", "selectors", "signal",
     "socket", "ssl", "subprocess", "threading", "time", "torch")
)  # fmt: skip
SANS_IO_TESTS = ["tests/wire", "tests/test_layout.py", "tests/test_partitions.py"]


def modules() -> dict[str, Path]:
    """Every module below ``checkmate``, by its dotted name there ("" is the package itself)."""
    names = {path: ".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in sorted(SOURCE.rglob("*.py"))}
    return {name.removesuffix("__init__").removesuffix("."): path for path, name in names.items()}


MODULES = modules()


def imports(name: str) -> Iterator[str]:
    """What a module imports, wherever in it: ours as dotted names after a dot, others by their first word."""
    is_package = MODULES[name].name == "__init__.py"
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".") if name else []
            base = parts[: len(parts) - node.level + is_package]
            if node.module:
                base = [*base, *node.module.split(".")]
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                yield "." + (inner if inner in MODULES else ".".join(base))


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def layer(name: str) -> int:
    """The number of the layer that names the module or, most closely, a package around it."""
    fitting = [(len(prefix), number) for number, row in enumerate(LAYERS) for prefix in row if within(name, prefix)]
    assert fitting, f"{name} stands in no layer"
    return max(fitting)[1]


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_downwards(name: str) -> None:
    for target in (found[1:] for found in imports(name) if found.startswith(".")):
        same_package = bool(name) and target.split(".")[0] == name.split(".")[0]
        assert layer(target) < layer(name) + same_package, f"{name} imports {target}"


@pytest.mark.parametrize("name", [name for name in MODULES if any(within(name, prefix) for prefix in SANS_IO)])
def test_wire_layout_and_agreement_do_no_input_or_output(name: str) -> None:
    assert not DOES_IO.intersection(imports(name))


def test_the_reader_of_imports_sees_them() -> None:
    assert {"socket", ".wire.frames", ".shadow.run"} <= set(imports("shadow.daemon"))
    assert {".values", ".recovery"} <= set(imports("trainer.installing"))
    assert [layer(name) for name in ("wire.frames", "shadow.run", "shadow.replay", "")] == [1, 6, 4, 11]


def test_tests_of_the_wire_run_where_there_is_no_torch() -> None:
    program = "import sys, pytest; sys.modules['torch'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-profile=few", *SANS_IO_TESTS]
    ran = subprocess.run(
        [sys.executable, "-c", program, *options], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]

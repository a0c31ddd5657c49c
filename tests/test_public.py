"""What ``import checkmate`` promises: these names, each explained, and documents that speak of what is there."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkmate
from checkmate import cli
from checkmate.shadow.run import Limits, Run
from checkmate.trainer.link import CONNECT_S

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/checkmate/**/*.md")])
PUBLIC = {
    "CheckmateError",
    "Checkpointer",
    "Mismatch",
    "ProtocolError",
    "Refused",
    "ReplicasDiffer",
    "ShadowReader",
    "StepNotFound",
    "Superseded",
    "Unreachable",
    "Unsupported",
    "UsageError",
    "attach",
}
METHODS = {
    "Checkpointer": {"anchor", "audit", "batches", "close", "restore", "stats", "step", "wait"},
    "ShadowReader": {"close"},
}


def test_all_is_the_public_interface() -> None:
    assert sorted(checkmate.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(checkmate, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'attack'"):
        _ = checkmate.attack


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_explained(name: str) -> None:
    assert len(inspect.getdoc(getattr(checkmate, name)) or "") > 20
    assert getattr(checkmate, name).__doc__, "inherited"


@pytest.mark.parametrize(("owner", "method"), [(o, m) for o, methods in METHODS.items() for m in sorted(methods)])
def test_every_public_method_is_explained(owner: str, method: str) -> None:
    assert len(getattr(checkmate, owner).__dict__[method].__doc__ or "") > 10


def test_methods_of_a_checkpointer_are_the_public_interface() -> None:
    members = checkmate.Checkpointer.__dict__.items()
    assert {name for name, value in members if callable(value) and name[0] != "_"} == METHODS["Checkpointer"]


def test_all_errors_are_checkmate_errors() -> None:
    errors = {name for name in PUBLIC if inspect.isclass(e := getattr(checkmate, name)) and issubclass(e, Exception)}
    assert errors == PUBLIC - {"attach", "Checkpointer", "ShadowReader"}
    assert all(issubclass(getattr(checkmate, name), checkmate.CheckmateError) for name in errors)


def test_importing_checkmate_does_not_import_torch() -> None:
    program = "import sys, checkmate; from checkmate import UsageError; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---------------------------------------------------------------- documents


def words(document: str) -> set[str]:
    """Everything in `code` of a document."""
    text = (ROOT / document).read_text()
    return {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"[\w.-]+", code)}


def test_operations_explains_every_key_of_stats_and_status() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with checkmate.attach(model, optimizer, shadow="tcp://127.0.0.1:1", run="r") as ckpt:
        keys = {*ckpt.stats(), *Run("r", Limits()).status()}
    assert keys <= words("docs/operations.md"), sorted(keys - words("docs/operations.md"))
    assert "unheard_of" not in words("docs/operations.md")


def test_wire_says_how_long_our_clients_wait_for_a_greeting() -> None:
    assert f"our clients {CONNECT_S:g} s" in (ROOT / "docs" / "wire.md").read_text()


def test_readme_names_every_command() -> None:
    commands = {f"checkmate {c.name or getattr(c.callback, '__name__', '')}" for c in cli.app.registered_commands}
    commands |= {f"checkmate {group.name}" for group in cli.app.registered_groups}
    assert len(commands) == 9
    text = (ROOT / "README.md").read_text()
    assert [command for command in commands if f"`{command}" not in text] == []


def test_every_test_that_a_document_names_is_there() -> None:
    tests = "\n".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    named = {name for path in DOCUMENTS for name in re.findall(r"\btest_\w+\b(?!\.py)", path.read_text())}
    assert "test_program_in_the_readme_goes_on_where_it_was_killed" in named
    assert sorted(name for name in named if f"def {name}(" not in tests) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), f"{document.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in anchors, f"{document.name} links to {target}"

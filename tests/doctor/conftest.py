from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from checkmate import cli

Result = tuple[int, str, str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run ``checkmate doctor --cluster FILE OPTIONS`` in this process: exit code, output, complaints."""

    def command(file: Path, *options: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["checkmate", "doctor", "--cluster", str(file), *options])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return (code if isinstance(code, int) else int(code is not None), *capsys.readouterr())

    return command

"""Calls of the program in the process of a test."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from secu import cli


class Result(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def caller(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Return a function that calls ``secu`` with some arguments."""

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["secu", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Result(ended.value.code, *capsys.readouterr())

    return call

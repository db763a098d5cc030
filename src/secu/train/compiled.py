"""Compilation of the parts of a step."""

import warnings
from collections.abc import Callable
from typing import Any

import torch


class CompiledCall:
    """Calls functions of tensors through torch.compile; each function is compiled at its first call.

    Shapes never change within a run. The recompile limits are raised so that one process can train any number of runs
    with different shapes.
    """

    def __init__(self) -> None:
        torch._dynamo.config.recompile_limit = 10_000
        torch._dynamo.config.accumulated_recompile_limit = 100_000
        for advice in ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled"):  # not actionable for users
            warnings.filterwarnings("ignore", advice, UserWarning, r"torch\._inductor\.")
        self.compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call a function, compiling it first if necessary."""
        if function not in self.compiled:
            self.compiled[function] = torch.compile(function, fullgraph=True, dynamic=False)
        return self.compiled[function](*inputs)

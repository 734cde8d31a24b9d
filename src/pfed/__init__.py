"""Personalized federated learning: many clients train together, and each ends with a model of its own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where each public name lives. They are imported at first use, so that `pfed --help` does not wait for torch.
_HOMES = {
    "ALL": "anatomy",
    "BACKBONE": "anatomy",
    "Batch": "forward",
    "Client": "client",
    "Cohort": "cohort",
    "Comparison": "result",
    "Dataset": "data.base",
    "Each": "method",
    "Experiment": "experiment",
    "Federation": "data.base",
    "HEAD": "anatomy",
    "Local": "config",
    "Method": "method",
    "NONE": "anatomy",
    "NORM": "anatomy",
    "Part": "anatomy",
    "Reduction": "method",
    "Result": "result",
    "RunError": "errors",
    "STATS": "anatomy",
    "Samples": "data.base",
    "Tensors": "tensors",
    "UserError": "errors",
    "compare": "comparison",
    "features": "forward",
    "federate": "data.federate",
    "federation": "data.user",
    "head": "forward",
    "load": "data.sources",
    "option": "options",
    "params": "anatomy",
    "register": "registry",
    "set_head": "anatomy",
    "snapshot": "anatomy",
    "step": "method",
    "tune": "tuning",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from pfed.anatomy import ALL, BACKBONE, HEAD, NONE, NORM, STATS, Part, params, set_head, snapshot
    from pfed.client import Client
    from pfed.cohort import Cohort
    from pfed.comparison import compare
    from pfed.config import Local
    from pfed.data.base import Dataset, Federation, Samples
    from pfed.data.federate import federate
    from pfed.data.sources import load
    from pfed.data.user import federation
    from pfed.errors import RunError, UserError
    from pfed.experiment import Experiment
    from pfed.forward import Batch, features, head
    from pfed.method import Each, Method, Reduction, step
    from pfed.options import option
    from pfed.registry import register
    from pfed.result import Comparison, Result
    from pfed.tensors import Tensors
    from pfed.tuning import tune


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pfed' has no attribute {name!r}")
    value = getattr(import_module(f"pfed.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""kvprune makes transformer language models smaller by removing the FFN slots that they hardly use.

    import kvprune
    results = kvprune.run("recipes/quickstart.yaml", "runs/quickstart")

The names below are loaded when they are first used: importing the package imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvprune.artifacts import Plan as Plan
    from kvprune.comparing import compare as compare
    from kvprune.errors import KvpruneError as KvpruneError
    from kvprune.inspecting import inspect as inspect
    from kvprune.options import Options as Options
    from kvprune.pipeline import calibrate as calibrate
    from kvprune.pipeline import evaluate as evaluate
    from kvprune.pipeline import export as export
    from kvprune.pipeline import plan as plan
    from kvprune.pipeline import recover as recover
    from kvprune.pipeline import refit as refit
    from kvprune.pipeline import run as run
    from kvprune.pipeline import show as show
    from kvprune.publishing import publish as publish
    from kvprune.recipe import load_recipe as load_recipe
    from kvprune.recipe import make_recipe as make_recipe
    from kvprune.reproducing import reproduce as reproduce
    from kvprune.schema import Recipe as Recipe
    from kvprune.sweeping import sweep as sweep

_HOMES = {
    "Plan": "artifacts",
    "KvpruneError": "errors",
    "Options": "options",
    "run": "pipeline",
    "calibrate": "pipeline",
    "plan": "pipeline",
    "refit": "pipeline",
    "export": "pipeline",
    "recover": "pipeline",
    "evaluate": "pipeline",
    "show": "pipeline",
    "inspect": "inspecting",
    "sweep": "sweeping",
    "compare": "comparing",
    "publish": "publishing",
    "reproduce": "reproducing",
    "Recipe": "schema",
    "load_recipe": "recipe",
    "make_recipe": "recipe",
}

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604  (strings all)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvprune' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvprune.{_HOMES[name]}"), name)

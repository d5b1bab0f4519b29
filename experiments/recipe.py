"""What an experiment is: a table or figure as a few pretraining runs, how they are judged, and what the paper reports.

Each file in experiments/recipes/ holds one RECIPE. Its docstring tells what it runs, what the paper found, what it
costs, and the command.
"""

import importlib
import pkgutil
from dataclasses import dataclass

import experiments.recipes
from util.cli import UserError

MAE = "--masking random"


@dataclass(frozen=True)
class Variant:
    """A row of a table: one pretraining, repeated for every seed."""

    name: str
    flags: str = ""  # of main_pretrain.py, beside those of the scale; none: CL-MAE as it is
    paper: tuple[float, float | None] | None = None  # nearest neighbour Acc@1 and Acc@5 on ImageNet-200; None: not told
    equal_compute: bool = False  # train for the epochs that CL-MAE's time would pay for
    full_only: bool = False  # such as models that are too large for a small scale


@dataclass(frozen=True)
class Recipe:
    title: str
    variants: tuple[Variant, ...]
    evaluations: tuple[str, ...] = ("knn",)  # of EVALUATIONS in experiments/scale.py
    downstream: bool = False  # judge on other data than the pretraining's, too
    pictures: tuple[str, ...] = ()  # flags of main_visualize.py, for a figure of the first seed's runs
    baseline: str | None = None  # the variant that others are tested against

    def variants_at(self, scale: str) -> list[Variant]:
        return [variant for variant in self.variants if scale == "full" or not variant.full_only]


def recipe_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(experiments.recipes.__path__))


def load_recipe(name: str) -> Recipe:
    if name not in recipe_names():
        raise UserError(f"there is no recipe {name}; known are {', '.join(recipe_names())}")
    return importlib.import_module(f"experiments.recipes.{name}").RECIPE


def recipe_text(name: str) -> str:
    """The recipe's documentation."""
    return importlib.import_module(f"experiments.recipes.{name}").__doc__.strip()

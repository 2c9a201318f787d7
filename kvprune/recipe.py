"""The recipe: what is done to which model. Parsed, completed and checked before anything heavy is loaded."""

import copy
import difflib
import os
import re
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from kvprune.errors import KvpruneError
from kvprune.schema import COLLECTED, SCORE_OPTIONS, Budget, Recipe, Recover, TextSource


class _Loader(yaml.SafeLoader):
    """YAML without its two traps: duplicate keys (the first is lost) and aliases (which can explode)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 1e-4 for a text; everybody else for a number.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML `text` with plain types only. Raises KvpruneError naming `where` and the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise KvpruneError(f"{where}{line}: not valid YAML: {problem}") from None
    except (RecursionError, ValueError, TypeError) as error:
        raise KvpruneError(f"{where}: not valid YAML: {error}") from None


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read the recipe file `path`, apply `overrides` ("plan.budget.keep=0.7"), complete and check it.

    `builtin:NAME` names a recipe that ships with the package. Raises KvpruneError with one line for every problem.
    """
    file = _recipe_file(str(path))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a UTF-8 text file"
        raise KvpruneError(
            f"{path}: cannot read the recipe: {reason}. Recipes here: {', '.join(builtin_recipes())}"
        ) from None
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise KvpruneError(f"{path}: a recipe is a YAML mapping that starts with 'model:', got {type(data).__name__}")
    return make_recipe(data, str(path), overrides)


def make_recipe(data: dict[str, Any], where: str = "recipe", overrides: list[str] | None = None) -> Recipe:
    """Check and complete recipe `data`, after `overrides`.

    Raises KvpruneError with one line for every problem, each with its path.
    """
    data = copy.deepcopy(data)
    # A new score or method first: it resets the options that go with it.
    for override in sorted(
        overrides or [], key=lambda item: not item.startswith(("plan.score=", "refit.method=", "recover.train="))
    ):
        _override(data, override)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        problems = sorted({_problem(dict(item)) for item in error.errors()})
        section = data.get("calibrate")
        if not (
            isinstance(section, dict) and isinstance(section.get("text"), list)
        ):  # one source was not written as a list
            problems = [problem.replace("calibrate.text.0", "calibrate.text") for problem in problems]
        raise KvpruneError("\n".join(f"{where}: {problem}" for problem in problems)) from None
    return _complete(recipe)


# What each stage rests on: when one of these values changes, the stage is stale. Export rests on its inputs alone.
STAGE_KEYS = {
    "calibrate": {"model", "dtype", "calibrate"},
    "plan": {"plan"},
    "refit": {"refit"},
    "export": set[str](),
    "recover": {"recover"},
    "evaluate": {"evaluate"},
}


def stage_recipe(recipe: Recipe, stage: str) -> dict[str, Any]:
    """The recipe values that a stage rests on, as plain data."""
    return recipe.model_dump(mode="json", include=STAGE_KEYS[stage])


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every default written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


def builtin_recipes() -> list[str]:
    """Names of the recipes that ship with the package, as `load_recipe` takes them."""
    return [f"builtin:{file.stem}" for file in sorted(_recipe_folder().glob("*.yaml"))]


def _recipe_folder() -> Path:
    packaged = Path(__file__).parent / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "recipes"


def _recipe_file(path: str) -> Path:
    return _recipe_folder() / f"{path.removeprefix('builtin:')}.yaml" if path.startswith("builtin:") else Path(path)


def _override(data: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise KvpruneError(f"--set {override}: should be key=value, as in --set plan.budget.keep=0.7")
    *parents, last = path.split(".")
    section: Any = data
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if isinstance(section, str) and parent == "text":
            raise KvpruneError(
                f"--set {override}: {parent} is a text here; set calibrate.text={{source: …}} as a whole"
            )
        if not isinstance(section, dict):
            raise KvpruneError(f"--set {override}: {parent} is not a section")
    value = parse_yaml(text, f"--set {override}")
    if parents[-1:] == ["budget"] and last in Budget.model_fields and value is not None:
        section.clear()  # one unit replaces another
    if parents == ["refit"] and last == "method":
        section.pop("target", None)
    if parents == ["recover"] and last == "train":
        section.pop("rank", None)
    if parents == ["plan"] and last == "score":
        for option in (*SCORE_OPTIONS, "guard"):
            section.pop(option, None)
    section[last] = value


def _complete(recipe: Recipe) -> Recipe:
    """Write out the defaults that depend on other values, and make local paths absolute."""
    plan = recipe.plan
    values: dict[str, Any] = {
        option: default
        for option, (score, default) in SCORE_OPTIONS.items()
        if plan.score == score and getattr(plan, option) is None
    }
    if plan.guard is None:
        values["guard"] = plan.score == "fire_rate"  # energy scores see a giant by themselves
    calibrate, evaluate, recover = recipe.calibrate, recipe.evaluate, recipe.recover
    text = _located(calibrate.text)
    collect = ["counts", COLLECTED[plan.score]] if plan.score in COLLECTED else calibrate.collect
    target = recipe.refit.target or ("residual" if recipe.refit.method == "sequential" else None)
    return recipe.model_copy(
        update={
            "model": _absolute(recipe.model),
            "calibrate": calibrate.model_copy(update={"text": text, "collect": collect}),
            "plan": plan.model_copy(update=values),
            "refit": recipe.refit.model_copy(update={"target": target}),
            "recover": _complete_recovery(recover, text),
            "evaluate": evaluate.model_copy(
                update={"include_path": evaluate.include_path and _absolute(evaluate.include_path)}
            ),
        }
    )


def _complete_recovery(recover: Recover, text: list[TextSource]) -> Recover:
    """Of a recovery that is asked for, its texts and its rank; `text` is that of the calibration."""
    if recover.method == "none":
        return recover
    return recover.model_copy(
        update={
            "text": _located(recover.text) if recover.text else text,
            "held_out": _located(recover.held_out or [TextSource(source="builtin-held-out")]),
            "rank": recover.rank or (16 if recover.train == "lora" else None),
        }
    )


def _located(sources: list[TextSource]) -> list[TextSource]:
    return [source.model_copy(update={"source": _absolute(source.source)}) for source in sources]


def _absolute(name: str) -> str:
    """A path that exists, made absolute, so that a run can be continued from any folder; else `name` as it is."""
    path = Path(name).expanduser()
    known = name in ("builtin", "builtin-task", "builtin-held-out", "self") or name.startswith("builtin:")
    return str(path.resolve()) if not known and os.path.exists(path) else name  # noqa: PTH110  (no error for a long name)


def _problem(item: dict[str, Any]) -> str:
    """One line from one pydantic error: path, what is wrong, what was given, what is allowed."""
    path = ".".join(str(part) for part in item["loc"] if part != "[key]") or "recipe"
    kind, got = item["type"], item["input"]
    if kind == "extra_forbidden":
        allowed = _fields_at(item["loc"][:-1])
        close = difflib.get_close_matches(str(item["loc"][-1]), allowed, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        return f"{path}: unknown key.{hint} Allowed: {', '.join(allowed)}"
    if kind == "missing":
        return f"{path}: missing, and it has no default"
    message = item["msg"].removeprefix("Value error, ")
    message = re.sub(r" or (instance|object) .*", "", re.sub(r"^(Input|String) should", "should", message))
    if kind == "value_error" and not item["loc"]:  # of two sections: it names both itself
        return str(message)
    if kind == "value_error" and isinstance(got, dict):
        return f"{path}: {message}"
    return f"{path}: {message}, got {got!r}"


def _fields_at(loc: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in (part for part in loc if isinstance(part, str)):
        annotation = model.model_fields[part].annotation
        annotation = next(iter(get_args(annotation)), annotation)  # the items of a list
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return list(model.model_fields)

"""The recipe: what is done to which model. Parsed, completed and checked before anything heavy is loaded."""

import difflib
import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvprune.errors import KvpruneError

SECTION = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
BYTE_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip

Score = Literal["wanda", "fire_rate", "contribution", "fluctuation", "activation_norm", "weight_norm", "random"]


def _quantity(units: dict[str, int], example: str) -> BeforeValidator:
    def parse(value: object) -> object:
        if not isinstance(value, str):
            return value
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if found is None or found[2].upper() not in units:
            raise ValueError(f"should be a number or a text like {example!r}")
        size = float(found[1]) * units[found[2].upper()]
        if math.isinf(size):
            raise ValueError("should be a size that a model can have")
        return math.floor(size)

    return BeforeValidator(parse)


class TextSource(BaseModel):
    """Where a calibration text comes from."""

    model_config = SECTION
    source: Annotated[str, Field(min_length=1)]
    config: str | None = None
    split: str | None = None
    field: str | None = None
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0  # its share of the tokens, relative to the other sources


def _text(value: object) -> object:
    """One source, or a list of them; a name alone is a source."""
    items = value if isinstance(value, list) else [value]
    return [{"source": item} if isinstance(item, str) else item for item in items]


class Calibrate(BaseModel):
    """Which tokens are counted."""

    model_config = SECTION
    text: Annotated[list[TextSource], Field(min_length=1), BeforeValidator(_text)] = [TextSource(source="builtin")]
    tokens: Annotated[int, Field(ge=1)] = 16384
    sequence_length: Annotated[int, Field(ge=2)] = 512
    skip_first: Annotated[int, Field(ge=0)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @field_validator("sequence_length")
    @classmethod
    def _whole_sequences(cls, length: int, info: ValidationInfo) -> int:
        tokens = info.data.get("tokens", 0)
        if tokens % length:
            near = [str(n) for n in (tokens // length * length, (tokens // length + 1) * length) if n]
            raise ValueError(f"should divide tokens ({tokens}); with this length, tokens could be {' or '.join(near)}")
        return length

    @field_validator("skip_first")
    @classmethod
    def _leaves_tokens(cls, skip: int, info: ValidationInfo) -> int:
        if skip >= info.data.get("sequence_length", math.inf):
            raise ValueError(f"should be below sequence_length ({info.data['sequence_length']})")
        return skip


class Budget(BaseModel):
    """How small: exactly one of three units."""

    model_config = SECTION
    keep: Annotated[float, Field(gt=0, le=1)] | None = None
    params: Annotated[int, Field(ge=1), _quantity(UNITS, "110M")] | None = None
    bytes: Annotated[int, Field(ge=1), _quantity(BYTE_UNITS, "200MiB")] | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        given = [name for name in ("keep", "params", "bytes") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"should have exactly one of keep, params, bytes, got {', '.join(given) or 'none'}")
        return self


# Options that one score reads and no other: a key that does nothing is refused.
SCORE_OPTIONS: dict[str, tuple[str, float | int]] = {
    "threshold": ("fire_rate", 2.0),
    "p": ("contribution", 1.0),
    "seed": ("random", 0),
}


def _layer(value: object) -> object:
    """JSON has no integer keys."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class PlanSection(BaseModel):
    """Which slots stay."""

    model_config = SECTION
    score: Score = "wanda"
    threshold: Annotated[float, Field(ge=2**-16, le=2**15)] | None = None
    p: Annotated[float, Field(gt=0, le=8)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    guard: bool | None = None
    budget: Budget = Budget(keep=0.8)
    allocation: Literal["uniform"] = "uniform"
    round_to: Annotated[int, Field(ge=1)] = 128
    floor: Annotated[int, Field(ge=1)] = 1
    protect: dict[Annotated[int, Field(ge=0), BeforeValidator(_layer)], list[Annotated[int, Field(ge=0)]]] = {}

    @field_validator(*SCORE_OPTIONS)
    @classmethod
    def _read_by_score(cls, value: float | None, info: ValidationInfo) -> float | None:
        reader, _ = SCORE_OPTIONS[str(info.field_name)]
        score = info.data.get("score", reader)
        if value is not None and score != reader:
            raise ValueError(f"is read by score {reader} only, and the score is {score}: remove it")
        return value

    @field_validator("threshold")
    @classmethod
    def _on_a_bin_edge(cls, value: float | None) -> float | None:
        if value is not None and not math.log2(value).is_integer():
            below = 2.0 ** math.floor(math.log2(value))
            raise ValueError(f"should be a power of two, as the histogram's edges are: {below:g} or {2 * below:g}")
        return value


class Evaluate(BaseModel):
    """How dense and slim are judged."""

    model_config = SECTION
    tasks: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] = ["builtin"]
    limit: Annotated[int, Field(ge=1)] | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    max_length: Annotated[int, Field(ge=2)] | None = None
    bootstrap_iters: Annotated[int, Field(ge=0)] = 0
    include_path: str | None = None
    apply_chat_template: bool = False
    system_instruction: Annotated[str, Field(min_length=1)] | None = None

    @field_validator("system_instruction")
    @classmethod
    def _in_a_chat(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not info.data.get("apply_chat_template", True):
            raise ValueError("is part of a chat: set apply_chat_template: true")
        return value


class Recipe(BaseModel):
    """A whole recipe. Frozen; `load_recipe` makes one from a file."""

    model_config = SECTION
    model: Annotated[str, Field(min_length=1)]
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    calibrate: Calibrate = Calibrate()
    plan: PlanSection = PlanSection()
    evaluate: Evaluate = Evaluate()


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
    # A new score first: it resets the options that go with a score.
    for override in sorted(overrides or [], key=lambda item: not item.startswith("plan.score=")):
        _override(data, override)
    return make_recipe(data, str(path))


def make_recipe(data: dict[str, Any], where: str = "recipe") -> Recipe:
    """Check and complete recipe `data`. Raises KvpruneError with one line for every problem, each with its path."""
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
    "export": set[str](),
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
    calibrate, evaluate = recipe.calibrate, recipe.evaluate
    text = [item.model_copy(update={"source": _absolute(item.source)}) for item in calibrate.text]
    return recipe.model_copy(
        update={
            "model": _absolute(recipe.model),
            "calibrate": calibrate.model_copy(update={"text": text}),
            "plan": plan.model_copy(update=values),
            "evaluate": evaluate.model_copy(
                update={"include_path": evaluate.include_path and _absolute(evaluate.include_path)}
            ),
        }
    )


def _absolute(name: str) -> str:
    """A path that exists, made absolute, so that a run can be continued from any folder; else `name` as it is."""
    path = Path(name).expanduser()
    known = name in ("builtin", "self") or name.startswith("builtin:")
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

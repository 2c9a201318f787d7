"""A recipe is completed, or refused with every problem at once; overrides and YAML do no more than they say."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvprune.errors import KvpruneError
from kvprune.recipe import builtin_recipes, dump_recipe, load_recipe, make_recipe, parse_yaml, stage_recipe
from kvprune.schema import Recipe
from kvprune.staleness import STAGES

RECIPES = Path(__file__).parents[1] / "recipes"


def write(folder: Path, text: str) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def problems(data: dict[str, Any]) -> list[str]:
    """The lines that `data`, with a model, is refused with."""
    with pytest.raises(KvpruneError) as error:
        make_recipe({"model": "org/name", **data}, "r")
    return str(error.value).splitlines()


def planned(**values: Any) -> Recipe:
    return make_recipe({"model": "org/name", "plan": values})


def overridden(folder: Path, text: str, *overrides: str) -> Recipe:
    return load_recipe(write(folder, text), list(overrides))


def test_only_the_model_is_needed() -> None:
    recipe = make_recipe({"model": "org/name"})
    assert recipe.model == "org/name"
    assert recipe.dtype == "auto"
    assert (recipe.calibrate.tokens, recipe.calibrate.sequence_length, recipe.calibrate.skip_first) == (16384, 512, 1)
    assert [text.model_dump(exclude_none=True) for text in recipe.calibrate.text] == [
        {"source": "builtin", "weight": 1.0}
    ]
    assert recipe.plan.score == "wanda"
    assert recipe.plan.budget.model_dump(exclude_none=True) == {"keep": 0.8}
    assert recipe.evaluate.tasks == ["builtin"]
    with pytest.raises(KvpruneError, match=r"^r: model: missing, and it has no default$"):
        make_recipe({}, "r")


@pytest.mark.parametrize(
    ("score", "threshold", "p", "seed", "guard"),
    [
        ("wanda", None, None, None, False),
        ("fire_rate", 2.0, None, None, True),
        ("contribution", None, 1.0, None, False),
        ("random", None, None, 0, False),
    ],
)
def test_a_score_gets_its_own_options_and_no_other(
    score: str, threshold: float | None, p: float | None, seed: int | None, guard: bool
) -> None:
    plan = planned(score=score).plan
    assert (plan.threshold, plan.p, plan.seed, plan.guard) == (threshold, p, seed, guard)


def test_given_options_are_not_completed_away() -> None:
    plan = planned(score="fire_rate", threshold=0.5, guard=False).plan
    assert (plan.threshold, plan.guard) == (0.5, False)
    assert planned(score="random", seed=0).plan.seed == 0
    assert planned(score="wanda", guard=True).plan.guard is True


def test_a_text_is_a_name_or_a_section() -> None:
    short = make_recipe({"model": "m", "calibrate": {"text": "org/text"}})
    long = make_recipe({"model": "m", "calibrate": {"text": {"source": "org/text"}}})
    assert short == long
    assert short.calibrate.text[0].field is None


def test_all_problems_are_reported_at_once() -> None:
    data = {
        "calibrate": {"skp_first": 1, "tokens": 1.5, "text": {"sorce": "x"}},
        "plan": {"budget": {"keep": 0}, "score": "wnda"},
        "evaluate": {"tasks": "builtin"},
        "zzz": 1,
    }
    assert problems(data) == [
        "r: calibrate.skp_first: unknown key. Did you mean skip_first? "
        "Allowed: text, tokens, sequence_length, skip_first, seed, collect",
        "r: calibrate.text.sorce: unknown key. Did you mean source? Allowed: source, config, split, field, weight",
        "r: calibrate.text.source: missing, and it has no default",
        "r: calibrate.tokens: should be a valid integer, got 1.5",
        "r: evaluate.tasks: should be a valid list, got 'builtin'",
        "r: plan.budget.keep: should be greater than 0, got 0",
        "r: plan.score: should be 'wanda', 'fire_rate', 'contribution', 'fluctuation', 'activation_norm', "
        "'reconstruction', 'greedy', 'taylor', 'weight_norm' or 'random', got 'wnda'",
        "r: zzz: unknown key. Allowed: model, dtype, calibrate, plan, refit, recover, evaluate",
    ]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"model": ""}, "model: "),
        ({"model": 3}, "model: should be a valid string, got 3"),
        ({"dtype": "int8"}, "dtype: should be 'auto', 'float32', 'bfloat16' or 'float16', got 'int8'"),
        ({"plan": 3}, "plan: should be a valid dictionary"),
        ({"plan": None}, "plan: should be a valid dictionary"),
        ({1: 2}, "1: Keys should be strings"),
        ({"calibrate": {"tokens": 0}}, "calibrate.tokens: should be greater than or equal to 1, got 0"),
        ({"calibrate": {"tokens": "512"}}, "calibrate.tokens: should be a valid integer, got '512'"),
        ({"calibrate": {"tokens": True}}, "calibrate.tokens: should be a valid integer, got True"),
        ({"calibrate": {"skip_first": -1}}, "calibrate.skip_first: should be greater than or equal to 0, got -1"),
        ({"calibrate": {"text": {"source": ""}}}, "calibrate.text.source: "),
        ({"plan": {"budget": {"keep": 1.5}}}, "plan.budget.keep: should be less than or equal to 1, got 1.5"),
        ({"plan": {"budget": {"keep": float("nan")}}}, "plan.budget.keep: should be "),
        ({"plan": {"budget": {"kep": 0.5}}}, "plan.budget.kep: unknown key. Did you mean keep? Allowed: keep, "),
        ({"plan": {"budget": {"params": 1.5}}}, "plan.budget.params: should be a valid integer"),
        (
            {"plan": {"round_to": 0}},
            "plan.round_to: should be a whole number, 1 or more, or one of gguf, vllm, moe, got 0",
        ),
        (
            {"plan": {"round_to": "awq"}},
            "plan.round_to: should be a whole number, 1 or more, or one of gguf, vllm, moe",
        ),
        ({"plan": {"round_to": True}}, "plan.round_to: should be a whole number, 1 or more, or one of gguf, vllm, moe"),
        (
            {"plan": {"allocation": "local"}},
            "plan.allocation: should be 'uniform', 'global' or 'sensitivity', got 'local'",
        ),
        ({"plan": {"guard": 1}}, "plan.guard: should be a valid boolean, got 1"),
        ({"plan": {"protect": {-1: [0]}}}, "plan.protect.-1: should be greater than or equal to 0, got -1"),
        ({"plan": {"protect": {"first": [0]}}}, "plan.protect.first: should be a valid integer, got 'first'"),
        ({"plan": {"protect": {0: [-1]}}}, "plan.protect.0.0: should be greater than or equal to 0, got -1"),
        ({"evaluate": {"limit": 0}}, "evaluate.limit: should be greater than or equal to 1, got 0"),
        ({"evaluate": {"tasks": [3]}}, "evaluate.tasks.0: should be a valid string, got 3"),
    ],
)
def test_a_wrong_value_is_one_line_with_its_path(data: dict[str, Any], line: str) -> None:
    (problem,) = problems(data)
    assert problem.startswith(f"r: {line}")


@pytest.mark.parametrize(
    ("budget", "got"),
    [
        ({}, "none"),
        ({"keep": None}, "none"),
        ({"keep": 0.5, "params": 10}, "keep, params"),
        ({"keep": 0.5, "params": 10, "bytes": 10}, "keep, params, bytes"),
    ],
)
def test_a_budget_has_exactly_one_unit(budget: dict[str, Any], got: str) -> None:
    expected = f"r: plan.budget: should have exactly one of keep, params, bytes, got {got}"
    assert problems({"plan": {"budget": budget}}) == [expected]


@pytest.mark.parametrize(
    ("unit", "given", "exact"),
    [
        ("params", "110M", 110 * 10**6),
        ("params", "1.5b", 1_500_000_000),
        ("params", "2 G", 2 * 10**9),
        ("params", 123, 123),
        ("params", "123", 123),
        ("bytes", "200MiB", 200 * 2**20),
        ("bytes", "1.5GB", 1_500_000_000),
        ("bytes", "0.5 kib", 512),
        ("bytes", "7B", 7),
        ("bytes", 10**12, 10**12),
    ],
)
def test_sizes_have_units(unit: str, given: int | str, exact: int) -> None:
    assert planned(budget={unit: given}).plan.budget.model_dump(exclude_none=True) == {unit: exact}


@pytest.mark.parametrize(
    ("unit", "given"),
    [
        ("params", "110X"),
        ("params", "1MiB"),
        ("params", "-5M"),
        ("params", "1e6"),
        ("params", "many"),
        ("params", ""),
        ("bytes", "1.MiB"),
        ("bytes", "5K"),
        ("bytes", "1" + "0" * 400),
    ],
)
def test_a_size_in_no_unit_is_refused(unit: str, given: str) -> None:
    (problem,) = problems({"plan": {"budget": {unit: given}}})
    assert problem.startswith(f"r: plan.budget.{unit}: should be ")


def test_a_size_below_one_is_refused() -> None:
    assert problems({"plan": {"budget": {"bytes": "0.2B"}}})[0].startswith("r: plan.budget.bytes: should be greater")


@pytest.mark.parametrize(
    ("tokens", "length", "near"), [(1000, 512, "512 or 1024"), (100, 512, "512"), (16384, 1000, "16000 or 17000")]
)
def test_tokens_fill_whole_sequences(tokens: int, length: int, near: str) -> None:
    expected = (
        f"r: calibrate.sequence_length: should divide tokens ({tokens}); "
        f"with this length, tokens could be {near}, got {length}"
    )
    assert problems({"calibrate": {"tokens": tokens, "sequence_length": length}}) == [expected]
    for good in near.split(" or "):
        data = {"model": "m", "calibrate": {"tokens": int(good), "sequence_length": length}}
        assert make_recipe(data).calibrate.tokens == int(good)


def test_skipping_leaves_tokens_to_count() -> None:
    section = {"tokens": 64, "sequence_length": 32}
    assert make_recipe({"model": "m", "calibrate": {**section, "skip_first": 31}}).calibrate.skip_first == 31
    expected = "r: calibrate.skip_first: should be below sequence_length (32), got 32"
    assert problems({"calibrate": {**section, "skip_first": 32}}) == [expected]


@pytest.mark.parametrize(
    ("option", "value", "reader"), [("threshold", 2, "fire_rate"), ("p", 2, "contribution"), ("seed", 0, "random")]
)
def test_an_option_of_another_score_is_refused(option: str, value: int, reader: str) -> None:
    (problem,) = problems({"plan": {"score": "wanda", option: value}})
    assert problem.startswith(f"r: plan.{option}: is read by score {reader} only, and the score is wanda: remove it")
    assert getattr(planned(score=reader, **{option: value}).plan, option) == value


def test_a_threshold_is_on_an_edge_of_the_histogram() -> None:
    for exponent in (-16, -1, 0, 15):
        assert planned(score="fire_rate", threshold=2.0**exponent).plan.threshold == 2.0**exponent
    (problem,) = problems({"plan": {"score": "fire_rate", "threshold": 3}})
    assert problem.startswith("r: plan.threshold: should be a power of two")
    assert "2 or 4" in problem
    for outside in (2.0**-17, 2.0**16, 0, -2):
        (problem,) = problems({"plan": {"score": "fire_rate", "threshold": outside}})
        assert problem.startswith("r: plan.threshold: should be ")


@pytest.mark.parametrize("unit", ["keep", "params", "bytes"])
def test_an_override_of_the_budget_replaces_the_unit(tmp_path: Path, unit: str) -> None:
    value = {"keep": 0.7, "params": 70, "bytes": 700}[unit]
    for given in ("{keep: 0.5}", "{params: 110M}", "{bytes: 1MiB}"):
        recipe = overridden(tmp_path, f"model: m\nplan: {{budget: {given}}}\n", f"plan.budget.{unit}={value}")
        assert recipe.plan.budget.model_dump(exclude_none=True) == {unit: value}


def test_an_override_of_the_score_resets_the_options_of_the_former(tmp_path: Path) -> None:
    text = "model: m\nplan: {score: fire_rate, threshold: 4, guard: true, budget: {keep: 0.5}, round_to: 4}\n"
    plan = overridden(tmp_path, text, "plan.score=wanda").plan
    assert (plan.score, plan.threshold, plan.guard, plan.budget.keep, plan.round_to) == ("wanda", None, False, 0.5, 4)


def test_the_order_of_overrides_does_not_lose_an_option_of_the_new_score(tmp_path: Path) -> None:
    plan = overridden(tmp_path, "model: m\n", "plan.p=2", "plan.score=contribution").plan
    assert (plan.score, plan.p) == ("contribution", 2.0)


def test_an_override_makes_the_section_that_it_needs(tmp_path: Path) -> None:
    recipe = overridden(tmp_path, "model: m\nplan:\n", "plan.protect={1: [0, 3]}", "calibrate.text=other", "model=n")
    assert recipe.plan.protect == {1: [0, 3]}
    assert [text.source for text in recipe.calibrate.text] == ["other"]
    assert recipe.model == "n"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("plan.budget", "should be key=value"),
        ("=3", "should be key=value"),
        ("model.x=1", "model is not a section"),
        ("calibrate.text.field=x", r"set calibrate\.text=\{source: …\} as a whole"),
        ("plan.budget.keep=[1", "not valid YAML"),
        ("plan.scor=wanda", r"plan\.scor: unknown key\. Did you mean score\?"),
        ("plan.budget.keep=2", r"plan\.budget\.keep: should be less than or equal to 1, got 2"),
        ("plan.score=wnda", r"plan\.score: should be 'wanda'"),
    ],
)
def test_a_wrong_override_is_one_line(tmp_path: Path, override: str, named: str) -> None:
    with pytest.raises(KvpruneError, match=named) as error:
        overridden(tmp_path, "model: m\ncalibrate: {text: builtin}\n", override)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: m\nplan: {round_to: 1}\nplan: {floor: 2}\n", "line 3: not valid YAML: duplicate key 'plan'"),
        ("model: m\nplan:\n  floor: 1\n  floor: 2\n", "line 4: not valid YAML: duplicate key 'floor'"),
        ("model: &name m\ncalibrate: {text: *name}\n", "line 2: not valid YAML: aliases"),
        ("model: m\nplan: &all\n  protect: *all\n", "line 3: not valid YAML: aliases"),
        ("model: [m\n", "not valid YAML"),
        ("model: !!python/name:os.system ''\n", "line 1: not valid YAML: could not determine a constructor"),
        ("model: m\n? [1]\n: 2\n", "not valid YAML"),
        ("model: 2020-13-45\n", "not valid YAML"),
        ("model: m\0\n", "not valid YAML"),
        ("- model\n", "a recipe is a YAML mapping that starts with 'model:', got list"),
        ("model\n", "a recipe is a YAML mapping that starts with 'model:', got str"),
        ("", "a recipe is a YAML mapping that starts with 'model:', got NoneType"),
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line(tmp_path: Path, text: str, named: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(KvpruneError) as error:
        load_recipe(file)
    assert str(error.value).startswith(str(file))
    assert named in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_deeply_nested_yaml_is_refused() -> None:
    with pytest.raises(KvpruneError, match=r"^here: not valid YAML"):
        parse_yaml("[" * 5000 + "]" * 5000, "here")


def test_a_file_that_cannot_be_read_is_named_with_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("model: é\n".encode("latin-1"))
    for name, reason in [("missing.yaml", "No such file"), (".", "Is a directory"), ("latin.yaml", "not a UTF-8")]:
        with pytest.raises(KvpruneError) as error:
            load_recipe(tmp_path / name)
        assert reason in str(error.value)
        assert "builtin:quickstart" in str(error.value)
    with pytest.raises(KvpruneError, match="builtin:quickstart"):
        load_recipe("builtin:other")


def test_a_recipe_is_frozen() -> None:
    recipe = make_recipe({"model": "m"})
    with pytest.raises(ValueError, match="frozen"):
        recipe.model = "n"
    with pytest.raises(ValueError, match="frozen"):
        recipe.plan.round_to = 1


def test_a_local_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("dense", "tasks"):
        Path(folder).mkdir()
    Path("text.txt").write_text("a", encoding="utf-8")
    data = {"model": "dense", "calibrate": {"text": "text.txt"}, "evaluate": {"include_path": "tasks"}}
    recipe = make_recipe(data)
    assert recipe.model == str(tmp_path / "dense")
    assert [text.source for text in recipe.calibrate.text] == [str(tmp_path / "text.txt")]
    assert recipe.evaluate.include_path == str(tmp_path / "tasks")


@pytest.mark.parametrize("name", ["org/name@main", "builtin:smollm2-135m", "m" * 300])
def test_a_name_stays_as_it_is(name: str) -> None:
    assert make_recipe({"model": name}).model == name


def test_a_folder_whose_name_starts_like_builtin_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("builtin-models").mkdir()
    assert make_recipe({"model": "builtin-models"}).model == str(tmp_path / "builtin-models")


FULL = {
    "model": "org/name@v1",
    "dtype": "bfloat16",
    "calibrate": {
        "text": {"source": "org/text", "config": "en", "split": "train", "field": "body"},
        "tokens": 64,
        "sequence_length": 16,
        "skip_first": 2,
        "seed": 7,
        "collect": ["counts", "gram"],
    },
    "plan": {
        "score": "fire_rate",
        "threshold": 0.25,
        "guard": False,
        "budget": {"bytes": "1.5GB"},
        "round_to": 4,
        "floor": 8,
        "protect": {0: [1, 2], 11: []},
    },
    "refit": {"method": "sequential", "target": "output", "ridge": "auto", "bias": "none"},
    "evaluate": {"tasks": ["builtin", "piqa"], "limit": 3, "num_fewshot": 0, "max_length": 64, "bootstrap_iters": 9},
}


@pytest.mark.parametrize("data", [{"model": "m"}, FULL], ids=["smallest", "fullest"])
def test_what_is_dumped_loads_as_the_same_recipe(tmp_path: Path, data: dict[str, Any]) -> None:
    recipe = make_recipe(data)
    text = dump_recipe(recipe)
    loaded = load_recipe(write(tmp_path, text))
    assert loaded == recipe
    assert dump_recipe(loaded) == text
    assert set(yaml.safe_load(text)) == set(Recipe.model_fields)


def test_each_value_belongs_to_one_stage_at_most() -> None:
    recipe = make_recipe(FULL)
    parts = [set(stage_recipe(recipe, stage)) for stage in STAGES]
    assert sum(len(part) for part in parts) == len(set.union(*parts)) == len(Recipe.model_fields)


@pytest.mark.parametrize("name", builtin_recipes())
def test_a_recipe_that_ships_is_valid(name: str) -> None:
    assert load_recipe(name).model
    assert load_recipe(RECIPES / f"{name.removeprefix('builtin:')}.yaml") == load_recipe(name)


def test_every_recipe_that_ships_is_listed() -> None:
    assert builtin_recipes() == [f"builtin:{file.stem}" for file in sorted(RECIPES.glob("*.yaml"))]
    assert "builtin:quickstart" in builtin_recipes()

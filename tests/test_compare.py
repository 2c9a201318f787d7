"""Comparisons: equal runs show no difference, worse ones are worse, and what is not alike is not compared."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvprune
from kvprune.artifacts import read_json, write_json
from kvprune.cli import main
from kvprune.errors import KvpruneError
from kvprune.results.comparison import render
from kvprune.results.intervals import difference_interval
from tests.conftest import recipe_data, save_model, words

TASKS = {"evaluate": {"tasks": ["builtin", "letters"], "max_length": 128}}
LETTERS = """
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_choice: [a, b, c, d]
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: mcc}}]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Runs of one model: mild, the same once more, and a bad one; on the builtin task and one of 30 questions."""
    base = tmp_path_factory.mktemp("compare")
    (base / "text.txt").write_text(words(500), encoding="utf-8")
    (base / "tasks").mkdir()
    rows = [{"text": f"{words(at + 3)} ", "label": at % 4} for at in range(30)]
    (base / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (base / "tasks" / "letters.yaml").write_text(LETTERS.format(rows=base / "rows.jsonl"), encoding="utf-8")
    data = recipe_data(save_model(base / "model"), base / "text.txt") | TASKS
    data["evaluate"]["include_path"] = str(base / "tasks")
    (base / "recipe.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPRUNE_CACHE", str(base / "cache"))
        patch.setenv("HF_DATASETS_CACHE", str(base / "datasets"))
        found = {}
        for name, overrides in {
            "mild": ["plan.budget.keep=0.75"],
            "again": ["plan.budget.keep=0.75"],
            "bad": ["plan.budget.keep=0.25", "plan.score=random"],
        }.items():
            kvprune.run(base / "recipe.yaml", base / "runs" / name, overrides=overrides)
            found[name] = base / "runs" / name
        yield found


@pytest.fixture
def copy(runs: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a run that a test may change."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(runs[name], tmp_path / name))

    return make


def edited(run: Path, file: str, keys: list[str], value: Any) -> Path:
    """A run with another value in one of its JSON files."""
    data = read_json(run / file)
    section = data
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    write_json(run / file, data)
    return run


def verdicts(found: dict[str, Any], against: str, metric: str) -> dict[str, str]:
    return {
        item["run"]: item["verdict"]
        for item in found["differences"]
        if (item["against"], item["metric"]) == (against, metric)
    }


# What runs are, side by side.


def test_the_same_recipe_twice_is_no_difference_and_a_worse_one_is_worse(runs: dict[str, Path]) -> None:
    found = kvprune.compare([runs["mild"], runs["again"], runs["bad"]])
    assert (found["format"], found["version"], found["against"]) == ("kvprune.compare", 1, "mild")
    assert verdicts(found, "mild", "token_perplexity") == {"again": "no difference shown", "bad": "worse"}
    assert verdicts(found, "dense", "token_perplexity")["bad"] == "worse"
    same = next(item for item in found["differences"] if (item["run"], item["against"]) == ("again", "mild"))
    assert (same["value"], same["interval"], same["documents"]) == (1, [1, 1], 16)
    turned = kvprune.compare([runs["mild"], runs["bad"]], runs["bad"])
    assert verdicts(turned, "bad", "token_perplexity") == {"mild": "better"}
    assert list(turned["runs"]) == ["mild", "bad"]


def test_values_are_those_of_the_results_and_the_best_are_marked(runs: dict[str, Path]) -> None:
    found = kvprune.compare([runs["bad"], runs["mild"]])
    columns = {column["name"]: column for column in found["columns"]}
    for name, run in runs.items():
        if name != "again":
            results, budget = read_json(run / "eval/results.json"), read_json(run / "model/kvprune.json")["budget"]
            ppl = columns["builtin: token perplexity"]
            assert ppl["runs"][name] == results["slim"]["tasks"]["builtin"]["token_perplexity"]
            assert ppl["dense"] == results["dense"]["tasks"]["builtin"]["token_perplexity"]
            for unit, label in (("slots", "FFN slots"), ("total_params", "parameters"), ("bytes", "bytes of weights")):
                assert columns[label]["runs"][name] == budget["after"][unit]
                assert columns[label]["dense"] == budget["before"][unit]
            speeds = [results[which]["prefill_tokens_per_second"] for which in ("slim", "dense")]
            assert columns["prefill tokens/s"]["runs"][name] == speeds[0]
            assert columns["prefill x dense"]["runs"][name] == speeds[0] / speeds[1]
    assert columns["parameters"]["best"] == ["bad"]
    assert columns["builtin: token perplexity"]["best"] == ["mild"]
    assert "letters: acc" in columns
    assert "builtin: word perplexity" not in columns  # the same loss over other counts
    ratio = next(item["value"] for item in found["differences"] if item["metric"] == "token_perplexity")
    assert ratio == pytest.approx(math.prod(ppl["runs"][name] ** sign for name, sign in (("mild", 1), ("bad", -1))))


def test_accuracies_are_paired_by_question(runs: dict[str, Path]) -> None:
    found = kvprune.compare([runs["bad"], runs["mild"]])
    item = next(i for i in found["differences"] if (i["metric"], i["against"]) == ("acc", "bad"))
    mine, theirs = (
        [json.loads(line)["acc"] for line in (runs[name] / "eval/slim/letters.samples.jsonl").read_text().splitlines()]
        for name in ("mild", "bad")
    )
    assert item["documents"] == 30
    assert [item["value"], *item["interval"]] == pytest.approx(difference_interval(mine, theirs), abs=0.02)
    assert "mcc" not in {item["metric"] for item in found["differences"]}  # no mean over questions
    assert "no mean over documents, and not paired: letters: mcc" in render(found)


def test_the_text_tells_all_and_json_is_plain(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(runs[name]) for name in ("mild", "bad", "again")]
    assert main(["compare", *paths]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("dense "))
    assert [line.split()[0] for line in lines[start : start + 4]] == ["dense", "mild", "bad", "again"]
    assert lines[start + 2].split()[1].endswith("*")  # the fewest slots
    for part in ("token perplexity", "against mild", "against dense", "worse", "no difference shown", "Pareto fronts"):
        assert part in text
    found = kvprune.compare(paths)
    count = found["correction"]["comparisons"]
    assert count == len(found["differences"]) == 2 * (2 + 3)
    assert f"level {1 - 0.05 / count:.2%}" in text
    assert f"Bonferroni's correction for {count} comparisons" in text
    assert main(["compare", *paths, "--against", paths[1], "--json"]) == 0
    told_by_json = json.loads(capsys.readouterr().out)
    assert told_by_json["against"] == "bad"
    assert told_by_json["columns"][:-2] == found["columns"][:-2]  # the others are of the reference's own dense speed


def test_comparing_imports_no_torch(runs: dict[str, Path]) -> None:
    code = (
        "import sys; from kvprune.cli import main\n"
        f"assert main(['compare', {str(runs['mild'])!r}, {str(runs['bad'])!r}]) == 0\n"
        "heavy = {'torch', 'transformers', 'datasets', 'lm_eval'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# What is refused.


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["key", "limit"], 5, r"limit is 5, and None in .*/bad; run: kvprune evaluate .*/mild --set .*limit=null"),
        (["key", "num_fewshot"], 3, "num_fewshot is 3, and None in"),
        (["key", "max_length"], 64, r"max_length is 64, and 128 in .*evaluate\.max_length=128"),
        (["key", "apply_chat_template"], True, r"apply_chat_template is True, and False in .*=false"),
        (["key", "system_instruction"], "Be kind.", "system_instruction is 'Be kind.', and None in"),
        (["key", "dtype"], "torch.bfloat16", "dtype is 'torch.bfloat16', and 'torch.float32' in .* one dtype"),
        (["key", "device"], "cuda", "device is 'cuda', and 'cpu' in .*; remove .*/mild/eval/results.json and run: kv"),
        (["key", "tasks", "files"], "0123456789abcdef", "digest of evaluate.include_path is '0123456789ab', and '"),
        (["key", "tasks", "builtin"], "0123456789abcdef", "digest of the builtin task is '0123456789ab', and '"),
        (["key", "tasks", "python"], "3.9.0", "Python, whose .* is '3.9.0', and '3"),
        (["key", "tasks", "versions", "lm_eval"], "0.4.1", "lm-eval is '0.4.1', and '0"),
        (["lm_eval", "versions"], {"kvprune_builtin": 0.5}, "task version is .*0.5.*, and .*1.0"),
        (["lm_eval", "n-shot"], {"kvprune_builtin": 2}, "few-shot examples is .*2.*, and .*0"),
    ],
)
def test_results_that_mean_different_things_are_not_compared(
    keys: list[str], value: Any, message: str, runs: dict[str, Path], copy: Callable[[str], Path]
) -> None:
    other = edited(copy("mild"), "eval/slim/builtin.json", keys, value)
    with pytest.raises(KvpruneError, match=rf"^{other}: builtin: {message}") as caught:
        kvprune.compare([runs["bad"], other])
    assert "\n" not in str(caught.value)


def test_a_limit_that_was_really_another(runs: dict[str, Path], copy: Callable[[str], Path]) -> None:
    other = copy("mild")
    kvprune.evaluate(other, overrides=["evaluate.limit=12"])
    with pytest.raises(
        KvpruneError, match=r"builtin: limit is 12, and None in .*/bad; run: kvprune evaluate"
    ) as caught:
        kvprune.compare([runs["bad"], other])
    kvprune.evaluate(other, overrides=[str(caught.value).rpartition("--set ")[2]])
    assert verdicts(kvprune.compare([runs["bad"], other]), "bad", "token_perplexity") == {"mild": "better"}


def test_other_documents_are_not_paired(runs: dict[str, Path], copy: Callable[[str], Path]) -> None:
    other = copy("mild")
    file = other / "eval/slim/letters.samples.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[7]["prompt_hash"] = "0" * 64
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(KvpruneError, match=r"/mild: letters: from document 7 on others were judged than in bad"):
        kvprune.compare([runs["bad"], other])


def test_another_base_model(runs: dict[str, Path], tmp_path: Path) -> None:
    data = yaml.safe_load((runs["mild"] / "recipe.yaml").read_text())
    data["model"] = str(save_model(tmp_path / "other", "gpt2"))
    kvprune.run(kvprune.make_recipe(data), tmp_path / "run")
    with pytest.raises(
        KvpruneError, match=r"run: is of the base model other, and .*/mild of model; compare runs of one"
    ):
        kvprune.compare([runs["mild"], tmp_path / "run"])


def test_unfinished_runs(runs: dict[str, Path], copy: Callable[[str], Path], tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    kvprune.calibrate(runs["mild"] / "recipe.yaml", begun)
    with pytest.raises(
        KvpruneError, match=rf"^{begun}: unfinished: plan is missing; run: kvprune run {begun}/recipe.yaml -o {begun}$"
    ):
        kvprune.compare([runs["mild"], begun])
    stale = copy("mild")
    kvprune.plan(stale, overrides=["plan.budget.keep=0.5"])
    with pytest.raises(KvpruneError, match=rf"^{stale}: unfinished: export is stale: plan.json is another .* run: "):
        kvprune.compare([runs["bad"], stale])


@pytest.mark.parametrize("broken", [None, "{not json\n"])
def test_results_without_samples(broken: str | None, runs: dict[str, Path], copy: Callable[[str], Path]) -> None:
    other = copy("mild")
    file = other / "eval/slim/builtin.samples.jsonl"
    if broken is None:
        file.unlink()
    else:
        file.write_text(broken)
    with pytest.raises(
        KvpruneError, match=rf"^{file}: .*results without samples .* remove {other}/eval and run: "
    ) as caught:
        kvprune.compare([runs["bad"], other])
    assert str(caught.value).endswith(f"kvprune evaluate {other}")


def test_runs_that_are_none_or_one(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mild = str(runs["mild"])
    for arguments, message in (
        ([mild], f"error: {mild}: is all there is to compare; name two runs or more"),
        ([mild, f"{mild}/../mild"], f"error: {mild}/../mild: is named twice"),
        ([mild, str(tmp_path)], f"error: {tmp_path}: not a run folder (no recipe.yaml)"),
        ([mild, "--against", mild], "error: "),
    ):
        assert main(["compare", *arguments]) == 1
        err = capsys.readouterr().err
        assert err.startswith(message)
        assert err.count("\n") == 1


def test_only_tasks_that_all_runs_have(runs: dict[str, Path], copy: Callable[[str], Path]) -> None:
    other = copy("mild")
    kvprune.evaluate(other, overrides=["evaluate.tasks=[letters]"])
    found = kvprune.compare([runs["bad"], other])
    assert found["left_out"] == ["builtin"]
    assert {item["task"] for item in found["differences"]} == {"letters"}
    third = edited(copy("again"), "eval/results.json", ["slim", "tasks"], {})
    with pytest.raises(KvpruneError, match="tasks in common"):
        kvprune.compare([other, third])


def test_fronts_of_runs(runs: dict[str, Path]) -> None:
    fronts = kvprune.compare([runs["bad"], runs["mild"], runs["again"]])["pareto"]
    assert (fronts["task"], fronts["metric"]) == ("builtin", "token_perplexity")
    assert fronts["fronts"]["parameters"] == fronts["fronts"]["bytes"] == ["bad", "mild", "again"]


def test_a_metric_of_no_known_direction_has_no_front(runs: dict[str, Path], copy: Callable[[str], Path]) -> None:
    others = [copy(name) for name in ("mild", "bad")]
    for run in others:
        kvprune.evaluate(run, overrides=["evaluate.tasks=[letters]"])
        edited(run, "eval/slim/letters.json", ["lm_eval", "higher_is_better"], {"letters": {"mcc": True}})
    found = kvprune.compare(others)
    assert next(each["metric"] for each in found["columns"] if "metric" in each) == "acc"
    assert found["pareto"]["metric"] == "mcc"
    for run in others:
        edited(run, "eval/slim/letters.json", ["lm_eval", "higher_is_better"], {})
    found = kvprune.compare(others)
    assert found["pareto"]["fronts"] == {}
    assert "no Pareto fronts: lm-eval does not say what is better in letters: acc" in render(found)


def test_a_run_called_dense_is_not_the_dense_model(
    runs: dict[str, Path], copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy("bad").rename(copy("mild").parent / "dense")
    monkeypatch.chdir(run.parent)
    found = kvprune.compare(["dense", "mild"])
    assert list(found["runs"]) == ["./dense", "mild"]
    assert {item["against"] for item in found["differences"]} == {"./dense", "dense"}

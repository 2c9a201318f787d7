"""What a recovery may be trained on: nothing of what the tasks judge on, whatever they show beside it."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvprune
from kvprune.artifacts import RunFolder
from kvprune.dense import open_dense
from kvprune.errors import KvpruneError
from kvprune.options import DEFAULT
from kvprune.recipe import load_recipe
from kvprune.schema import Evaluate
from kvprune.stages.evaluate import judged_texts, task_manager
from kvprune.tokens import recovery_tokens
from tests.conftest import tiny_tokenizer, words, write_task
from tests.test_recover import exported, recover

Task = Callable[..., list[str]]


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """Writes a task file of documents; gives the recipe values that judge on it."""
    folder = tmp_path / "tasks"

    def write(name: str, rows: list[dict[str, Any]], **more: Any) -> list[str]:
        folder.mkdir(exist_ok=True)
        write_task(folder, name, rows, **more)
        return [f"evaluate.tasks=[{name}]", f"evaluate.include_path={folder}", "evaluate.limit=null"]

    return write


def judged(overrides: list[str]) -> list[str]:
    """What a task's documents are, as the recovery's search has them."""
    values = dict(item.removeprefix("evaluate.").split("=", 1) for item in overrides)
    section = Evaluate(tasks=[values["tasks"].strip("[]")], include_path=values["include_path"])
    return list(judged_texts(section, task_manager(section)))


def document(at: int, count: int) -> str:
    """So many words, which no other document has."""
    return " ".join(f"{at * 30 + number:03x}" for number in range(count))


def text_of(tmp_path: Path, documents: list[str]) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(f"{json.dumps({'text': text})}\n" for text in documents), encoding="utf-8")
    return file


def taken(run: RunFolder, text: Path, settings: list[str]) -> torch.Tensor:
    """The tokens `[sequences, 128]` that a recovery of four steps of two sequences trains on."""
    section = {"method": "distill", "text": text, "tokens": 1024, "sequence_length": 128, "batch_tokens": 256}
    recipe = load_recipe(run.recipe, [*(f"recover.{key}={value}" for key, value in section.items()), *settings])
    found = judged_texts(recipe.evaluate, task_manager(recipe.evaluate))
    counted = torch.zeros((0, 128), dtype=torch.int64)
    return recovery_tokens(recipe, run, open_dense(recipe.model), DEFAULT, counted, found)[0]


@pytest.mark.parametrize("count", [13, 14, 20])
def test_sequences_of_a_judged_document_are_left_out_in_whole_steps(count: int, tmp_path: Path, task: Task) -> None:
    run = exported(tmp_path)
    shown = [document(at, count) for at in range(100)]  # each between special tokens
    text = text_of(tmp_path, shown)
    unjudged = taken(run, text, task("other", [{"q": words(20), "a": "no"}]))
    assert len(unjudged) == 8
    rows = tiny_tokenizer().batch_decode(unjudged)
    whole = next(found for found in shown if sum(found in row for row in rows) == 1)
    left = taken(run, text, task("mine", [{"q": whole.upper(), "a": "yes"}]))
    assert len(left) == 6  # seven are left, and a step has two
    assert not any(whole in row for row in tiny_tokenizer().batch_decode(left))


def test_a_text_that_is_all_judged_on_is_refused(tmp_path: Path, task: Task) -> None:
    shown = [document(at, 30) for at in range(60)]
    settings = task("mine", [{"q": some, "a": "yes"} for some in shown])
    with pytest.raises(KvpruneError, match=r"^recover\.text: 8 of 8 sequences share 13 words in a row with a task's"):
        taken(exported(tmp_path), text_of(tmp_path, shown), settings)


def test_few_shot_examples_are_no_documents_that_are_judged_on(task: Task) -> None:
    rows = [{"q": f"question {at}", "a": f"answer {at}"} for at in range(20)]
    shots = {"num_fewshot": 3, "fewshot_split": "test"}
    assert judged(task("few", rows, **shots)) == [f"question {at} answer {at}" for at in range(20)]


def test_what_is_to_be_generated_is_judged_on_too(task: Task) -> None:
    generate = {"output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
    assert judged(task("write", [{"q": "two and two", "a": "four"}], **generate)) == ["two and two four"]


def test_documents_that_no_search_has_seen_are_told(
    tmp_path: Path, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    run = exported(tmp_path)
    rows = [{"q": document(at, 3), "a": "yes"} for at in range(4)]
    tasks = [*task("mine", rows)[:2], "evaluate.max_length=64"]

    def told(*more: str) -> bool:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            kvprune.evaluate(run.path, overrides=[*tasks, *more])
        return "was searched for" in caplog.text

    kvprune.run(run.recipe, run.path, overrides=["recover.method=distill", *tasks, "evaluate.limit=3"])
    assert not told("evaluate.limit=3")
    assert not told("evaluate.limit=2")
    assert told("evaluate.limit=4")
    assert told("evaluate.limit=null")
    task("mine", rows[::-1])
    assert told("evaluate.limit=3")


def test_two_fields_of_one_file_are_two_held_out_texts(tmp_path: Path) -> None:
    file = tmp_path / "two.jsonl"
    file.write_text(json.dumps({"a": words(200), "b": words(300)}), encoding="utf-8")
    both = ", ".join(f"{{source: {file}, field: {field}}}" for field in "ab")
    report = recover(exported(tmp_path), held_out=f"[{both}]")
    assert list(report["looks"][0]["texts"]) == ["held-back", f"{file} a", f"{file} b"]

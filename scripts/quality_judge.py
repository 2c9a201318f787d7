"""How good models are, document by document, and whether a difference between two of them is more than chance."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvprune.artifacts import samples_file
from kvprune.results.intervals import Sums, difference_interval, perplexity, ratio_interval
from kvprune.schema import Evaluate
from kvprune.stages import evaluate as evaluating

WINDOW = 1024
WIKITEXT_WINDOWS, LAMBADA_WINDOWS = 12, 10  # of the running text, as the figures of this project are quoted
LAMBADA_TEXTS = 400


@dataclass(frozen=True)
class Tests:
    """What models are judged by."""

    wikitext: list[list[int]]  # the first tokens of each page of WikiText-2 test
    lambada: list[list[int]]  # texts of LAMBADA
    running: dict[str, list[list[int]]]  # the first windows of either, end to end
    judge: evaluating.Judge


def open_tests(data: Path, tokenizer: Any, limit: int) -> Tests:
    """The test sets in `data`, made into tokens without BOS."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, verbose=False)["input_ids"])

    def windows(text: str, count: int) -> list[list[int]]:
        tokens = ids(text)
        return [tokens[at * WINDOW : (at + 1) * WINDOW] for at in range(count)]

    pages = [json.loads(row)["page"] for row in _lines(data / "wikitext2.test.pages.jsonl")]
    texts = [json.loads(row)["text"] for row in _lines(data / "lambada_openai.test.jsonl")[:LAMBADA_TEXTS]]
    running = {
        "wikitext": windows((data / "wikitext2.test.txt").read_text(encoding="utf-8"), WIKITEXT_WINDOWS),
        "lambada": windows("\n\n".join(texts), LAMBADA_WINDOWS),
    }
    section = Evaluate(
        tasks=["local_piqa", "local_arc_easy", "local_lambada"], limit=limit, include_path=str(data / "tasks")
    )
    judge = evaluating.Judge(section, tokenizer, evaluating.task_manager(section), 8)
    return Tests([ids(page)[:WINDOW] for page in pages], [ids(text)[:WINDOW] for text in texts], running, judge)


def _lines(file: Path) -> list[str]:
    return [line for line in file.read_text(encoding="utf-8").split("\n") if line]


@torch.inference_mode()
def losses(model: Any, documents: Sequence[Sequence[int]]) -> Sums:
    """Sum of losses in nats and number of predictions of each document, in windows of 1,024 tokens."""
    found = []
    for document in documents:
        total, count = 0.0, 0
        for start in range(0, len(document), WINDOW):
            ids = torch.tensor([document[start : start + WINDOW]])
            if ids.shape[1] > 1:
                logits = model(ids, use_cache=False).logits[0, :-1].float()
                total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
                count += ids.shape[1] - 1
        found.append([total, count])
    return found


def judged(model: Any, tests: Tests, folder: Path, name: str, *, running: bool) -> dict[str, Any]:
    """All that is known of a model, as plain data, of the `running` texts if asked. lm-eval's files go to `folder`."""
    evaluating.judge_slim(tests.judge, model, {"name": name}, folder)
    tasks = {}
    for task in tests.judge.section.tasks:
        rows = [json.loads(row) for row in _lines(samples_file(folder / "slim", task))]
        tasks[task] = [float(row["acc"]) for row in sorted(rows, key=lambda row: int(row["doc_id"]))]
    return {
        "wikitext": losses(model, tests.wikitext),
        "lambada": losses(model, tests.lambada),
        "running": {key: losses(model, some) for key, some in tests.running.items()} if running else {},
        "tasks": tasks,
    }


def table(results: dict[str, Any], keeps: Sequence[float], against: str) -> str:
    """Markdown, a section for each budget: perplexities, and how each method compares with that of name `against`."""
    parts = []
    for keep in keeps:
        cells = {key.rpartition(" ")[0]: cell for key, cell in results.items() if key.rpartition(" ")[2] == f"{keep:g}"}
        base, dense = cells.get(against), results["dense 1"]
        tasks = list(dense.get("tasks", {}))
        head = ["method", "", "WikiText-2", f"÷ {against}", "LAMBADA", f"÷ {against}"]
        head += [part for task in tasks for part in (f"{task.removeprefix('local_')} %", "")]
        head += ["12 × 1,024", "LAMBADA text", "minutes"]
        rows = [head, ["---"] * len(head)]
        for name, cell in {
            "dense": dense,
            **dict(sorted(cells.items(), key=lambda item: perplexity(item[1]["wikitext"]))),
        }.items():
            rows.append([name, cell["kind"], *_row(cell, None if name in ("dense", against) else base, tasks)])
        body = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"### keep {keep:g}\n\n{body}")
    return "\n\n".join(parts)


def _row(cell: dict[str, Any], base: dict[str, Any] | None, tasks: Sequence[str]) -> list[str]:
    row = []
    for name in ("wikitext", "lambada"):
        row.append(f"{perplexity(cell[name]):.2f}")
        row.append("" if base is None else "{:.3f} ({:.3f}–{:.3f})".format(*ratio_interval(cell[name], base[name])))
    for task in tasks:
        row.append(f"{100 * np.mean(cell['tasks'][task]):.1f}")
        row.append("" if base is None else _verdict(difference_interval(cell["tasks"][task], base["tasks"][task])))
    running = cell.get("running", {})
    row += [f"{perplexity(running[name]):.2f}" if name in running else "" for name in ("wikitext", "lambada")]
    return [*row, f"{cell['seconds']['make'] / 60:.0f}"]


def _verdict(found: tuple[float, float, float]) -> str:
    mean, low, high = (100 * value for value in found)
    shown = f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
    return shown if low > 0 or high < 0 else f"{shown}, no difference shown"

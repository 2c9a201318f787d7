"""Evaluate: judge dense and slim with lm-eval, and measure size and prefill speed side by side."""

import hashlib
import io
import json
import logging
import math
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch

from kvprune.artifacts import cache_folder, library_versions, read_json, write_json, write_text
from kvprune.errors import KvpruneError
from kvprune.progress import log
from kvprune.recipe import Evaluate

BUILTIN_TASKS = Path(__file__).parents[1] / "data" / "tasks"
PREFILL_TOKENS = 512
PREFILL_ROUNDS = 7
SEEN_BY_LM_EVAL = ("torch", "transformers", "datasets", "lm_eval")


def task_manager(section: Evaluate) -> Any:
    """lm-eval's index of tasks, with the recipe's own. Raises KvpruneError for a task that it does not have."""
    wanted = [_lm_eval_name(task) for task in section.tasks]
    paths = [str(BUILTIN_TASKS)]
    if section.include_path is not None:
        if not Path(section.include_path).is_dir():
            raise KvpruneError(f"evaluate.include_path: {section.include_path}: no such folder")
        paths.append(section.include_path)
    with _quiet():
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=paths, include_defaults=False)
        if not set(wanted) <= set(manager.all_tasks):  # indexing lm-eval's own thousands takes seconds
            manager = TaskManager(include_path=paths)
    unknown = [task for task in wanted if task not in manager.all_tasks]
    if unknown:
        raise KvpruneError(
            f"evaluate.tasks: unknown: {', '.join(unknown)}; see the list of: lm-eval ls tasks, or set evaluate.include_path"
        )
    return manager


def _lm_eval_name(task: str) -> str:
    return "kvprune_builtin" if task == "builtin" else task


def evaluate_tasks(
    section: Evaluate, model: Any, tokenizer: Any, manager: Any, folder: Path, *, batch_size: int, key: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Evaluate `model` on every task of the recipe; metrics by task.

    Each task's full results and samples are written to `folder` as they are done; what is there with the same `key`
    is not done again.
    """
    return {task: evaluate_task(section, task, model, tokenizer, manager, folder, batch_size, key) for task in section.tasks}


def evaluate_task(
    section: Evaluate,
    task: str,
    model: Any,
    tokenizer: Any,
    manager: Any,
    folder: Path,
    batch_size: int,
    key: dict[str, Any],
) -> dict[str, float]:
    """Evaluate one task, or read its result where it was evaluated under the same `key` before. Returns its metrics."""
    file = result_file(folder, task)
    key = {**key, **task_key(section, task, batch_size)}
    if file.is_file() and (found := read_json(file))["key"] == key:
        return dict(found["metrics"])
    started = time.monotonic()
    output = _lm_eval(section, task, model, tokenizer, manager, batch_size)
    samples = output.pop("samples")
    metrics = _metrics(output, samples, tokenizer)
    lines = [json.dumps(row, ensure_ascii=False, default=str) for rows in samples.values() for row in rows]
    write_text(file.with_suffix(".samples.jsonl"), "\n".join(lines) + "\n")
    write_json(file, {"key": key, "metrics": metrics, "lm_eval": json.loads(json.dumps(output, default=str))})
    log.info("evaluate: %s: %s in %.0f s", task, ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()), time.monotonic() - started)
    return metrics


def result_file(folder: Path, task: str) -> Path:
    """Where a task's result is; its samples lie beside it."""
    return folder / f"{task.replace('/', '_')}.json"


def task_key(section: Evaluate, task: str, batch_size: int) -> dict[str, Any]:
    """What a task's result depends on beside the model."""
    versions = library_versions()
    return {
        "task": task,
        "limit": section.limit,
        "num_fewshot": section.num_fewshot,
        "max_length": section.max_length,
        "bootstrap_iters": section.bootstrap_iters,
        "batch_size": batch_size,
        "task_files": _folder_digest(section.include_path),
        "versions": {name: versions[name] for name in SEEN_BY_LM_EVAL},
        "python": platform.python_version() if task == "builtin" else None,  # the text is Python's own
    }


def _folder_digest(folder: str | None) -> str | None:
    """Names, sizes and times of a folder's files: local task files and the data beside them."""
    if folder is None:
        return None
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    text = "\n".join(f"{path.relative_to(folder)} {(s := path.stat()).st_size} {s.st_mtime_ns}" for path in files)
    return hashlib.sha256(text.encode()).hexdigest()


def dense_folder(section: Evaluate, key: dict[str, Any], batch_size: int) -> Path:
    """Where the dense model's results are cached for every run of the same settings: each task is evaluated once."""
    identity = json.dumps([key, task_key(section, "", batch_size)], sort_keys=True)
    return cache_folder() / "dense" / hashlib.sha256(identity.encode()).hexdigest()[:16]


def _lm_eval(section: Evaluate, task: str, model: Any, tokenizer: Any, manager: Any, batch_size: int) -> dict[str, Any]:
    with _quiet():
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=section.max_length)
        try:
            output = lm_eval.simple_evaluate(
                model=wrapped,
                tasks=[_lm_eval_name(task)],
                task_manager=manager,
                limit=section.limit,
                num_fewshot=section.num_fewshot,
                bootstrap_iters=section.bootstrap_iters,
                log_samples=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise KvpruneError(f"evaluate.tasks: {task}: lm-eval failed: {' '.join(str(error).split())[:300]}") from error
    return dict(output)


def _metrics(output: dict[str, Any], samples: dict[str, Any], tokenizer: Any) -> dict[str, float]:
    """lm-eval's own metrics of the task (or of the group's mean), and for a perplexity task the one per token."""
    names = output.get("groups") or output["results"]
    found = next(iter(names.values()))
    metrics = {
        name.removesuffix(",none"): value
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "_stderr" not in name and "," in name
    }
    rows = [row for rows in samples.values() for row in rows]
    if "word_perplexity" in metrics and rows:
        metrics = {"token_perplexity": _token_perplexity(rows, tokenizer), **metrics}
    return metrics


def _token_perplexity(rows: list[dict[str, Any]], tokenizer: Any) -> float:
    """exp(-Σ log-likelihood / tokens): lm-eval has it per word and byte, and people compare it per token."""
    total = math.fsum(float(row["resps"][0][0]) for row in rows)
    texts = [row["arguments"][0][0] if isinstance(row["arguments"], list | tuple) else row["target"] for row in rows]
    tokens = sum(len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts)
    return math.exp(-total / tokens)


def prefill_speeds(models: dict[str, Any], vocabulary: int) -> dict[str, float]:
    """Tokens per second of one forward over PREFILL_TOKENS tokens, the models in turn; the median of each."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (1, PREFILL_TOKENS), generator=generator)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(PREFILL_ROUNDS + 1):
        for name, model in models.items():
            taken = _prefill(model, tokens)
            if turn:  # the first warms up
                seconds[name].append(taken)
    return {name: PREFILL_TOKENS / statistics.median(times) for name, times in seconds.items()}


@torch.inference_mode()
def _prefill(model: Any, tokens: torch.Tensor) -> float:
    tokens = tokens.to(model.device)
    _wait(model.device)
    started = time.perf_counter()
    model(tokens, use_cache=True, logits_to_keep=1)
    _wait(model.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval's remarks are kept for --verbose, and its progress bars for terminals: they would bury ours."""
    if log.isEnabledFor(logging.DEBUG):
        yield
        return
    bars = sys.stderr.isatty() and log.isEnabledFor(logging.INFO)
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "lm-eval")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with nullcontext() if bars else redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def copy_results(cache: Path, folder: Path, tasks: list[str]) -> None:
    """Copy the tasks' results and samples from the dense model's cache to a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        for file in (result_file(cache, task), result_file(cache, task).with_suffix(".samples.jsonl")):
            shutil.copyfile(file, folder / file.name)

"""Evaluate: judge dense and slim with lm-eval, and measure size and prefill speed side by side."""

import hashlib
import io
import json
import logging
import math
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kvprune.artifacts import (
    RunFolder,
    cache_folder,
    digest,
    provenance,
    read_json,
    result_file,
    samples_file,
    write_json,
    write_text,
)
from kvprune.dense import Dense
from kvprune.errors import KvpruneError
from kvprune.ffn.checkpoint import open_checkpoint
from kvprune.progress import log
from kvprune.recipe import stage_recipe
from kvprune.schema import Evaluate, Recipe
from kvprune.sources.models import fingerprint, is_out_of_memory, load_model, one_line, out_of_memory
from kvprune.sources.tasks import BUILTIN_FOLDER, task_fingerprint

PREFILL_TOKENS = 512
PREFILL_ROUNDS = 7


def task_manager(section: Evaluate) -> Any:
    """lm-eval's index of tasks, with the recipe's own. Raises KvpruneError for a task that it does not have."""
    wanted = [lm_eval_name(task) for task in section.tasks]
    paths = [str(BUILTIN_FOLDER)]
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
            f"evaluate.tasks: unknown: {', '.join(unknown)}; list all with: lm-eval ls tasks; or set include_path"
        )
    return manager


def lm_eval_name(task: str) -> str:
    """What lm-eval calls a task of a recipe."""
    return "kvprune_builtin" if task == "builtin" else task


def judged_texts(section: Evaluate, manager: Any) -> Iterator[str]:
    """All that the tasks ask a model for: contexts and what is to follow them, of every document that is judged on."""
    for task in section.tasks:
        with _quiet():
            try:
                found = manager.load([lm_eval_name(task)])["tasks"].values()
                for each in found:
                    each.set_config("num_fewshot", 0)  # examples are drawn anew each time, and nobody is judged on them
                    each.build_all_requests(limit=section.limit, rank=0, world_size=1)
            except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
                raise KvpruneError(f"evaluate.tasks: {task}: lm-eval failed: {one_line(error)}") from error
        for each in found:
            for request in each.instances:
                asked = [part for part in request.arguments if isinstance(part, str)]
                if request.request_type == "generate_until":  # it has what comes before alone
                    asked += [answer] if isinstance(answer := each.doc_to_target(request.doc), str) else []
                yield " ".join(asked)


@dataclass(frozen=True)
class Judge:
    """How models are judged: the recipe's section, and what lm-eval needs to follow it."""

    section: Evaluate
    tokenizer: Any
    manager: Any
    batch_size: int


def evaluate(
    recipe: Recipe, dense: Dense, judge: Judge, run: RunFolder, device: str, *, trust_remote_code: bool
) -> dict[str, Any]:
    """Judge dense and slim of an exported run; `trust_remote_code` is for the slim one."""
    checkpoint = {"checkpoint": digest(run.model / "kvprune.json"), "weights": fingerprint(str(run.model), None)}
    tasks: dict[str, Any] = {}
    # One model at a time while judging; both only for the speeds, which are measured in turn.
    log.info("loading %s on %s", dense.source.title, device)
    model = dense.load(recipe.dtype, device)
    tasks["dense"] = judge_dense(judge, model, recipe.model, dense.source.fingerprint, run.eval)
    del model
    dtype = dense.run_dtype(recipe.dtype, device)
    slim, _ = load_model(run.model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    tasks["slim"] = judge_slim(judge, slim, checkpoint, run.eval)
    speeds = prefill_speeds({"dense": dense.load(recipe.dtype, device), "slim": slim}, dense.text_config)
    budget = read_json(run.model / "kvprune.json")["budget"]
    inputs = {**checkpoint, "tasks": task_fingerprint(recipe.evaluate)}
    sizes = {
        "dense": (budget["before"]["total_params"], dense.checkpoint),
        "slim": (budget["after"]["total_params"], open_checkpoint(run.model)),
    }
    return {
        "provenance": provenance("results", stage_recipe(recipe, "evaluate"), inputs),
        "model": {"title": dense.source.title, "note": dense.source.note},
    } | {
        name: {
            "params": params,
            "bytes": weights.bytes,
            "tasks": tasks[name],
            "prefill_tokens_per_second": speeds[name],
        }
        for name, (params, weights) in sizes.items()
    }


def judge_dense(judge: Judge, model: Any, name: str, fingerprint: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Metrics by task of the dense model. Each task is done once for all runs: its results come from the cache."""
    key = {"name": name, "model": fingerprint, **_running(model)}
    identity = json.dumps([key, _settings(judge, "")], sort_keys=True)
    cache = cache_folder() / "dense" / hashlib.sha256(identity.encode()).hexdigest()[:16]
    metrics = {}
    (folder / "dense").mkdir(parents=True, exist_ok=True)
    for task in judge.section.tasks:
        metrics[task] = _judge(judge, task, model, "dense", cache, key)
        for file in (result_file(cache, task), samples_file(cache, task)):
            shutil.copyfile(file, folder / "dense" / file.name)
    return metrics


def judge_slim(judge: Judge, model: Any, checkpoint: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Metrics by task of the slim model; `checkpoint` changes when its files do."""
    key = {"checkpoint": checkpoint, **_running(model)}
    return {task: _judge(judge, task, model, "slim", folder / "slim", key) for task in judge.section.tasks}


def _running(model: Any) -> dict[str, str]:
    return {"dtype": str(model.dtype), "device": model.device.type}


def _judge(judge: Judge, task: str, model: Any, name: str, folder: Path, key: dict[str, Any]) -> dict[str, float]:
    """Evaluate one task, or read its result where it was evaluated under the same `key` before. Returns its metrics.

    Full results and samples are written to `folder` as soon as the task is done.
    """
    file = result_file(folder, task)
    key = {**key, **_settings(judge, task)}
    if file.is_file() and (found := read_json(file))["key"] == key:
        return dict(found["metrics"])
    log.info("evaluate: %s: %s …", name, task)
    started = time.monotonic()
    output = _lm_eval(judge, task, model)
    samples = output.pop("samples")
    metrics = _metrics(output, samples, judge.tokenizer, lm_eval_name(task))
    rows = [{"task": name, **row} for name, some in samples.items() for row in some]  # of a group: whose row it is
    lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
    write_text(samples_file(folder, task), "\n".join(lines) + "\n")
    write_json(file, {"key": key, "metrics": metrics, "lm_eval": json.loads(json.dumps(output, default=str))})
    figures = ", ".join(f"{metric} {value:.4g}" for metric, value in metrics.items())
    log.info("evaluate: %s: %s: %s (%.0f s)", name, task, figures, time.monotonic() - started)
    return metrics


def _settings(judge: Judge, task: str) -> dict[str, Any]:
    """What a task's result depends on beside the model."""
    section = judge.section
    return {
        "task": task,
        "limit": section.limit,
        "num_fewshot": section.num_fewshot,
        "max_length": section.max_length,
        "bootstrap_iters": section.bootstrap_iters,
        "apply_chat_template": section.apply_chat_template,
        "system_instruction": section.system_instruction,
        "batch_size": judge.batch_size,
        "tasks": task_fingerprint(section.model_copy(update={"tasks": [task]})),
    }


def _lm_eval(judge: Judge, task: str, model: Any) -> dict[str, Any]:
    section = judge.section
    with _quiet():
        import lm_eval.evaluator
        from lm_eval.models.huggingface import HFLM

        wrapped = HFLM(
            pretrained=model, tokenizer=judge.tokenizer, batch_size=judge.batch_size, max_length=section.max_length
        )
        # It asks git for the commit of the user's working folder, and git says "fatal" where there is none.
        no_git = mock.patch.object(lm_eval.evaluator, "get_git_commit_hash", lambda: None)
        try:
            with no_git:
                output = lm_eval.simple_evaluate(
                    model=wrapped,
                    tasks=[lm_eval_name(task)],
                    task_manager=judge.manager,
                    limit=section.limit,
                    num_fewshot=section.num_fewshot,
                    bootstrap_iters=section.bootstrap_iters,
                    apply_chat_template=section.apply_chat_template,
                    system_instruction=section.system_instruction,
                    log_samples=True,
                )
        except (OSError, ValueError, RuntimeError, KeyError, ImportError, MemoryError) as error:
            if is_out_of_memory(error):
                raise out_of_memory(judge.batch_size, "evaluate.max_length") from None
            raise KvpruneError(f"evaluate.tasks: {task}: lm-eval failed: {one_line(error)}") from error
    return dict(output)


def _metrics(output: dict[str, Any], samples: dict[str, Any], tokenizer: Any, name: str) -> dict[str, float]:
    """lm-eval's own metrics of the task, of a group's mean, or of every task of a tag; and a perplexity per token."""
    results = {**output["results"], **output.get("groups", {})}
    if name not in results:  # a tag: tasks side by side, without a mean
        return {f"{task} {metric}": value for task in results for metric, value in _own(results[task]).items()}
    metrics = _own(results[name])
    if "word_perplexity" in metrics and len(samples) == 1:
        metrics = {"token_perplexity": _token_perplexity(next(iter(samples.values())), tokenizer), **metrics}
    return metrics


def _own(found: dict[str, Any]) -> dict[str, float]:
    return {
        name.removesuffix(",none"): value
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "_stderr" not in name and "," in name
    }


def _token_perplexity(rows: list[dict[str, Any]], tokenizer: Any) -> float:
    """exp(-Σ log-likelihood / tokens): lm-eval has it per word and byte, and people compare it per token."""
    total = math.fsum(float(row["resps"][0][0]) for row in rows)
    texts = [row["arguments"][0][0] if isinstance(row["arguments"], list | tuple) else row["target"] for row in rows]
    tokens = sum(len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts)
    return math.exp(-total / tokens)


def prefill_speeds(models: dict[str, Any], config: Any) -> dict[str, float]:
    """Tokens per second of one forward over PREFILL_TOKENS tokens, or the model's context where that is shorter.

    The models run in turn; the median of each.
    """
    count = min(PREFILL_TOKENS, getattr(config, "max_position_embeddings", None) or PREFILL_TOKENS)
    log.info("measuring prefill: %d rounds of %d tokens, in turn", PREFILL_ROUNDS, count)
    tokens = torch.randint(0, config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(PREFILL_ROUNDS + 1):
        for name, model in models.items():
            taken = _prefill(model, tokens)
            if turn:  # the first warms up
                seconds[name].append(taken)
    return {name: count / statistics.median(times) for name, times in seconds.items()}


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

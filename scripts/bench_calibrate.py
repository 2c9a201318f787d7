"""Measure what counting and exporting cost, each against the least that could do, in one run.

    python scripts/bench_calibrate.py

1. counting against the same model's plain forward without the head, same tokens: alternating rounds, medians
2. export (write, sync; without verification) against copying the folder: alternating rounds, medians
3. peak anonymous memory of an export over that of its process before, against the largest tensor

Model: builtin SmolLM2-135M in bfloat16. Machines are noisy: read ratios, not seconds.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvprune.artifacts import FfnPlan, Plan, Size, fsync
from kvprune.config import write_config
from kvprune.dense import Dense, open_dense
from kvprune.ffn.counting import make_counters
from kvprune.ffn.forwards import count_batch, empty
from kvprune.schema import Calibrate
from kvprune.sources.models import BUILTIN, load_tokenizer
from kvprune.sources.texts import sequences
from kvprune.stages.export import carry_over, make_changes, write_weights
from kvprune.stages.plan import layer_fields


def seconds(work: Callable[[], Any]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def alternate(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median seconds of two works, done in turn; a first round warms up."""
    times = [(seconds(first), seconds(second)) for _ in range(rounds + 1)][1:]
    return statistics.median(time for time, _ in times), statistics.median(time for _, time in times)


def bench_counting(dense: Dense, tokens: int, batch_size: int, rounds: int) -> None:
    """Counting against the plain forward."""
    model = dense.load("bfloat16", "cpu")
    batches = torch.split(sequences(Calibrate(tokens=tokens), load_tokenizer(dense.source)), batch_size)
    stats = empty(model, dense.layout)

    @torch.inference_mode()
    def plain() -> None:
        for batch in batches:
            model.base_model(input_ids=batch, use_cache=False)

    with make_counters(model.device) as counters:

        def counting() -> None:
            for batch in batches:
                count_batch(model, dense.layout, stats, batch, 1, counters)

        base, counted = alternate(plain, counting, rounds)
    print(f"forward without head {tokens / base:,.0f} tokens/s, counting {tokens / counted:,.0f} tokens/s")
    print(f"counting / forward: {counted / base:.3f} (target: at most 1.25)")


def half_plan(dense: Dense, share: float = 0.8) -> Plan:
    """A plan that keeps a regular pattern of slots: for timing it does not matter which."""
    nothing = Size(0, 0, 0, 0)
    ffns = [
        FfnPlan(ffn.name, ffn.width, [slot for slot in range(ffn.width) if slot % 10 < share * 10])
        for ffn in dense.layout.ffns
    ]
    layers = layer_fields(dense.layout, [ffn.width for ffn in ffns])
    return Plan({}, {}, nothing, nothing, ffns, layers)


def export_only(dense: Dense, plan: Plan, target: Path) -> None:
    """What an export writes, without verification and digests."""
    target.mkdir()
    write_weights(dense.checkpoint, make_changes(dense, plan, {}), target)
    write_config(dense, plan, target)
    carry_over(dense, target)


def copy_only(dense: Dense, target: Path) -> None:
    """Copy the dense folder and make it as durable as an export is."""
    shutil.copytree(dense.source.folder, target)
    for file in target.iterdir():
        fsync(file)


def bench_export(dense: Dense, rounds: int) -> None:
    """Export against copying."""
    plan = half_plan(dense)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)

        def fresh(work: Callable[[Path], None]) -> Callable[[], None]:
            def call() -> None:
                shutil.rmtree(folder / "out", ignore_errors=True)
                work(folder / "out")

            return call

        copied, exported = alternate(
            fresh(lambda target: copy_only(dense, target)),
            fresh(lambda target: export_only(dense, plan, target)),
            rounds,
        )
    print(f"copy {copied:.2f} s, export {exported:.2f} s")
    print(f"export / copy: {exported / copied:.2f} (target: at most 2)")


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process; mapped files do not count."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this kernel does not report RssAnon")


@contextmanager
def watching_memory() -> Iterator[list[int]]:
    """A list with the largest anonymous memory of this process meanwhile, sampled every millisecond."""
    peak, over = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def measure_memory() -> None:
    """Export once in this process and print the peak over what it held before."""
    dense = open_dense(BUILTIN)
    plan = half_plan(dense)
    before = anonymous_bytes()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, watching_memory() as peak:
        export_only(dense, plan, Path(name) / "out")
    largest = max(entry.end - entry.start for entry in dense.checkpoint.tensors.values())
    print(json.dumps({"peak": peak[0] - before, "largest": largest}))


def bench_memory() -> None:
    """Peak anonymous memory, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory"], capture_output=True, text=True, check=True, env={**os.environ}
    )
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"export: peak anonymous memory over the importing process {found['peak'] / 2**20:.1f} MiB")
    allowed = found["largest"] + 150e6
    limit = f"largest tensor {found['largest'] / 2**20:.1f} MiB + 150 MB"
    print(f"peak / ({limit}): {found['peak'] / allowed:.2f} (target: at most 1)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="only the memory measurement, as JSON")
    arguments = parser.parse_args()
    if arguments.memory:
        measure_memory()
        return
    dense = open_dense(BUILTIN)
    bench_counting(dense, arguments.tokens, arguments.batch_size, arguments.rounds)
    bench_export(dense, arguments.rounds)
    bench_memory()


if __name__ == "__main__":
    main()

"""What `kvprune inspect` finds on a real model, and what the triggers of all slots cost.

    KVPRUNE_DATA=folder python scripts/bench_inspect.py --run runs/inspect [--html page.html]

time    the triggers of every slot into a file (the whole verb, opening and writing included) against the model's plain
        forward without the head over the same tokens, in the same type: alternating rounds, medians; and the peak of
        anonymous memory over that of the loaded model
tables  firing, coherence of values, layer by layer; and the slots that --show names

Model: builtin SmolLM2-135M. Text: WikiText-2 validation, sequences of 512.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from bench_calibrate import alternate, anonymous_bytes, watching_memory

import kvprune
from kvprune.dense import open_dense
from kvprune.recipe import make_recipe
from kvprune.results.inspection import render
from kvprune.schema import Recipe
from kvprune.sources.models import BUILTIN, load_tokenizer
from kvprune.sources.texts import sequences


def bench_time(run: Path, recipe: Recipe, rounds: int) -> None:
    """Triggers of all slots against the plain forward."""
    dense = open_dense(BUILTIN)
    model = dense.load("float32", "cpu")
    ids = sequences(recipe.calibrate, load_tokenizer(dense.source))
    loaded = anonymous_bytes()

    @torch.inference_mode()
    def forward() -> None:
        for batch in torch.split(ids, 8):
            model.base_model(input_ids=batch, use_cache=False)

    with tempfile.TemporaryDirectory(dir=run) as name:
        file = Path(name) / "slots.jsonl"

        def triggers() -> None:
            kvprune.inspect(run, sections=["triggers"], all_slots=file)

        with watching_memory() as peak:
            base, taken = alternate(forward, triggers, rounds)
        size = file.stat().st_size
    print(f"{ids.numel():,} tokens, forward without head: {ids.numel() / base:,.0f} tokens/s")
    print(f"triggers of all slots / forward: {taken / base:.3f} (target: at most 2); {size:,} bytes written")
    print(f"peak over the loaded model: {(peak[0] - loaded) / 2**30:.3f} GiB (target: at most 1)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder, used again")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--show", nargs="*", default=[], metavar="LAYER:INDEX", help="slots to print")
    parser.add_argument("--html", type=Path, help="a page of it")
    parser.add_argument("--no-time", action="store_true", help="tables only")
    arguments = parser.parse_args()
    if not os.environ.get("KVPRUNE_DATA"):
        raise SystemExit("KVPRUNE_DATA is not set: it names the folder with WikiText-2")
    text = str(Path(os.environ["KVPRUNE_DATA"]) / "wikitext2.valid.txt")
    recipe = make_recipe(
        {"model": BUILTIN, "calibrate": {"text": text, "tokens": arguments.tokens, "sequence_length": 512}}
    )
    kvprune.calibrate(recipe, arguments.run)
    if not arguments.no_time:
        bench_time(arguments.run, recipe, arguments.rounds)
    print(render(kvprune.inspect(arguments.run, slots=arguments.show, html=arguments.html)))


if __name__ == "__main__":
    main()

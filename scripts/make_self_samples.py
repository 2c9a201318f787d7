"""Write kvprune/data/self_samples.jsonl: the builtin calibration text, sampled from the builtin model by a seed.

A model's own samples need no data set and no licence, and calibrate for every domain that the model knows. Run it again
only to make the file anew: python scripts/make_self_samples.py
"""

import argparse
import json
from pathlib import Path

import torch

from kvprune.artifacts import write_text
from kvprune.sources.models import BUILTIN, load_model, load_tokenizer, open_model
from kvprune.sources.packing import pack
from kvprune.sources.samples import sample
from kvprune.sources.texts import BUILTIN_TEXT

SEQUENCE = 512
BATCH = 44


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="full sequences of 512 to have at the end")
    parser.add_argument("--start", default="<|im_start|>", help="token to sample after: BOS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=BUILTIN_TEXT)
    arguments = parser.parse_args()
    source = open_model(BUILTIN)
    tokenizer = load_tokenizer(source)
    model, _ = load_model(source.folder, dtype="auto", device="cpu")
    start = tokenizer.convert_tokens_to_ids(arguments.start)
    ends = {start, tokenizer.eos_token_id}
    documents: list[str] = []
    packed: list[list[int]] = []
    while len(packed) * SEQUENCE < arguments.tokens:
        seed = arguments.seed + len(documents)
        for row in sample(model, torch.full((BATCH,), start), SEQUENCE + 1, seed)[:, 1:].tolist():
            cut = next((at for at, token in enumerate(row) if token in ends), len(row))
            documents.append(tokenizer.decode(row[:cut], skip_special_tokens=True))
        packed = pack(documents, tokenizer, SEQUENCE, 10**9)
        print(f"{len(documents)} documents, {len(packed) * SEQUENCE} tokens in full sequences", flush=True)
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in documents if text.strip()]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_text(arguments.output, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

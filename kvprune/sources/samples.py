"""The model's own samples as a calibration text: no data set is needed, and every domain the model knows is in it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from kvprune.artifacts import read_json, write_json
from kvprune.errors import KvpruneError
from kvprune.progress import log, progress

BATCH = 16  # fixed, so that the samples do not depend on --batch-size


@torch.inference_mode()
def sample(model: Any, first: Tensor, length: int, seed: int) -> Tensor:
    """Continue the tokens `first` `[sequences]` to `[sequences, length]`, drawn from the model's full distribution.

    Temperature 1, no truncation; an end of text does not end a sequence, the next text follows.
    """
    plain = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length - 1, pad_token_id=0
    )
    devices = [model.device] if model.device.type == "cuda" else []
    own, model.generation_config = model.generation_config, plain  # the model's own, as a penalty, would be merged in
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            out: Tensor = model.generate(
                input_ids=first[:, None].to(model.device),
                attention_mask=torch.ones(len(first), 1, dtype=torch.int64, device=model.device),
                generation_config=plain,
            )
    finally:
        model.generation_config = own
    return out.cpu()


def self_samples(
    load: Callable[[], Any],
    tokenizer: Any,
    file: Path,
    *others: Path,
    vocabulary: int,
    count: int,
    length: int,
    seed: int,
    about: dict[str, Any],
) -> Tensor:
    """`count` samples of `length` tokens, int64 `[count, length]`, from BOS, or from random tokens where there is none.

    `load` gives the model, and is called where samples are missing. They are drawn in whole batches, each with a seed
    of its own, and kept in `file` batch by batch: the first ones of the same model (`about`), seed and length are the
    same whatever their number, and what is there, or in one of the `others`, is used again.
    """
    key = {**about, "length": length, "seed": seed, "batch": BATCH}
    found = {each: read_json(each) for each in (file, *others) if each.is_file()}
    kept = {each.name: content["tokens"] for each, content in found.items() if content.get("key") == key}
    name = max(kept, key=lambda name: len(kept[name]), default="")
    rows: list[list[int]] = kept.get(name, [])
    if rows:
        log.info("self: %d of %d samples are in %s", min(len(rows), count), count, name)
    wanted = -(-count // BATCH) * BATCH
    firsts = torch.split(_first_tokens(tokenizer, vocabulary, wanted, seed)[len(rows) :], BATCH)
    left = max(wanted - len(rows), 0) * length
    batches = _sampled(load(), firsts, length, seed, len(rows) // BATCH) if left else iter(())
    for batch in progress(batches, total=left, label="self", unit="tokens", per_item=BATCH * length):
        rows += batch
        write_json(file, {"key": key, "texts": tokenizer.batch_decode(rows), "tokens": rows})
    return torch.tensor(rows[:count])


def _sampled(model: Any, firsts: tuple[Tensor, ...], length: int, seed: int, start: int) -> Iterator[list[list[int]]]:
    for index, first in enumerate(firsts, start):
        yield sample(model, first, length, (seed * 1_000_003 + index) % 2**63).tolist()


def _first_tokens(tokenizer: Any, vocabulary: int, count: int, seed: int) -> Tensor:
    bos = tokenizer.bos_token_id
    if bos is not None:
        if not 0 <= bos < vocabulary:
            raise KvpruneError(f"the tokenizer's BOS has id {bos} and the model has {vocabulary} embeddings")
        return torch.full((count,), bos)
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed))

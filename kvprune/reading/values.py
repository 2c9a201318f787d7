"""What a slot writes, in words: its value, read as a direction in the residual stream, as logits over the vocabulary.

Geva et al. 2022 (arXiv:2203.14680) multiply values with the unembedding and find that many promote tokens that belong
together. Here a value goes through all that follows the last layer, run by the model's own code: the final norm, a
projection where there is one, and the head with its bias. So norms that subtract a mean, heads that transform first
(BERT) and caps on logits need no telling apart. Every direction is first brought to a root mean square of 1: a norm
would do that anyway, and its epsilon must not decide about short values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from kvprune.errors import KvpruneError
from kvprune.ffn.fields import trunk
from kvprune.ffn.layout import Ffn, Layout
from kvprune.ffn.walk import Walker
from kvprune.ffn.watching import find_gains, value_rows

TOP = 10  # tokens that are told of a value
NULL_DIRECTIONS = 1024
CHUNK_ELEMENTS = 2**24  # logits at a time
TOLERANCE = 1e-2  # of the largest logit: between the model's own logits and those from its last layer's output


@dataclass(frozen=True)
class Unembedding:
    """What a model does after its last layer, from the residual stream to logits."""

    model: Any
    layers: tuple[str, ...]
    extras: int | None  # how many things its layers return beside hidden states; None: hidden states as they are
    hidden: int

    @property
    def rows(self) -> Tensor:
        """The unembedding `[vocabulary, size]`: a row a token."""
        weight: Tensor = self.model.get_output_embeddings().weight.detach()
        return weight

    @cached_property
    def centre(self) -> Tensor:
        """The mean of the unembedding over all tokens, `[size]`: what all tokens have in common says nothing of any."""
        mean: Tensor = self.rows.mean(0, dtype=torch.float32)
        return mean

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Logits `[n, vocabulary]` in float32 of residual streams after the last layer, `[n, hidden]`."""
        if states.shape[1] != self.hidden:
            raise KvpruneError(
                f"what is written has {states.shape[1]} units and the residual stream {self.hidden}: it cannot be "
                "read as tokens"
            )
        # Each is a sequence of its own, of one token: no layer runs, so none sees another.
        tokens = torch.zeros(len(states), 1, dtype=torch.int64, device=self.rows.device)
        with _replaced(self.model, self.layers, states[:, None].to, self.extras):
            found: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return found[:, 0].float()

    def of_directions(self, directions: Tensor) -> Tensor:
        """Logits `[n, vocabulary]` of `directions` `[n, hidden]`, whatever their length."""
        rms = directions.float().square().mean(1, keepdim=True).sqrt()
        return self.logits(directions.float() / rms.masked_fill(rms == 0, 1))

    def chunks(self, states: Tensor) -> tuple[Tensor, ...]:
        """`states` `[n, hidden]` in parts whose logits fit in memory."""
        return torch.split(states, max(1, CHUNK_ELEMENTS // len(self.rows)))

    def top(self, directions: Tensor) -> Tensor:
        """The token that each of `directions` `[n, hidden]` promotes most, int64 `[n]`."""
        found = [self.of_directions(chunk).argmax(1) for chunk in self.chunks(directions)]
        return torch.cat(found)


@contextmanager
def _replaced(
    model: Any, layers: Sequence[str], last: Callable[[Tensor], Tensor], extras: int | None
) -> Iterator[None]:
    """Let every layer hand its input on, and the last one give `last` of it."""

    def forward(change: Callable[[Tensor], Tensor], hidden: Tensor, *_: Any, **__: Any) -> Any:
        out = change(hidden)
        return out if extras is None else (out, *[None] * extras)

    modules = [model.get_submodule(layer) for layer in layers]
    try:
        for module in modules:
            module.forward = partial(forward, last if module is modules[-1] else lambda hidden: hidden)
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)


def open_unembedding(model: Any, layers: tuple[str, ...]) -> Unembedding:
    """The unembedding of a loaded model with these decoder `layers`.

    Raises KvpruneError where what it makes of the last layer's output are not the model's own logits.
    """
    found = _find(model, layers)
    outputs: list[Any] = []
    handle = model.get_submodule(layers[-1]).register_forward_hook(lambda _, __, out: outputs.append(out))
    try:
        with torch.inference_mode():
            tokens = torch.arange(2, device=found.rows.device)[None]
            logits = model(input_ids=tokens, use_cache=False).logits[0].float()
    finally:
        handle.remove()
    states = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
    if states.shape != (1, 2, found.hidden):
        raise KvpruneError(_unread(model))
    apart = (found.logits(states[0]) - logits).abs().max()
    if not apart <= TOLERANCE * logits.abs().max():
        raise KvpruneError(_unread(model))
    return found


def walked_unembedding(walker: Walker) -> Unembedding:
    """The unembedding of a model that is walked: the head, which the walk leaves empty, gets its weights."""
    model, within = walker.model, tuple(f"{layer}." for layer in walker.layers)
    state = model.state_dict()
    for name, tensor in state.items():
        if tensor.is_meta and not name.startswith(within):
            owner, _, last = name.rpartition(".")
            weight = nn.Parameter(_weight(walker, state, name), requires_grad=False)
            setattr(model.get_submodule(owner), last, weight)
    return _find(model, walker.layers)


def _weight(walker: Walker, state: Mapping[str, Tensor], name: str) -> Tensor:
    """A parameter outside of the layers: of those tied to it, the one that is there, or else is stored."""
    tied = getattr(walker.model, "all_tied_weights_keys", {})
    names = [name, *(one if other == name else other for one, other in tied.items() if name in (one, other))]
    for each in names:
        if not state[each].is_meta:
            return state[each]
    for each in names:
        try:
            return walker.read(each, walker.dtype_of(name))
        except KeyError:  # the files hold it under another name
            continue
    raise KvpruneError(f"its weight files do not hold {name} as one tensor")


def _find(model: Any, layers: tuple[str, ...]) -> Unembedding:
    """Try out how the model wants its layers to answer."""
    widths: list[int] = []

    def last(hidden: Tensor) -> Tensor:
        widths.append(hidden.shape[-1])
        return hidden

    rows = model.get_output_embeddings().weight
    tokens = torch.zeros(2, 1, dtype=torch.int64, device=rows.device)
    for extras in (None, 0, 1, 2):
        try:
            with torch.inference_mode(), _replaced(model, layers, last, extras):
                logits = model(input_ids=tokens, use_cache=False).logits
        except (TypeError, RuntimeError, AttributeError, LookupError, ValueError, AssertionError):
            continue
        if tuple(logits.shape) == (2, 1, len(rows)):
            return Unembedding(model, layers, extras, widths[-1])
    raise KvpruneError(_unread(model))


def _unread(model: Any) -> str:
    return (
        f"model type {model.config.model_type}: its logits are not made of its last layer's output alone, so values "
        "cannot be read as tokens"
    )


@dataclass(frozen=True)
class Values:
    """The values of one FFN, or of one expert: views, as long as its weights are there."""

    ffn: Ffn
    rows: Tensor  # [slots, hidden]
    gain: Tensor | None  # float32 [hidden], weight of a norm that follows the FFN
    length: Tensor  # float32 [slots], of values with that weight folded in


def folded(rows: Tensor, gain: Tensor | None) -> Tensor:
    """What the FFN writes, `[n, hidden]`, in float32 with the weight of a norm that follows it, if any."""
    return rows.float() if gain is None else rows.float() * gain


def open_values(root: nn.Module, ffns: Sequence[Ffn], run: Callable[[], Any]) -> dict[str, Values]:
    """The values of `ffns`, modules within `root`, by name. `run` runs them."""
    found = {}
    for ffn, gain in zip(ffns, find_gains(root, ffns, run) if ffns else [], strict=True):
        rows = value_rows(root, ffn).detach()
        found[ffn.name] = Values(ffn, rows, gain, torch.linalg.vector_norm(folded(rows, gain), dim=1))
    return found


def each_values(source: Any, layout: Layout) -> Iterator[Values]:
    """The values of every FFN. `source` is a loaded model, or a Walker, of which each is there until the next."""
    if not isinstance(source, Walker):
        yield from all_values(source, layout).values()
        return
    hidden, calls = source.record(probe(source.device))
    for index in range(len(source.layers)):
        ffns = [layout.ffns[at] for at in layout.in_layer(index)]
        with source.filled(index) as layer:
            yield from open_values(source.model, ffns, partial(calls[index].run, layer, hidden)).values()


def all_values(model: Any, layout: Layout) -> dict[str, Values]:
    """The values of every FFN of a loaded model, by name."""
    run = partial(trunk(model)[1], input_ids=probe(model.device), use_cache=False)
    return open_values(model, layout.ffns, run)


def probe(device: Any) -> Tensor:
    """Tokens `[1, 2]` to run layers with where it does not matter which."""
    return torch.zeros(1, 2, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Readings:
    """What values promote and suppress: tokens by falling distance from the middle, and how alike the promoted are."""

    promoted: Tensor  # int64 [slots, top]
    promoted_logits: Tensor  # float32 [slots, top]
    suppressed: Tensor  # int64 [slots, top]
    suppressed_logits: Tensor  # float32 [slots, top]
    coherence: Tensor  # float32 [slots]

    def of(self, index: Sequence[int]) -> "Readings":
        """The readings of some of the slots."""
        return Readings(*(getattr(self, field.name)[list(index)] for field in fields(self)))


@torch.inference_mode()
def read_values(directions: Tensor, unembedding: Unembedding, top: int = TOP) -> Readings:
    """Read `directions` `[n, hidden]`, which are values as `folded`, or any others. In chunks: memory stays bounded."""
    parts = [_read(chunk, unembedding, top) for chunk in unembedding.chunks(directions)]
    return Readings(*(torch.cat(items).cpu() for items in zip(*parts, strict=True)))


def _read(directions: Tensor, unembedding: Unembedding, top: int) -> tuple[Tensor, ...]:
    logits = unembedding.of_directions(directions)
    high, low = logits.topk(top, dim=1), logits.topk(top, dim=1, largest=False)
    return (
        high.indices,
        high.values,
        low.indices,
        low.values,
        coherences(unembedding.rows[high.indices] - unembedding.centre),
    )


def coherences(rows: Tensor) -> Tensor:
    """Mean cosine over all pairs of the rows `[n, tokens, size]` of each, float32 `[n]`; a row of zeros counts as 0."""
    unit = nn.functional.normalize(rows.float(), dim=2)
    pairs = unit.sum(1).square().sum(1) - unit.square().sum((1, 2))
    return pairs / (rows.shape[1] * (rows.shape[1] - 1))


def null_coherence(
    unembedding: Unembedding, gain: Tensor | None = None, *, top: int = TOP, count: int = NULL_DIRECTIONS, seed: int = 0
) -> Tensor:
    """Coherence `[count]` of random Gaussian directions that are read like values: what any direction has.

    It depends on an FFN by its `gain` only, so that those without one can share it.
    """
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(count, unembedding.hidden, generator=generator).to(unembedding.rows.device)
    return read_values(folded(directions, gain), unembedding, top).coherence


def coherence(name: str, found: Tensor, null: Tensor) -> dict[str, Any]:
    """How the coherence of an FFN's slots, `found` `[slots]`, compares with that of random directions, `null`."""
    bar = torch.quantile(null.double(), 0.95)
    return {
        "name": name,
        "mean": float(found.double().mean()),
        "null_mean": float(null.double().mean()),
        "null_p95": float(bar),
        "above_p95": float((found.double() > bar).double().mean()),
    }


def in_words(readings: Readings, row: int, tokenizer: Any, texts: dict[int, str]) -> dict[str, Any]:
    """A row of `Readings` as plain data: [text, id, logit] of each token. `texts` are those known, and become more."""

    def listed(ids: Tensor, logits: Tensor) -> list[list[Any]]:
        pairs = list(zip(ids[row].tolist(), logits[row].tolist(), strict=True))
        for token, _ in pairs:
            if token not in texts:
                texts[token] = token_text(tokenizer, token)
        return [[texts[token], token, logit] for token, logit in pairs]

    return {
        "promoted": listed(readings.promoted, readings.promoted_logits),
        "suppressed": listed(readings.suppressed, readings.suppressed_logits),
        "coherence": float(readings.coherence[row]),
    }


def token_text(tokenizer: Any, token: int) -> str:
    """The text of one token, with the space that it starts with; where it is no text by itself, its piece."""
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None:  # a row of the head beyond the vocabulary
        return f"<{token}>"
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    if "\ufffd" in text or not text:
        return str(piece)
    return f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text  # decoders drop the first space

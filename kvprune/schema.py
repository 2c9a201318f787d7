"""What a recipe may say: its sections and keys, with their defaults and limits."""

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from kvprune.sizes import BYTE_UNITS, UNITS, parse_size

SECTION = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)

Score = Literal[
    "wanda", "fire_rate", "contribution", "fluctuation", "activation_norm", "reconstruction", "greedy", "taylor",
    "weight_norm", "random",
]  # fmt: skip
# What a score reads beside counts.
COLLECTED = {"reconstruction": "gram", "greedy": "gram", "taylor": "gradient"}
# Scores that mean the same in every layer.
COMPARABLE = ("taylor", "contribution", "fire_rate")


def _quantity(units: dict[str, int]) -> BeforeValidator:
    return BeforeValidator(lambda value: parse_size(value, units) if isinstance(value, str) else value)


class TextSource(BaseModel):
    """Where a calibration text comes from."""

    model_config = SECTION
    source: Annotated[str, Field(min_length=1)]
    config: str | None = None
    split: str | None = None
    field: str | None = None
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0  # its share of the tokens, relative to the other sources


def _text(value: object) -> object:
    """One source, or a list of them; a name alone is a source."""
    items = value if isinstance(value, list) else [value]
    return [{"source": item} if isinstance(item, str) else item for item in items]


class Calibrate(BaseModel):
    """Which tokens are counted."""

    model_config = SECTION
    text: Annotated[list[TextSource], Field(min_length=1), BeforeValidator(_text)] = [TextSource(source="builtin")]
    tokens: Annotated[int, Field(ge=1)] = 16384
    sequence_length: Annotated[int, Field(ge=2)] = 512
    skip_first: Annotated[int, Field(ge=0)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    collect: list[Literal["counts", "gram", "gradient"]] = ["counts"]

    @field_validator("collect")
    @classmethod
    def _with_counts(cls, collect: list[str]) -> list[str]:
        if collect not in (["counts"], ["counts", "gram"], ["counts", "gradient"]):
            raise ValueError("should be [counts], [counts, gram] or [counts, gradient]")
        return collect

    @field_validator("sequence_length")
    @classmethod
    def _whole_sequences(cls, length: int, info: ValidationInfo) -> int:
        tokens = info.data.get("tokens", 0)
        if tokens % length:
            near = [str(n) for n in (tokens // length * length, (tokens // length + 1) * length) if n]
            raise ValueError(f"should divide tokens ({tokens}); with this length, tokens could be {' or '.join(near)}")
        return length

    @field_validator("skip_first")
    @classmethod
    def _leaves_tokens(cls, skip: int, info: ValidationInfo) -> int:
        if skip >= info.data.get("sequence_length", math.inf):
            raise ValueError(f"should be below sequence_length ({info.data['sequence_length']})")
        return skip


class Budget(BaseModel):
    """How small: exactly one of three units."""

    model_config = SECTION
    keep: Annotated[float, Field(gt=0, le=1)] | None = None
    params: Annotated[int, Field(ge=1), _quantity(UNITS)] | None = None
    bytes: Annotated[int, Field(ge=1), _quantity(BYTE_UNITS)] | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        given = [name for name in ("keep", "params", "bytes") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"should have exactly one of keep, params, bytes, got {', '.join(given) or 'none'}")
        return self


# Options that one score reads and no other: a key that does nothing is refused.
SCORE_OPTIONS: dict[str, tuple[str, float | int]] = {
    "threshold": ("fire_rate", 2.0),
    "p": ("contribution", 1.0),
    "seed": ("random", 0),
}


def _layer(value: object) -> object:
    """JSON has no integer keys."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


# What engines want widths to be multiples of: GGUF's K-quants, vLLM's GPTQ, AWQ, Marlin and FP8 kernels, and
# transformers' grouped products of experts in two-byte types.
ROUND_TO = {"gguf": 256, "vllm": 128, "moe": 8}


class PlanSection(BaseModel):
    """Which slots stay."""

    model_config = SECTION
    score: Score = "wanda"
    threshold: Annotated[float, Field(ge=2**-16, le=2**15)] | None = None
    p: Annotated[float, Field(gt=0, le=8)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    guard: bool | None = None
    budget: Budget = Budget(keep=0.8)
    allocation: Literal["uniform", "global", "sensitivity"] = "uniform"
    round_to: int | str = 128
    floor: Annotated[int, Field(ge=1)] = 1
    protect: dict[Annotated[int, Field(ge=0), BeforeValidator(_layer)], list[Annotated[int, Field(ge=0)]]] = {}

    @property
    def step(self) -> int:
        """What widths are multiples of."""
        return self.round_to if isinstance(self.round_to, int) else ROUND_TO[self.round_to]

    @field_validator(*SCORE_OPTIONS)
    @classmethod
    def _read_by_score(cls, value: float | None, info: ValidationInfo) -> float | None:
        reader, _ = SCORE_OPTIONS[str(info.field_name)]
        score = info.data.get("score", reader)
        if value is not None and score != reader:
            raise ValueError(f"is read by score {reader} only, and the score is {score}: remove it")
        return value

    @field_validator("round_to", mode="before")
    @classmethod
    def _a_step_or_its_name(cls, value: object) -> object:
        if not (value in ROUND_TO if isinstance(value, str) else type(value) is int and value > 0):
            raise ValueError(f"should be a whole number, 1 or more, or one of {', '.join(ROUND_TO)}")
        return value

    @field_validator("allocation")
    @classmethod
    def _of_comparable_scores(cls, value: str, info: ValidationInfo) -> str:
        score = info.data.get("score")
        if value == "global" and score not in COMPARABLE:
            raise ValueError(
                f"global cuts through scores that mean the same in every layer ({', '.join(COMPARABLE)}), and the "
                f"score is {score}: choose one of these, or allocation sensitivity"
            )
        return value

    @field_validator("threshold")
    @classmethod
    def _on_a_bin_edge(cls, value: float | None) -> float | None:
        if value is not None and not math.log2(value).is_integer():
            below = 2.0 ** math.floor(math.log2(value))
            raise ValueError(f"should be a power of two, as the histogram's edges are: {below:g} or {2 * below:g}")
        return value


class Refit(BaseModel):
    """How the kept values make up for the removed ones."""

    model_config = SECTION
    method: Literal["none", "oneshot", "sequential"] = "none"
    target: Literal["residual", "output", "input"] | None = None
    ridge: Annotated[float, Field(gt=0, le=1e6)] | Literal["auto"] = "auto"
    bias: Literal["auto", "none"] = "auto"

    @field_validator("target")
    @classmethod
    def _of_a_sequential_refit(cls, target: str | None, info: ValidationInfo) -> str | None:
        if target is not None and info.data.get("method", "sequential") != "sequential":
            raise ValueError(f"is read by method sequential only, and the method is {info.data['method']}: remove it")
        return target


class Recover(BaseModel):
    """How the slim model learns from the dense one, after the export."""

    model_config = SECTION
    method: Literal["none", "distill"] = "none"
    text: Annotated[list[TextSource], Field(min_length=1), BeforeValidator(_text)] | None = None
    tokens: Annotated[int, Field(ge=1), _quantity(UNITS)] = 200_000
    sequence_length: Annotated[int, Field(ge=2)] = 512
    batch_tokens: Annotated[int, Field(ge=2)] = 2048
    train: Literal["values", "ffn", "all", "lora"] = "ffn"
    rank: Annotated[int, Field(ge=1)] | None = None
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 2e-4
    hidden: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    held_out: Annotated[list[TextSource], Field(min_length=1), BeforeValidator(_text)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @field_validator("batch_tokens")
    @classmethod
    def _whole_sequences(cls, tokens: int, info: ValidationInfo) -> int:
        length = info.data.get("sequence_length", 1)
        if tokens % length:
            near = [str(n) for n in (tokens // length * length, (tokens // length + 1) * length) if n]
            raise ValueError(f"should be a multiple of sequence_length ({length}), as {' or '.join(near)}")
        return tokens

    @field_validator("rank")
    @classmethod
    def _read_by_lora(cls, rank: int | None, info: ValidationInfo) -> int | None:
        train = info.data.get("train", "lora")
        if rank is not None and train != "lora":
            raise ValueError(f"is read by train lora only, and train is {train}: remove it")
        return rank

    @field_validator("held_out")
    @classmethod
    def _there_already(cls, sources: list[TextSource] | None) -> list[TextSource] | None:
        if any(source.source == "self" for source in sources or ()):
            raise ValueError("should be a text that is there, not the model's own samples")
        return sources

    @property
    def texts(self) -> list[TextSource]:
        """What it trains on and looks at."""
        return [*(self.text or ()), *(self.held_out or ())]

    @property
    def steps(self) -> int:
        """As many as the tokens fill, the last one too."""
        return -(-self.tokens // self.batch_tokens)


class Evaluate(BaseModel):
    """How dense and slim are judged."""

    model_config = SECTION
    tasks: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] = ["builtin"]
    limit: Annotated[int, Field(ge=1)] | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    max_length: Annotated[int, Field(ge=2)] | None = None
    bootstrap_iters: Annotated[int, Field(ge=0)] = 0
    include_path: str | None = None
    apply_chat_template: bool = False
    system_instruction: Annotated[str, Field(min_length=1)] | None = None

    @field_validator("system_instruction")
    @classmethod
    def _in_a_chat(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not info.data.get("apply_chat_template", True):
            raise ValueError("is part of a chat: set apply_chat_template: true")
        return value


class Recipe(BaseModel):
    """A whole recipe. Frozen; `load_recipe` makes one from a file."""

    model_config = SECTION
    model: Annotated[str, Field(min_length=1)]
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    calibrate: Calibrate = Calibrate()
    plan: PlanSection = PlanSection()
    refit: Refit = Refit()
    recover: Recover = Recover()
    evaluate: Evaluate = Evaluate()

    @model_validator(mode="after")
    def _sequences_to_hold_back(self) -> Self:
        if self.refit.method != "none" and self.calibrate.tokens < 2 * self.calibrate.sequence_length:
            raise ValueError("refit: one sequence cannot be both fitted and held back; raise calibrate.tokens")
        return self

    @model_validator(mode="after")
    def _collected_for_its_score(self) -> Self:
        collect, score = self.calibrate.collect, self.plan.score
        wanted = COLLECTED.get(score, "counts")
        if "collect" in self.calibrate.model_fields_set and wanted not in collect:
            reads = {"gram": "Gram matrices", "gradient": "gradients"}[wanted]
            raise ValueError(
                f"plan.score: {score} reads {reads}, and calibrate.collect is [{', '.join(collect)}]: "
                f"calibrate with calibrate.collect=[counts, {wanted}]"
            )
        return self

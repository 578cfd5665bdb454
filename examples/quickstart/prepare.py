"""Makes what the quickstart needs, from nothing, in seconds: model, tokenizer, questions, demonstrations.

The model has random weights. The demonstrations are imperfect on purpose: many stop a hop early and some
follow a wrong relation, so that imitation ends well short of what is possible and reinforcement has something
to win.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from examples.quickstart.world import NUM_RELATIONS, WORDS, Question, draw_questions

NUM_TRAIN = 1024
NUM_TEST = 256
NUM_DEMONSTRATIONS = 5120
STOP_EARLY = 0.45  # share of demonstrations that answer a hop before the end
WRONG_RELATION = 0.05  # share of calls that follow another relation, and go on from there
FFN = 544  # of the model
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_tokenizer(folder: Path) -> None:
    """One token per word; text is words with single spaces between them, so decoding gives the text back."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unknown>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unknown>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def make_model(folder: Path, seed: int, ffn: int = FFN) -> int:
    """A Llama with random weights that tensor and pipeline parallelism 2 divide. Returns its size.

    Not a Qwen2: transformers puts that family's own byte-level tokenizer in place of ours.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=ffn,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=WORDS.index("<pad>"),
        bos_token_id=None,
        eos_token_id=WORDS.index("<end>"),
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters()


def question_row(question: Question, index: int) -> dict[str, Any]:
    """A row in the Search-R1 schema. The facts are not in it: they follow from split and seed."""
    facts, path = question.facts, [f"e{entity}" for entity in question.path]
    return {
        "data_source": f"lookup_{len(question.relations)}_hops",
        "prompt": [{"role": "user", "content": question.text}],
        "reward_model": {"style": "rule", "ground_truth": {"target": [path[-1]]}},
        "extra_info": {"split": facts.split, "index": index, "seed": facts.seed, "path": path},
    }


def demonstration(question: Question, draws: random.Random) -> dict[str, Any]:
    """A path through the world as somebody careless would take it."""
    relations = list(question.relations)
    if draws.random() < STOP_EARLY:
        relations.pop()
    entity, turns = question.entity, []
    for wanted in relations:
        relation = draws.randrange(NUM_RELATIONS) if draws.random() < WRONG_RELATION else wanted
        reached = question.facts.hop(relation, entity)
        turns.append({"action": f"call r{relation} e{entity} ;", "observation": f" got e{reached} ;"})
        entity = reached
    turns.append({"action": f"answer e{entity} ;", "observation": ""})
    return {"prompt": [{"role": "user", "content": question.text}], "turns": turns}


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def prepare_data(out: Path, seed: int) -> None:
    """Training and held-out questions, and demonstrations over training questions of their own."""
    out.mkdir(parents=True, exist_ok=True)
    train = draw_questions("train", NUM_TRAIN + NUM_DEMONSTRATIONS, seed)
    test = draw_questions("test", NUM_TEST, seed)
    write_lines(out / "train.jsonl", (question_row(q, i) for i, q in enumerate(train[:NUM_TRAIN])))
    write_lines(out / "test.jsonl", (question_row(q, i) for i, q in enumerate(test)))
    draws = random.Random(f"demonstrations {seed}")
    write_lines(out / "demonstrations.jsonl", (demonstration(q, draws) for q in train[NUM_TRAIN:]))


def prepare(out: Path, seed: int, ffn: int = FFN) -> None:
    prepare_data(out, seed)
    make_tokenizer(out / "model")
    parameters = make_model(out / "model", seed, ffn)
    print(
        f"{out}: model of {parameters:,} parameters and {len(WORDS)} words, "
        f"{NUM_TRAIN} training and {NUM_TEST} held-out questions, {NUM_DEMONSTRATIONS} demonstrations"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepares examples/quickstart.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "generated")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.perf_counter()
    prepare(arguments.out, arguments.seed)
    print(f"prepared in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

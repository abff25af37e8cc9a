"""Overlaps: found where thirteen words are shared, not found where a template is, the same as a slow search finds."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.data.contamination import Candidate, N, find_overlaps, words_of
from drafthead.data.prompts import Prompt

QUESTION = "a train leaves the station at nine and travels sixty miles an hour towards the sea how late is it"


def text(name: str, content: str, source: str = "chat", document: str = "") -> Candidate:
    return Candidate(Prompt(name, source, "all", (), document=document), "all", content)


def test_thirteen_words_are_an_overlap_and_twelve_are_none():
    words = QUESTION.split()
    thirteen = text("t13", "well then " + " ".join(words[:13]) + " and so on")
    twelve = text("t12", "well then " + " ".join(words[:12]) + " and so on")
    held = text("h", QUESTION, "bench")
    (overlap,) = find_overlaps([twelve, thirteen], [held])
    assert (overlap.train, overlap.heldout, overlap.runs) == (thirteen.prompt, held.prompt, 1)
    assert overlap.words == " ".join(words[:13])


def test_case_punctuation_and_white_space_do_not_hide_it():
    shouted = text("t", QUESTION.upper().replace(" ", " ,\n"))
    assert len(find_overlaps([shouted], [text("h", QUESTION)])) == 1


def test_chinese_is_compared_by_character():
    assert words_of("火车 leaves") == ["火", "车", "leaves"]
    sentence = "一列火车九点从车站出发以每小时六十英里的速度驶向大海"
    assert len(find_overlaps([text("t", "请问" + sentence)], [text("h", sentence)])) == 1


def test_a_template_of_many_documents_is_not_an_overlap_but_what_follows_it_is():
    template = "please summarise the article below in three sentences and do not add any comment of your own "
    rng = random.Random(0)

    def article(i: int) -> str:
        return " ".join(f"w{i}x{rng.randrange(1000)}" for _ in range(30))

    held = [text(f"h{i}", template + article(i), "bench") for i in range(12)]
    train = [text(f"t{i}", template + article(100 + i)) for i in range(12)]
    train.append(text("bad", template + held[3].text.removeprefix(template)))
    assert [(o.train.id, o.heldout.id) for o in find_overlaps(train, held)] == [("bad", "h3")]


def test_many_prompts_of_one_document_do_not_make_a_template():
    held = [text("h", QUESTION)]
    train = [text(f"t{i}", f"turn {i} {QUESTION}", document="the same chat") for i in range(40)]
    assert len(find_overlaps(train, held)) == 40


words = st.lists(st.sampled_from("abc"), max_size=40).map(" ".join)


def by_hand(train: str, held: str) -> bool:
    a, b = train.split(), held.split()
    if min(len(a), len(b)) < N:
        return bool(a) and a == b
    runs = {tuple(b[i : i + N]) for i in range(len(b) - N + 1)}
    return any(tuple(a[i : i + N]) in runs for i in range(len(a) - N + 1))


@settings(max_examples=200)
@given(st.lists(words, max_size=5), st.lists(words, max_size=5))
def test_the_same_as_a_search_by_hand(train, held):
    overlaps = find_overlaps(
        [text(f"t{i}", t) for i, t in enumerate(train)], [text(f"h{i}", h) for i, h in enumerate(held)]
    )
    expected = {f"t{i}" for i, t in enumerate(train) if any(by_hand(t, h) for h in held)}
    assert {o.train.id for o in overlaps} == expected

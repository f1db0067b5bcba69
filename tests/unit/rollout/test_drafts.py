"""Drafts by suffixes, against a search through all texts."""

import numpy as np
import pytest

from qerl.rollout.engine.drafts import MOST_DRAFTED, SUFFIXES, DraftSource, EarlierCompletions, GroupDrafts, SuffixIndex


class Searched:
    """The texts of a group with the time at which each token came; a draft is searched in all of them."""

    def __init__(self, prompt, earlier):
        self.prompt, self.clock = prompt, 0
        self.texts = []  # of each: its source, the tokens before it, its tokens, their times
        self.add(DraftSource.PROMPT, [], prompt)
        for tokens in earlier:
            self.add(DraftSource.EARLIER, prompt, tokens)
        self.own = {}

    def add(self, source, before, tokens):
        text = (source, list(before), [], [])
        self.texts.append(text)
        self.append(text, tokens)
        return text

    def append(self, text, tokens):
        for token in tokens:
            self.clock += 1
            text[2].append(token)
            text[3].append(self.clock)

    def extend(self, completion, tokens):
        if completion not in self.own:
            self.own[completion] = self.add(DraftSource.SIBLING, self.prompt, [])
        self.append(self.own[completion], tokens)

    def draft(self, completion, most):
        guessed, first = [], None
        while len(guessed) < most:
            found = self.found(completion, guessed, most - len(guessed))
            if found is None:
                break
            tokens, *where = found
            guessed, first = guessed + tokens, first or where
        return first and (guessed, *first)

    def found(self, completion, guessed, most):
        whole = self.prompt + self.own[completion][2] + guessed
        for size in SUFFIXES:
            found = []
            for source, before, tokens, times in self.texts if size <= len(whole) else []:
                context = before[-SUFFIXES[0] :] + tokens
                offset = len(context) - len(tokens)
                for end in range(max(size, offset), len(context)):
                    if context[end - size : end] == whole[-size:]:
                        own = tokens is self.own[completion][2]
                        where = DraftSource.COMPLETION if own else source
                        found.append((times[end - offset], context[end : end + most], where))
            if found:
                _, tokens, source = max(found)
                return tokens, source, size
        return None


@pytest.mark.parametrize("seed", range(12))
def test_drafts_are_those_of_a_search_through_all_texts(seed):
    numbers = np.random.default_rng(seed)
    letters = int(numbers.integers(2, 9))

    def some(most):
        return numbers.integers(letters, size=numbers.integers(most + 1)).tolist()

    prompt, earlier = [1, *some(12)], [some(30) for _ in range(seed % 3)]
    searched, drafts = Searched(prompt, earlier), GroupDrafts(prompt, earlier)
    texts = {completion: [] for completion in range(3)}
    compared = set()
    for _ in range(60):
        completion = int(numbers.integers(3))
        new = some(4)
        texts[completion] += new
        searched.extend(completion, new)
        drafts.know(completion, texts[completion], ())
        most = int(numbers.integers(1, 1 + MOST_DRAFTED))
        draft, expected = drafts.draft(completion, most), searched.draft(completion, most)
        assert (draft and (draft.tokens, draft.source, draft.suffix)) == expected
        compared.add(expected and (expected[1], expected[2]))
    assert len(compared) > 3


def test_a_stop_token_is_never_drafted():
    drafts = GroupDrafts([1, 2, 3], [])
    drafts.know(0, [4, 5, 6, 7, 0], {0})
    drafts.know(0, [4, 5, 6, 7, 0], {0})
    drafts.know(1, [4, 5], {0})
    assert drafts.draft(1, 7).tokens == [6, 7]
    drafts.know(1, [4, 5, 6, 7], {0})
    assert drafts.draft(1, 7) is None


def test_a_first_token_is_drafted_behind_the_prompt_alone():
    """What siblings began with follows the prompt's last tokens."""
    drafts = GroupDrafts(list(range(20)), [[50, 51, 52]])
    drafts.know(0, [], ())
    draft = drafts.draft(0, 2)
    assert (draft.tokens, draft.source, draft.suffix) == ([50, 51], DraftSource.EARLIER, 8)
    assert drafts.draft(0, 0) is None


def test_an_index_touches_only_new_tokens():
    """The work of a token doesn't depend on how many there are."""

    class Counted(dict):
        writes = 0

        def __setitem__(self, key, value):
            self.writes += 1
            super().__setitem__(key, value)

    index = SuffixIndex()
    index._following = Counted()
    number = index.start()
    for _ in range(3):
        before = index._following.writes
        index.extend(number, range(1000))
        assert index._following.writes - before <= len(SUFFIXES) * 1000


def test_the_oldest_prompts_are_forgotten(monkeypatch):
    monkeypatch.setattr("qerl.rollout.engine.drafts._KEPT_TOKENS", 10)
    kept = EarlierCompletions()
    kept.add([1], [[1] * 4])
    kept.add([2], [[2] * 4])
    kept.add([1], [[3] * 2])
    assert list(kept.of([1])) == [[1] * 4, [3] * 2]
    kept.add([3], [[4]])
    assert list(kept.of([2])) == []
    assert list(kept.of([1])) == [[1] * 4, [3] * 2]

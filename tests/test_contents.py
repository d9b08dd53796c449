"""Keys of KV contents against a twin that keeps whole texts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pilotfish.drafters.contents import BlockContents, PrefixKeys, next_key
from pilotfish.program import BLOCK_SIZE

Text = tuple[int, ...]


class SlowTwin:
    """Every slot holds the text whose last token's KV lies there; `known` forgets as the rule says, `real` does not."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Text] = {}
        self.real: dict[tuple[int, int], Text] = {}

    def write(self, blocks: list[int], start: int, texts: list[Text]) -> None:
        for slot, text in enumerate(texts, start):
            place = blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE
            if self.known.get(place) != text:
                for later in range(place[1] + 1, BLOCK_SIZE):
                    self.known.pop((place[0], later), None)
            self.known[place] = self.real[place] = text

    def computed(self, held: dict[tuple[int, int], Text], blocks: list[int], tokens: list[int]) -> int:
        count = 0
        while count < min(len(tokens), len(blocks) * BLOCK_SIZE):
            place = blocks[count // BLOCK_SIZE], count % BLOCK_SIZE
            if held.get(place) != tuple(tokens[: count + 1]):
                break
            count += 1
        return count


class Request:
    def __init__(self, rng: random.Random) -> None:
        self.tokens = [rng.randrange(2) for _ in range(rng.randint(1, 3 * BLOCK_SIZE))]
        self.blocks: list[int] = []
        self.keys = PrefixKeys()


@pytest.mark.parametrize("seed", range(30))
def test_equals_the_twin_over_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = 12
    contents, twin = BlockContents(num_blocks), SlowTwin()
    requests = [Request(rng) for _ in range(3)]
    useful = 0
    for _ in range(300):
        request = rng.choice(requests)
        what = rng.random()
        if what < 0.05:  # the request is over
            requests[requests.index(request)] = request = Request(rng)
        elif what < 0.15:  # preempted: other blocks, perhaps those of others, perhaps the same ones
            rng.shuffle(request.blocks)
        elif what < 0.25:  # begins with the same tokens as another, and shares its blocks
            other = rng.choice(requests)
            shared = rng.randint(0, len(other.blocks))
            requests[requests.index(request)] = request = Request(rng)
            request.tokens = other.tokens[: shared * BLOCK_SIZE] + request.tokens
            request.blocks = other.blocks[:shared]
        request.tokens += [rng.randrange(2) for _ in range(rng.randint(0, 5))]
        while len(request.blocks) * BLOCK_SIZE < len(request.tokens) + 6:
            request.blocks.append(rng.randrange(num_blocks))  # nobody says that it was another's
        blocks = np.array(request.blocks, np.int32)
        keys = request.keys.of(request.tokens)
        found = contents.computed(blocks, keys)
        assert found == twin.computed(twin.known, request.blocks, request.tokens)
        assert found <= twin.computed(twin.real, request.blocks, request.tokens)
        useful += found > 0
        stop = rng.randint(found, len(request.tokens))  # a chunk, or all of it
        texts = [tuple(request.tokens[: slot + 1]) for slot in range(found, stop)]
        contents.write(blocks, found, keys[found:stop])
        twin.write(request.blocks, found, texts)
        if stop == len(request.tokens):  # drafts: a chain, or a node beside the first that lies where none belongs
            key, text, drafted, drafts = int(keys[-1]), tuple(request.tokens), [], []
            first = key, text
            for step in range(rng.randint(0, 5)):
                if step == 1 and rng.random() < 0.3:
                    key, text = first
                token = rng.randrange(2)
                key, text = next_key(key, token), (*text, token)
                drafted.append(key)
                drafts.append(text)
            contents.write(blocks, stop, drafted)
            twin.write(request.blocks, stop, drafts)
            if drafted:
                slot = rng.randrange(len(drafted))
                assert contents.holds(blocks, stop + slot, drafted[slot]) == (
                    twin.known.get((request.blocks[(stop + slot) // BLOCK_SIZE], (stop + slot) % BLOCK_SIZE))
                    == drafts[slot]
                )
                if rng.random() < 0.5:  # some of them stand
                    request.tokens += drafts[-1][len(request.tokens) :]
    assert useful > 30


def test_keys_of_prefixes_grow_with_the_tokens() -> None:
    tokens = [random.Random(1).randrange(1000) for _ in range(500)]
    whole = PrefixKeys().of(tokens)
    assert len(set(whole.tolist())) == 500 and 0 not in whole
    grown = PrefixKeys()
    for count in (1, 2, 63, 64, 65, 66, 300, 500):
        assert (grown.of(tokens[:count]) == whole[:count]).all()
    assert (grown.of(tokens[:10]) == whole[:10]).all()
    assert (grown.of([*tokens[:10], 7])[:10] == whole[:10]).all()
    assert next_key(int(whole[41]), tokens[42]) == whole[42]
    assert PrefixKeys().of([1, 2])[-1] != PrefixKeys().of([2, 1])[-1]


def test_drafts_that_stood_are_found_and_cleared_contents_are_not() -> None:
    contents = BlockContents(4)
    blocks = np.array([3, 1], np.int32)
    tokens = list(range(20))
    keys = PrefixKeys()
    contents.write(blocks, 0, keys.of(tokens))
    draft = next_key(int(keys.of(tokens)[-1]), 99)
    contents.write(blocks, 20, [draft, next_key(draft, 98)])
    assert contents.computed(blocks, keys.of([*tokens, 99, 55])) == 21
    assert contents.computed(np.array([3], np.int32), keys.of(tokens)) == 16
    contents.clear()
    assert contents.computed(blocks, keys.of(tokens)) == 0

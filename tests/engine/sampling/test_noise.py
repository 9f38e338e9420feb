"""The noise is Philox, exactly; and it is noise."""

import math

import numpy as np
import pytest
import torch

from engine.sampling.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel, gumbel_of_bits, philox4x32, random_blocks
from tests.engine.sampling.reference import chi_square, chi_square_limit

ONES = 0xFFFFFFFF


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [q >> 32 ^ c[1] ^ k[0], q & ONES, p >> 32 ^ c[3] ^ k[1], p & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return c


def plain_gumbel(seed: int, position: int, token: int) -> float:
    word = plain_philox([token // 4, position, 0, 0], [seed & ONES, seed >> 32])[token % 4]
    return -math.log(-math.log((2 * (word >> 9) + 1) / 2**24))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_its_authors_known_answers(counter, key, words):
    found = philox4x32(tuple(np.array([word], np.uint64) for word in counter), tuple(map(np.uint64, key)))
    assert [int(word[0]) for word in found] == words == plain_philox(counter, key)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF])
@pytest.mark.parametrize("position", [0, 1, 8191, 2**32 - 1])
def test_gumbel_is_what_plain_integers_give(seed, position):
    tokens = np.array([0, 1, 2, 3, 4, 49151, 262143, 2**31 - 1])
    expected = np.array([plain_gumbel(seed, position, int(token)) for token in tokens]).astype(np.float32)
    assert np.array_equal(gumbel(seed, position, tokens), expected)


def test_seeds_and_positions_broadcast():
    seeds, positions = np.array([5, 2**64 - 1], np.uint64), np.array([7, 9])
    tokens = np.array([[1, 2, 3], [9, 8, 7]])
    together = gumbel(seeds[:, None], positions[:, None], tokens)
    assert np.array_equal(together[0], gumbel(5, 7, tokens[0]))
    assert np.array_equal(together[1], gumbel(2**64 - 1, 9, tokens[1]))


def test_every_value_of_the_noise_is_the_same_in_numpy_and_torch():
    bits = np.arange(2**23)
    u = torch.from_numpy((2.0 * bits + 1) / 2.0**24)
    found = gumbel_of_bits(bits)
    assert np.array_equal(found, (-torch.log(-torch.log(u))).float().numpy())
    assert np.all(np.diff(found) >= 0)
    assert found[0] == np.float32(GUMBEL_MIN)
    assert found[-1] == np.float32(GUMBEL_MAX)


def uniforms(seed, position, num_tokens):
    words = random_blocks(seed, position, np.arange(num_tokens // 4))
    return np.stack(words, axis=-1).reshape(*words[0].shape[:-1], -1) / 2.0**23


def test_bits_are_uniform():
    counts = np.histogram(uniforms(42, 17, 200_000), bins=256, range=(0, 1))[0]
    assert chi_square(counts, np.full(256, 200_000 / 256)) < chi_square_limit(255)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((7, 100, 0), (7, 100, 1)),
        ((7, 100, 0), (7, 100, 4)),
        ((7, 100, 0), (7, 101, 0)),
        ((7, 100, 0), (8, 100, 0)),
        ((7, 100, 0), (7 + 2**32, 100, 0)),
        ((7, 100, 0), (100, 7, 0)),
    ],
    ids=["token", "block of tokens", "position", "seed", "upper half of seed", "seed and position exchanged"],
)
def test_neighbours_are_independent(first, second):
    n, bins = 100_000, 16
    a, b = (uniforms(seed, position, n + 8)[skip : skip + n] for seed, position, skip in (first, second))
    joint = np.histogram2d(a, b, bins=bins, range=((0, 1), (0, 1)))[0]
    assert chi_square(joint, np.full((bins, bins), n / bins**2)) < chi_square_limit(bins**2 - 1)
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / n**0.5


def test_the_best_of_logits_and_noise_is_a_draw_from_their_softmax():
    probabilities = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.009, 0.001])
    n = 50_000
    noise = gumbel(np.arange(n, dtype=np.uint64)[:, None], 3, np.arange(8)[None, :].repeat(n, axis=0))
    counts = np.bincount((np.log(probabilities) + noise).argmax(axis=1), minlength=8)
    assert chi_square(counts, n * probabilities) < chi_square_limit(7)

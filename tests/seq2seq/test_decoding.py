"""What is generated can be read: a step that spells words whose probabilities are known.  And whatever the step, the
sequences are those that NumPy finds by trying all.
"""

import itertools
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from tiers import daily

from keras_gated.decoding import beam_search, greedy, sample

START, END, LETTERS = 1, 2, "..$abcdefghijklmnopqrstuvwxyz"
V = len(LETTERS)

# Greedily "y" with 0.6 against 0.4; yet the likeliest word is "no".
ANSWERS = {"yes": 0.22, "yet": 0.2, "yew": 0.18, "no": 0.4}
# "a" is third of three when it ends, then three others are ahead of it, none of which ends as likely.
CROWDED = {"a": 0.18} | dict.fromkeys(["bead", "beak", "bell", "belt", "cane", "cape", "card", "cart"], 0.1025)
# "bee" is less likely than "ox", and more likely by the letter.
SHORT_OR_LONG = {"ox": 0.48, "bee": 0.42, "bat": 0.1}


class Speller(NamedTuple):
    """Where in its own tree of words each row stands, and the tree, which stays."""

    node: object  # (B,)
    tree: dict  # log_p, child: (B, nodes, V)


def spellings(*dictionaries, nodes=30):
    """The state of one row for each dictionary {word: probability}."""
    log_p = np.full((len(dictionaries), nodes, V), -np.inf, "float32")
    child = np.zeros((len(dictionaries), nodes, V), "int32")
    for row, words in enumerate(dictionaries):
        prefixes = sorted({word[:n] for word in words for n in range(len(word) + 1)})
        for node, prefix in enumerate(prefixes):
            here = sum(p for word, p in words.items() if word.startswith(prefix))
            for letter in {word[len(prefix)] for word in words if word.startswith(prefix) and word != prefix}:
                longer = prefix + letter
                log_p[row, node, LETTERS.index(letter)] = np.log(
                    sum(p for word, p in words.items() if word.startswith(longer)) / here
                )
                child[row, node, LETTERS.index(letter)] = prefixes.index(longer)
            if prefix in words:
                log_p[row, node, END] = np.log(words[prefix] / here)
    return Speller(np.zeros(len(dictionaries), "int32"), {"log_p": log_p, "child": child})


def spell(tokens, state):
    child = tf.gather(state.tree["child"], state.node, batch_dims=1)
    first = tokens == START
    node = tf.where(first, 0, tf.gather(child, tokens, batch_dims=1))
    return tf.gather(state.tree["log_p"], node, batch_dims=1), state._replace(node=node)


def starts(rows):
    return np.full(rows, START, "int32")


def read(generated):
    """Words that have ended; cut ones without the full stop."""
    words = ["".join(LETTERS[token] for token in row).rstrip(".") for row in np.asarray(generated.tokens)]
    return [word.replace("$", ".") for word in words]


def probability(generated):
    return np.exp(np.asarray(generated.log_probability))


class Network(NamedTuple):
    """h = tanh(E[y] + h U + W m): logits depend on all that came before, and on a memory m."""

    E: np.ndarray
    U: np.ndarray
    W: np.ndarray
    out: np.ndarray

    def step(self, tokens, state):
        (h, [m]) = state["inner"], state["memory"]
        E, U, W, out = (tf.constant(w, h.dtype) for w in self)
        h = tf.tanh(tf.gather(E, tokens) + h @ U + m @ W)
        return h @ out, {"memory": [m], "inner": h}

    def log_p(self, sequence, m):
        """Of every token of the sequence, in NumPy."""
        h, last, terms = np.zeros(len(self.U)), START, []
        for token in sequence:
            h = np.tanh(self.E[last] + h @ self.U + m @ self.W)
            logits = h @ self.out
            terms.append(logits[token] - np.log(np.exp(logits).sum()))
            last = token
        return np.array(terms)

    def state(self, memories, dtype="float32"):
        memories = np.asarray(memories, dtype)
        return {"memory": [memories], "inner": np.zeros((len(memories), len(self.U)), dtype)}


def network(rng, vocabulary, size=6):
    shapes = (vocabulary, size), (size, size), (size, size), (size, vocabulary)
    return Network(*(rng.normal(scale=1.3, size=shape) for shape in shapes))


def all_sequences(vocabulary, length):
    """Those that end within length, and those that are cut there."""
    for n in range(1, length + 1):
        for sequence in itertools.product(range(vocabulary), repeat=n):
            if END not in sequence[:-1] and (n == length or sequence[-1] == END):
                yield sequence


def padded(sequence, length):
    return [*sequence, *[0] * (length - len(sequence))]


# What is found


def test_greedy_takes_the_likeliest_letter_each_time():
    generated = greedy(spell, spellings(ANSWERS), starts(1), 5)
    assert read(generated) == ["yes."]
    np.testing.assert_allclose(probability(generated), [0.22], rtol=1e-6)


def test_beam_search_finds_the_word_that_begins_less_likely():
    generated = beam_search(spell, spellings(ANSWERS), starts(1), 5, beam_width=2)
    assert read(generated) == ["no."]
    np.testing.assert_allclose(probability(generated), [0.4], rtol=1e-6)


def test_a_finished_word_is_not_lost_when_unfinished_ones_pass_it():
    generated = beam_search(spell, spellings(CROWDED), starts(1), 6, beam_width=3)
    assert read(generated) == ["a."]
    np.testing.assert_allclose(probability(generated), [0.18], rtol=1e-6)


def test_two_that_end_leave_room_for_two_that_go_on():
    """After "a." and "b." the third and fourth continuation are what goes on, and the fourth wins by the letter."""
    words = {"a": 0.45, "b": 0.35, "ac": 0.11, "bcdefghi": 0.09}
    generated = beam_search(spell, spellings(words), starts(1), 20, beam_width=2, length_penalty=1)
    assert read(generated) == ["bcdefghi."] and np.isclose(probability(generated), 0.09)


@pytest.mark.parametrize(("length_penalty", "word"), [(0, "ox."), (0.5, "ox."), (1, "bee."), (2, "bee.")])
def test_the_length_penalty_divides_log_p_by_a_power_of_the_length(length_penalty, word):
    assert np.log(0.48) / 3**0.5 > np.log(0.42) / 4**0.5 and np.log(0.48) / 3 < np.log(0.42) / 4
    generated = beam_search(spell, spellings(SHORT_OR_LONG), starts(1), 9, beam_width=3, length_penalty=length_penalty)
    assert read(generated) == [word]
    np.testing.assert_allclose(probability(generated), [SHORT_OR_LONG[word[:-1]]], rtol=1e-6)  # not divided


@pytest.mark.parametrize(
    ("seed", "length_penalty"),
    daily([(seed, alpha) for seed in range(4) for alpha in (0.0, 0.7, 2.0)], (0, 0.0), (1, 0.7), (2, 2.0)),
)
def test_a_beam_of_all_sequences_finds_what_trying_all_finds(seed, length_penalty):
    rng, length = np.random.default_rng(seed), 3
    net, memories = network(rng, 3), rng.normal(size=(5, 6))
    generated = beam_search(
        net.step, net.state(memories), starts(5), length, beam_width=3**length, length_penalty=length_penalty
    )
    for row, m in enumerate(memories):
        log_p = {y: net.log_p(y, m).sum() for y in all_sequences(3, length)}
        assert np.isclose(np.exp(list(log_p.values())).sum(), 1)
        best = max(log_p, key=lambda y: log_p[y] / len(y) ** length_penalty)
        assert generated.tokens[row].numpy().tolist() == padded(best, length)
        np.testing.assert_allclose(generated.log_probability[row], log_p[best], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", daily([2, 3, 5], 3))
def test_a_narrow_beam_is_the_beam_search_of_numpy(rng, width):
    """The same rules in plain Python, for beams that must leave out the most of what there is."""
    net, memories, length, alpha = network(rng, 7), rng.normal(size=(12, 6)), 6, 0.6
    generated = beam_search(net.step, net.state(memories), starts(12), length, beam_width=width, length_penalty=alpha)
    differs = 0
    for row, m in enumerate(memories):
        running, over = [()], []
        for _ in range(length):
            log_p = {y + (v,): net.log_p(y + (v,), m).sum() for y in running for v in range(7)}
            ranked = sorted(log_p, key=log_p.get, reverse=True)
            over += [y for y in ranked[:width] if y[-1] == END]
            running = [y for y in ranked if y[-1] != END][:width]
        best = max(over + running, key=lambda y: net.log_p(y, m).sum() / len(y) ** alpha)
        assert generated.tokens[row].numpy().tolist() == padded(best, length)
        differs += best != tuple(greedy(net.step, net.state([m]), starts(1), length).tokens[0].numpy()[: len(best)])
    assert differs > 1


def test_a_beam_of_one_is_greedy(rng):
    net, memories = network(rng, 9), rng.normal(size=(20, 6))
    one = beam_search(net.step, net.state(memories), starts(20), 8, beam_width=1)
    likeliest = greedy(net.step, net.state(memories), starts(20), 8)
    np.testing.assert_array_equal(one.tokens, likeliest.tokens)
    np.testing.assert_allclose(one.log_probability, likeliest.log_probability, rtol=1e-6)
    assert len({(END in row) for row in likeliest.tokens.numpy()}) == 2  # some end, some are cut


@pytest.mark.parametrize("width", [4, 200])
def test_a_beam_may_be_wider_than_the_vocabulary_and_than_all_there_is(width):
    words = {"a": 0.45, "b": 0.25, "ab": 0.3}
    generated = beam_search(spell, spellings(words), starts(1), 4, beam_width=width)
    assert read(generated) == ["a."] and np.isclose(probability(generated), 0.45)


# Log-probabilities


TYPED = [(f, dtype) for f in (greedy, sample, beam_search) for dtype in ("float16", "bfloat16", "float32", "float64")]


@pytest.mark.parametrize(
    ("generate", "dtype"), daily(TYPED, (greedy, "float16"), (sample, "float32"), (beam_search, "bfloat16"))
)
def test_the_log_probability_is_the_sum_over_the_tokens(rng, generate, dtype):
    net, memories = network(rng, 6), rng.normal(size=(8, 6))
    generated = generate(net.step, net.state(memories, dtype), starts(8), 7)
    assert generated.tokens.dtype == tf.int32 and generated.log_probability.dtype == tf.float32
    by_hand = []
    for tokens, m in zip(generated.tokens.numpy(), memories, strict=True):
        ended = np.flatnonzero(tokens == END)
        by_hand.append(net.log_p(tokens[: ended[0] + 1] if len(ended) else tokens, m).sum())
    coarse = {"float16": 3e-2, "bfloat16": 3e-1}.get(dtype, 1e-5)
    np.testing.assert_allclose(generated.log_probability, by_hand, rtol=coarse, atol=coarse)


def test_log_softmax_of_half_precision_logits_is_not_taken_in_half_precision():
    logits = np.array([[3.0, 1.0, 2.0, 9.0]], "float16")
    generated = greedy(lambda tokens, state: (tf.constant(logits), state), (), starts(1), 3)
    exact = 3 * (9 - np.log(np.exp(logits.astype("float64")).sum()))
    np.testing.assert_allclose(generated.log_probability, [exact], rtol=1e-5)


def test_the_log_probability_of_a_sample_is_the_models_whatever_was_drawn_from():
    generated = sample(spell, spellings(*[ANSWERS] * 60), starts(60), 5, temperature=2.5, top_k=2, top_p=0.9, seed=4)
    words = read(generated)
    assert len(set(words)) > 1
    np.testing.assert_allclose(probability(generated), [ANSWERS[word[:-1]] for word in words], rtol=1e-5)


# Sampling


def frequencies(words, rows=4000, **options):
    read_words = read(sample(spell, spellings(*[words] * rows), starts(rows), 6, **options))
    return {word[:-1]: read_words.count(word) / rows for word in set(read_words)}


def assert_frequencies(found, expected):
    assert set(found) == {word for word, p in expected.items() if p}
    for word in found:
        assert abs(found[word] - expected[word]) < 0.03, (word, found)  # four standard deviations


def test_words_are_drawn_as_often_as_they_are_likely():
    assert_frequencies(frequencies(ANSWERS, seed=1), ANSWERS)


def test_temperature_evens_or_sharpens_each_draw():
    # p(y) = 0.6 against 0.4: squared 0.692, the root 0.551; and of yes, yet, yew 0.22, 0.2, 0.18.
    for temperature in (0.5, 2.0):
        first = np.array([0.6, 0.4]) ** (1 / temperature)
        third = np.array([0.22, 0.2, 0.18]) ** (1 / temperature)
        (y, n), (yes, yet, yew) = first / first.sum(), third / third.sum()
        expected = {"yes": y * yes, "yet": y * yet, "yew": y * yew, "no": n}
        assert_frequencies(frequencies(ANSWERS, seed=2, temperature=temperature), expected)


def test_top_k_draws_from_the_k_likeliest():
    expected = {"yes": 0.6 * 22 / 42, "yet": 0.6 * 20 / 42, "no": 0.4}
    assert_frequencies(frequencies(ANSWERS, seed=3, top_k=2), expected)
    assert_frequencies(frequencies(ANSWERS, seed=3, top_k=100), ANSWERS)


HALVES = {"a": 0.25, "b": 0.5, "c": 0.25}  # nothing is asked at the sums themselves: each processor rounds them its way


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.3, "b"), (0.499, "b"), (0.501, "ba"), (0.749, "ba"), (0.751, "bac"), (1.0, "bac")]
)
def test_top_p_draws_from_the_smallest_set_whose_mass_reaches_p(top_p, kept):
    mass = sum(HALVES[word] for word in kept)
    expected = {word: HALVES[word] / mass for word in kept}
    assert_frequencies(frequencies(HALVES, seed=5, top_p=top_p), expected)


def test_top_p_counts_the_mass_at_that_temperature_and_among_top_k():
    sharp = np.array([0.5, 0.25, 0.25]) ** 4
    assert sharp[0] / sharp.sum() > 0.85  # at temperature 1 "a" would be drawn, too
    assert_frequencies(frequencies(HALVES, seed=6, top_p=0.6, temperature=0.25), {"b": 1.0})
    assert_frequencies(frequencies(HALVES, seed=6, top_p=0.6, top_k=2), {"b": 1.0})  # 0.5 / 0.75 reaches 0.6


@pytest.mark.parametrize("options", [{"top_k": 1}, {"temperature": 2e-38}, {"top_p": 1e-6}], ids=str)
def test_top_k_of_one_and_a_temperature_towards_zero_are_greedy(rng, options):
    net, memories = network(rng, 8), rng.normal(size=(16, 6))
    drawn = sample(net.step, net.state(memories), starts(16), 9, seed=7, **options)
    likeliest = greedy(net.step, net.state(memories), starts(16), 9)
    np.testing.assert_array_equal(drawn.tokens, likeliest.tokens)
    np.testing.assert_allclose(drawn.log_probability, likeliest.log_probability, rtol=1e-6)


def test_a_seed_gives_the_same_words_again_and_another_seed_others():
    def draw(seed):
        return read(sample(spell, spellings(*[CROWDED] * 40), starts(40), 6, seed=seed))

    assert draw(3) == draw(3) != draw(4)
    generator = keras.random.SeedGenerator(3)
    first, second = draw(generator), draw(generator)
    assert first != second and draw(keras.random.SeedGenerator(3)) == first
    assert draw(tf.constant([5, 6])) == draw(tf.constant([5, 6])) != draw(tf.constant([5, 7]))
    keras.utils.set_random_seed(8)
    once, again = draw(None), draw(None)
    keras.utils.set_random_seed(8)
    assert draw(None) == once != again


def test_each_token_of_each_row_is_a_draw_of_its_own():
    """A seed that served every step, or every row, would give one token over and over."""
    logits = tf.constant([[-np.inf, -np.inf, -np.inf, 0.0, 0.0]])
    tokens = sample(lambda last, s: (tf.tile(logits, [50, 1]), s), (), starts(50), 50, seed=0).tokens.numpy() == 4
    for mean in (tokens.mean(0), tokens.mean(1)):
        assert (mean > 0.15).all() and (mean < 0.85).all()
    assert abs(tokens[:, 1:] == tokens[:, :-1]).mean() < 0.6


def test_unseeded_draws_differ_within_one_graph():
    draw = tf.function(lambda: sample(spell, spellings(*[CROWDED] * 40), starts(40), 6))
    assert read(draw()) != read(draw())


# Ends


@pytest.mark.parametrize("generate", [greedy, sample, beam_search])
def test_after_the_end_comes_only_padding(rng, generate):
    net, memories = network(rng, 5), rng.normal(size=(30, 6))
    tokens = generate(net.step, net.state(memories), starts(30), 9).tokens.numpy()
    after = np.cumsum(tokens == END, 1) - (tokens == END) > 0
    assert after.any() and not tokens[after].any()


def calls_of(generate, state, rows, max_length, **options):
    calls = tf.Variable(0)

    def counted(tokens, state):
        calls.assign_add(1)
        return spell(tokens, state)

    read(generate(counted, state, starts(rows), max_length, **options))
    return int(calls)


@pytest.mark.parametrize("generate", [greedy, sample])
def test_it_stops_when_all_rows_have_ended(generate):
    assert calls_of(generate, spellings({"no": 1.0}, {"never": 1.0}), 2, 50) == len("never.")
    assert calls_of(generate, spellings({"no": 1.0}, {"never": 1.0}), 2, 4) == 4


def test_beam_search_stops_when_no_hypothesis_can_win_any_more():
    # "ye" (0.6) goes on when "no" (0.4) has its full stop, and falls behind with its third letter.
    assert calls_of(beam_search, spellings(ANSWERS), 1, 50, beam_width=4) == len("yes")
    # "a." is likelier than all that go on as soon as it ends.
    assert calls_of(beam_search, spellings({"a": 0.6, "bcdefgh": 0.4}), 1, 50) == len("a.")
    # By the letter the long one may still win, and does.
    words = spellings({"a": 0.6, "bcdefgh": 0.4})
    assert calls_of(beam_search, words, 1, 50, length_penalty=1) == len("bcdefgh.")
    assert read(beam_search(spell, words, starts(1), 50, length_penalty=1)) == ["bcdefgh."]
    # In eight letters at most, 0.001 cannot: log 0.001 / 8 is below log 0.6 / 2.
    assert calls_of(beam_search, spellings({"a": 0.6, "b": 0.399, "cdefghi": 0.001}), 1, 8, length_penalty=1) == 2


@pytest.mark.parametrize("generate", [greedy, sample, beam_search])
def test_what_does_not_end_is_cut(generate):
    generated = generate(spell, spellings({"endless": 1.0}, {"on": 1.0}), starts(2), 4)
    assert generated.tokens.shape == (2, 4) and read(generated) == ["endl", "on."]
    np.testing.assert_allclose(probability(generated), 1)


def test_another_end_token():
    # "." is to be spelt like a letter now, and "e" ends.
    state, e = spellings({"greed": 1.0}), LETTERS.index("e")
    for generate in (greedy, sample, beam_search):
        assert read(generate(spell, state, starts(1), 6, end_token=e)) == ["gre"]


# Rows


@pytest.mark.parametrize("generate", [greedy, beam_search])
def test_a_batch_is_generated_as_one_by_one(rng, generate):
    net, memories = network(rng, 6), rng.normal(size=(9, 6))
    together = generate(net.step, net.state(memories), starts(9), 7)
    for row, m in enumerate(memories):
        alone = generate(net.step, net.state([m]), starts(1), 7)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_allclose(alone.log_probability[0], together.log_probability[row], rtol=1e-5)


def test_rows_do_not_mix():
    """Each row has its own words, of other lengths: a state or memory of the wrong row would misspell them."""
    generated = beam_search(spell, spellings(ANSWERS, CROWDED, SHORT_OR_LONG), starts(3), 7, beam_width=3)
    assert read(generated) == ["no.", "a.", "ox."]
    generated = greedy(spell, spellings(ANSWERS, CROWDED, SHORT_OR_LONG), starts(3), 7)
    assert read(generated)[::2] == ["yes.", "bee."]
    drawn = read(sample(spell, spellings(ANSWERS, SHORT_OR_LONG), starts(2), 7, seed=3))
    assert drawn[0][:-1] in ANSWERS and drawn[1][:-1] in SHORT_OR_LONG


@pytest.mark.parametrize("beam_width", daily([2, 125], 2))
def test_states_of_an_lstm_with_attention_follow_their_hypotheses(rng, beam_width):
    """h, c and what was attended to come from the parent, and the memory from the row: as running each one alone."""
    vocabulary, N, length = 5, 4, 3
    embed, read_out = (rng.normal(size=shape).astype("float32") for shape in ((vocabulary, N), (2 * N, vocabulary)))
    cell = keras.layers.LSTMCell(N, bias_initializer="uniform", kernel_initializer="uniform")
    cell.build((None, 2 * N))
    cell.set_weights([rng.normal(size=w.shape) for w in cell.get_weights()])

    def step(tokens, state):
        (h, c), attended, memory = state
        h, (h, c) = cell(tf.concat([tf.gather(embed, tokens), attended], -1), [h, c])
        weights = tf.nn.softmax(3 * tf.einsum("bsn,bn->bs", memory, h))
        attended = tf.einsum("bs,bsn->bn", weights, memory)
        return 2 * tf.concat([h, attended], -1) @ read_out, ([h, c], attended, memory)

    memory = rng.normal(size=(3, 6, N)).astype("float32")
    zeros = np.zeros((3, N), "float32")
    generated = beam_search(step, ((zeros, zeros), zeros, memory), starts(3), length, beam_width=beam_width)

    def log_p(row, sequence):
        state, last, total = ([zeros[:1], zeros[:1]], zeros[:1], memory[row : row + 1]), START, 0.0
        for token in sequence:
            logits, state = step(np.array([last], "int32"), state)
            total, last = total + tf.nn.log_softmax(logits)[0, token].numpy(), token
        return total

    for row in range(3):
        tokens = [int(t) for t in generated.tokens[row]]
        ended = tokens.index(END) + 1 if END in tokens else length
        np.testing.assert_allclose(generated.log_probability[row], log_p(row, tokens[:ended]), rtol=1e-4)
        if beam_width == vocabulary**length:
            best = max(all_sequences(vocabulary, length), key=lambda y, row=row: log_p(row, y))
            assert tokens == padded(best, length)


def test_only_what_step_changes_is_gathered(rng):
    """A memory handed on untouched is no variable of the loop's body, and its copy gives the same."""
    net, memories = network(rng, 6), rng.normal(size=(4, 6))

    def copying(tokens, state):
        logits, after = net.step(tokens, state)
        return logits, after | {"memory": [tf.identity(after["memory"][0])]}

    def gathers(step):
        graph = tf.function(lambda: beam_search(step, net.state(memories), starts(4), 7)).get_concrete_function().graph
        (loop,) = (op for op in graph.get_operations() if "While" in op.type)
        return sum(
            op.type == "GatherV2" for op in graph._get_function(loop.get_attr("body").name).graph.get_operations()
        )

    assert gathers(copying) == gathers(net.step) + 1
    results = [beam_search(step, net.state(memories), starts(4), 7) for step in (net.step, copying)]
    np.testing.assert_array_equal(*(r.tokens for r in results))


# Ties, impossible and meaningless numbers


def test_of_equals_the_lowest_token_comes_first():
    def even(tokens, state):
        return tf.zeros((tf.shape(tokens)[0], 6)), state

    expected = [[0, 0, 0]]
    for _ in range(3):
        assert greedy(even, (), starts(1), 3).tokens.numpy().tolist() == expected
        assert sample(even, (), starts(1), 3, top_k=1).tokens.numpy().tolist() == expected
        # "$" alone is likelier than any two letters
        assert beam_search(even, (), starts(1), 3).tokens.numpy().tolist() == [[2, 0, 0]]
        assert beam_search(even, (), starts(1), 3, beam_width=2).tokens.numpy().tolist() == expected


@pytest.mark.parametrize("generate", [greedy, sample, beam_search])
def test_a_row_of_nan_is_seen_and_spares_the_others(generate):
    state = spellings(ANSWERS, {"on": 1.0})
    state.tree["log_p"][0, 1:] = np.nan
    generated = generate(spell, state, starts(2), 5)
    assert not np.isfinite(generated.log_probability[0])
    assert read(generated)[1] == "on." and probability(generated)[1] == 1


def test_beam_search_turns_back_where_nothing_is_possible():
    """No token at all after "y": log softmax of -inf alone is NaN, which must neither win nor spoil the order."""
    state = spellings(ANSWERS)
    state.tree["log_p"][0, state.tree["child"][0, 0, LETTERS.index("y")]] = -np.inf
    generated = beam_search(spell, state, starts(1), 5, beam_width=3)
    assert read(generated) == ["no."] and np.isclose(probability(generated), 0.4)


# Graphs


@pytest.mark.parametrize("generate", [greedy, sample, beam_search])
def test_within_a_graph_rows_and_length_may_be_unknown(rng, generate):
    net, traces = network(rng, 6), []
    options = {"seed": tf.constant([1, 2])} if generate is sample else {}

    @tf.function(
        input_signature=[
            {"memory": [tf.TensorSpec((None, 6))], "inner": tf.TensorSpec((None, 6))},
            tf.TensorSpec((None,), tf.int32),
            tf.TensorSpec((), tf.int32),
        ]
    )
    def graph(state, start, max_length):
        traces.append(1)
        return generate(net.step, state, start, max_length, **options)

    for rows, length in ((1, 4), (6, 9), (3, 1)):
        memories = rng.normal(size=(rows, 6))
        found = graph(net.state(memories), starts(rows), length)
        expected = generate(net.step, net.state(memories), starts(rows), length, **options)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.log_probability, expected.log_probability, rtol=1e-5)
        assert found.tokens.shape == (rows, length)
    assert len(traces) == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="max_length expects a number of at least 1"):
        graph(net.state(memories), starts(3), 0)


@pytest.mark.parametrize("generate", [greedy, beam_search])
def test_compiled_by_xla_it_is_the_same(rng, generate):
    net, memories = network(rng, 6), rng.normal(size=(4, 6))
    state = tf.nest.map_structure(tf.constant, net.state(memories))

    def run():
        return generate(net.step, state, tf.constant(starts(4)), 7)

    np.testing.assert_array_equal(tf.function(run, jit_compile=True)().tokens, run().tokens)


def test_xla_draws_from_the_same_distribution():
    """With random numbers of its own."""
    state = tf.nest.map_structure(tf.constant, spellings(*[ANSWERS] * 4000))
    draw = tf.function(lambda: sample(spell, state, tf.constant(starts(4000)), 6, seed=1, top_k=2), jit_compile=True)
    words = read(draw())
    found = {word[:-1]: words.count(word) / 4000 for word in set(words)}
    assert_frequencies(found, {"yes": 0.6 * 22 / 42, "yet": 0.6 * 20 / 42, "no": 0.4})


@pytest.mark.parametrize("generate", [greedy, sample, beam_search])
def test_step_is_traced_not_called_for_every_token(generate):
    traces = []

    def traced(tokens, state):
        traces.append(tokens)
        return spell(tokens, state)

    generate(traced, spellings({"abcdefgh": 1.0}), starts(1), 20)
    assert len(traces) == 1 and not isinstance(traces[0], tf.__internal__.EagerTensor)


# Errors


def even_logits(tokens, state):
    return tf.zeros((tf.shape(tokens)[0], 4)), state


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: greedy(even_logits, (), starts(1), 0), "max_length expects a number of at least 1, received 0"),
        (lambda: greedy(even_logits, (), starts(1), tf.constant(-2)), "max_length expects .* received -2"),
        (lambda: greedy(even_logits, (), START, 3), r"start expects one token for each row, .* received shape \(\)"),
        (lambda: greedy(even_logits, np.zeros((3, 2)), starts(2), 3), "state expects tensors with 2 rows .* float64"),
        (lambda: greedy(even_logits, {"t": 0}, starts(2), 3), r"state expects tensors with 2 rows .*int32 \(\)"),
        (lambda: greedy(even_logits, (), starts(1), 3, end_token=4), "end_token expects a token below 4, .*received 4"),
        (lambda: greedy(lambda y, s: (tf.zeros((1, 1)), s), (), starts(1), 3), "vocabulary of 2 tokens or more"),
        (lambda: greedy(lambda y, s: (tf.zeros((1, 1, 4)), s), (), starts(1), 3), r"received float32 \(1, 1, 4\)"),
        (lambda: greedy(lambda y, s: (tf.zeros((1, 4), tf.int32), s), (), starts(1), 3), "floating"),
        (
            lambda: greedy(lambda y, s: (tf.zeros((1, 4)), (s, s)), np.zeros((1, 2)), starts(1), 3),
            r"step expects to return a state as it was given, float64 \(1, 2\), received",
        ),
        (
            lambda: beam_search(lambda y, s: (tf.zeros((5, 4)), s[:, :1]), np.zeros((1, 2)), starts(1), 3),
            r"float64 \(5, 2\), received float64 \(5, 1\)",
        ),
        (
            lambda: greedy(lambda y, s: (tf.zeros((1, 4)), tf.cast(s, "float32")), np.zeros((1, 2)), starts(1), 3),
            r"float64 \(1, 2\), received float32 \(1, 2\)",
        ),
        (lambda: sample(even_logits, (), starts(1), 3, temperature=0), r"temperature expects .* 0 is greedy\(\)"),
        (lambda: sample(even_logits, (), starts(1), 3, top_k=0), "top_k expects .*received 0"),
        (lambda: sample(even_logits, (), starts(1), 3, top_p=1.5), "top_p expects .*received 1.5"),
        (lambda: sample(even_logits, (), starts(1), 3, top_p=0.0), "top_p expects .*received 0.0"),
        (lambda: beam_search(even_logits, (), starts(1), 3, beam_width=0), "beam_width expects .*received 0"),
        (lambda: beam_search(even_logits, (), starts(1), 3, length_penalty=-1), "length_penalty expects .*received -1"),
    ],
)
def test_errors_say_what_was_expected(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_state_may_come_back_in_lists_for_tuples():
    """As keras cells return theirs."""
    state = (np.zeros((2, 3)), (np.ones((2, 1)),))
    generated = greedy(lambda y, s: (tf.zeros((2, 4)), [s[0], [s[1][0]]]), state, starts(2), 3)
    assert generated.tokens.numpy().tolist() == [[0, 0, 0]] * 2

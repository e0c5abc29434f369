"""Guessers that know the answers: right, wrong, now this, now that; and what must hold of an engine that guesses.

INVARIANTS.md says what G1, G2 and the others are."""
import random
from cbatch.guesses import Guess, Guesser, Lookup

class Knows(Guesser):
    "Has been told the answer to every request; `most` guesses at most"
    def __init__(self, answer, vocab_size=13, most=99, seed=0):
        self.answer, self.vocab_size, self.most, self.rng = answer, vocab_size, most, random.Random(seed)
        self.ended = []
    def right(self, r, n):
        "What `r` says next, and more of the same beyond its end"
        at, n = len(r.output_ids), min(n, self.most)
        return (self.answer(r)[at:at + n] + [1] * n)[:n]
    def forget(self, r): self.ended.append(r)

class Oracle(Knows):
    "Always right"
    def guess(self, r, most): return Guess(self.right(r, most), 8)

class Wrong(Knows):
    "Never right"
    def guess(self, r, most):
        return Guess([(t + 1) % self.vocab_size for t in self.right(r, most)], self.rng.randint(0, 8))

class Mixed(Knows):
    "Right up to somewhere; now and then nothing, or more than it was asked for"
    def guess(self, r, most):
        rng = self.rng
        tokens = self.right(r, rng.choice([most, most, most + 3, rng.randint(0, most)]))
        k = rng.choice([0, len(tokens), rng.randint(0, len(tokens))])
        return Guess(tokens[:k] + [(t + rng.randint(1, 9)) % self.vocab_size for t in tokens[k:]], rng.randint(0, 8))

class Own(Lookup):
    "What an engine has by itself, from one token that agrees on"
    def __init__(self, answer, vocab_size=13, seed=0): super().__init__(least=1 + seed % 2)

KINDS = dict(oracle=Oracle, wrong=Wrong, mixed=Mixed, lookup=Own)

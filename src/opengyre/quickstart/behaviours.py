"""What a function of a quickstart library can be asked to do.

A behaviour is one line of a requirements file, the expression that meets it, and the expression a careless author
writes instead. The mistake is used twice: test inputs are chosen to tell it from the reference, and the demonstrator of
the shipped policy makes it with a set probability, so that reinforcement learning starts from a policy that errs.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

NAMES = ("tax", "fee", "lot", "bin", "row", "bag", "box", "tag", "cup", "map")  # few tokens, and no hint at a behaviour
CONSTANTS = range(2, 10)  # one digit, one token; 0 and 1 make several behaviours trivial


@dataclass(frozen=True, slots=True)
class Behaviour:
    """``argument`` is x (an int) or s (a list of ints); n is a constant, the default of a second argument."""

    key: str
    argument: str
    line: str
    reference: str
    mistake: str


BEHAVIOURS: dict[str, Behaviour] = {
    b.key: b
    for b in (
        Behaviour("cap", "x", "x at most n", "min(x, n)", "min(x, -n)"),
        Behaviour("floor", "x", "x at least n", "max(x, n)", "max(x, -n)"),
        Behaviour("up", "x", "x up to a multiple of n", "-(-x // n) * n", "x // n * n"),
        Behaviour("last", "s", "last n of s", "s[-n:]", "s[:-n]"),
        Behaviour("over", "s", "count of s over n", "sum(v > n for v in s)", "sum(v >= n for v in s)"),
        Behaviour("top", "s", "top n of s", "sorted(s)[::-1][:n]", "sorted(s)[:n]"),
    )
}


@dataclass(frozen=True, slots=True)
class Function:
    """One function a library must have."""

    name: str
    behaviour: Behaviour
    constant: int

    @property
    def signature(self) -> str:
        """How reports name it."""
        return f"{self.name}({self.behaviour.argument})"

    @property
    def head(self) -> str:
        """How requirements and source name it."""
        return f"{self.name}({self.behaviour.argument}, n={self.constant})"

    @property
    def requirement(self) -> str:
        """Its line in the requirements file."""
        return f"{self.head}: {self.behaviour.line}"

    def definition(self, *, right: bool = True) -> str:
        """Its source, as the reference or as the careless author writes it."""
        return f"def {self.head}: return {self.behaviour.reference if right else self.behaviour.mistake}\n"

    def cases(self, rng: Random, count: int) -> list[list[Any]]:
        """``count`` pairs [input, expected result], at least half of which the mistake gets wrong."""
        right, wrong = self._evaluate(right=True), self._evaluate(right=False)
        telling: list[list[Any]] = []
        other: list[list[Any]] = []
        while len(telling) < (count + 1) // 2 or len(telling) + len(other) < count:
            value = self._input(rng)
            expected = right(value)
            (telling if wrong(value) != expected else other).append([value, expected])
        cases = (telling + other)[:count]
        rng.shuffle(cases)
        return cases

    def _evaluate(self, *, right: bool) -> Any:
        namespace: dict[str, Any] = {}
        exec(self.definition(right=right), namespace)
        return namespace[self.name]

    def _input(self, rng: Random) -> Any:
        if self.behaviour.argument == "x":
            return rng.choice([rng.randint(-20, 40), self.constant * rng.randint(-3, 5), self.constant])
        return [rng.choice([rng.randint(0, 12), self.constant]) for _ in range(rng.randint(0, 14))]

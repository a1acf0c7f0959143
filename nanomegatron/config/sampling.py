"""How generation chooses tokens."""

from typing import NamedTuple


class Sampling(NamedTuple):
    """How tokens are chosen: from the `top_k` likeliest, of these the fewest that sum to `top_p`."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0  # of the first prompt; prompt i uses seed + i
    stops: frozenset[int] = frozenset()  # each ends a text

    def check(self) -> "Sampling":
        """Return self. Raises ValueError for a setting out of range."""
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature}: give 0 (the likeliest token) or more")
        if self.top_k < 0:
            raise ValueError(f"top-k {self.top_k}: give the number of tokens to choose from, 0 for all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p}: give a probability above 0, at most 1")
        return self


DEFAULT = Sampling(temperature=0.8, top_k=40, top_p=0.95)  # of `generate`, and of the sample at a run's end

"""A reward that even an untrained model earns some of: how much of a completion is digits."""


def share_of_digits(completions: list[str], weight: float = 1.0) -> list[float]:
    return [weight * sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

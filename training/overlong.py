"""What to do about responses that ran into the length limit (DAPO, arXiv:2503.14476, section 3.4)."""


def soft_overlong_penalty(length: int, *, max_length: int, cache: int) -> float:
    """A number to add to the reward: 0 up to max_length - cache, then linear down to -1 at max_length and beyond."""
    excess = length - (max_length - cache)
    return -min(max(excess / cache, 0.0), 1.0)


def drop_truncated(loss_mask: tuple[bool, ...], *, truncated: bool) -> tuple[bool, ...]:
    """Overlong filtering: a truncated row is not trained, though its reward still counts in its group's statistics."""
    return (False,) * len(loss_mask) if truncated else loss_mask

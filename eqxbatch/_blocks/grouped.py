"""What is computed together: small things with others, large ones alone."""

_MOST_GROUPS = 8


def grouped(sizes: list[int], least: int) -> list[list[int]]:
    """Consecutive ones, about an eighth of all together, or `least` if that is more."""
    most = max(sum(sizes) // _MOST_GROUPS, least)
    groups: list[list[int]] = []
    for i, size in enumerate(sizes):
        if groups and sum(sizes[k] for k in groups[-1]) + size <= most:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups

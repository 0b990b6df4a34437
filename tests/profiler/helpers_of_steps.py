"""What a user keeps in another file than the step: values, and functions that read them."""

ALPHA = 0.5
BETA = 0.5
GAMMA = 0.5
EPOCH = 0


def weighted(loss):
    """A helper that reads a global of its own file."""
    return loss * BETA


def counted(loss):
    """A helper that uses a builtin."""
    return loss * len([0, 0])

"""Names of files."""


def slug(text: str) -> str:
    """A piece of a file's name."""
    return "".join(c if c.isalnum() else "_" for c in text.replace("%", "pct"))

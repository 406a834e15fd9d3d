"""What is done to a file of a folder that somebody made, as functions of the folder."""


def write(name, content=""):
    """Put a file there, or another one in its place."""

    def tamper(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return tamper


def append(name):
    """Put an empty line behind a file's content."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b"\n")


def remove(name):
    """Take a file away."""
    return lambda folder: (folder / name).unlink()

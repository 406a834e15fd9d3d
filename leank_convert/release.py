"""What a release fills in: the address of the project."""

PROJECT_URL = ""
"""Where the project is published, without a slash at its end; `bin/release` refuses it empty."""

"""The shipped model: a small Llama that retrieves, for the quickstart and tests."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"

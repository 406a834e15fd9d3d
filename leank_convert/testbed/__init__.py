"""The shipped model: a small Llama that retrieves, on which every accuracy figure of the project stands."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"

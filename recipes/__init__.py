"""Recipes: one YAML per model and context regime. Installed as `leank_convert._recipes` and read as data."""

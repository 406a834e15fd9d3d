"""Experiments on the shipped model, SmolLM2 or Qwen2.5-Coder: a plan each, one driver, a report of tables.

`bin/reproduce`, or `python -m bin.reproduction` in a checkout. All that is made is kept in one folder and
made once, by as many processes as work on it.
"""

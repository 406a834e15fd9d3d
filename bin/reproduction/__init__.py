"""The paper's experiments on the shipped model or on SmolLM2: masks by every method, answers, a report.

`bin/reproduce`, or `python -m bin.reproduction` in a checkout. All that is made is kept in one folder and
made once, by as many processes as work on it.
"""

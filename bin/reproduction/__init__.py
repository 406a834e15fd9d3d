"""The paper's experiments on the shipped model: masks by every method, answers through all of them, a report.

`bin/reproduce`, or `python -m bin.reproduction` in a checkout. All that is made is kept in one folder and
made once.
"""
